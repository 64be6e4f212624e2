"""Spec of `bwd_bias.cu`."""

from sandbox.spec import Arch, Dim3, Kernel, Problem, Tile, cdiv


def grid(p: Problem, t: Tile) -> Dim3:
    """A block for each tile of the bias."""
    B, H, rows, columns = p.bias
    return cdiv(rows, t.BLOCK_M) * cdiv(columns, t.BLOCK_N), H, B


def supports(p: Problem, arch: Arch | None) -> str | None:
    """There must be a bias."""
    return None if p.bias else "a problem without a bias has no gradient of it"


kernel = Kernel(
    name="bwd_bias",
    computes="dbias",
    rung=1,
    summary="the gradient of the bias, after delta; a block owns a tile of it and walks all that reads it",
    dtypes=("float32", "float16", "bfloat16"),
    min_arch=(7, 5),
    tiles=(Tile(BLOCK_M=32, BLOCK_N=32),),
    grid=grid,
    block=lambda t: (256, 1, 1),
    smem_bytes=lambda p, t: 4 * (t.BLOCK_M + t.BLOCK_N) * 33,
    supports=supports,
    check_tile=lambda p, t, arch: (
        None
        if t.BLOCK_M % 16 == 0 and t.BLOCK_N % 16 == 0 and t.BLOCK_M * t.BLOCK_N <= 33 * (t.BLOCK_M + t.BLOCK_N)
        else f"tile {t}: each side must be a multiple of 16, up to 64"
    ),
    args=(
        "dO", "Q", "K", "V", "LSE", "delta", "dbias", "bias_b", "bias_h", "bias_i", "bias_j", "H", "heads", "group", "score",
    ),
)  # fmt: skip
