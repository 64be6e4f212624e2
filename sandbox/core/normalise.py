"""Values of a problem as people write them, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from .errors import SpecError
from .integers import integer

Causal = Literal[False, "bottom-right", "top-left"]
Window = tuple[int | None, int | None]  # keys to the left, to the right of a query's own place; None: no bound


def number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise SpecError(f"{name}={value!r} must be a number") from None
    if not math.isfinite(number):
        raise SpecError(f"{name}={number!r} must be finite")
    return number


def normalise_causal(causal: bool | str) -> Causal:
    """`causal=` as people write it -> the alignment it names. True is "bottom-right"."""
    if causal is False or causal is None:
        return False
    if causal is True or causal == "bottom-right":
        return "bottom-right"
    if causal == "top-left":
        return "top-left"
    raise SpecError(f'causal={causal!r} is not known: choose False, True (= "bottom-right") or "top-left"')


def normalise_window(window: Any) -> Window:
    """`window=` as people write it. Raises SpecError."""
    if window is None:
        return None, None
    try:
        left, right = window
        return tuple(None if n is None else integer("window", n, 0) for n in (left, right))  # type: ignore[return-value]
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
