"""Spec of `fwd_decode.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv, refused_by_copies

SM_SMEM = 233472  # bytes of shared memory of a multiprocessor, a block's own KiB among them
SM_ASKS = 131072  # bytes on their way to a multiprocessor that keep its share of memory busy while blocks come and go
MOST_SPLITS = 256
MOST_BLOCKS = 65535  # along the grid's last axis
MOST_ACCUMULATORS = 32 * 160  # of S and O in a warp


def columns(width: int) -> int:
    """Rows are padded to whole MMA steps."""
    return cdiv(width, 16) * 16


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q; m and l of every warp's rows; and each warp's stages of K and V, where its O is left in the end."""
    D, Dv = columns(p.D), columns(p.Dv)
    stages = t.STAGES * 2 * t.BLOCK_N * (D + Dv)
    return 2 * t.BLOCK_M * D + t.WARPS * (8 * t.BLOCK_M + max(stages, 4 * t.BLOCK_M * (Dv + 8)))


def group(p: Problem) -> int:
    """Query heads that share keys."""
    return p.H // p.Hk if p.Hk else 1


def row_tiles(p: Problem, t: Tile) -> int:
    """Tiles of packed rows, queries by heads of a group, of a key/value head."""
    rows = p.rows[0] * group(p)
    if p.ragged:
        return rows // t.BLOCK_M + p.B if p.B else 0
    return cdiv(rows, t.BLOCK_M)


def dealt(p: Problem) -> bool:
    """Whether blocks are dealt to batch entries of different numbers of keys, on the device, where these are known."""
    return p.key_lengths and not p.ragged


def at_once(p: Problem, t: Tile) -> int:
    """Blocks that keep the GPU's memory busy, as far as there is room for them: more of them finish no earlier."""
    room = max(1, SM_SMEM // (smem_bytes(p, t) + 1024))
    asked = t.WARPS * (t.STAGES - 1) * 2 * t.BLOCK_N * (columns(p.D) + columns(p.Dv))
    return t.BLOCKS * min(room, cdiv(SM_ASKS, asked))


def units(p: Problem, t: Tile) -> int:
    """Tiles of rows, of all key/value heads, of a batch entry, or of a ragged batch."""
    return row_tiles(p, t) * p.Hk


def splits(p: Problem, t: Tile) -> int:
    """How many blocks share the keys of a tile of rows; if dealt, those of all of them.

    As many as finish first, counted in rounds of a block's warps, if all take equally long; two rounds more for what
    a block does besides, one more to merge. Each has as many rounds as it asks for at once, or more. If dealt, what
    there is to do is cut into equal stretches for as many blocks as there are at once.
    """
    rounds = cdiv(p.Sk, t.BLOCK_N * t.WARPS)
    most = max(1, rounds // (t.STAGES - 1))  # of an entry
    if dealt(p):
        return max(1, min(at_once(p, t), p.B * units(p, t) * most))
    shared = units(p, t) * p.batches

    def takes(n: int) -> int:
        return cdiv(shared * n, at_once(p, t)) * (cdiv(rounds, n) + 2) + (n > 1)

    most = max(1, min(most, MOST_SPLITS, MOST_BLOCKS // max(p.batches, 1)))
    return min(range(1, most + 1), key=takes)


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Blocks: of each tile of rows, or those that share all of them."""
    if dealt(p):
        return splits(p, t) if p.B * units(p, t) else 0, 1, 1
    return row_tiles(p, t), p.Hk, splits(p, t) * p.batches


def merges(p: Problem, t: Tile) -> bool:
    """Whether some row's keys may be shared."""
    return splits(p, t) > 1 and p.Sk > t.BLOCK_N * t.WARPS


def merge_grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Blocks: rows; if dealt, packed."""
    if dealt(p):
        return (p.Sq * group(p) if merges(p, t) else 0), p.Hk, p.B
    return (p.query_tiles(1) if merges(p, t) else 0), p.H, p.batches


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Numbers: O, m and l of every row and split, or of two tiles of rows of a block; none of them has to be zero."""
    rows = 2 * splits(p, t) * t.BLOCK_M if dealt(p) else splits(p, t) * p.batches * p.H * p.rows[0]
    return (rows * (p.Dv + 2) if merges(p, t) else 0), 0


def first_for(p: Problem) -> bool:
    """Where it is measured to be faster than fwd_mma and fwd_wgmma (experiment 020): few rows share many keys, or more
    rows of so few heads that tiles of 128 queries leave half of the multiprocessors idle."""
    rows = p.Sq * group(p)
    few, alone = p.Sq <= 32 and rows <= 64, p.B * p.H * cdiv(p.Sq, 128) <= 66 and rows <= 256
    return 0 < 16 * p.Sq <= p.Sk and (few or alone) and not p.ragged and not p.block_map[3]


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Rows are copied 16 bytes at a time; the scale is folded into the exponent."""
    if reason := refused_by_copies(p, "fwd_block2d"):
        return reason
    if p.rows[0] * group(p) >= 2**31:
        return f"{p.rows[0]} queries of {group(p)} heads a group are not built: fewer than 2^31 rows are (fwd_mma)"
    if dealt(p) and p.B * p.Hk * (p.Sq * group(p) // 16 + 1) * (p.Sk // 32 + 3) >= 2**30:
        return f"key_lengths of {p.B} entries of {p.Hk} heads of {p.Sk} keys come to more than 31 bits tell (fwd_mma)"
    return None


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What an MMA step, a page and the register file ask of a tile."""
    width = columns(p.Dv) + t.BLOCK_N
    rules = (
        (t.BLOCK_M % 16 == 0, f"BLOCK_M={t.BLOCK_M} must be a multiple of 16: the rows of an MMA step"),
        (t.BLOCK_N % 16 == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of 16: one m16n8k16 step of P V"),
        (
            p.page_size % t.BLOCK_N == 0,
            f"BLOCK_N={t.BLOCK_N} must divide page_size={p.page_size}: a tile of keys lies in one page",
        ),
        (t.BLOCK_M * width <= MOST_ACCUMULATORS, f"BLOCK_M={t.BLOCK_M} at Dv={p.Dv} and BLOCK_N={t.BLOCK_N} spill"),
        (t.BLOCK_M == 16 or not p.dropout, f"BLOCK_M={t.BLOCK_M} spills with dropout: 16 rows do not"),
        (t.STAGES >= 2, "STAGES must be at least 2: one is read while the others are on their way"),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def rank(p: Problem, t: Tile) -> int:
    """The rows that there are in as few tiles as possible, and of these the smallest."""
    return 1024 * cdiv(p.Sq * group(p), t.BLOCK_M) + t.BLOCK_M


kernel = Kernel(
    name="fwd_decode",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    paged=True,
    summary="few queries, many keys: heads of a group share a tile, blocks share the keys, keys may lie in pages",
    dtypes=("float16", "bfloat16"),
    min_arch=(8, 0),
    tiles=(
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=3, BLOCKS=132),
        Tile(BLOCK_M=32, BLOCK_N=16, WARPS=4, STAGES=3, BLOCKS=132),
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=2, BLOCKS=132),  # D >= 128, of 100 KB a multiprocessor
    ),
    space={
        "BLOCK_M": (16, 32),
        "BLOCK_N": (16, 32),
        "WARPS": (2, 4, 8),
        "STAGES": (2, 3, 4, 6),
        "BLOCKS": (132,),
    },
    grid=grid,
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    first_for=first_for,
    scratch={"partials": partials},
    numbers={"splits_or_entries": lambda p, t: p.B if dealt(p) else splits(p, t)},
    args=("Q", "K", "V", "O", "LSE", "partials", "H", "group", "splits_or_entries", "score"),
    then=(
        Entry(
            name="fwd_decode_merge",
            early=True,
            grid=merge_grid,
            block=lambda t: (32 * t.WARPS, 1, 1),
            smem_bytes=lambda p, t: 0,
            numbers={"splits": splits},
            args=("O", "LSE", "partials", "H", "splits", "score"),
        ),
    ),
)
