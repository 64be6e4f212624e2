"""Conversion of a caller's values to the form that `Problem` stores."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal

from .errors import SpecError

Causal = Literal[False, "bottom-right", "top-left"]
Window = tuple[int | None, int | None]  # visible keys to the left, to the right of key i + diagonal; None: no bound


# Numbers from here on round to infinity in float32, in which kernels compute.
FLOAT32_OVERFLOW = 2.0**128 - 2.0**103
FLOAT32_NORMAL = 2.0**-126  # below it float32 loses bits, and GPUs may flush to 0


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def integer(name: str, value: Any, least: int) -> int:
    """`value`, also a NumPy integer, as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise SpecError(f"{name}={value!r} must be an integer >= {least}")
    return operator.index(value)


def number(name: str, value: Any) -> float:
    """`value` as a float. Raises SpecError if it is not a number, not finite, or not finite in float32."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # of an int beyond float64
        raise SpecError(f"{name}={value!r} must be a number") from None
    if not -FLOAT32_OVERFLOW < number < FLOAT32_OVERFLOW:
        if math.isfinite(number):
            raise SpecError(
                f"{name}={number!r} is not supported: kernels compute in float32, whose largest number is 3.4e38"
            )
        raise SpecError(f"{name}={number!r} must be finite")
    return number


def normalise_causal(causal: bool | str | None) -> Causal:
    """The alignment of a caller's `causal`; True is "bottom-right", None is False.

    Values equal to True or False (1, 0, np.True_) are accepted: they have the same hash, so a plan lookup cannot tell
    them apart. Raises SpecError for anything else.
    """
    if isinstance(causal, str):
        if causal in ("bottom-right", "top-left"):
            return causal  # type: ignore[return-value]
    elif causal is None or (not hasattr(causal, "__dlpack__") and causal in (0, 1)):  # == of an array is an array
        return "bottom-right" if causal else False
    raise SpecError(f'causal={causal!r} is not known: choose False, True (= "bottom-right") or "top-left"')


def normalise_window(window: Any, most: int | None = None) -> Window:
    """A caller's `window` as (left, right), each an int of at most `most`, or None. Raises SpecError."""
    if window is None:
        return None, None
    try:
        left, right = (None if n is None else integer("window", n, 0) for n in window)
        if most is not None:
            left, right = (None if n is None else min(n, most) for n in (left, right))
        return left, right
    except (TypeError, ValueError):  # SpecError among them
        raise SpecError(
            f"window={window!r} must be (left, right), the keys visible to either side: each an integer >= 0, or None "
            "for no bound (FlashAttention's -1 is not supported)"
        ) from None
