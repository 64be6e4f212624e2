"""Spec of `bwd_wgmma.cu`."""

from dataclasses import replace

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, cdiv, unsupported_by_wgmma

SMEM = 232448  # bytes that a block may have
BLOCKS = 132  # that run at one time, one a multiprocessor
ABREAST = 16  # heads of a section at least, where a window makes pieces short
MAP_WORDS = 128  # of 32 query tiles, of all heads that share a key/value head


def columns(p: Problem, t: Tile) -> int:
    """D_PAD."""
    return 256 if t.BLOCK_N == 64 else cdiv(p.D, 16) * 16


def smem_bytes(p: Problem, t: Tile) -> int:
    """K, V; stages of Q, dO, LSE, delta and a bias; dS, P where consumers share keys, else dQ; the mbarriers; of a
    block map what concerns a block."""
    row, shared = 128 * cdiv(columns(p, t), 64), t.BLOCK_N == 64
    dQ = 4 * 128 * (columns(p, t) if t.BLOCK_M == 128 else 64 if p.D > 64 else 32 if p.D > 32 else 16)
    pairs = 2 * t.BLOCK_M * t.BLOCK_N * 2
    fed = 2 * t.BLOCK_N * row + t.STAGES * (t.BLOCK_M * (2 * row + 8) + (pairs // 2 if p.bias else 0))
    return fed + pairs + (pairs if shared else 0) + (0 if shared else dQ) + 256 + (8 * MAP_WORDS if mapped(p) else 0)


def mapped(p: Problem) -> bool:
    """Whether there is a block map."""
    return p.block_map[3] > 0


def supports(p: Problem, arch: Arch | None) -> str | None:
    """wgmma is Hopper's own; tensor maps ask for alignment and for strides; the scale is folded into the exponent."""
    if reason := unsupported_by_wgmma(p, arch, "bwd_block2d"):
        return reason
    if p.bias and not p.bias_tiles:
        return "a bias that tensor maps cannot copy in tiles is not built: bwd_mma is faster with it"
    if p.bias and p.D > 128:
        return f"a bias beside D={p.D} is not built: shared memory has no room for it (bwd_mma takes it)"
    if p.Dv > p.D:
        return f"Dv={p.Dv} beside D={p.D} is not built: v must not be wider than k (bwd_mma takes it)"
    if mapped(p) and p.group * cdiv(p.Sq, 32 * 64) > MAP_WORDS:
        return f"a mask of {p.group} heads of {p.Sq} queries is not built: {MAP_WORDS * 2048} rows a group are"
    return None


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What two consumer warpgroups' registers and an SM's shared memory ask of a tile."""
    smem = smem_bytes(p, t)
    fits = (64, 64) if p.D > 128 else (64 if p.D > 64 else t.BLOCK_M, 128)
    rules = (
        (fits == (t.BLOCK_M, t.BLOCK_N), f"at D={p.D} BLOCK_M={fits[0]} and BLOCK_N={fits[1]} alone are built"),
        (
            t.BLOCK_M < 128 or not (p.softcap or p.bias or p.mask or p.score or p.dropout),
            "BLOCK_M=128 spills with softcap, bias, mask, score and dropout: 64 queries do not",
        ),
        (smem <= SMEM, f"STAGES={t.STAGES} need {smem} bytes of shared memory at D={p.D}: a block may have {SMEM}"),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


def counted_dQ(p: Problem, t: Tile) -> tuple[int, int]:
    """dQ_accum: counters, of pieces and two for each query tile, which have to be zeros; and the sums, of which the
    first is stored."""
    rows = p.batches * p.H * p.query_tiles(128) * 128
    counters = 128 + rows // 32
    return counters + rows * (1 << max(p.D - 1, 31).bit_length()), counters


def dQ_in_any_order(p: Problem, t: Tile) -> tuple[int, int]:
    """The same where the first is stored, of a ragged batch with zeros by `bwd_wgmma_scheduler`; else all zeros."""
    numbers, counters = counted_dQ(p, t)
    if p.D > 128 or (p.ragged and p.D <= 64):  # not COUNTED of dq_semaphore.cuh
        return numbers, numbers
    return numbers, 0 if p.ragged else counters


def table_of_pieces(p: Problem, t: Tile) -> tuple[int, int]:
    """Of a ragged batch: eight numbers a piece."""
    return 8 * p.key_tiles(t.BLOCK_N) * p.Hk if p.ragged else 0, 0


def abreast(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Pieces of a section of heads side by side: as many as run at one time, or of short rows half of them; of a
    window more. (ABREAST of include/dq_semaphore.cuh.)"""
    tiles, heads = p.key_tiles(t.BLOCK_N), p.batches * p.Hk
    if not heads:
        return 1, tiles, 0
    sections = round(heads * tiles / (BLOCKS if tiles > 4 else BLOCKS / 2))
    width = cdiv(heads, min(max(sections, 1), heads))
    if p.bounds[0] is not None:
        width = max(width, min(heads, ABREAST))
    return width, tiles, cdiv(heads, width)


def any_order(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Abreast where a last key makes pieces of different length."""
    return (p.key_tiles(t.BLOCK_N), p.Hk, p.batches) if p.ragged or p.bounds[1] is None else abreast(p, t)


in_any_order = Kernel(
    name="bwd_wgmma",
    computes="backward",
    rung=4,
    preference=3,
    summary="Hopper's warpgroup MMA, fed by TMA; dQ leaves by bulk reductions that L2 carries out",
    dtypes=("float16", "bfloat16"),
    min_arch=(9, 0),
    arch_suffix="a",
    deterministic=False,
    programmatic_launch=True,
    scratch={"dQ_accum": dQ_in_any_order, "work_tiles": table_of_pieces},
    default=True,
    ragged=True,
    tiles=(
        Tile(BLOCK_M=128, BLOCK_N=128, STAGES=2),  # D <= 64
        Tile(BLOCK_M=64, BLOCK_N=128, STAGES=2),  # D <= 128, and D <= 64 with options that need registers
        Tile(BLOCK_M=64, BLOCK_N=64, STAGES=2),
    ),
    grid=any_order,
    block=lambda t: (384, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    args=(
        *("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dK", "dV"),
        *("Q_tile_map", "dO_tile_map", "K_map", "V_map", "dK_map", "dV_map", "B", "Hk", "group", "score"),
        *("bias_map", "work_tiles"),
    ),
    then=(
        Entry(
            name="bwd_wgmma_scheduler",
            launch_first=True,
            grid=lambda p, t: (cdiv(table_of_pieces(p, t)[0], 8 * 8), 1, 1),
            block=lambda t: (256, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("work_tiles", "dQ_accum", "counters", "Hk", "group", "score"),
            numbers={"counters": lambda p, t: counted_dQ(p, t)[1]},
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


def in_sections(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Abreast; of a window, whose pieces are alike, no more heads than make as many as run at one time. Without a mask
    twice as many heads, of wide ones with long rows four times, where it was measured: half as many pieces of a head
    wait for one another at the beginning."""
    width, tiles, _ = abreast(p, t)
    heads, rows = p.batches * p.Hk, tiles * t.BLOCK_N
    if p.bounds[0] is not None and tiles:
        width = min(cdiv(BLOCKS, tiles), heads)
    elif p.bounds[1] is None and heads and rows >= 4096 and (p.D > 128 or rows <= 8192):
        width = min((4 if p.D > 128 and rows >= 8192 else 2) * width, heads)
    return width, tiles, cdiv(heads, width) if heads else 0


def supports_in_order(p: Problem, arch: Arch | None) -> str | None:
    """Who adds to a query tile, and when, has to follow from numbers."""
    if mapped(p):
        return "masks and conditions are not built in order (bwd_block2d takes them)"
    return supports(p, arch)


in_order = replace(
    in_any_order,
    name="bwd_wgmma_deterministic",
    preference=1,
    summary="bwd_wgmma, whose blocks add to dQ in the order of the keys: the same bits every time",
    deterministic=True,
    ragged=False,
    supports=supports_in_order,
    macros={"DETERMINISTIC": 1},
    grid=in_sections,
    scratch={"dQ_accum": counted_dQ, "work_tiles": table_of_pieces},
    then=tuple(
        replace(entry, name="bwd_wgmma_deterministic_postprocess")
        for entry in in_any_order.then
        if not entry.launch_first
    ),
)

kernels = (in_any_order, in_order)
