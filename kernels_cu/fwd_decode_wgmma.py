"""Spec of `fwd_decode_wgmma.cu`."""

from sandbox.spec import HOPPER_SMS, SM_SMEM, Arch, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, P twice or O, stages of K and V, row statistics, mbarriers; rows padded to multiples of 128 bytes."""
    row, row_v = 128 * cdiv(p.D, 64), 128 * cdiv(p.Dv, 64)
    return t.BLOCK_M * (row + max(2 * 128, row_v) + 20) + t.STAGES * (t.BLOCK_N * (row + row_v) + 32)


def row_tiles(p: Problem, rows: int) -> int:
    """Number of tiles of `rows` packed rows per key/value head."""
    return cdiv(p.Sq * p.group, rows)


def work_tiles(p: Problem, rows: int) -> int:
    """Number of work tiles of all heads."""
    return row_tiles(p, rows) * p.Hk * p.batches


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Persistent blocks, at most as many as fit on the GPU, each with the same number of work tiles, or one fewer."""
    count = work_tiles(p, t.BLOCK_M)
    return (cdiv(count, max(1, cdiv(count, t.BLOCKS * t.BLOCKS_PER_SM))), 1, 1)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """The requirements of tensor maps and wgmma."""
    if p.Sq * p.group >= 2**31:
        return f"Sq * H / Hk = {p.Sq * p.group} is not supported: the limit is 2^31 - 1 packed rows"
    return unsupported_by_wgmma(p, arch)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Why a tile is not supported: wgmma, or shared memory of an SM."""
    limit = SM_SMEM // t.BLOCKS_PER_SM - 1024
    rules = (
        (t.BLOCK_M in (16, 32, 64), f"BLOCK_M={t.BLOCK_M} must be 16, 32 or 64: packed rows are N of wgmma"),
        (t.BLOCK_N == 64, f"BLOCK_N={t.BLOCK_N} must be 64: keys are M of wgmma"),
        (
            t.BLOCKS_PER_SM == 1 or max(p.D, p.Dv) <= 128,
            f"BLOCKS_PER_SM={t.BLOCKS_PER_SM} leaves too few registers for O at {p.widths}: use 1",
        ),
        (
            smem_bytes(p, t) <= limit,
            (
                f"tile {t} needs {smem_bytes(p, t)} bytes of shared memory: "
                f"the limit with BLOCKS_PER_SM={t.BLOCKS_PER_SM} is {limit}"
            ),
        ),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def rows_of(p: Problem) -> int:
    """Packed rows per tile: all rows of a head if the registers suffice; options need registers."""
    rows = p.Sq * p.group
    return 16 if rows <= 16 or p.dropout else 32 if rows <= 32 or not p.plain else 64


def balanced(count: int) -> bool:
    """Whether work tiles are evenly distributed: nearly every SM has one, or two blocks with two or more each."""
    if count <= HOPPER_SMS:
        return count >= 0.9 * HOPPER_SMS
    return count > 2 * HOPPER_SMS and cdiv(count, cdiv(count, 2 * HOPPER_SMS)) >= 0.95 * 2 * HOPPER_SMS


def rank(p: Problem, t: Tile) -> int:
    """Prefers BLOCK_M of rows_of; for 32 rows, three stages if balanced, otherwise two (B64 H64/8 Sq4 Sk8192: 0.3%
    faster with three; B48 Sk4096: 5% slower)."""
    stages = 3 if rows_of(p) == 32 and balanced(work_tiles(p, 32)) else 2
    return 1024 * (rows_of(p) != t.BLOCK_M) + 512 * (stages != t.STAGES) + t.BLOCK_M


def first_for(p: Problem) -> bool:
    """Where it is faster than fwd_decode and fwd_wgmma_split (experiments/020_decode): few queries, many keys, and
    enough work tiles. Up to D = 128: enough for nearly every SM, and with up to 16 packed rows balanced ones; with such
    rows and D up to 64 fwd_decode is 5% faster, up to the B that it supports. Above D = 128, where fwd_decode computes
    longer than it reads: more than 16 rows in one tile, and enough blocks to read at full speed, which are more with 64
    rows."""
    rows, width = p.Sq * p.group, max(p.D, p.Dv)
    if not (0 < 16 * p.Sq <= p.Sk and rows <= 64):
        return False
    if p.ragged or p.key_lengths or p.page_size or p.reads_elements:  # differ in length, or read memory
        return False
    count = work_tiles(p, rows_of(p))
    if width > 128:
        return 16 < rows <= rows_of(p) and count >= (0.36 if rows <= 32 else 0.75) * HOPPER_SMS
    if rows <= 16:
        return balanced(count) and (width > 64 or p.B > 65535)
    return count >= 0.9 * HOPPER_SMS


kernel = Kernel(
    name="fwd_decode_wgmma",
    test_share=3,
    computes="forward",
    rung=4,
    invariant_to=("runs", "entries", "batch", "heads", "SMs", "strides"),
    summary="decoding with enough heads to fill the GPU: packed GQA on warpgroup MMA, fed by TMA, no split-KV",
    dtypes=("float16", "bfloat16"),
    max_D=256,
    default=True,
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=32, BLOCK_N=64, STAGES=3, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=32, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=16, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=2),
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=132, BLOCKS_PER_SM=1),
        Tile(BLOCK_M=32, BLOCK_N=64, STAGES=3, BLOCKS=132, BLOCKS_PER_SM=1),
        Tile(BLOCK_M=16, BLOCK_N=64, STAGES=3, BLOCKS=132, BLOCKS_PER_SM=1),
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
