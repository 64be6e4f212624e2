"""Queries and keys turned by one and the same rotation, which leaves their products and spreads what is large."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UnsupportedProblem
from ..launch.dlpack import library_of


def rotate(q: Any, k: Any, seed: int = 0) -> tuple[Any, Any]:
    """q and k, (…, D) each, times the same random orthogonal matrix: q k^T is what it was, and a number that is larger
    than the others of its row is spread over all of them, so that less of the row is lost when it is rounded to float8.

    The matrix has D * D numbers of ±1/sqrt(D): a Hadamard matrix whose columns changed their signs by lot, `seed`; of a
    D that is no power of two, blocks of one as large as divides it. NumPy, CuPy or PyTorch arrays of a floating dtype;
    the results have the same. To be called before scales are taken and q and k become float8. Raises UnsupportedProblem
    for widths that differ, and for arrays of another library.

    Source: FlashAttention-3 (Shah et al. 2024), section 3.3, "incoherent processing"; QuIP (Chee et al. 2023).
    """
    if q.shape[-1] != k.shape[-1]:
        raise UnsupportedProblem(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: D must be the same")
    return _turned(q, seed), _turned(k, seed)


def _turned(x: Any, seed: int) -> Any:
    name, matrix = library_of(x).name, _matrix(x.shape[-1], seed)
    if name == "PyTorch":
        import torch

        return (x.float() @ torch.from_numpy(matrix).to(x.device)).to(x.dtype)
    if name == "CuPy":
        import cupy

        matrix = cupy.asarray(matrix)
    elif name != "NumPy":
        raise UnsupportedProblem(f"rotate takes NumPy, CuPy or PyTorch arrays, not {type(x).__name__}")
    return (x.astype(np.float32) @ matrix).astype(x.dtype)


@lru_cache(maxsize=16)
def _matrix(D: int, seed: int) -> NDArray[np.float32]:
    size, block = D & -D, np.ones((1, 1), np.float32)
    while len(block) < size:
        block = np.block([[block, block], [block, -block]]) / np.sqrt(np.float32(2))
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), D)
    return np.ascontiguousarray(signs[:, None] * np.kron(np.eye(D // size, dtype=np.float32), block))
