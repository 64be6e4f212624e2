"""Spec of `histogram.cu`."""

import numpy as np

from sandbox.spec import Kernel, Operation, Tensor, Tile, cdiv

BINS = 64

kernel = Kernel(
    name="histogram",
    computes=Operation(
        dims=("N",),
        inputs={"x": Tensor("N", dtype="int32", values=lambda rng, shape: rng.integers(0, BINS, shape))},
        outputs={"counts": Tensor(BINS, dtype="int32")},
        reference=lambda x: np.bincount(x, minlength=BINS),
        cases=("1000", "1", "4099"),
        peers={"torch": lambda torch, x: torch.bincount(x, minlength=BINS).int()},
    ),
    dtypes=("float32",),  # not used: x and counts have dtypes of their own
    tiles=(Tile(THREADS=64, ITEMS=8),),
    macros={"BINS": BINS},
    zeroed=("counts",),
    grid=lambda p, t: (cdiv(p.N, t.THREADS * t.ITEMS), 1, 1),
    block=lambda t: (t.THREADS, 1, 1),
    args=("x", "counts", "N"),
)
