"""Rounding to the kernels' dtypes, and their units in the last place (ulp)."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .semantics import plain_array


class _Format(NamedTuple):
    numpy: np.dtype
    fraction_bits: int  # stored bits of the significand: one ulp at 1.0 is 2**-fraction_bits
    min_exponent: int  # of the smallest normal number; below it the spacing is constant


_FORMATS = {
    "float16": _Format(np.dtype(np.float16), 10, -14),
    "bfloat16": _Format(np.dtype(ml_dtypes.bfloat16), 7, -126),
    "float32": _Format(np.dtype(np.float32), 23, -126),
    "float8_e4m3": _Format(np.dtype(ml_dtypes.float8_e4m3fn), 3, -6),
    "float8_e5m2": _Format(np.dtype(ml_dtypes.float8_e5m2), 2, -14),
}
LARGEST_FINITE = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}


def dtype_name(dtype: DTypeLike) -> str:
    """The dtype's name: float32, float16, bfloat16, float8_e4m3 (float8_e4m3fn in ml_dtypes) or float8_e5m2, from a
    name, NumPy dtype or scalar type. Raises ValueError for other dtypes."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    name = "float8_e4m3" if name == "float8_e4m3fn" else name
    if name not in _FORMATS:
        raise ValueError(f"dtype {name!r} must be one of {', '.join(_FORMATS)}")
    return name


def round_to(x: ArrayLike, dtype: DTypeLike) -> NDArray[np.float32]:
    """x rounded to nearest-even in `dtype`, as float32. Values beyond the range become ±inf, or for 8-bit dtypes the
    largest finite value, as in the kernels' conversions.

    Any shape. x is first converted to float32. Raises ValueError for an unknown dtype.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # overflow to inf is intended
        wide: NDArray[np.float32] = plain_array(x).astype(np.float32, copy=False)
        if largest := LARGEST_FINITE.get(dtype_name(dtype)):
            wide = np.clip(wide, np.float32(-largest), np.float32(largest))
        return wide.astype(_FORMATS[dtype_name(dtype)].numpy, copy=False).astype(np.float32, copy=False)


def quantised(P: ArrayLike, dtype: DTypeLike) -> NDArray[np.float32]:
    """P (values up to 1) rounded to 8 bits as in the kernels: P is scaled so that 1 becomes the largest finite value,
    which uses the dtype's full range."""
    largest = np.float32(LARGEST_FINITE[dtype_name(dtype)])
    return round_to(np.asarray(P, np.float32) * largest, dtype) / largest


def ulp(x: ArrayLike, dtype: DTypeLike) -> NDArray[np.float64]:
    """One unit in the last place of `dtype` at |x|, float64, x's shape; NaN where x is not finite.

    It is 2**(e − fraction bits) for 2**e ≤ |x| < 2**(e+1), and the smallest subnormal at 0. Beyond the dtype's range
    the exponent is extended. Raises ValueError for an unknown dtype.
    """
    fmt = _FORMATS[dtype_name(dtype)]
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.where(x == 0, 2.0**-1000, x))  # x = f · 2**exponent with 1/2 ≤ |f| < 1
    size = np.ldexp(1.0, np.maximum(exponent - 1, fmt.min_exponent) - fmt.fraction_bits)
    return np.where(np.isfinite(x), size, np.nan)


def sum_rounding(magnitude: ArrayLike, terms: ArrayLike) -> NDArray[np.float64]:
    """The rounding error of fp32 sums of `terms` products one after the other, which are scaled, reduced by the row's
    maximum and exponentiated, or are multiplied by such numbers: √(terms + 3) · 2^-24 · magnitude. `magnitude`: the
    sum of the absolute values of the terms, times the derivative of the result.

    Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis (2019), theorem 2.4, with λ = 1.
    """
    count, size = np.asarray(terms).astype(np.float64), np.asarray(magnitude).astype(np.float64)
    return np.sqrt(count + 3) * 2.0**-24 * size
