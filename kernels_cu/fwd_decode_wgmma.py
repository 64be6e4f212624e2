"""Spec of `fwd_decode_wgmma.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma

SM_SMEM = 233472  # bytes of shared memory of a multiprocessor, a block's own KiB among them
SMS = 132  # multiprocessors of the GPU on which it was measured


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, P twice, stages of K and V, numbers of each row, mbarriers; rows padded to multiples of 128 bytes."""
    row, row_v = 128 * cdiv(p.D, 64), 128 * cdiv(p.Dv, 64)
    return t.BLOCK_M * (row + 2 * 128 + 20) + t.STAGES * (t.BLOCK_N * (row + row_v) + 32)


def row_tiles(p: Problem, rows: int) -> int:
    """Tiles of so many packed rows, of a key/value head."""
    return cdiv(p.Sq * p.group, rows)


def pieces(p: Problem, rows: int) -> int:
    """The same of all heads."""
    return row_tiles(p, rows) * p.Hk * p.batches


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """As many blocks as there is room for at most, each with as many pieces as any other, or one fewer."""
    many = pieces(p, t.BLOCK_M)
    return (cdiv(many, max(1, cdiv(many, t.BLOCKS * t.BLOCKS_PER_SM))), 1, 1)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """What tensor maps and wgmma take."""
    if p.ragged:
        return "ragged batches are not built (fwd_decode takes them)"
    if p.Sq * p.group >= 2**31:
        return f"{p.Sq} queries of {p.group} heads a group are not built: fewer than 2^31 rows are (fwd_mma)"
    return unsupported_by_wgmma(p, arch, "fwd_block2d")


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What wgmma and an SM's shared memory ask of a tile."""
    have = SM_SMEM // t.BLOCKS_PER_SM - 1024
    rules = (
        (t.BLOCK_M in (16, 32, 64), f"BLOCK_M={t.BLOCK_M} must be 16, 32 or 64: packed rows"),
        (t.BLOCK_M < 64 or p.plain, "BLOCK_M=64 takes plain problems alone (a window spills): 32 rows take options"),
        (t.BLOCK_M == 16 or not p.dropout, f"BLOCK_M={t.BLOCK_M} spills with dropout: 16 rows do not"),
        (t.BLOCK_N == 64, f"BLOCK_N={t.BLOCK_N} must be 64: the rows of wgmma"),
        (smem_bytes(p, t) <= have, f"tile {t} needs {smem_bytes(p, t)} bytes of shared memory: a block has {have}"),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def rows_of(p: Problem) -> int:
    """Rows of a tile: all that there are where they find room, which options leave less of."""
    rows = p.Sq * p.group
    return 16 if rows <= 16 or p.dropout else 32 if rows <= 32 or not p.plain else 64


def evenly(many: int) -> bool:
    """Whether of so many pieces nearly every multiprocessor has as many blocks, and each of them as many pieces: one,
    or two blocks of two pieces and more."""
    if many <= SMS:
        return many >= 0.9 * SMS
    return many > 2 * SMS and cdiv(many, cdiv(many, 2 * SMS)) >= 0.95 * 2 * SMS


def rank(p: Problem, t: Tile) -> int:
    """The rows that there are; of 32 three stages where blocks are dealt out evenly, else two: B64 H64/8 Sq4 Sk8192
    takes 0.3% less with three, B48 Sk4096 5% more."""
    stages = 3 if rows_of(p) == 32 and evenly(pieces(p, 32)) else 2
    return 1024 * (rows_of(p) != t.BLOCK_M) + 512 * (stages != t.STAGES) + t.BLOCK_M


def first_for(p: Problem) -> bool:
    """Where it is measured to be faster than fwd_decode and fwd_wgmma (experiment 020): few queries of many keys, and
    heads enough for nearly every multiprocessor; of 16 packed rows where they are dealt out evenly alone."""
    rows = p.Sq * p.group
    if not (0 < 16 * p.Sq <= p.Sk and p.Sq <= 32 and rows <= 128):
        return False
    if p.ragged or p.key_lengths or p.page_size or p.bias or p.mask or p.score:  # of different lengths, or looked up
        return False
    many = pieces(p, rows_of(p))
    return evenly(many) if rows <= 16 else many >= 0.9 * SMS


kernel = Kernel(
    name="fwd_decode_wgmma",
    computes="forward",
    rung=4,
    summary="fwd_decode for many heads, none of which is shared: warpgroup MMA, fed by TMA, and nothing to merge",
    dtypes=("float16", "bfloat16"),
    max_D=128,
    default=True,
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=32, BLOCK_N=64, STAGES=3, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=32, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=16, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=2),
    ),
    grid=grid,
    block=lambda t: (160, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    first_for=first_for,
    rank=rank,
    numbers={"row_tiles": lambda p, t: row_tiles(p, t.BLOCK_M)},
    args=("Q", "K", "V", "O", "LSE", "K_map", "V_map", "B", "H", "Hk", "group", "score"),
)
