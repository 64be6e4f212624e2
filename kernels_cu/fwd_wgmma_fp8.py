"""Spec of `fwd_wgmma_fp8.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma

SMEM = 232448  # bytes that a block may have


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, stages of K, V and V turned round, and the mbarriers; rows of 128 bytes, once or more."""
    row, row_v, keys = 128 * cdiv(p.D, 128), 128 * cdiv(p.Dv, 128), 128 * cdiv(t.BLOCK_N, 128)
    turned = cdiv(keys * p.Dv, 1024) * 1024
    return row * t.BLOCK_M + t.STAGES * ((row + row_v) * t.BLOCK_N + turned) + 1024


def supports(p: Problem, arch: Arch | None) -> str | None:
    """wgmma is Hopper's own; tensor maps ask for alignment and for strides; the scale is folded into the exponent."""
    return unsupported_by_wgmma(p, arch, "fwd_block2d")


def most_keys(p: Problem) -> int:
    """BLOCK_N that does not spill, found by trial."""
    width = max(p.D, p.Dv)
    if p.bias or p.mask or p.score:  # looked up in memory
        return 64 if width <= (64 if p.score else 128) else 32
    if p.dropout:
        return 128 if width <= 128 else 64
    return 192 if width <= 64 and simple(p) and not p.sink and p.window == (None, None) else 128


def simple(p: Problem) -> bool:
    """Whether nothing is asked for that takes registers."""
    return not (p.softcap or p.alibi or p.bias or p.mask or p.score or p.dropout or p.key_lengths or p.ragged)


def frugal(p: Problem) -> bool:
    """Whether three warpgroups' registers suffice."""
    scales = any(isinstance(scale, tuple) for scale in p.descale)
    return simple(p) and (max(p.D, p.Dv) <= 64 or (p.window == (None, None) and not scales))


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What a warpgroup's registers and an SM's shared memory ask of a tile."""
    consumers, smem = t.BLOCK_M // 64, smem_bytes(p, t)
    registers, most = p.Dv // 2 + t.BLOCK_N // 2, 128 if consumers == 3 else 192
    rules = (
        (
            t.BLOCK_M in (64, 128, 192),
            f"BLOCK_M={t.BLOCK_M} must be 64, 128 or 192: 64 rows for each consumer warpgroup",
        ),
        (t.BLOCK_N % 32 == 0 and t.BLOCK_N <= 256, f"BLOCK_N={t.BLOCK_N} must be a multiple of 32 up to 256"),
        (
            registers <= most,
            f"BLOCK_N={t.BLOCK_N} needs {registers} registers for O and S at Dv={p.Dv}: at most {most}",
        ),
        (most_keys(p) >= t.BLOCK_N, f"BLOCK_N={t.BLOCK_N} spills on {p.variant}: {most_keys(p)} keys do not"),
        (
            consumers < 2 or not p.dropout or max(p.D, p.Dv) <= 128,
            f"BLOCK_M={t.BLOCK_M} spills on {p.variant} at D={p.D}: 64 rows do not",
        ),
        (consumers < 3 or frugal(p), f"BLOCK_M={t.BLOCK_M} spills on {p.variant} at D={p.D}: 128 rows do not"),
        (
            consumers < 3 or t.LOADS == 1 or p.D == p.Dv == 32 * t.LOADS,
            f"LOADS={t.LOADS} spill at D={p.D}, Dv={p.Dv} with BLOCK_M={t.BLOCK_M}: LOADS=1 does not",
        ),
        (
            t.BLOCK_N < 192 or t.LOADS > 1 or not p.causal or p.D < 64,
            f"LOADS={t.LOADS} spills at D={p.D} with BLOCK_N={t.BLOCK_N} under a causal mask: LOADS=2 do not",
        ),
        (smem <= SMEM, f"STAGES={t.STAGES} need {smem} bytes of shared memory at D={p.D}: a block may have {SMEM}"),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def rank(p: Problem, t: Tile) -> int:
    """First what was fastest on an H200."""
    many = p.Sk >= (1024 if p.causal else 2048)  # of few keys, tiles of 192 leave much of the last one empty
    return 2 * ((t.BLOCK_N == 192) != (many and most_keys(p) == 192)) + (t.LOADS > 1 and p.D <= 64)


def pieces(p: Problem, t: Tile) -> int:
    """Query tiles of all heads."""
    return p.query_tiles(t.BLOCK_M) * p.batches * p.H


def full_wave_tiles(p: Problem, t: Tile) -> int:
    """How many of them are dealt out whole: all, or as many as are whole rounds of the blocks, where parting the others
    by their keys saves more key tiles than to put away and to join what the parts have summed up costs."""
    many, keys = pieces(p, t), cdiv(p.Sk, t.BLOCK_N)
    left = many % t.BLOCKS
    scales = any(isinstance(scale, tuple) for scale in p.descale)
    if not simple(p) or scales or p.causal or p.window != (None, None) or p.Sk >= 2**23:
        return many
    return many - left if left and keys * (t.BLOCKS - left) / t.BLOCKS > 4 + t.BLOCKS / left else many


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Numbers: of each block four counters, O put away where there are many keys, and O of its part of a piece."""
    apart = 4096 if p.dtype_of("O") == "bfloat16" else 1024  # SPLIT_KEYS
    parted = full_wave_tiles(p, t) < pieces(p, t)
    places = 2 if parted else p.Sk > apart
    return (t.BLOCKS * (4 + places * t.BLOCK_M * (p.Dv + 8)) if places else 0), 4 * t.BLOCKS * parted


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """One block for each of BLOCKS multiprocessors, which takes piece after piece."""
    many = pieces(p, t)
    return (min(many, t.BLOCKS) if full_wave_tiles(p, t) == many else t.BLOCKS, 1, 1)


kernel = Kernel(
    name="fwd_wgmma_fp8",
    computes="forward",
    rung=4,
    default=True,
    ragged=True,
    summary="Hopper's warpgroup MMA of 8 bits: V is turned round on its way, long sums are put away in fp32",
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
