"""Whole numbers, checked and divided."""

from __future__ import annotations

import operator
from typing import Any

from .errors import SpecError


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def integer(name: str, value: Any, least: int) -> int:
    """`value`, also a NumPy integer, as an int."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise SpecError(f"{name}={value!r} must be an integer >= {least}")
    return operator.index(value)
