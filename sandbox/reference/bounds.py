"""Errors of a result relative to the reference, and their bounds. NaN never passes.

Write `assert max_error(x, ref) <= output_bound(ref, naive, dtype)`, never `if error > bound: fail`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .rounding import dtype_name, sum_rounding, ulp
from .semantics import plain_array

OUTPUT_FACTOR = 2.0  # multiple of naive attention's error, for O
GRADIENT_FACTOR = 3.0  # the same for dQ, dK and dV
LSE_TOLERANCE = {
    "float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3, "float8_e4m3": 5e-3, "float8_e5m2": 5e-3
}  # fmt: skip


def errors(x: ArrayLike, ref: ArrayLike) -> NDArray[np.float64]:
    """|x − ref| elementwise, float64, in ref's shape.

    Elements that are not finite: 0 if x and ref are equal or both NaN, otherwise inf. Any dtypes. Raises ValueError if
    the shapes differ, because broadcasting would hide a missing axis.
    """
    x, ref = plain_array(x).astype(np.float64), plain_array(ref).astype(np.float64)
    if x.shape != ref.shape:
        raise ValueError(f"result {x.shape} and reference {ref.shape} must have the same shape")
    finite = np.isfinite(x) & np.isfinite(ref)
    equal = (x == ref) | (np.isnan(x) & np.isnan(ref))
    return np.where(finite, abs(np.where(finite, x, 0) - np.where(finite, ref, 0)), np.where(equal, 0, np.inf))


def max_error(x: ArrayLike, ref: ArrayLike) -> float:
    """The maximum of `errors(x, ref)`; 0 for empty arrays. Never NaN."""
    return float(errors(x, ref).max(initial=0))


def output_bound(
    ref: ArrayLike, naive: ArrayLike, dtype: DTypeLike, factor: float = OUTPUT_FACTOR, rounding: ArrayLike = 0.0
) -> float:
    """The bound for the error of O: factor · max|naive − ref| + one ulp at max|ref| + the largest finite `rounding`.

    For float32 inputs `rounding` is `output_rounding`: naive's error may be near zero by chance, and the matrix
    products of NumPy add in another order than kernels, with smaller errors. For 16 bits it is 0, because naive rounds
    each score.

    ref is the float64 reference, naive is plain attention in `dtype`; they have the same shape. Both maxima are over
    the elements that are finite in ref. Elements that are not finite in naive (its scores overflow float16) are ignored
    in the first maximum. Raises ValueError if no element remains, if the shapes differ, and for an unknown dtype.
    """
    ref, naive = np.asarray(ref).astype(np.float64), np.asarray(naive).astype(np.float64)
    if ref.shape != naive.shape:
        raise ValueError(f"naive {naive.shape} and reference {ref.shape} must have the same shape")
    expected = np.isfinite(ref)
    measured = expected & np.isfinite(naive)
    if expected.any() and not measured.any():
        raise ValueError(
            f"naive attention in {dtype_name(dtype)} has no finite element, so there is no bound: "
            "its scores overflow; use smaller inputs or a smaller scale"
        )
    naive_error = abs(naive[measured] - ref[measured]).max(initial=0)
    return float(factor * naive_error + ulp(abs(ref[expected]).max(initial=0), dtype)) + _largest_finite(rounding)


def gradient_bound(
    ref: ArrayLike, naive: ArrayLike, magnitude: ArrayLike, dtype: DTypeLike, factor: float = GRADIENT_FACTOR,
    terms: int = 1,
) -> float:  # fmt: skip
    """The bound for the error of dQ, dK or dV: `output_bound` with `factor`, plus the rounding of fp32 sums at the
    largest finite `magnitude` (of `backward_magnitudes`): one ulp, or for float32 `sum_rounding` of `terms`, which is
    the head dimension.

    The last term is necessary because naive does not contain all errors of a kernel. In a row with one key,
    autograd's dP − rowsum(P ∘ dP) is exactly 0, while a kernel's dP − delta has two rounding errors. A kernel also
    reads LSE in fp32.

    dsink is one number per head, for which naive's error is arbitrary. A kernel's error comes only from its rounded
    inputs. For dsink, `naive` is the float64 gradient for the given O and LSE, and `factor` is 1.

    Raises ValueError like `output_bound`.
    """
    size = _largest_finite(magnitude)
    rounding = sum_rounding(size, terms) if dtype_name(dtype) == "float32" else ulp(size, "float32")
    return output_bound(ref, naive, dtype, factor) + float(rounding)


def _largest_finite(x: ArrayLike) -> float:
    numbers = np.asarray(x).astype(np.float64)
    return float(numbers[np.isfinite(numbers)].max(initial=0))


def lse_bound(ref_lse: ArrayLike, dtype: DTypeLike) -> NDArray[np.float64]:
    """The bounds for the error of each LSE: tolerance · max(1, |ref|), in ref_lse's shape (B, H, Sq).

    The tolerance is 1e-5 for float32 inputs, 1e-3 for 16-bit inputs, and 5e-3 for 8-bit inputs, whose products tensor
    cores accumulate with about 14 bits. Where ref_lse is not finite the bound is 0: a row without visible keys must
    have −inf. Compare elementwise: `(errors(lse, ref) <= lse_bound(ref, dtype)).all()`. Raises ValueError for an
    unknown dtype.
    """
    ref = np.asarray(ref_lse).astype(np.float64)
    return np.where(np.isfinite(ref), LSE_TOLERANCE[dtype_name(dtype)] * np.maximum(1, abs(ref)), 0)
