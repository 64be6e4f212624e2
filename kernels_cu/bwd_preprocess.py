"""Spec of `bwd_preprocess.cu`."""

from sandbox.spec import Dim3, Entry, Kernel, Problem, Tile, cdiv


def bias_grid(p: Problem, t: Tile) -> Dim3:
    """One block per tile of the bias."""
    B, H, rows, columns = p.bias or (0, 0, 0, 0)
    return cdiv(rows, t.BIAS_M) * cdiv(columns, t.BIAS_N), H, B


def check_tile(p: Problem, t: Tile, arch: object) -> str | None:
    """Limits of a tile: even division among the threads."""
    if t.WARPS > 32 or t.BLOCK_M % (4 * t.WARPS):
        return f"tile {t}: WARPS must be at most 32, and BLOCK_M a multiple of 4 * WARPS"
    if t.BIAS_M % 16 or t.BIAS_N % 16 or t.BIAS_M * t.BIAS_N > 33 * (t.BIAS_M + t.BIAS_N):
        return (
            f"tile {t}: BIAS_M and BIAS_N must be multiples of 16 with BIAS_M * BIAS_N <= 33 * (BIAS_M + BIAS_N), such "
            "as 64 and 64: the tile of dbias reuses the shared memory of the inputs"
        )
    return None


kernel = Kernel(
    name="bwd_preprocess",
    computes="preprocess",
    rung=1,
    summary="backward preprocess: delta = rowsum(dO * O); the gradients of bias and sinks",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    default=True,
    ragged=True,
    programmatic_launch=True,
    tiles=(Tile(BLOCK_M=64, WARPS=8, BIAS_M=32, BIAS_N=32),),
    grid=lambda p, t: (p.query_tiles(t.BLOCK_M), p.H, p.batches),
    block=lambda t: (32 * t.WARPS, 1, 1),
    smem_bytes=lambda p, t: 0,
    check_tile=check_tile,
    args=("dO", "O", "dLSE", "delta", "score"),
    then=(
        Entry(
            name="bwd_preprocess_bias",
            grid=bias_grid,
            block=lambda t: (256, 1, 1),
            smem_bytes=lambda p, t: 4 * (t.BIAS_M + t.BIAS_N) * 33,  # steps of 32 columns, padded by one
            args=(
                "dO", "Q", "K", "V", "LSE", "delta", "dbias", "bias_b", "bias_h", "bias_i", "bias_j", "H", "heads",
                "group", "score",
            ),
        ),
        Entry(
            name="bwd_preprocess_sink",
            grid=lambda p, t: (p.H if p.sink else 0, 1, 1),
            block=lambda t: (32 * t.WARPS, 1, 1),
            smem_bytes=lambda p, t: 0,
            args=("LSE", "delta", "dsink", "H", "heads", "score"),
        ),
    ),
)  # fmt: skip
