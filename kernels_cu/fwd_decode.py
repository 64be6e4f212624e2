"""Spec of `fwd_decode.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv, unsupported_by_cp_async

SM_SMEM = 233472  # bytes of shared memory of a multiprocessor, a block's own KiB among them
SM_ASKS = 131072  # bytes on their way to a multiprocessor that keep its share of memory busy while blocks come and go
MOST_SPLITS = 256
MOST_BLOCKS = 65535  # along the grid's last axis
DEALT_WAVES = 4  # of blocks that are dealt
SMS = 132  # multiprocessors of the GPU on which tiles were measured
NO_LONGER = 8192  # keys: a cluster reads so many of one entry in no time that counts beside those of all
MOST_ACCUMULATORS = 32 * 160  # of S and O in a warp


def row_bytes(p: Problem) -> tuple[int, int]:
    """Of K, or Q, and of V; padded to whole MMA steps, which take 32 bytes."""
    return cdiv(p.D * p.itemsize, 32) * 32, cdiv(p.Dv * p.itemsize, 32) * 32


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q; m and l of every warp's rows; each warp's stages of K and V, where its O is left in the end; and what the
    blocks of a cluster send: O of the columns that a block finishes, four at a time, m and l."""
    K, V = row_bytes(p)
    stages = t.STAGES * t.BLOCK_N * (K + V)
    inbox = t.CLUSTER * t.BLOCK_M * (16 * cdiv(p.Dv // 4, t.CLUSTER) + 8) if t.CLUSTER > 1 else 0
    return t.BLOCK_M * K + t.WARPS * (8 * t.BLOCK_M + max(stages, 4 * t.BLOCK_M * (V // p.itemsize + 8))) + inbox


def row_tiles(p: Problem, t: Tile) -> int:
    """Tiles of packed rows, queries by heads of a group, of a key/value head."""
    rows = p.rows[0] * p.group
    if p.ragged:
        return rows // t.BLOCK_M + p.B if p.B else 0
    return cdiv(rows, t.BLOCK_M)


def dealt(p: Problem, t: Tile) -> bool:
    """Whether blocks are dealt to batch entries of different numbers of keys, on the device, where these are known."""
    return p.key_lengths and not p.ragged and t.CLUSTER == 1


def at_once(p: Problem, t: Tile) -> int:
    """Blocks that keep the GPU's memory busy, as far as there is room for them: more of them finish no earlier."""
    room = max(1, SM_SMEM // (smem_bytes(p, t) + 1024))
    asked = t.WARPS * (t.STAGES - 1) * t.BLOCK_N * sum(row_bytes(p))
    return t.BLOCKS * min(room, cdiv(SM_ASKS, asked))


def splits(p: Problem, t: Tile) -> int:
    """How many blocks, or teams, share the keys of a tile of rows; if dealt, of all batch entries.

    As many as finish first, counted in rounds of a block's warps, if all take equally long; two rounds more for what
    a block does besides, one more to merge and three for eight parts. Each has as many rounds as it asks for at once,
    or more. Where they take differently long, of several entries, so many that the last ones are short.
    """
    tiles, rounds = row_tiles(p, t) * p.Hk, cdiv(p.Sk, t.BLOCK_N * t.WARPS * t.CLUSTER)
    most = max(1, rounds // (t.STAGES - 1))  # of an entry
    if dealt(p, t):
        wanted = at_once(p, t) * (DEALT_WAVES if p.B > 1 else 1) // max(tiles, 1)
        return max(1, min(p.B * most, wanted, MOST_BLOCKS - p.B))
    shared = tiles * p.batches

    def takes(n: int) -> int:
        return cdiv(shared * n * t.CLUSTER, at_once(p, t)) * (cdiv(rounds, n) + 2) + (n > 1 and 1 + cdiv(3 * n, 8))

    most = max(1, min(most, MOST_SPLITS, MOST_BLOCKS // max(p.batches, 1)))
    return min(range(1, most + 1), key=takes)


def blocks(p: Problem, t: Tile) -> int:
    """Blocks that share keys of a tile of rows, of all batch entries; if dealt, at most."""
    return splits(p, t) + p.B if dealt(p, t) else splits(p, t) * p.batches


def merges(p: Problem, t: Tile) -> bool:
    """Whether some row's keys may be shared."""
    return splits(p, t) > 1 and p.Sk > t.BLOCK_N * t.WARPS * t.CLUSTER


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Numbers: O, m and l of every row and split; none of them has to be zero."""
    return (blocks(p, t) * p.H * p.rows[0] * (p.Dv + 2) if merges(p, t) else 0), 0


def first_for(p: Problem) -> bool:
    """Where it is measured to be faster than fwd_mma and fwd_wgmma, of float8 than fwd_wgmma_fp8 (experiment 020): few
    rows share many keys, or more of so few heads that tiles of 128 queries leave half of the multiprocessors idle."""
    rows, most = p.Sq * p.group, 128 if max(p.D, p.Dv) <= 64 and not p.float8 else 64
    few, alone = p.Sq <= 32 and rows <= most, p.B * p.H * cdiv(p.Sq, 128) <= 66 and rows <= 256
    return 0 < 16 * p.Sq <= p.Sk and (few or alone) and not (p.ragged or p.block_map[3])


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Rows are copied 16 bytes at a time; the scale is folded into the exponent."""
    if reason := unsupported_by_cp_async(p, "fwd_block2d"):
        return reason
    if p.rows[0] * p.group >= 2**31:
        return f"{p.rows[0]} queries of {p.group} heads a group are not built: fewer than 2^31 rows are (fwd_mma)"
    return None


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What an MMA step, a page and the register file ask of a tile."""
    width = row_bytes(p)[1] // p.itemsize + t.BLOCK_N
    rules = (
        (t.BLOCK_M % 16 == 0, f"BLOCK_M={t.BLOCK_M} must be a multiple of 16: the rows of an MMA step"),
        (t.BLOCK_N % 16 == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of 16: one m16n8k16 step of P V"),
        (
            p.page_size % t.BLOCK_N == 0,
            f"BLOCK_N={t.BLOCK_N} must divide page_size={p.page_size}: a tile of keys lies in one page",
        ),
        (t.BLOCK_M * width <= MOST_ACCUMULATORS, f"BLOCK_M={t.BLOCK_M} at Dv={p.Dv} and BLOCK_N={t.BLOCK_N} spill"),
        (
            not p.float8 or t.BLOCK_N == 16 or t.BLOCK_M * p.Dv <= 2048,
            f"BLOCK_N={t.BLOCK_N} spills with BLOCK_M={t.BLOCK_M} of float8 at Dv={p.Dv}: 16 does not",
        ),
        (t.BLOCK_M == 16 or not p.dropout, f"BLOCK_M={t.BLOCK_M} spills with dropout: 16 rows do not"),
        (
            t.BLOCK_M == 16 or not p.mask or arch is None or arch >= (9, 0),
            f"BLOCK_M={t.BLOCK_M} spills with a mask before compute capability 9.0: 16 rows do not",
        ),
        (
            t.BLOCK_M == 16 or not (p.score and p.score.hides),
            f"BLOCK_M={t.BLOCK_M} spills with a condition of one's own: 16 rows do not",
        ),
        (
            t.BLOCK_M == 16 or t.WARPS < 8 or not (p.ragged or p.Dv != p.D),
            f"BLOCK_M={t.BLOCK_M} with WARPS={t.WARPS} spills in ragged batches and at Dv={p.Dv}: 4 warps do not",
        ),
        (
            t.BLOCK_M == 16 or not p.float8 or p.D <= 128 or p.Dv == p.D,
            f"BLOCK_M={t.BLOCK_M} of float8 spills at D={p.D}, Dv={p.Dv}: 16 rows do not",
        ),
        (
            t.BLOCK_N == 16 or p.float8 or not (p.softcap or p.score or p.ragged),
            f"BLOCK_N={t.BLOCK_N} of 16 bits spills with softcap, a score of one's own or ragged rows: 16 does not",
        ),
        (t.BLOCK_N == 16 or not p.mask, f"BLOCK_N={t.BLOCK_N} spills with a mask: 16 does not"),
        (
            t.CLUSTER == 1 or p.Dv >= 128 or not (p.score and p.score.hides),
            f"CLUSTER={t.CLUSTER} spills with a condition of one's own at Dv={p.Dv}: 1 does not",
        ),
        (
            t.CLUSTER == 1 or arch is None or arch >= (9, 0),
            f"CLUSTER={t.CLUSTER} needs compute capability 9.0 or later, whose blocks read each other's shared memory",
        ),
        (t.STAGES >= 2, "STAGES must be at least 2: one is read while the others are on their way"),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def form(p: Problem, t: Tile) -> tuple[int, int, int]:
    """The warps of a block, the blocks of a cluster, and the bytes of a column of K that a warp has on their way, as
    they were measured to be best of 16 bits and 256 columns of K and V, with which eight warps fill a multiprocessor.

    A cluster of two where that makes one wave of all tiles of rows, so that nothing is left to merge. Of four small
    blocks, where entries have keys of different numbers, none of many: two multiprocessors have two teams at a time,
    one of which reads while the other ends. Alone where there are many waves anyway. Of several waves each has fewer
    bytes on their way.
    """
    tiles, blocks = row_tiles(p, t) * p.Hk * p.batches, (4, 1, 64)
    if sum(row_bytes(p)) != 512 or p.float8 or p.ragged:
        return blocks
    if p.key_lengths:
        return (4, 4, 32) if 2 * tiles >= 0.75 * SMS and p.Sk <= NO_LONGER else blocks
    if 0.75 * SMS <= 2 * tiles <= SMS:
        return 8, 2, 64
    return (8, 1, 32) if tiles >= 3 * SMS else blocks


def rank(p: Problem, t: Tile) -> int:
    """The rows that there are in as few tiles as possible; of these what has the form that was measured to be best, and
    the smallest."""
    *warps, on_their_way = form(p, t)
    wrong = 512 * (warps != [t.WARPS, t.CLUSTER]) + 256 * (on_their_way != (t.STAGES - 1) * t.BLOCK_N * p.itemsize)
    return 1024 * cdiv(p.Sq * p.group, t.BLOCK_M) + wrong + t.BLOCK_M


kernel = Kernel(
    name="fwd_decode",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    paged=True,
    summary="few queries, many keys: heads of a group share a tile, blocks share the keys, keys may lie in pages",
    dtypes=("float16", "bfloat16", "float8_e4m3", "float8_e5m2"),
    min_arch=(8, 0),
    tiles=(
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=3, BLOCKS=132, CLUSTER=1),
        Tile(BLOCK_M=32, BLOCK_N=16, WARPS=4, STAGES=3, BLOCKS=132, CLUSTER=1),
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=8, STAGES=3, BLOCKS=132, CLUSTER=2),
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=2, BLOCKS=132, CLUSTER=4),
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=8, STAGES=2, BLOCKS=132, CLUSTER=1),
        Tile(BLOCK_M=32, BLOCK_N=16, WARPS=8, STAGES=2, BLOCKS=132, CLUSTER=1),
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=2, BLOCKS=132, CLUSTER=1),  # D >= 128, of 100 KB a multiprocessor
        Tile(BLOCK_M=16, BLOCK_N=32, WARPS=4, STAGES=3, BLOCKS=132, CLUSTER=1),  # float8
        Tile(BLOCK_M=16, BLOCK_N=16, WARPS=4, STAGES=5, BLOCKS=132, CLUSTER=1),  # float8 in pages of 16, or wide
    ),
    space={
        "BLOCK_M": (16, 32),
        "BLOCK_N": (16, 32),
        "WARPS": (2, 4, 8),
        "STAGES": (2, 3, 4, 5, 6),
        "BLOCKS": (132,),
        "CLUSTER": (1, 2, 4),
    },
    grid=lambda p, t: (row_tiles(p, t) * t.CLUSTER, p.Hk, blocks(p, t)),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    cluster=lambda t: t.CLUSTER,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    first_for=first_for,
    scratch={"partials": partials},
    numbers={"splits": splits, "row_tiles": row_tiles},
    args=("Q", "K", "V", "O", "LSE", "partials", "H", "group", "splits", "score"),
    then=(
        Entry(
            name="fwd_decode_combine",
            programmatic_launch=True,
            grid=lambda p, t: (p.query_tiles(1) if merges(p, t) else 0, p.H, p.batches),
            block=lambda t: (32 * t.WARPS, 1, 1),
            smem_bytes=lambda p, t: 0,
            numbers={"splits": splits},
            args=("O", "LSE", "partials", "H", "splits", "score"),
        ),
    ),
)
