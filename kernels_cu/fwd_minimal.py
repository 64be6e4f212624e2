"""Spec of `fwd_minimal.cu`."""

from sandbox.spec import ROW_INDEPENDENT, Kernel, Tile

kernel = Kernel(
    name="fwd_minimal",
    computes="forward",
    rung=1,
    default=True,
    ragged=True,
    paged=True,
    float8_keys=True,
    invariant_to=ROW_INDEPENDENT,
    summary="one thread per query row, K and V tiles in shared memory",
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"),
    min_arch=(7, 5),
    tiles=(Tile(BLOCK_M=64, BLOCK_N=32), Tile(BLOCK_M=32, BLOCK_N=32), Tile(BLOCK_M=32, BLOCK_N=16)),
    space={"BLOCK_M": (32, 64, 128, 256), "BLOCK_N": (8, 16, 32, 64)},
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (t.BLOCK_M, 1, 1),
    smem_bytes=lambda p, t: 4 * (p.D + p.Dv) * (t.BLOCK_M + t.BLOCK_N),
    invariant_tile=lambda p: {"BLOCK_N": 32},
    check_tile=lambda p, t, arch: (
        None
        if t.BLOCK_M <= 1024
        else f"BLOCK_M={t.BLOCK_M} is too large: a block has at most 1024 threads, one per row"
    ),
    args=("Q", "K", "V", "O", "LSE", "group", "score"),
)
