"""An array of any library: its address, shape, strides, dtype and device, and the properties that kernels require."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..core.dtypes import ITEMSIZE
from ..core.errors import UnsupportedProblem
from ..core.score import SIZES

Device = tuple[str, int]  # ("cpu", 0) or ("cuda", ordinal)
HOST: Device = ("cpu", 0)
SEEDS = (0, 2**63 - 1)  # range of random seeds


class ArrayView:
    """A view of one array, independent of its library. `strides` in elements; `owner` keeps the memory alive.

    Raises UnsupportedProblem for address 0, unless the array is empty. Not a dataclass, which would take 0.5 ms of
    `import sandbox`.
    """

    __slots__ = ("device", "dtype", "owner", "pointer", "shape", "strides")

    def __init__(
        self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: Device, owner: Any
    ):
        if not pointer and 0 not in shape:
            raise UnsupportedProblem(
                f"an array of shape {shape} without memory is not supported (its address is 0): "
                f"pass an array that holds its elements, not a {type(owner).__name__} that stands for others"
            )
        self.pointer, self.shape, self.strides = pointer, shape, strides
        self.dtype, self.device, self.owner = dtype, device, owner

    @property
    def alignment(self) -> int:
        """The alignment of every row (every index but the last), in bytes: at most 16."""
        steps = [s * SIZES[self.dtype] for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True) if n > 1]
        return math.gcd(16, self.pointer, *steps)

    @property
    def mappable(self) -> bool:
        """Whether a tensor map supports the strides: positive and below 2^40 bytes, or 0 in B or H. The strides of
        dimensions of size 1 do not matter."""
        steps = [s * SIZES[self.dtype] for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True) if n > 1]
        return all(0 <= s < 2**40 for s in steps) and (self.shape[-2] <= 1 or self.strides[-2] > 0)

    def extent(self) -> tuple[int, int]:
        """(lowest, one past the highest) element that the view reaches, counted from its first element."""
        if 0 in self.shape:
            return 0, 0
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + 1


def layout(views: Iterable[ArrayView]) -> dict[str, Any]:
    """The fields `alignment` and `mappable` of a Problem, for these tensors."""
    tensors = [view for view in views if len(view.shape) == 4]
    return {"alignment": min(x.alignment for x in tensors), "mappable": all(x.mappable for x in tensors)}


def boxes(view: ArrayView) -> bool:
    """Whether a tensor map can describe the array: the field `bias_boxes` of a Problem."""
    return len(view.shape) > 1 and view.alignment == 16 and view.mappable


def dense_strides(shape: tuple[int, ...], like: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides without gaps for `shape`. The dimensions have the order of the strides `like` (default: C order).

    The last dimension stays innermost; broadcast dimensions, of stride 0, go outermost.
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
    """Strides in bytes -> in elements. Raises UnsupportedProblem if one is not a multiple of the item size."""
    if any(stride % itemsize for stride in strides):
        raise UnsupportedProblem(
            f"strides {strides} (bytes) are not supported: they must be multiples of the item size {itemsize} "
            "(pass a contiguous copy)"
        )
    return tuple(stride // itemsize for stride in strides)


def permuted(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of a C-ordered array, axes to transpose it by) such that the result has `shape` and dense `strides`."""
    order = sorted(range(len(shape)), key=lambda i: (-strides[i], i))
    return tuple(shape[i] for i in order), tuple(order.index(i) for i in range(len(shape)))


def numpy_dtype(name: str) -> np.dtype:
    """A dtype name, such as "bfloat16", as a NumPy dtype."""
    if name in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
    return np.dtype(name)


_ML_DTYPES = {"bfloat16": "bfloat16", "float8_e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
DTYPE_NAMES = ", ".join(_ML_DTYPES.get(name, name) for name in ITEMSIZE)  # of q, k and v, as array libraries name them
