"""Spec of `bwd_sink.cu`."""

from sandbox.spec import Kernel, Tile

kernel = Kernel(
    name="bwd_sink",
    computes="dsink",
    rung=1,
    ragged=True,
    summary="the gradient of the sinks, after delta; one block a head",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    tiles=(Tile(WARPS=16),),
    grid=lambda p, t: (p.H, 1, 1),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=lambda p, t: 0,
    supports=lambda p, arch: None if p.sink else "a problem without a sink has no gradient of it",
    check_tile=lambda p, t, arch: None if t.WARPS <= 32 else f"WARPS={t.WARPS}: a block has at most 32",
    args=("LSE", "delta", "dsink", "B", "H", "score"),
)
