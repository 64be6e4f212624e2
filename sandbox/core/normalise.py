"""Values of a problem as a user writes them -> their normalised form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from .errors import SpecError
from .integers import integer

Causal = Literal[False, "bottom-right", "top-left"]
Window = tuple[int | None, int | None]  # keys to the left, to the right of a query's own place; None: no bound


# Numbers from here on round to infinity in float32, in which kernels compute.
FLOAT32_OVERFLOW = 2.0**128 - 2.0**103
FLOAT32_NORMAL = 2.0**-126  # below it float32 loses bits, and GPUs may flush to 0


def number(name: str, value: Any) -> float:
    """`value` as a float. Raises SpecError for what is no number, not finite, or not finite in float32."""
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
    """`causal=` as people write it -> the alignment it names. True is "bottom-right".

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
    """`window=` as people write it -> (left, right) of type int or None, each at most `most`. Raises SpecError."""
    if window is None:
        return None, None
    try:
        left, right = (None if n is None else integer("window", n, 0) for n in window)
        if most is not None:
            left, right = (None if n is None else min(n, most) for n in (left, right))
        return left, right
    except (TypeError, ValueError):  # SpecError among them
        raise SpecError(
            f"window={window!r} must be (left, right): keys to either side, each an integer >= 0, or None for no bound"
        ) from None


def lengths_of(text: str) -> tuple[tuple[int, ...], ...]:
    """Of sequences, with commas between: a number, or queries x keys."""
    pairs = [part.strip().split("x") for part in text.split(",")]
    if not all(len(pair) <= 2 and all(n.isdecimal() for n in pair) for pair in pairs):
        raise SpecError(f"lengths {text!r} must be numbers with commas between, 128x256 of 128 queries and 256 keys")
    return tuple((int(pair[0]), int(pair[-1])) for pair in pairs)


def sizes_of(name: str, text: str, known: Mapping[str, int]) -> tuple[int, ...]:
    """Numbers, or names of what they are, with commas between."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() or part in known for part in parts):
        raise SpecError(f"{name} {text!r} must be four numbers with commas between, or names: 1,H,Sq,Sk")
    return tuple(int(part) if part.isdecimal() else known[part] for part in parts)
