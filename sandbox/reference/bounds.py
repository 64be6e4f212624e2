"""How far a result may lie from the truth, and how far it does; NaN never passes.

Write `assert max_error(x, ref) <= output_bound(ref, naive, dtype)`, never `if error > bound: fail`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .rounding import dtype_name, ulp

OUTPUT_FACTOR = 2.0  # of the yardstick's own error, for O
GRADIENT_FACTOR = 3.0  # for dQ, dK and dV
LSE_TOLERANCE = {
    "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3, "float8_e4m3": 5e-3, "float8_e5m2": 5e-3
}  # fmt: skip


def errors(x: ArrayLike, ref: ArrayLike) -> NDArray[np.float64]:
    """|x − ref| elementwise, float64, in ref's shape; 0 or inf where either is not finite.

    Where ref is NaN or ±inf, x must be the same: 0 if it is, inf if not. Where ref is finite and x is not: inf.
    Any dtypes. Raises ValueError when the shapes differ, since broadcasting would hide a missing axis.
    """
    x, ref = np.asarray(x).astype(np.float64), np.asarray(ref).astype(np.float64)
    if x.shape != ref.shape:
        raise ValueError(f"result {x.shape} and reference {ref.shape} must have one shape")
    finite = np.isfinite(x) & np.isfinite(ref)
    equal = (x == ref) | (np.isnan(x) & np.isnan(ref))
    return np.where(finite, abs(np.where(finite, x, 0) - np.where(finite, ref, 0)), np.where(equal, 0, np.inf))


def max_error(x: ArrayLike, ref: ArrayLike) -> float:
    """The largest of `errors(x, ref)`; 0 for empty arrays. Never NaN."""
    return float(errors(x, ref).max(initial=0))


def output_bound(ref: ArrayLike, naive: ArrayLike, dtype: DTypeLike, factor: float = OUTPUT_FACTOR) -> float:
    """The largest error that O may have: factor · max|naive − ref| + one ulp at max|ref|.

    ref is the truth, naive the same computed plainly in `dtype`, of one shape. Both maxima run over the elements that
    are finite in ref. One that is finite in ref and not in naive (its scores overflow float16) measures nothing and is
    left out. Raises ValueError when all drop out that way, when the shapes differ, and for an unknown dtype.
    """
    ref, naive = np.asarray(ref).astype(np.float64), np.asarray(naive).astype(np.float64)
    if ref.shape != naive.shape:
        raise ValueError(f"naive {naive.shape} and reference {ref.shape} must have one shape")
    expected = np.isfinite(ref)
    measured = expected & np.isfinite(naive)
    if expected.any() and not measured.any():
        raise ValueError(
            f"naive attention in {dtype_name(dtype)} is finite nowhere that the reference is, so it measures nothing: "
            "its scores overflow; use smaller inputs or a smaller scale"
        )
    naive_error = abs(naive[measured] - ref[measured]).max(initial=0)
    return float(factor * naive_error + ulp(abs(ref[expected]).max(initial=0), dtype))


def gradient_bound(
    ref: ArrayLike, naive: ArrayLike, magnitude: ArrayLike, dtype: DTypeLike, factor: float = GRADIENT_FACTOR
) -> float:
    """The largest error that dQ, dK or dV may have: `output_bound` with `factor`, and one fp32 ulp at the largest
    finite `magnitude`, of `backward_magnitudes`: what sums in fp32 lose.

    Autograd's dP − rowsum(P ∘ dP) is exactly 0 in a row of one key; a kernel's dP − delta, from O, is two roundings of
    a difference of 0, which nothing in ref or naive measures. Nor do they know that a kernel is given LSE in fp32.

    dsink is one number a head, where naive's error is a matter of luck. A kernel's is not: it rounds nothing but what
    is given to it. There `naive` is the true gradient of O and LSE as they are given, and `factor` 1.

    Raises ValueError as `output_bound` does.
    """
    size = np.asarray(magnitude).astype(np.float64)
    lost = ulp(size[np.isfinite(size)].max(initial=0), "float32")
    return output_bound(ref, naive, dtype, factor) + float(lost)


def lse_bound(ref_lse: ArrayLike, dtype: DTypeLike) -> NDArray[np.float64]:
    """The largest error that each LSE may have: tolerance · max(1, |ref|), in ref_lse's shape (B, H, Sq).

    The tolerance is 1e-5 for float32 inputs, 1e-3 for those of 16 bits and 5e-3 for those of 8, of whose
    products tensor cores sum up some 14 bits. Where ref_lse is not finite the bound
    is 0: a row without keys must have −inf. Compare elementwise: `(errors(lse, ref) <= lse_bound(ref, dtype)).all()`.
    Raises ValueError for an unknown dtype.
    """
    ref = np.asarray(ref_lse).astype(np.float64)
    return np.where(np.isfinite(ref), LSE_TOLERANCE[dtype_name(dtype)] * np.maximum(1, abs(ref)), 0)
