"""Spec of `fwd_wgmma_fp8.cu`."""

from sandbox.spec import (
    BLOCK_SMEM,
    Arch,
    Kernel,
    Problem,
    Tile,
    cdiv,
    tiles_of_full_waves,
    tiles_of_heads,
    unsupported_by_wgmma,
)


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, stages of K, V and Vt (V transposed), and the mbarriers; rows padded to multiples of 128 bytes."""
    row, row_v, keys = 128 * cdiv(p.D, 128), 128 * cdiv(p.Dv, 128), 128 * cdiv(t.BLOCK_N, 128)
    transposed = cdiv(keys * p.Dv, 1024) * 1024
    return row * t.BLOCK_M + t.STAGES * ((row + row_v) * t.BLOCK_N + transposed) + 1024


def supports(p: Problem, arch: Arch | None) -> str | None:
    """The requirements of wgmma, of tensor maps (alignment, strides), and of a scale that is part of the exponent."""
    return unsupported_by_wgmma(p, arch)


def most_keys(p: Problem) -> int:
    """Largest BLOCK_N without spills (measured)."""
    width = max(p.D, p.Dv)
    if p.reads_elements:
        return 64 if width <= (64 if p.score else 128) else 32
    if p.dropout:
        return 128 if width <= 128 else 64
    return 192 if width <= 64 and few_registers(p) and not p.sink and p.window == (None, None) else 128


def few_registers(p: Problem) -> bool:
    """Whether no option is used that needs registers."""
    return p.options <= {"window", "sink", "descale"}


def fits_three_consumers(p: Problem) -> bool:
    """Whether the problem fits the registers of three consumer warpgroups."""
    scales = any(isinstance(scale, tuple) for scale in p.descale)
    return few_registers(p) and (max(p.D, p.Dv) <= 64 or (p.window == (None, None) and not scales))


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Why a tile is not supported: registers of a warpgroup, or shared memory of a block."""
    consumers, smem = t.BLOCK_M // 64, smem_bytes(p, t)
    registers, most = p.Dv // 2 + t.BLOCK_N // 2, 128 if consumers == 3 else 192
    rules = (
        (
            t.BLOCK_M in (64, 128, 192),
            f"BLOCK_M={t.BLOCK_M} must be 64, 128 or 192: 64 rows for each consumer warpgroup",
        ),
        (t.BLOCK_N % 32 == 0 and t.BLOCK_N <= 256, f"BLOCK_N={t.BLOCK_N} must be a multiple of 32 up to 256"),
        (t.STAGES & (t.STAGES - 1) == 0, f"STAGES={t.STAGES} must be a power of two"),
        (
            t.STAGES >= 2 or consumers == 1,
            (
                f"STAGES={t.STAGES} must be at least 2 with BLOCK_M={t.BLOCK_M}: a consumer issues P V of a key "
                "tile and Q K^T of the next one together"
            ),
        ),
        (
            registers <= most,
            f"BLOCK_N={t.BLOCK_N} needs {registers} registers for O and S at Dv={p.Dv}: at most {most}",
        ),
        (
            most_keys(p) >= t.BLOCK_N,
            f"BLOCK_N={t.BLOCK_N} spills registers on {p.variant}: use BLOCK_N <= {most_keys(p)}",
        ),
        (
            consumers < 2 or not p.dropout or max(p.D, p.Dv) <= 128,
            f"BLOCK_M={t.BLOCK_M} spills registers on {p.variant} at D={p.D}: use BLOCK_M=64",
        ),
        (
            consumers < 3 or fits_three_consumers(p),
            f"BLOCK_M={t.BLOCK_M} spills registers on {p.variant} at D={p.D}: use BLOCK_M=128",
        ),
        (
            consumers < 3 or t.LOADS == 1 or p.D == p.Dv == 32 * t.LOADS,
            f"LOADS={t.LOADS} spills registers at D={p.D}, Dv={p.Dv} with BLOCK_M={t.BLOCK_M}: use BLOCK_M=128",
        ),
        (
            t.BLOCK_N < 192 or t.LOADS > 1 or not p.causal or p.D < 64,
            f"LOADS={t.LOADS} spills registers at D={p.D} with BLOCK_N={t.BLOCK_N} and a causal mask: use LOADS=2",
        ),
        (
            smem <= BLOCK_SMEM,
            (
                f"tile {t} needs {smem} bytes of shared memory at {p.widths}: the limit of a block is {BLOCK_SMEM} "
                "(use fewer STAGES or a smaller BLOCK_N)"
            ),
        ),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def rank(p: Problem, t: Tile) -> int:
    """The fastest tile on an H200 first."""
    long = p.Sk >= (1024 if p.causal else 2048)  # with few keys, the last tile of 192 is mostly empty
    return 2 * ((t.BLOCK_N == 192) != (long and most_keys(p) == 192)) + (t.LOADS > 1 and p.D <= 64)


def full_wave_tiles(p: Problem, t: Tile) -> int:
    """Work tiles that one block processes whole; the others are split by key tiles (stream-K)."""
    count = tiles_of_heads(p, t)
    scales = any(isinstance(scale, tuple) for scale in p.descale)
    if not few_registers(p) or scales or p.causal or p.window != (None, None):
        return count
    return tiles_of_full_waves(p, t, count)


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Size in floats, and how many of them to clear. Per block: four counters, O of earlier keys if there are more than
    MMA_SUM_KEYS, and the partial O of a split work tile."""
    mma_sum_keys = 4096 if p.dtype_of("O") == "bfloat16" else 1024  # MMA_SUM_KEYS of the kernel
    stream_k = full_wave_tiles(p, t) < tiles_of_heads(p, t)
    slots = 2 if stream_k else p.Sk > mma_sum_keys
    return (t.BLOCKS * (4 + slots * t.BLOCK_M * (p.Dv + 8)) if slots else 0), 4 * t.BLOCKS * stream_k


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """At most BLOCKS persistent blocks, one per SM."""
    count = tiles_of_heads(p, t)
    return (min(count, t.BLOCKS) if full_wave_tiles(p, t) == count else t.BLOCKS, 1, 1)


kernel = Kernel(
    name="fwd_wgmma_fp8",
    computes="forward",
    rung=4,
    default=True,
    ragged=True,
    invariant_to=("runs",),
    summary="Hopper's warpgroup MMA of 8 bits: transpose warps for V, long sums accumulated in fp32",
    dtypes=("float8_e4m3", "float8_e5m2"),
    min_arch=(9, 0),
    arch_suffix="a",
    tiles=(
        Tile(BLOCK_M=192, BLOCK_N=128, STAGES=2, BLOCKS=132, LOADS=4),
        Tile(BLOCK_M=192, BLOCK_N=192, STAGES=2, BLOCKS=132, LOADS=1),
        Tile(BLOCK_M=192, BLOCK_N=192, STAGES=2, BLOCKS=132, LOADS=2),
        Tile(BLOCK_M=192, BLOCK_N=128, STAGES=2, BLOCKS=132, LOADS=1),
        Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2, BLOCKS=132, LOADS=4),
        Tile(BLOCK_M=128, BLOCK_N=64, STAGES=2, BLOCKS=132, LOADS=2),
        Tile(BLOCK_M=128, BLOCK_N=32, STAGES=2, BLOCKS=132, LOADS=1),
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2, BLOCKS=132, LOADS=2),
    ),
    grid=grid,
    block=lambda t: (128 + 2 * t.BLOCK_M, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    scratch={"partials": partials},
    args=(
        *("Q", "K", "V", "O", "LSE", "Q_map", "K_map", "V_map"),
        *("H", "heads", "group", "score", "full_wave_tiles", "partials"),
    ),
    numbers={"full_wave_tiles": full_wave_tiles},
)
