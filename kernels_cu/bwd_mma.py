"""Spec of `bwd_mma.cu`."""

from sandbox.spec import Arch, Entry, Kernel, Problem, Tile, unsupported_by_cp_async, unsupported_by_sm


def columns(width: int, t: Tile) -> int:
    """D_PAD or DV_PAD: a power of two, at least 16 columns for each of the warps that share keys (KEY_WARPS), and of
    those that share rows of dQ (DQ_COL_WARPS)."""
    minimum = max(width, 16 * (t.WARPS * 32 // t.BLOCK_N), 16 * (t.WARPS * 32 // t.BLOCK_M))
    return 1 << (minimum - 1).bit_length()


def smem_bytes(p: Problem, t: Tile) -> int:
    """K, V; two stages of Q, dO, LSE and delta; dS^T, and P^T if several warps share keys."""
    rows, shared = 2 * (columns(p.D, t) + columns(p.Dv, t)), 2 if t.WARPS * 32 > t.BLOCK_N else 1
    return t.BLOCK_N * rows + 2 * (t.BLOCK_M * rows + 8 * t.BLOCK_M) + shared * 2 * t.BLOCK_N * t.BLOCK_M


def dQ_accum(p: Problem, t: Tile) -> tuple[int, int]:
    """Floats of scratch memory, and how many of them are zeroed: whole tiles of BLOCK_M rows and D_PAD columns."""
    numbers = p.batches * p.H * p.query_tiles(t.BLOCK_M) * t.BLOCK_M * columns(p.D, t)
    return numbers, numbers


def supports(p: Problem, arch: Arch | None) -> str | None:
    """cp.async copies 16 bytes of a row at a time; the scale is part of the exponent."""
    return unsupported_by_cp_async(p)


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: whole MMA steps, columns of dK and dV, shared memory of an SM."""
    rows = 32 * t.WARPS  # a warp has 32 keys, and 32 rows of dQ
    if rows % t.BLOCK_N or rows % t.BLOCK_M or t.BLOCK_M > 128:
        return f"BLOCK_M={t.BLOCK_M} and BLOCK_N={t.BLOCK_N} must divide 32 * WARPS = {rows}, with BLOCK_M <= 128"
    share, widest = rows // t.BLOCK_N, max(p.D, p.Dv)
    rules = (
        (
            t.BLOCK_M // share % 16 == 0,
            f"BLOCK_M={t.BLOCK_M} must be a multiple of {16 * share}: 16 queries for each of {share} warps",
        ),
        (
            columns(widest, t) <= 64 * share,
            (
                f"BLOCK_N={t.BLOCK_N} with WARPS={t.WARPS} is not supported at D={p.D}, Dv={p.Dv}: a warp has at most "
                f"64 columns of dK and dV, and the number of warps that share them is 32 * WARPS / BLOCK_N = {share} "
                "(use a smaller BLOCK_N or more WARPS)"
            ),
        ),
        (widest > 64 or t.WARPS == 4, f"WARPS={t.WARPS} is not supported at {p.widths}: use WARPS=4"),
    )
    return next((reason for holds, reason in rules if not holds), None) or unsupported_by_sm(p, t, smem_bytes(p, t))


kernel = Kernel(
    name="bwd_mma",
    computes="backward",
    rung=3,
    default=True,
    ragged=True,
    summary="tensor cores (mma.sync): P^T and dS^T stay in registers; dQ by fp32 atomics",
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
