"""Spec of `fwd_decode.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv, refused_by_copies

SM_SMEM = 233472  # bytes of shared memory of a multiprocessor, a block's own KiB among them
MOST_SPLITS = 256
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


def splits(p: Problem, t: Tile) -> int:
    """How many blocks share the keys of a tile of rows: as many as finish first, counted in rounds of a block's warps,
    if all take equally long; two rounds more for what a block does besides, one more to merge. Not measured yet."""
    blocks = row_tiles(p, t) * p.Hk * p.batches
    rounds = cdiv(p.Sk, t.BLOCK_N * t.WARPS)
    at_once = t.BLOCKS * max(1, SM_SMEM // (smem_bytes(p, t) + 1024))

    def takes(n: int) -> int:
        return cdiv(blocks * n, at_once) * (cdiv(rounds, n) + 2) + (n > 1)

    return min(range(1, max(1, min(rounds, MOST_SPLITS)) + 1), key=takes)


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Numbers: O, m and l of every row and split; none of them has to be zero."""
    n = splits(p, t)
    return (p.batches * p.H * p.rows[0] * n * (p.Dv + 2) if n > 1 else 0), 0


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Rows are copied 16 bytes at a time; the scale is folded into the exponent."""
    if reason := refused_by_copies(p, "fwd_block2d"):
        return reason
    if p.rows[0] * group(p) >= 2**31:
        return f"{p.rows[0]} queries of {group(p)} heads a group are not built: fewer than 2^31 rows are (fwd_mma)"
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
    grid=lambda p, t: (row_tiles(p, t) * splits(p, t), p.Hk, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    scratch={"partials": partials},
    numbers={"splits": splits},
    args=("Q", "K", "V", "O", "LSE", "partials", "H", "group", "splits", "score"),
    then=(
        Entry(
            name="fwd_decode_merge",
            grid=lambda p, t: (p.query_tiles(1) if splits(p, t) > 1 else 0, cdiv(p.H, t.WARPS), p.batches),
            block=lambda t: (32 * t.WARPS, 1, 1),
            smem_bytes=lambda p, t: 0,
            numbers={"splits": splits},
            args=("O", "LSE", "partials", "H", "splits", "score"),
        ),
    ),
)
