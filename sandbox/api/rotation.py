"""A rotation of queries and keys that preserves their products and spreads outliers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem


def rotate(q: Any, k: Any, seed: int = 0) -> tuple[Any, Any]:
    """q and k, (…, D) each, times the same random orthogonal matrix: q kᵀ is what it was, and a number that sticks out
    of its row is spread over all of it, so that less of the row is lost when it is rounded to float8. Columns that are
    wide in all rows are better left alone (experiments/015_fp8).

    The matrix is a diagonal of random signs, drawn with `seed`, times a Hadamard matrix over sqrt(D): of a D that is
    no power of two, blocks of one as large as divides it. Any arrays of a floating dtype that know reshape and
    assignment to slices; the results are new ones of the same kind. To be called before scales are taken and q and k
    become float8. Raises UnsupportedProblem for widths that differ.

    Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608), section 3.3, "incoherent processing".
    """
    if q.shape[-1] != k.shape[-1]:
        raise UnsupportedProblem(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: D must be the same")
    return _rotated(q, seed), _rotated(k, seed)


def _rotated(x: Any, seed: int) -> Any:
    """By the fast Hadamard transform."""
    D = x.shape[-1]
    size, half = D & -D, 1
    minus = np.flatnonzero(np.random.default_rng(seed).random(D) < 0.5).tolist()
    y = x * 1
    y[..., minus] = -y[..., minus]
    while half < size:
        pairs = y.reshape((*x.shape[:-1], D // (2 * half), 2, half))
        both, apart = pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]
        pairs[..., 0, :], pairs[..., 1, :] = both, apart
        y, half = pairs.reshape(x.shape), 2 * half
    return y * size**-0.5
