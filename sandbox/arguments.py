"""Kernel arguments: what each name in a spec's `args` is in C, and where its value comes from.

One row of `ARGUMENTS` is one kind of argument. Values are packed by their declared C type, once, into memory whose
addresses form the `void**` table that both cuLaunchKernel and the CPU backend take; a launch refills pointers only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from .errors import SpecError
from .spec import COMPUTATIONS, Entry, Kernel, Problem, cdiv


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


class Launch(Protocol):
    """Launches a prepared kernel on tensors at these addresses, in the order of its `args`, on a CUDA stream.

    Safe from several threads. On the CPU backend it returns when the work is done.
    """

    def __call__(self, pointers: tuple[int, ...], stream: int = 0) -> None: ...


class Row(NamedTuple):
    """One kind of argument: its C type, and either a tensor's name to follow or a value from the problem."""

    ctype: type
    value: Callable[[Problem], object] | None = None  # None: a tensor, filled in at launch


_TENSOR = Row(View)  # any strides, unit stride in D
_POINTER = Row(ctypes.c_void_p)  # contiguous, fp32, its shape fixed by the problem: (B, H, Sq) but for SCRATCH's

ARGUMENTS: dict[str, Row] = {
    **dict.fromkeys(("Q", "K", "V", "O", "dO", "dQ", "dK", "dV"), _TENSOR),
    **dict.fromkeys(("LSE", "delta", "dQ_accum"), _POINTER),
    "score": Row(Score, lambda p: Score(p.Sq, p.Sk, p.diagonal, p.scale)),
    "group": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.H // p.Hk if p.Hk else 1)),
}


class Scratch(NamedTuple):
    """Memory that a backward needs and its caller does not own: contiguous fp32, made by whoever launches."""

    shape: Callable[[Problem], tuple[int, ...]]
    zeroed: bool  # by the launch, on its stream


SCRATCH: dict[str, Scratch] = {
    "delta": Scratch(lambda p: (p.B, p.H, p.Sq), zeroed=False),
    # Sums of dQ, in whatever order the kernel that names it likes; room for whole tiles of up to 128 rows.
    "dQ_accum": Scratch(lambda p: (p.B, p.H, cdiv(p.Sq, 128) * 128, 1 << max(p.D - 1, 31).bit_length()), zeroed=True),
}


def scratch_of(kernel: Kernel, problem: Problem) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the scratch that `kernel` needs."""
    named = {name: None for entry in kernel.entries for name in entry.args if name in SCRATCH}
    return {name: SCRATCH[name].shape(problem) for name in named if name not in COMPUTATIONS[kernel.computes].writes}


class ArgumentBlock:
    """The arguments of one entry point for one problem, packed.

    `table` is the `void**` to launch with; `slots` hold the addresses of `tensor_names`, in the order of the spec.
    """

    def __init__(self, entry: Entry, problem: Problem, tensors: Mapping[str, Tensor]):
        unknown = [name for name in entry.args if name not in ARGUMENTS]
        if unknown:
            raise SpecError(f"{entry.name}: args {', '.join(unknown)} are not in sandbox/arguments.py")
        self.tensor_names = tuple(name for name in entry.args if ARGUMENTS[name].value is None)
        self.values = [_pack(ARGUMENTS[name], problem, tensors.get(name)) for name in entry.args]
        self.table = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(value) for value in self.values))
        self.table.values = self.values  # type: ignore[attr-defined]  # whoever holds the table may launch with it
        # A tensor's address is the first word of its argument, whether a view or a bare pointer.
        packed = zip(entry.args, self.values, strict=True)
        self.slots = [ctypes.c_void_p.from_buffer(value) for name, value in packed if ARGUMENTS[name].value is None]


def _pack(row: Row, problem: Problem, tensor: Tensor | None) -> Any:
    if row.value is not None:
        return row.value(problem)
    if row.ctype is not View:
        return row.ctype(tensor.pointer if tensor else None)
    assert tensor is not None, "the caller names every tensor whose strides count"
    return View(tensor.pointer, *tensor.strides[:3])


def describe(value: Any) -> str:
    """A packed argument, for people."""
    if isinstance(value, ctypes.Structure):
        return ", ".join(f"{field[0]} {getattr(value, field[0])}" for field in value._fields_)
    return str(value.value)
