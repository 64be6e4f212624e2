"""Spec of `bwd_wgmma.cu`."""

from dataclasses import replace

from sandbox.spec import (
    BLOCK_SMEM,
    HOPPER_SMS,
    Arch,
    Entry,
    Kernel,
    Problem,
    Tile,
    cdiv,
    head_groups,
    mask_of,
    query_splits,
    unsupported_by_wgmma,
)

MAP_WORDS = 128  # of GroupBlockMap in m_block_range.cuh: 32-bit words, one bit per m_block and head of a group


def narrow_v(p: Problem, t: Tile) -> bool:
    """NARROW_V of the kernel."""
    return p.D > 128 and t.BLOCK_N == 128


def d_pad(p: Problem, t: Tile) -> int:
    """D_PAD of the kernel."""
    return 256 if t.BLOCK_N == 64 else 192 if narrow_v(p, t) else cdiv(p.D, 16) * 16


def dv_pad(p: Problem, t: Tile) -> int:
    """DV_PAD of the kernel."""
    return 128 if p.D > 128 and p.Dv <= 128 else d_pad(p, t)


def smem_bytes(p: Problem, t: Tile, deterministic: bool = False) -> int:
    """Sum of: K, V; STAGES times Q, dO, LSE, delta, bias; dS; dQ; mbarriers; a column of the block map. BLOCK_N = 64
    (the consumers split the head dimension): also P; one stage of dO and half of dQ or, if deterministic, no dQ."""
    row_bytes = 128 * (cdiv(d_pad(p, t), 64) + cdiv(dv_pad(p, t), 64))  # a row of K and one of V
    dQ = 4 * 128 * (d_pad(p, t) if t.BLOCK_M == 128 else 64 if p.D > 64 else 32 if p.D > 32 else 16)
    if narrow_v(p, t):
        dQ = 4 * 64 * 96  # of one consumer: they stage dQ in turn
    dS = 2 * t.BLOCK_M * t.BLOCK_N * 2
    P, dO_stages = 0, t.STAGES
    if t.BLOCK_N == 64:
        P, dQ, dO_stages = dS, *((0, t.STAGES) if deterministic else (4 * 64 * 128, 1))
    Q_and_dO = 128 * t.BLOCK_M * (t.STAGES * cdiv(d_pad(p, t), 64) + dO_stages * cdiv(dv_pad(p, t), 64))
    loaded = t.BLOCK_N * row_bytes + Q_and_dO + t.STAGES * (8 * t.BLOCK_M + (dS // 2 if p.bias else 0))
    return loaded + dS + P + dQ + 256 + (8 * MAP_WORDS if p.has_block_map else 0)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Requirements of wgmma (Hopper), of tensor maps (alignment, strides), and of shared memory."""
    if reason := unsupported_by_wgmma(p, arch):
        return reason
    if p.bias and not p.bias_tiles:
        return (
            f"bias={p.bias} is not supported: TMA copies tiles of it, so it must have q's dtype, Sq > 1 rows, Sk "
            "columns (a multiple of 8), 16-byte alignment and no broadcast queries or keys, in a dense batch"
        )
    if p.bias and p.D > 128:
        return f"a bias with D={p.D} is not supported: it exceeds shared memory beyond D=128"
    if p.Dv > p.D:
        return f"Dv={p.Dv} with D={p.D} is not supported: Dv must not exceed D"
    if p.has_block_map and p.group * cdiv(p.Sq, 32 * 64) > MAP_WORDS:
        return (
            f"a block map of {p.group} query heads per key/value head with Sq={p.Sq} is not supported: at most "
            f"{MAP_WORDS * 2048} query rows per key/value head, with Sq rounded up to a multiple of 2048"
        )
    return None


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """The tile for each head dimension, stages, and limits of shared memory."""
    smem = smem_bytes(p, t)
    key_rows = 128 if p.D <= 128 or (t.BLOCK_N == 128 and p.D <= 192 and p.Dv <= 128) else 64
    fits = (128 if t.BLOCK_M == 128 and p.D <= 64 else 64, key_rows)
    rules = (
        (
            fits == (t.BLOCK_M, t.BLOCK_N),
            f"BLOCK_M={t.BLOCK_M}, BLOCK_N={t.BLOCK_N} is not supported at {p.widths}: use {fits[0]} and {fits[1]}",
        ),
        (
            t.BLOCK_M < 128 or not (p.bias or p.mask or (p.score and p.score.hides)),
            (
                "BLOCK_M=128 is not supported with a bias or a mask: a TMA box of the bias has 64 rows, and a lane has "
                "mask bits for 64 rows; use 64"
            ),
        ),
        (t.STAGES >= 2, f"STAGES={t.STAGES} must be at least 2: Q is released after Q of the next m_block is loaded"),
        (
            smem <= BLOCK_SMEM,
            (
                f"STAGES={t.STAGES} needs {smem} bytes of shared memory at {p.widths}: the limit is {BLOCK_SMEM} "
                "(use fewer)"
            ),
        ),
    )
    return next((reason for passed, reason in rules if not passed), None)


def dQ_accum_with_semaphores(p: Problem, t: Tile) -> tuple[int, int]:
    """(elements of dQ_accum, how many of them are zeroed before the launch). The tile counter and the semaphores are
    zeroed, the accumulators are not: the first block stores. See include/dq_semaphore.cuh."""
    rows = p.batches * p.H * p.query_tiles(128) * 128
    # Upper bounds of what the kernel uses. Tile counter and alignment; two semaphores per m_block of at least 64 rows.
    counters = 128 + rows // 32
    # Columns of a row: 2 * DQ_COLS (192 if NARROW_V, otherwise 32, 64, 128 or 256); if BLOCK_M = 128 an upper bound of
    # D_PAD.
    columns = 192 if narrow_v(p, t) else 1 << max(p.D - 1, 31).bit_length()
    return counters + rows * columns, counters


def zeroed_dQ(p: Problem, t: Tile) -> bool:
    """Whether dQ_accum is zeroed before the launch and all blocks add, so that there are no semaphores.

    Ragged, D <= 64: semaphores are 1% slower. Causal with more n_blocks per head than SMs: the n_blocks of a head start
    at different m_blocks, their diagonals, and the last one that has an SM is the first at all m_blocks beyond its own.
    Because a first store takes longer than an addition, the others catch up, and then all wait at each m_block (D 256,
    16k rows: 4.0 instead of 2.7 us).
    """
    left, right = p.bounds
    if p.ragged:
        return p.D <= 64
    return left is None and right is not None and p.key_tiles(t.BLOCK_N) > HOPPER_SMS


def dQ_accum(p: Problem, t: Tile) -> tuple[int, int]:
    """As above; if zeroed_dQ, all elements are zeroed. Ragged: `bwd_wgmma_scheduler` zeroes the counters."""
    elements, counters = dQ_accum_with_semaphores(p, t)
    if zeroed_dQ(p, t):
        return elements, elements
    return elements, 0 if p.ragged else counters


def work_tiles(p: Problem, t: Tile) -> tuple[int, int]:
    """(ints, of which zeroed): 8 ints per work tile of a ragged batch."""
    return 8 * p.key_tiles(t.BLOCK_N) * p.Hk if p.ragged else 0, 0


def partial_words(p: Problem, t: Tile) -> int:
    """Elements of 4 bytes of a partial dK and dV of an n_block, in slabs of 64 keys and 64 columns of 16 bits; see
    include/bwd_combine_group.cuh."""
    slabs = cdiv(d_pad(p, t), 64) + cdiv(dv_pad(p, t), 64)
    return t.BLOCK_N // 64 * slabs * 64 * 64 // 2


def dKV_partials(p: Problem, t: Tile) -> tuple[int, int]:
    """(elements of 4 bytes, of which zeroed): a partial dK and dV per query head."""
    return p.batches * p.H * p.key_tiles(t.BLOCK_N) * partial_words(p, t), 0


def per_query_head(p: Problem) -> Problem:
    """The problem with as many key/value heads as query heads: its work tiles are those of bwd_wgmma_split_group."""
    return replace(p, Hk=p.H)


nondeterministic = Kernel(
    name="bwd_wgmma",
    computes="backward",
    rung=4,
    preference=3,
    summary="warpgroup MMA (wgmma) fed by TMA, warp-specialised; dQ by TMA reduce-add",
    dtypes=("float16", "bfloat16"),
    min_arch=(9, 0),
    arch_suffix="a",
    deterministic=False,
    programmatic_launch=True,
    scratch={"dQ_accum": dQ_accum, "work_tiles": work_tiles, "dKV_partials": lambda p, t: (0, 0)},
    macros_of=lambda p, t: {"ZEROED_DQ": int(zeroed_dQ(p, t))},
    default=True,
    ragged=True,
    tiles=(
        Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2),  # D <= 64
        # D <= 128 (D <= 64: with a bias, mask, dropout or Score, or where 128 rows spill), and D <= 192 with Dv <= 128
        Tile(BLOCK_M=64, BLOCK_N=128, STAGES=2),
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2),  # other D > 128, and where the tile above spills (D <= 192 with a mask)
    ),
    grid=head_groups.grid,
    block=lambda t: (384, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    # With dropout or a Score only BLOCK_M=64 has been measured: it is tried first.
    rank=lambda p, t: bool(t.BLOCK_M == 128 and (p.dropout or p.score)),
    args=(
        *("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dK", "dV"),
        *("Q_tile_map", "dO_tile_map", "K_map", "V_map", "dK_map", "dV_map", "B", "Hk", "group", "score"),
        *("bias_map", "work_tiles", "dKV_partials"),
    ),
    then=(
        Entry(
            name="bwd_wgmma_scheduler",
            launch_first=True,
            grid=lambda p, t: (cdiv(work_tiles(p, t)[0], 8 * 8), 1, 1),
            block=lambda t: (256, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("work_tiles", "dQ_accum", "num_counters", "Hk", "group", "score"),
            numbers={"num_counters": lambda p, t: dQ_accum_with_semaphores(p, t)[1]},
        ),
        Entry(
            name="bwd_wgmma_postprocess",
            programmatic_launch=True,
            grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
            block=lambda t: (256, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dQ", "group", "score"),
        ),
    ),
)


def supports_split_group(p: Problem, arch: Arch | None) -> str | None:
    """No block map: with it, the load warps spill."""
    if p.has_block_map:
        return f"{mask_of(p)} is not supported: registers would spill"
    return supports(p, arch)


split_group = replace(
    nondeterministic,
    name="bwd_wgmma_split_group",
    test_share=3,
    preference=2,
    summary="bwd_wgmma with a work tile per query head: for few key/value heads or keys",
    supports=supports_split_group,
    macros={"SPLIT_GROUP": 1},
    grid=lambda p, t: head_groups.grid(per_query_head(p), t),
    scratch={
        "dQ_accum": dQ_accum,
        "work_tiles": lambda p, t: work_tiles(per_query_head(p), t),
        "dKV_partials": dKV_partials,
    },
    first_for=query_splits.split_group_pays,
    then=(
        replace(
            nondeterministic.then[0],
            name="bwd_wgmma_split_group_scheduler",
            grid=lambda p, t: (cdiv(work_tiles(per_query_head(p), t)[0], 8 * 8), 1, 1),
        ),
        replace(nondeterministic.then[1], name="bwd_wgmma_split_group_postprocess"),
        Entry(
            name="bwd_wgmma_split_group_combine",
            programmatic_launch=True,
            grid=lambda p, t: (p.key_tiles(16), p.Hk, p.batches),
            block=lambda t: (256, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("Q", "K", "V", "dO", "LSE", "delta", "dK", "dV", "group", "score", "dKV_partials"),
        ),
    ),
)


def supports_deterministic(p: Problem, arch: Arch | None) -> str | None:
    """Also requires that there is no block map: the kernel computes the order of additions to a dQ tile from ranges of
    visible keys."""
    if p.has_block_map:
        return f"{mask_of(p)} is not supported: the order of additions to dQ is computed from ranges of visible keys"
    return supports(p, arch)


deterministic_kernel = replace(
    nondeterministic,
    name="bwd_wgmma_deterministic",
    test_share=3,
    preference=1,
    summary="bwd_wgmma with semaphores that order the additions to dQ: deterministic",
    deterministic=True,
    invariant_to=("runs", "entries", "batch", "heads", "strides"),
    invariant_tile=lambda p: {},
    ragged=False,
    supports=supports_deterministic,
    macros={"DETERMINISTIC": 1},
    macros_of=lambda p, t: {},
    grid=head_groups.deterministic_grid,
    smem_bytes=lambda p, t: smem_bytes(p, t, deterministic=True),
    scratch={**nondeterministic.scratch, "dQ_accum": dQ_accum_with_semaphores},
    then=tuple(
        replace(entry, name="bwd_wgmma_deterministic_postprocess")
        for entry in nondeterministic.then
        if not entry.launch_first
    ),
)


def supports_stream_k(p: Problem, arch: Arch | None) -> str | None:
    """No mask: all work tiles take equally long."""
    if others := (p.options - {"sink"}) | ({"causal"} if p.causal else set()):
        return f"{', '.join(sorted(others))} is not supported: all queries must see all keys, without a score option"
    return supports(p, arch)


def check_stream_k_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """As for bwd_wgmma; up to 1024 shares, so that the kernel can count units in 32 bits."""
    return f"BLOCKS={t.BLOCKS} must be at most 1024" if t.BLOCKS > 1024 else check_tile(p, t, arch)


def first_for_stream_k(p: Problem) -> bool:
    """Where splitting work tiles by queries pays, but not by query heads."""
    if supports_stream_k(p, None) or nondeterministic.max_D < p.D or query_splits.split_group_pays(p):
        return False
    tile = next((t for t in stream_k.tiles if not check_tile(p, t, None)), None)
    return tile is not None and query_splits.pays(p, tile)


stream_k = replace(
    nondeterministic,
    name="bwd_wgmma_stream_k",
    test_share=10,
    preference=-1,
    summary="bwd_wgmma without a mask: work tiles that do not fill a wave are split by queries (stream-K)",
    ragged=False,
    supports=supports_stream_k,
    macros={"STREAM_K": 1},
    tiles=tuple(Tile(**t, BLOCKS=HOPPER_SMS) for t in nondeterministic.tiles),
    check_tile=check_stream_k_tile,
    first_for=first_for_stream_k,
    args=(*nondeterministic.args, *query_splits.NUMBERS),
    grid=query_splits.grid,
    numbers=query_splits.NUMBERS,
    scratch={
        **nondeterministic.scratch,
        "dKV_partials": lambda p, t: (query_splits.parts(p, t) * partial_words(p, t), 0),
    },
    then=(
        query_splits.combine("bwd_wgmma_stream_k_combine"),
        replace(nondeterministic.then[1], name="bwd_wgmma_stream_k_postprocess"),
    ),
)

kernels = (nondeterministic, split_group, deterministic_kernel, stream_k)
