"""Spec of `fwd_mma.cu`."""

from sandbox.spec import Arch, Kernel, Problem, Tile, cdiv


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, and two stages of K and V, in 16-bit elements; rows padded to a multiple of 16 columns."""
    return 2 * cdiv(p.D, 16) * 16 * (t.BLOCK_M + 4 * t.BLOCK_N)


def supports(p: Problem, arch: Arch | None) -> str | None:
    """Rows are copied 16 bytes at a time; the scale is folded into the exponent."""
    if p.D % 8:
        return f"D={p.D} is not built: it must be a multiple of 8 (fwd_block2d takes any D)"
    if p.alignment < 16:
        return f"rows that begin at multiples of {p.alignment} bytes are not built: pass contiguous copies (16 bytes)"
    return None if p.scale > 0 else f"scale={p.scale} is not built: it must be positive (fwd_block2d takes any)"


kernel = Kernel(
    name="fwd_mma",
    computes="forward",
    rung=3,
    summary="tensor cores warp by warp (mma.sync), fed by cp.async through swizzled shared memory",
    dtypes=("float16", "bfloat16"),
    min_arch=(8, 0),
    tiles=(
        Tile(BLOCK_M=128, BLOCK_N=64, SUB_N=64, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=128, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
        Tile(BLOCK_M=64, BLOCK_N=32, SUB_N=32, WARPS=4, MIN_BLOCKS=2),
    ),
    grid=lambda p, t: (cdiv(p.Sq, t.BLOCK_M), p.H, p.B),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=smem_bytes,
    supports=supports,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
