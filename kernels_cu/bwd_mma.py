"""Spec of `bwd_mma.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, unsupported_by_cp_async


def columns(width: int, t: Tile) -> int:
    """D_PAD, DV_PAD: padded so that the warps of a group, and of a row of dQ, divide them into whole MMA steps."""
    least = max(width, 16 * (t.WARPS * 32 // t.BLOCK_N), 16 * (t.WARPS * 32 // t.BLOCK_M))
    return 1 << (least - 1).bit_length()


def smem_bytes(p: Problem, t: Tile) -> int:
    """K, V; two stages of Q, dO, LSE and delta; dS^T, and P^T where warps share keys."""
    rows, shared = 2 * (columns(p.D, t) + columns(p.Dv, t)), 2 if t.WARPS * 32 > t.BLOCK_N else 1
    return t.BLOCK_N * rows + 2 * (t.BLOCK_M * rows + 8 * t.BLOCK_M) + shared * 2 * t.BLOCK_N * t.BLOCK_M


def dQ_accum(p: Problem, t: Tile) -> tuple[int, int]:
    """Whole tiles of BLOCK_M rows of D_PAD columns, which a wide v pads too: all zeros."""
    numbers = p.batches * p.H * p.query_tiles(t.BLOCK_M) * t.BLOCK_M * columns(p.D, t)
    return numbers, numbers


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Rows are copied 16 bytes at a time; the scale is folded into the exponent."""
    return unsupported_by_cp_async(p, "bwd_block2d")


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """What an MMA step, the register file and an SM's shared memory ask of a tile."""
    rows = 32 * t.WARPS  # 32 of the keys' and of dQ's tile for each warp
    if rows % t.BLOCK_N or rows % t.BLOCK_M or t.BLOCK_M > 128:
        return f"BLOCK_M={t.BLOCK_M} and BLOCK_N={t.BLOCK_N} must divide {rows}, 32 rows a warp; BLOCK_M is at most 128"
    share, smem, widest = rows // t.BLOCK_N, t.MIN_BLOCKS * smem_bytes(p, t), max(p.D, p.Dv)
    tight = p.dtype == "float16" or columns(widest, t) > widest > 96  # a few registers more
    rules = (
        (
            t.BLOCK_M // share % 16 == 0,
            f"BLOCK_M={t.BLOCK_M} must be a multiple of 16 queries for each of {share} warps",
        ),
        (columns(widest, t) <= 64 * share, f"dK and dV of D={widest} spill: {share} warps hold 64 columns each"),
        (widest > 64 or t.WARPS == 4, f"WARPS={t.WARPS} at D={widest} are not built: 4 warps hold it"),
        (not p.ragged or t.BLOCK_N < 128 or t.WARPS > 4, "BLOCK_N=128 of a ragged batch spills with WARPS=4"),
        (
            not p.dropout or widest <= 64 or t.WARPS > 4 or arch != (9, 0),
            f"WARPS={t.WARPS} at D={widest} spill with dropout on compute capability 9.0: 8 do not",
        ),
        (
            not (p.dropout and p.causal and tight) or t.BLOCK_N < 128 or widest <= 64 or arch != (9, 0),
            f"BLOCK_N={t.BLOCK_N} at D={widest} spills with causal dropout on compute capability 9.0: 64 keys do not",
        ),
        (not arch or arch < (10, 0) or t.BLOCK_N < 128, "BLOCK_N=128 spills on compute capability 10.0 and later"),
        (smem <= 232448, f"MIN_BLOCKS={t.MIN_BLOCKS} need {smem} bytes of shared memory at D={p.D}: an SM has 232448"),
    )
    return next((sentence for kept, sentence in rules if not kept), None)


kernel = Kernel(
    name="bwd_mma",
    computes="backward",
    rung=3,
    default=True,
    ragged=True,
    summary="tensor cores warp by warp: S^T and dP^T feed dV and dK from registers; dQ by fp32 reductions in L2",
    dtypes=("float16", "bfloat16"),
    min_arch=(8, 0),
    deterministic=False,
    scratch={"dQ_accum": dQ_accum},
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=128, WARPS=4, MIN_BLOCKS=2),  # D <= 64
        Tile(BLOCK_M=64, BLOCK_N=128, WARPS=8, MIN_BLOCKS=1),  # D <= 128
        Tile(BLOCK_M=64, BLOCK_N=64, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=64, WARPS=8, MIN_BLOCKS=1),
    ),
    grid=lambda p, t: (p.key_tiles(t.BLOCK_N), p.Hk, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    args=("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dK", "dV", "group", "score"),
    then=(
        Entry(
            name="bwd_mma_postprocess",
            grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
            block=lambda t: (32 * t.WARPS, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("Q", "K", "V", "dO", "LSE", "delta", "dQ_accum", "dQ", "group", "score"),
        ),
    ),
)
