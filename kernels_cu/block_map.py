"""Spec of `block_map.cu`."""

from sandbox.spec import Dim3, Kernel, Problem, Tile, cdiv


def grid(p: Problem, t: Tile) -> Dim3:
    """One block per word of SOME_VISIBLE bits of a row of the map, or of two rows if the map has element bits; none if
    no map is needed."""
    B, H, rows, row_words = p.block_map
    words = 4 * cdiv(p.Sk, 4 * t.BLOCK_N)
    return cdiv(rows, 2 if row_words > 2 * words else 1) * words, H, B


kernel = Kernel(
    name="block_map",
    computes="block_map",
    rung=1,
    summary="block sparsity: which tiles a mask tensor or mask_mod leaves partly or fully visible",
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"),
    min_arch=(7, 5),
    float8_keys=True,  # it reads no keys
    default=True,
    tiles=(Tile(BLOCK_M=64, BLOCK_N=512),),  # one word of the map
    grid=grid,
    block=lambda t: (t.BLOCK_N, 1, 1),
    smem_bytes=lambda p, t: 0,
    args=("block_map", "map_rows", "score"),
)
