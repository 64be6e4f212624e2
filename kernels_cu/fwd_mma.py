"""Spec of `fwd_mma.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv, unsupported_by_cp_async

RANGES = {"window", "ragged", "key_lengths", "sink", "dropout"}  # options that do not modify scores


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, whose memory O reuses, and two stages of K and V: 16-bit elements, rows padded to a multiple of 16 columns."""
    K, V = cdiv(p.D, 16) * 16, cdiv(p.Dv, 16) * 16
    return 2 * (max(K, V) * t.BLOCK_M + 2 * (K + V) * t.BLOCK_N)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """cp.async copies 16 bytes of a row at a time; the scale is part of the exponent."""
    return unsupported_by_cp_async(p, "fwd_block2d")


def check_tile(p: Problem, t: Tile, arch: Arch | None) -> str | None:
    """Limits of a tile: whole MMA steps, registers without spills, shared memory of an SM."""
    rows, columns, smem = t.BLOCK_M // t.WARPS, cdiv(max(p.D, p.Dv), 16) * 16, t.MIN_BLOCKS * smem_bytes(p, t)
    ranges = bool(p.options & {"window", "ragged"}) and p.options <= RANGES
    max_elements = 6144 if p.dropout else 16384 if rows == 16 and (p.plain or ranges) else 8192
    accumulators = rows * (columns + t.SUB_N) // 32
    rules = (
        (
            t.BLOCK_M % (16 * t.WARPS) == 0,
            f"BLOCK_M={t.BLOCK_M} must be a multiple of 16 * WARPS={16 * t.WARPS}",
        ),
        (t.SUB_N % 16 == 0, f"SUB_N={t.SUB_N} must be a multiple of 16: one m16n8k16 step of P V"),
        (p.plain or t.SUB_N != 48, "SUB_N=48 spills with score options: use 16 or 32"),
        (
            rows == 16 or not p.reads_elements,
            f"{rows} rows per warp spill with a bias, a mask or a Score: use 16",
        ),
        (rows == 16 or not p.dropout or columns <= 64, f"{rows} rows per warp spill with dropout at D={p.D}: use 16"),
        (
            not arch or arch < (10, 0) or t.SUB_N != 48,
            "SUB_N=48 spills on compute capability >= 10.0: use 16 or 32",
        ),
        (
            columns <= 240 or t.SUB_N == 16 or not ranges or p.dropout or arch != (9, 0),
            f"SUB_N={t.SUB_N} spills with a window or ragged batches at D={p.D} on compute capability 9.0: use 16",
        ),
        (t.BLOCK_N % t.SUB_N == 0, f"BLOCK_N={t.BLOCK_N} must be a multiple of SUB_N={t.SUB_N}"),
        (
            t.BLOCK_N * columns <= max_elements,
            f"BLOCK_N={t.BLOCK_N} spills at D={p.D}: BLOCK_N * D is at most {max_elements}",
        ),
        (
            accumulators <= 176,
            f"{rows} rows per warp need {accumulators} registers for S, O at D={p.D}: the limit is 176",
        ),
        (
            smem <= 232448,
            f"MIN_BLOCKS={t.MIN_BLOCKS} needs {smem} bytes of shared memory at D={p.D}: an SM has 232448",
        ),
    )
    return next((reason for holds, reason in rules if not holds), None)


def rank(p: Problem, t: Tile) -> bool:
    """Tiles of eight warps first where they are faster (experiments/003_forward_paper)."""
    return (t.WARPS == 8) != prefers_eight_warps(p)


def prefers_eight_warps(p: Problem) -> bool:
    """Whether eight warps should share a K/V tile: D > 240, at least four waves of blocks, and long rows if causal."""
    blocks, min_rows = cdiv(p.Sq, 128) * p.H * p.B, 2048 if p.causal else 512
    return p.plain and p.D > 240 and min(p.Sq, p.Sk) >= min_rows and blocks >= 4 * 132


kernel = Kernel(
    name="fwd_mma",
    computes="forward",
    rung=3,
    default=True,
    ragged=True,
    summary="tensor cores (mma.sync): two cp.async stages in swizzled shared memory, deferred rescaling",
    dtypes=("float16", "bfloat16"),
    min_arch=(8, 0),
    tiles=(
        Tile(BLOCK_M=128, BLOCK_N=128, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=48, SUB_N=48, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=64, SUB_N=16, WARPS=8, MIN_BLOCKS=1),
    ),
    space={
        "BLOCK_M": (64, 128, 192, 256),
        "BLOCK_N": (16, 32, 48, 64, 96, 128, 192),
        "SUB_N": (16, 32, 48, 64),
        "WARPS": (4, 8),
        "MIN_BLOCKS": (1, 2, 3),
    },
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    check_tile=check_tile,
    rank=rank,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
