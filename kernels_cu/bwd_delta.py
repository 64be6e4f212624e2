"""Spec of `bwd_delta.cu`."""

from sandbox.spec import Kernel, Tile

kernel = Kernel(
    name="bwd_delta",
    computes="delta",
    rung=1,
    default=True,
    ragged=True,
    summary="delta = rowsum(dO * O), which every backward needs first; neighbouring lanes share a row",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    tiles=(Tile(BLOCK_M=64, WARPS=8),),
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=lambda p, t: 0,
    check_tile=lambda p, t, arch: (
        None
        if t.WARPS <= 32 and t.BLOCK_M % (4 * t.WARPS) == 0
        else f"tile {t}: a block has at most 32 warps, and BLOCK_M must be a multiple of their 4 rows each"
    ),
    args=("dO", "O", "dLSE", "delta", "score"),
)
