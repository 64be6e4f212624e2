"""An array, whoever's it is: where it lies and how, and what kernels ask of that."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem
from ..core.score import SIZES

Device = tuple[str, int]  # ("cpu", 0) or ("cuda", ordinal)
HOST: Device = ("cpu", 0)
SEEDS = (0, 2**63 - 1)  # that are drawn: from, up to


@dataclass(frozen=True)
class ArrayView:
    """One array, seen from outside its library. `strides` in elements; `owner` keeps the memory alive.

    Raises UnsupportedProblem for address 0, unless there is nothing there.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    owner: Any

    def __post_init__(self) -> None:
        if not self.pointer and 0 not in self.shape:
            raise UnsupportedProblem(
                f"an array of shape {self.shape} has no memory (its address is 0): "
                f"pass one that holds its numbers, not a {type(self.owner).__name__} that stands for others"
            )

    @property
    def alignment(self) -> int:
        """Bytes, at most 16, that the address of every row (every index but the last) is a multiple of."""
        steps = [s * SIZES[self.dtype] for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True) if n > 1]
        return math.gcd(16, self.pointer, *steps)

    @property
    def mappable(self) -> bool:
        """A tensor map takes these strides: positive and below 2^40 bytes, or 0 in B or H; of rows that are there."""
        steps = [s * SIZES[self.dtype] for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True) if n > 1]
        return all(0 <= s < 2**40 for s in steps) and (self.shape[-2] <= 1 or self.strides[-2] > 0)

    def extent(self) -> tuple[int, int]:
        """(lowest, one past the highest) element that the view reaches, counted from its first element."""
        if 0 in self.shape:
            return 0, 0
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + 1


def layout(views: Iterable[ArrayView]) -> dict[str, Any]:
    """What kernels ask of how tensors lie: the fields `alignment` and `mappable` of a Problem."""
    tensors = [view for view in views if len(view.shape) == 4]
    return {"alignment": min(x.alignment for x in tensors), "mappable": all(x.mappable for x in tensors)}


def boxes(view: ArrayView) -> bool:
    """Whether a tensor map describes it: the field `bias_boxes` of a Problem."""
    return len(view.shape) > 1 and view.alignment == 16 and view.mappable


def dense_strides(shape: tuple[int, ...], like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides without gaps for `shape`, the dimensions nested as strides `like` nest them (as in C order without).

    The last dimension stays innermost; a broadcast one, of stride 0, goes outermost.
    """
    outer = list(range(len(shape) - 1))
    if like is not None:
        outer.sort(key=lambda i: -like[i] if like[i] else -sys.maxsize)
    strides, step = [1] * len(shape), max(shape[-1], 1) if shape else 1
    for i in reversed(outer):
        strides[i] = step
        step *= max(shape[i], 1)
    return tuple(strides)


def element_strides(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes -> in elements. Raises UnsupportedProblem where they are not whole."""
    if any(stride % itemsize for stride in strides):
        raise UnsupportedProblem(f"strides {strides} (bytes) are no multiples of the item size {itemsize}: copy it")
    return tuple(stride // itemsize for stride in strides)


def permuted(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of the C-ordered array, axes to transpose it by) that give `shape` with dense `strides`."""
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], i))
    return tuple(shape[i] for i in order), tuple(order.index(i) for i in range(len(shape)))


def numpy_dtype(name: str) -> np.dtype:
    """`"bfloat16"` and so on as a NumPy dtype."""
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return np.dtype(name)


_ML_DTYPES = {"bfloat16": "bfloat16", "float8_e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
