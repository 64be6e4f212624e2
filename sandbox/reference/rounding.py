"""Rounding to the kernels' dtypes and the size of their last place."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray


class _Format(NamedTuple):
    numpy: np.dtype
    fraction_bits: int  # stored bits of the significand: one ulp at 1.0 is 2**-fraction_bits
    min_exponent: int  # of the smallest normal number; below it the spacing stays constant


_FORMATS = {
    "float16": _Format(np.dtype(np.float16), 10, -14),
    "bfloat16": _Format(np.dtype(ml_dtypes.bfloat16), 7, -126),
    "float32": _Format(np.dtype(np.float32), 23, -126),
}


def dtype_name(dtype: DTypeLike) -> str:
    """The name float16, bfloat16 or float32 for a name, NumPy dtype or scalar type; ValueError for any other."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _FORMATS:
        raise ValueError(f"dtype {name!r} must be one of {', '.join(_FORMATS)}")
    return name


def round_to(x: ArrayLike, dtype: DTypeLike) -> NDArray[np.float32]:
    """x rounded to nearest-even in `dtype`, kept as float32; beyond the dtype's range it becomes ±inf.

    Any shape. x is taken to float32 first. ValueError for a dtype other than float16, bfloat16, float32.
    """
    with np.errstate(over="ignore"):  # overflow to inf is the dtype's answer, not a fault
        x = np.asarray(x).astype(np.float32, copy=False)
        return x.astype(_FORMATS[dtype_name(dtype)].numpy, copy=False).astype(np.float32, copy=False)


def ulp(x: ArrayLike, dtype: DTypeLike) -> NDArray[np.float64]:
    """One unit in the last place of `dtype` at |x|, float64, x's shape; NaN where x is not finite.

    It is 2**(e − fraction bits) for 2**e ≤ |x| < 2**(e+1), and the smallest subnormal at 0. Beyond the dtype's
    largest number it goes on as if the exponent did. ValueError for an unknown dtype.
    """
    form = _FORMATS[dtype_name(dtype)]
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.where(x == 0, 2.0**-1000, x))  # x = f · 2**exponent with 1/2 ≤ |f| < 1
    size = np.ldexp(1.0, np.maximum(exponent - 1, form.min_exponent) - form.fraction_bits)
    return np.where(np.isfinite(x), size, np.nan)
