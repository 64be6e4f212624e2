"""Kernel arguments: what each name in a spec's `args` is in C, and where its value comes from.

One row of `ARGUMENTS` is one kind of argument. Values are packed by their declared C type, once, into memory whose
addresses form the `void**` table that both cuLaunchKernel and the CPU backend take; a launch refills pointers only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from .errors import SpecError
from .spec import Kernel, Problem


class Tensor(Protocol):
    """What an argument needs of a tensor: its address, and its strides in elements."""

    @property
    def pointer(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


class View(ctypes.Structure):
    """`View<T>` of include/common.cuh: a (B, H, S, D) tensor with unit stride in D; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_b", ctypes.c_int64),
        ("stride_h", ctypes.c_int64),
        ("stride_s", ctypes.c_int64),
    )


class Score(ctypes.Structure):
    """`Score` of include/score.cuh: all that turns a dot product into a score."""

    _fields_ = (
        ("Sq", ctypes.c_int32),
        ("Sk", ctypes.c_int32),
        ("diagonal", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class Row(NamedTuple):
    """One kind of argument: its C type, and either a tensor's name to follow or a value from the problem."""

    ctype: type
    value: Callable[[Problem], object] | None = None  # None: a tensor, filled in at launch


_TENSOR = Row(View)  # any strides, unit stride in D
_POINTER = Row(ctypes.c_void_p)  # contiguous, its shape fixed by the problem: (B, H, Sq) fp32

ARGUMENTS: dict[str, Row] = {
    **dict.fromkeys(("Q", "K", "V", "O", "dO", "dQ", "dK", "dV"), _TENSOR),
    **dict.fromkeys(("LSE", "delta"), _POINTER),
    "score": Row(Score, lambda p: Score(p.Sq, p.Sk, p.diagonal, p.scale)),
    "group": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.H // p.Hk if p.Hk else 1)),
}


class ArgumentBlock:
    """The arguments of one kernel for one problem, packed; `table` is the `void**` to launch with.

    `pointers` refills the tensors' addresses in the order of `tensor_names`.
    """

    def __init__(self, kernel: Kernel, problem: Problem, tensors: Mapping[str, Tensor]):
        unknown = [name for name in kernel.args if name not in ARGUMENTS]
        if unknown:
            raise SpecError(f"{kernel.name}: args {', '.join(unknown)} are not in sandbox/arguments.py")
        self.values: list = []
        self.tensor_names = [name for name in kernel.args if ARGUMENTS[name].value is None]
        for name in kernel.args:
            ctype, value = ARGUMENTS[name]
            if value is not None:
                self.values.append(value(problem))
            elif ctype is View:
                self.values.append(View(tensors[name].pointer, *tensors[name].strides[:3]))
            else:
                self.values.append(ctype(tensors[name].pointer))
        self.table = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(value) for value in self.values))
        by_name = dict(zip(kernel.args, self.values, strict=True))
        # A tensor's address is the first word of its argument, whether a view or a bare pointer.
        self._slots = [ctypes.c_void_p.from_buffer(by_name[name]) for name in self.tensor_names]

    def refill(self, pointers: tuple[int, ...]) -> None:
        """Put in the tensors' addresses, in the order of `tensor_names`."""
        for slot, pointer in zip(self._slots, pointers, strict=True):
            slot.value = pointer
