"""Spec of `fwd_wgmma.cu`."""

from dataclasses import replace

from sandbox.spec import (
    BLOCK_SMEM,
    HOPPER_SMS,
    Arch,
    Entry,
    Kernel,
    Problem,
    Tile,
    ascending_from_0,
    best_splits,
    cdiv,
    decode_tiles,
    decode_us,
    fields_of_splits,
    fields_of_stream_k,
    key_ranges,
    mask_of,
    packs,
    pays_to_split_last_wave,
    split_blocks,
    split_floats,
    split_us,
    splits_by_range,
    stream_k_us,
    tiles_of_heads,
    unsupported_by_wgmma,
    wgmma_tiles,
    work_tiles,
)

# By BLOCK_M: the largest Dv for which ptxas can compile P V. At launch a thread has 128 registers with BLOCK_M=192,
# and 96 with BLOCK_M=256.
WIDEST_V = {192: 192, 256: 128}


def smem_bytes(p: Problem, t: Tile) -> int:
    """`input_bytes`, and all or half of O if it fits; rows padded to multiples of 128 bytes."""
    return with_output(p, t, input_bytes(p, t))


def with_output(p: Problem, t: Tile, other_bytes: int) -> int:
    """other_bytes, and all or half of O if it fits."""
    slabs = cdiv(p.Dv, 64)
    sizes = (other_bytes + 128 * o_slabs * t.BLOCK_M for o_slabs in (slabs, cdiv(slabs, 2)))
    return next((size for size in sizes if size <= BLOCK_SMEM), other_bytes)


def input_bytes(p: Problem, t: Tile) -> int:
    """Q, stages of K, V and, if TMA can load them, bias tiles; mbarriers."""
    row, row_v = 128 * cdiv(p.D, 64), 128 * cdiv(p.Dv, 64)
    bias = 128 * cdiv(t.BLOCK_N, 64) * t.BLOCK_M if p.bias_tiles else 0
    return row * t.BLOCK_M + t.STAGES * ((row + row_v) * t.BLOCK_N + bias) + 1024


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Why a problem is not supported: requirements of wgmma and tensor maps, 16-byte rows, the scale."""
    return unsupported_by_wgmma(p, arch)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Why a tile is not supported: steps of wgmma, registers of O, bits of a mask, block maps, or shared memory of a
    block."""
    smem = smem_bytes(p, t)
    rules = (
        (
            t.BLOCK_M in (64, 128, 192, 256),
            f"BLOCK_M={t.BLOCK_M} must be 64, 128, 192 or 256: 64 rows for each consumer warpgroup",
        ),
        (t.BLOCK_N % 16 == 0 and t.BLOCK_N <= 256, f"BLOCK_N={t.BLOCK_N} must be a multiple of 16 up to 256"),
        (
            p.Dv <= WIDEST_V.get(t.BLOCK_M, 256),
            f"BLOCK_M={t.BLOCK_M} leaves too few registers for O at Dv={p.Dv}: use BLOCK_M=128",
        ),
        (
            t.BLOCK_N <= 128 or not ("mask" in p.options or (p.score and p.score.hides)),
            (
                f"BLOCK_N={t.BLOCK_N} is not supported with mask= or a score that hides keys: a thread has 32 mask "
                "bits for its BLOCK_N / 4 scores of a row: use 128"
            ),
        ),
        (
            not p.has_block_map or 512 % t.BLOCK_N == 0,
            f"BLOCK_N={t.BLOCK_N} must divide 512 with a block map: one of its words covers 512 keys",
        ),
        (
            t.BLOCK_M <= 128 or not p.has_block_map or bool(p.score and p.score.hides),
            f"BLOCK_M={t.BLOCK_M} is not supported with mask=: its bits are computed for 128 queries at once; use 128",
        ),
        (
            cdiv(p.Dv, 64) <= cdiv(p.D, 64) or smem > input_bytes(p, t),
            f"STAGES={t.STAGES} leaves no shared memory for O at Dv={p.Dv}, D={p.D}: use fewer stages",
        ),
        (
            smem <= BLOCK_SMEM,
            (
                f"tile {t} needs {smem} bytes of shared memory at {p.widths}: the limit of a block is {BLOCK_SMEM} "
                "(use fewer STAGES or a smaller BLOCK_N)"
            ),
        ),
    )
    return next((message for valid, message in rules if not valid), None)


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """At most BLOCKS persistent blocks, one per SM."""
    return (min(tiles_of_heads(p, t), t.BLOCKS), 1, 1)


kernel = Kernel(
    name="fwd_wgmma",
    computes="forward",
    rung=4,
    default=True,
    ragged=True,
    paged=True,
    short_sequences="fwd_decode",
    invariant_to=("runs", "entries", "batch", "heads", "pages", "page_size", "ragged", "SMs", "strides"),
    summary="Hopper's warpgroup MMA, fed by TMA: warp-specialised, persistent, ping-pong consumers",
    dtypes=("float16", "bfloat16"),
    min_arch=(9, 0),
    arch_suffix="a",
    programmatic_launch=True,
    tiles=(
        Tile(BLOCK_M=192, BLOCK_N=128, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=192, BLOCK_N=96, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=192, BLOCK_N=80, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=96, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=80, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=64, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=48, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=32, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=192, BLOCK_N=64, STAGES=4, BLOCKS=132),  # windows, pages, biases; two stages with a bias at D > 64
        Tile(BLOCK_M=192, BLOCK_N=64, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=256, BLOCK_N=64, STAGES=4, BLOCKS=132),
    ),
    grid=grid,
    block=lambda t: (128 + 2 * t.BLOCK_M, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=wgmma_tiles.rank,
    args=(
        *("Q", "K", "V", "O", "LSE", "Q_map", "K_map", "V_map", "O_warp_map", "bias_map"),
        *("H", "heads", "group", "score", "tile_counter"),
    ),
    then=(
        Entry(
            name="fwd_wgmma_clear",
            launch_first=True,
            grid=lambda p, t: (1 if p.ragged or p.has_block_map else 0, 1, 1),
            block=lambda t: (32, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("tile_counter", "score"),
        ),
    ),
)


def invariant_tile(p: Problem) -> dict[str, int]:
    """BLOCK_N, which determines after which keys m may change, and so the bits. It depends only on head dimensions and
    options, and is the fastest on average over lengths and layouts (experiments/029_invariant)."""
    width = max(p.D, p.Dv)
    if p.reads_elements:
        return {"BLOCK_N": 64 if width <= 128 else 32}
    return {"BLOCK_N": 80 if 64 < width <= 128 else 64}


def invariant_rank(p: Problem, t: Tile) -> float:
    """Sort key of tiles: of those that were timed with the options, the one with the fewest work tiles. Of equal ones
    the smallest, or, if each SM has at most one work tile, the one with most STAGES."""
    if not wgmma_tiles.was_timed(p, t, wgmma_tiles.pure(p)):
        return float("inf")
    tiles = work_tiles(p, t)
    return 16 * tiles + (t.BLOCK_M // 64 if tiles * splits_by_range(p, t) > HOPPER_SMS else -t.STAGES)


def merges(p: Problem, t: Tile) -> bool:
    """MERGE_RANGES: whether a block merges the ranges of a row."""
    return key_ranges(p, t) > 1 and splits_by_range(p, t) == 1


def earlier_bytes(p: Problem, t: Tile) -> int:
    """Shared memory for the sums of earlier ranges: O in fp32, m and l, if they fit. O must then fit in Q's buffer."""
    size = cdiv(t.BLOCK_M * (cdiv(p.Dv, 16) * 64 + 8), 1024) * 1024
    fits = input_bytes(p, t) + size <= BLOCK_SMEM and cdiv(p.Dv, 64) <= cdiv(p.D, 64)
    return size if merges(p, t) and fits else 0


def invariant_macros(p: Problem, t: Tile) -> dict[str, int]:
    """Which code the lengths need (key_splits.cuh, work_tile.cuh)."""
    return {"MERGE_RANGES": int(merges(p, t)), **SPLIT_FIELDS["macros_of"](p, t)}


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Floats of scratch memory, of which none is zeroed: those of the splits; without splits O, m and l of the earlier
    keys of each consumer thread of a block, if they do not fit in shared memory (key_splits.cuh)."""
    if not merges(p, t) or earlier_bytes(p, t):
        return split_floats(p, splits_by_range(p, t)), 0
    return 4 * split_blocks(p, t, 1) * (cdiv(p.Dv, 16) * 2 * 2 * t.BLOCK_M + t.BLOCK_M // 2), 0


SPLIT_FIELDS = fields_of_splits("fwd_wgmma_invariant", splits_by_range)

invariant_kernel = replace(
    kernel,
    name="fwd_wgmma_invariant",
    test_share=10,
    preference=-1,
    short_sequences="",
    summary="fwd_wgmma for invariant=True: m and fallback per row; sums over fixed key ranges",
    invariant_to=(
        "runs", "entries", "batch", "heads", "queries", "allocation", "pages", "page_size", "ragged", "SMs", "splits",
        "strides",
    ),
    invariant_tile=invariant_tile,
    tiles=(
        Tile(BLOCK_M=192, BLOCK_N=80, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=64, BLOCK_N=80, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=4, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=80, STAGES=3, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=64, STAGES=4, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=64, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=128, BLOCK_N=32, STAGES=2, BLOCKS=132),
        Tile(BLOCK_M=256, BLOCK_N=64, STAGES=4, BLOCKS=132),
    ),
    rank=invariant_rank,
    macros={"KEY_SPLITS": 1, "INVARIANT": 1},
    smem_bytes=lambda p, t: with_output(p, t, input_bytes(p, t) + earlier_bytes(p, t)),
    args=(*("Q_warp_map" if name == "Q_map" else name for name in kernel.args), "partials", "splits"),
    **{
        **SPLIT_FIELDS, "macros_of": invariant_macros, "scratch": {"partials": partials},
        "then": (replace(kernel.then[0], name="fwd_wgmma_invariant_clear"), *SPLIT_FIELDS["then"]),
    },
)  # fmt: skip


def supports_split(p: Problem, arch: Arch | None) -> str | None:
    """Why a problem is not supported: as for fwd_wgmma, and options with which key tile j does not begin at key
    j * BLOCK_N."""
    if not ascending_from_0(p):
        given = f"window={p.window}" if p.bounds[0] is not None else "alibi" if p.alibi else mask_of(p)
        return f"{given} is not supported: with splits, key tile j must begin at key j * BLOCK_N"
    return supports(p, arch)


def first_for_split(p: Problem) -> bool:
    """Problems on which, by the estimates, it is faster than fwd_wgmma and fwd_decode: with too few work tiles for the
    GPU, or few rows of each head of a group. With up to 512 keys also one wave of work tiles, where it is up to 8%
    faster without splits (experiment 026). Left to fwd_decode: up to 32 rows of a group, and few blocks. Left to
    fwd_wgmma: causal problems in which some rows see few keys and others all, whose work tiles the estimate takes for
    equally long."""
    if p.ragged or max(p.D, p.Dv) > kernel.max_D or supports_split(p, None):
        return False
    if 0 in (p.B, p.H, p.Sq, p.Sk) or p.Sq * p.group <= 32 or decode_tiles.few_blocks(p):
        return False
    if p.causal and 2 * p.Sq > p.Sk and p.Sq > 128:
        return False
    tiles = [t for t in split_kernel.tiles if not check_tile(p, t, None)]
    tile = min(tiles, key=lambda t: split_us(p, t), default=None)
    if not tile:
        return False
    if not packs(p, tile) and best_splits(p, tile) == 1:
        return p.plain and p.Sk <= 512 and work_tiles(p, tile) <= HOPPER_SMS
    other = wgmma_tiles.us_of(p, wgmma_tiles.best(p))
    if 16 * p.Sq <= p.Sk:  # fwd_decode may be chosen
        other = min(other, decode_us(p))
    return split_us(p, tile) < 0.95 * other


split_kernel = replace(
    invariant_kernel,
    name="fwd_wgmma_split",
    preference=-1,
    ragged=False,
    invariant_tile=None,
    summary="fwd_wgmma for few work tiles: packed GQA, split-KV",
    invariant_to=("runs", "entries", "heads", "strides"),
    tiles=tuple(
        Tile(BLOCK_M=m, BLOCK_N=n, STAGES=2, BLOCKS=132)
        for m, n in ((192, 128), (192, 80), (128, 128), (128, 80), (128, 64), (128, 48), (128, 32))
    ),
    rank=split_us,
    macros={"KEY_SPLITS": 1},
    smem_bytes=smem_bytes,
    supports=supports_split,
    first_for=first_for_split,
    **fields_of_splits("fwd_wgmma_split", best_splits),
)


def supports_stream_k(p: Problem, arch: Arch | None) -> str | None:
    """Why a problem is not supported: as for fwd_wgmma, and work tiles that see different numbers of keys. Other
    options than a sink were not timed."""
    if p.causal or not p.options <= {"sink"}:
        return f"{p.variant} is not supported: all queries must see all keys, and the only option is a sink"
    return supports(p, arch)


def check_stream_k_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Why a tile is not supported: as for fwd_wgmma, and a block has counters for three consumers; the kernel that
    clears them has a thread for each block."""
    if t.BLOCK_M > 192 or t.BLOCKS > 1024:
        return f"BLOCK_M={t.BLOCK_M}, BLOCKS={t.BLOCKS} is not supported: at most BLOCK_M=192 and BLOCKS=1024"
    return check_tile(p, t, arch)


LEAST_QUERIES = 1024  # fewer were not timed; few are computed faster by other kernels


def first_for_stream_k(p: Problem) -> bool:
    """Problems of at least one full wave whose other work tiles are worth splitting, with fwd_wgmma's fastest tile; or
    with 192 x 128 where that is faster by the estimates than the tile for four consumers, which are not supported. Dv
    other than D was not timed."""
    if p.Sq < LEAST_QUERIES or supports_stream_k(p, None) or not wgmma_tiles.pure(p) or kernel.max_D < p.D:
        return False
    best = wgmma_tiles.best(p)
    if best[0] == 256:
        three = Tile(BLOCK_M=192, BLOCK_N=128, BLOCKS=HOPPER_SMS)
        best = (192, 128) if stream_k_us(p, three) < 0.95 * wgmma_tiles.us_of(p, best) else best
    tile = next((t for t in stream_k_kernel.tiles if best == (t.BLOCK_M, t.BLOCK_N)), None)
    return tile is not None and not check_tile(p, tile, None) and pays_to_split_last_wave(p, tile)


stream_k_kernel = replace(
    kernel,
    name="fwd_wgmma_stream_k",
    test_share=10,
    preference=-2,
    ragged=False,
    paged=False,
    short_sequences="",
    summary="fwd_wgmma without a mask: work tiles that do not fill a wave are split by keys (stream-K)",
    invariant_to=("runs", "entries", "strides"),
    macros={"STREAM_K": 1},
    tiles=tuple(t for t in kernel.tiles if t.BLOCK_M <= 192),
    supports=supports_stream_k,
    check_tile=check_stream_k_tile,
    first_for=first_for_stream_k,
    args=(*kernel.args, "partials", "full_wave_tiles"),
    **fields_of_stream_k("fwd_wgmma_stream_k"),
)

kernels = (kernel, invariant_kernel, split_kernel, stream_k_kernel)
