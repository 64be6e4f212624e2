"""Spec of `fwd_block2d.cu`."""

from sandbox.spec import Kernel, Problem, Tile, cdiv


def smem_bytes(p: Problem, t: Tile) -> int:
    """Q, a step of K or V, and P: fp32, rows padded by four words."""
    widths = cdiv(p.D, t.BLOCK_D) * t.BLOCK_D, t.BLOCK_D, t.BLOCK_N
    return 4 * sum(rows * (width + 4) for rows, width in zip((t.BLOCK_M, t.BLOCK_N, t.BLOCK_M), widths))


kernel = Kernel(
    name="fwd_block2d",
    computes="forward",
    rung=2,
    summary="a 2-D thread block shares each tile; each thread owns a register tile of S and O",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    tiles=(
        Tile(BLOCK_M=64, BLOCK_N=64, BLOCK_D=64, THREADS_X=8, THREADS_Y=16),
        Tile(BLOCK_M=64, BLOCK_N=64, BLOCK_D=64, THREADS_X=16, THREADS_Y=8),
        Tile(BLOCK_M=64, BLOCK_N=128, BLOCK_D=64, THREADS_X=16, THREADS_Y=8),
        Tile(BLOCK_M=32, BLOCK_N=32, BLOCK_D=64, THREADS_X=16, THREADS_Y=8),
        Tile(BLOCK_M=32, BLOCK_N=64, BLOCK_D=64, THREADS_X=8, THREADS_Y=8),
    ),
    grid=lambda p, t: (cdiv(p.Sq, t.BLOCK_M), p.H, p.B),
    block=lambda t: (t.THREADS_X, t.THREADS_Y, 1),
    smem_bytes=smem_bytes,
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
