"""Spec of `stencil.cu`."""

import numpy as np

from sandbox.spec import Kernel, Operation, Tensor, Tile, cdiv


def stencil(x, w):
    K = len(w)
    padded = np.pad(x, (K // 2, K - 1 - K // 2))
    return np.lib.stride_tricks.sliding_window_view(padded, K) @ w


kernel = Kernel(
    name="stencil",
    computes=Operation(
        dims=("N", "K"),
        inputs={"x": Tensor("N"), "w": Tensor("K", dtype="float32")},
        outputs={"y": Tensor("N")},
        reference=stencil,
        flops=lambda p: 2 * p.N * p.K,
        cases=("300,5", "1,1", "64,3", "65,4"),
        shapes=("16777216,7",),
    ),
    dtypes=("float32", "float16"),
    tiles=(Tile(THREADS=64),),
    grid=lambda p, t: (cdiv(p.N, t.THREADS), 1, 1),
    block=lambda t: (t.THREADS, 1, 1),
    smem_bytes=lambda p, t: 4 * (t.THREADS + p.K - 1),
    args=("x", "w", "y", "N", "K"),
)
