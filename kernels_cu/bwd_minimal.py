"""Spec of `bwd_minimal.cu`."""

from sandbox.spec import Entry, Kernel, Tile

kernel = Kernel(
    name="bwd_minimal",
    computes="backward",
    rung=1,
    default=True,
    ragged=True,
    invariant_to=("runs", "entries", "batch", "heads", "ragged"),
    summary="one thread per key row for dK and dV, then one per query row for dQ; P recomputed from LSE",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    invariant_tile=lambda p: {},
    tiles=(Tile(BLOCK_M=32, BLOCK_N=32), Tile(BLOCK_M=16, BLOCK_N=16)),
    grid=lambda p, t: (p.key_tiles(t.BLOCK_N), p.Hk, p.batches),
    block=lambda t: (t.BLOCK_N, 1, 1),
    smem_bytes=lambda p, t: 4 * (p.D + p.Dv) * (2 * t.BLOCK_N + t.BLOCK_M),  # K, V, dK, dV; Q, dO
    args=("dO", "Q", "K", "V", "LSE", "delta", "dK", "dV", "group", "score"),
    then=(
        Entry(
            name="bwd_minimal_dq",
            grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
            block=lambda t: (t.BLOCK_M, 1, 1),
            # Q, dQ, dO; K, V
            smem_bytes=lambda p, t: 4 * (p.D * (2 * t.BLOCK_M + t.BLOCK_N) + p.Dv * (t.BLOCK_M + t.BLOCK_N)),
            args=("dO", "Q", "K", "V", "LSE", "delta", "dQ", "group", "score"),
        ),
    ),
    check_tile=lambda p, t, arch: (
        None if max(t.values()) <= 1024 else f"tile {t} is too large: a block has at most 1024 threads, one per row"
    ),
)
