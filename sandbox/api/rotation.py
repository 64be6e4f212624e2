"""A rotation of queries and keys that preserves q kᵀ and spreads outliers over D."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem


def rotate(q: Any, k: Any, seed: int = 0) -> tuple[Any, Any]:
    """Multiplies q and k, both (…, D), by the same random orthogonal matrix: q kᵀ does not change, and an outlier is
    spread over its row, so that the row loses less when it is rounded to float8. Do not rotate if some columns are
    large in all rows: then the error grows (experiments/015_fp8).

    The matrix is a diagonal of random signs, drawn with `seed`, times a block diagonal matrix of Hadamard matrices /
    sqrt(n). The block size n is the largest power of two that divides D. q and k: arrays of any floating dtype, of any
    library that has reshape and slice assignment; returns new arrays. Call it before computing the scales of q and k
    and converting them to float8. Raises UnsupportedProblem if D differs.

    Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3, "incoherent processing".
    """
    if q.shape[-1] != k.shape[-1]:
        raise UnsupportedProblem(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: D must be the same")
    return _rotated(q, seed), _rotated(k, seed)


def _rotated(x: Any, seed: int) -> Any:
    """By the fast Hadamard transform, in float32 or wider. The factor n^-1/2 comes first, so that no intermediate is
    larger in magnitude than the largest result: the larger one of |a + b| and |a - b| is |a| + |b|."""
    D = x.shape[-1]
    size, half = D & -D, 1
    minus = np.flatnonzero(np.random.default_rng(seed).random(D) < 0.5).tolist()
    y = (_as_dtype(x, "float32") if x.dtype.itemsize < 4 else x) * size**-0.5
    y[..., minus] = -y[..., minus]
    while half < size:
        pairs = y.reshape((*x.shape[:-1], D // (2 * half), 2, half))
        sums, differences = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        pairs[..., 0, :], pairs[..., 1, :] = sums, differences
        y, half = pairs.reshape(x.shape), 2 * half
    return y if y.dtype == x.dtype else _as_dtype(y, x.dtype)


def _as_dtype(x: Any, dtype: Any) -> Any:
    if hasattr(x, "astype"):
        return x.astype(dtype)
    return x.float() if dtype == "float32" else x.to(dtype)
