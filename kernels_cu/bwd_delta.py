"""Spec of `bwd_delta.cu`."""

from sandbox.spec import Kernel, Tile, cdiv

kernel = Kernel(
    name="bwd_delta",
    computes="delta",
    rung=1,
    summary="delta = rowsum(dO * O), which every backward needs first; one warp per query row",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    tiles=(Tile(BLOCK_M=8),),
    grid=lambda p, t: (cdiv(p.Sq, t.BLOCK_M), p.H, p.B),
    block=lambda t: (32, t.BLOCK_M, 1),
    smem_bytes=lambda p, t: 0,
    check_tile=lambda p, t, arch: (
        None if t.BLOCK_M <= 32 else f"BLOCK_M={t.BLOCK_M} is too large: a block has at most 32 warps, one a row"
    ),
    args=("dO", "O", "delta", "score"),
)
