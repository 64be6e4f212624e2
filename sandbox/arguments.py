"""Kernel arguments: what each name in a spec's `args` is in C, and where its value comes from.

One row of `ARGUMENTS` is one kind of argument. Values are packed by their declared C type, once, into memory whose
addresses form the `void**` table that both cuLaunchKernel and the CPU backend take; a launch refills pointers only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from .errors import SpecError, UnsupportedProblem
from .spec import ITEMSIZE, Kernel, Problem, Tile


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


class TensorMap(ctypes.Structure):
    """`TensorMap` of include/hopper.cuh: what cuTensorMapEncodeTiled writes, or, on the CPU backend, `Box` itself."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Box(ctypes.Structure):
    """A (B, H, S, D) tensor, innermost dimension first, and the box of it that one copy moves. Strides in bytes.

    `cpu::TensorMap` of cpu/runtime.h, and the operands of cuTensorMapEncodeTiled.
    """

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64 * 4),
        ("stride", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("itemsize", ctypes.c_uint32),
    )


class Encode(Protocol):
    """Writes the tensor map for a box, of elements of that dtype, to the 128 bytes at `address`, a multiple of 64."""

    def __call__(self, address: int, box: Box, dtype: str) -> None: ...


def encode_for_host(address: int, box: Box, dtype: str) -> None:
    """What the CPU backend reads a tensor map as."""
    ctypes.memmove(address, ctypes.addressof(box), ctypes.sizeof(box))


class Launch(Protocol):
    """Launches a prepared kernel on tensors at these addresses, in the order of its `args`, on a CUDA stream.

    Safe from several threads. On the CPU backend it returns when the work is done.
    """

    def __call__(self, pointers: tuple[int, ...], stream: int = 0) -> None: ...


class Row(NamedTuple):
    """One kind of argument: its C type, and a tensor's name to follow or a value from the problem."""

    ctype: type
    value: Callable[[Problem], object] | None = None  # None: of a tensor, filled in at launch
    tensor: str = ""  # whose address it follows
    rows: Callable[[Tile], int] | None = None  # of a tensor map's box


def _view(name: str) -> Row:  # any strides, unit stride in D
    return Row(View, tensor=name)


def _pointer(name: str) -> Row:  # contiguous, its shape fixed by the problem: (B, H, Sq) fp32
    return Row(ctypes.c_void_p, tensor=name)


def _map(name: str, rows: Callable[[Tile], int]) -> Row:  # boxes of so many rows and 64 columns
    return Row(TensorMap, tensor=name, rows=rows)


_WARPGROUP_ROWS = 64  # of queries, which one wgmma multiplies
_BOX_BYTES = 128  # a row of a box: the width of the swizzle

ARGUMENTS: dict[str, Row] = {
    **{name: _view(name) for name in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")},
    **{name: _pointer(name) for name in ("LSE", "delta")},
    **{f"{name}_map": _map(name, lambda t: _WARPGROUP_ROWS) for name in ("Q", "O")},
    **{f"{name}_map": _map(name, lambda t: t.BLOCK_N) for name in ("K", "V")},
    "score": Row(Score, lambda p: Score(p.Sq, p.Sk, p.diagonal, p.scale)),
    "group": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.H // p.Hk if p.Hk else 1)),
    "H": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.H)),
    "heads": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.B * p.H)),
}


class _MapSlot:
    """Where a tensor map is for one launch; setting `value`, the tensor's address, puts the map for it there."""

    def __init__(self, address: int, box: Box, dtype: str, encode: Encode):
        self._address, self._box, self._dtype, self._encode = address, box, dtype, encode
        self._known: dict[int, bytes] = {}  # an allocator gives out the same addresses again and again
        if box.data:
            self.value = box.data

    def _put(self, pointer: int) -> None:
        known = self._known.get(pointer)
        if known is None:
            self._box.data = pointer
            if 0 not in self._box.size:  # nothing is ever copied of an empty tensor
                self._encode(self._address, self._box, self._dtype)
            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            self._known[pointer] = ctypes.string_at(self._address, ctypes.sizeof(TensorMap))
        else:
            ctypes.memmove(self._address, known, len(known))

    value = property(None, _put)


_MOST_MAPS = 1024  # of 128 bytes


class _Slots:
    """Several arguments that follow one tensor."""

    def __init__(self, slots: Iterable[Any]):
        self._slots = tuple(slots)

    def _put(self, pointer: int) -> None:
        for slot in self._slots:
            slot.value = pointer

    value = property(None, _put)


class ArgumentBlock:
    """The arguments of one kernel for one problem, packed.

    `table` is the `void**` to launch with; `slots` hold the addresses of `tensor_names`, in the order of the spec.
    `encode` makes the tensor maps. Raises UnsupportedProblem for a tensor that no map can describe.
    """

    def __init__(
        self, kernel: Kernel, problem: Problem, tile: Tile, tensors: Mapping[str, Tensor],
        encode: Encode = encode_for_host,
    ):  # fmt: skip
        unknown = [name for name in kernel.args if name not in ARGUMENTS]
        if unknown:
            raise SpecError(f"{kernel.name}: args {', '.join(unknown)} are not in sandbox/arguments.py")
        slots: dict[str, list[Any]] = {}
        self.values: list[Any] = []
        for row in (ARGUMENTS[name] for name in kernel.args):
            if row.value is not None:
                self.values.append(row.value(problem))
                continue
            tensor = tensors[row.tensor]  # the caller names every tensor of the spec's args
            if row.rows is None:
                strides = tensor.strides[:3] if row.ctype is View else ()
                value: Any = row.ctype(tensor.pointer, *strides)
                slot: Any = ctypes.c_void_p.from_buffer(value)  # its first word, whether a view or a bare pointer
            else:
                value = _aligned_map()
                box = _box(row.tensor, problem, tensor, row.rows(tile))
                slot = _MapSlot(ctypes.addressof(value), box, problem.dtype, encode)
            self.values.append(value)
            slots.setdefault(row.tensor, []).append(slot)
        self.tensor_names = tuple(slots)
        self.slots = [own[0] if len(own) == 1 else _Slots(own) for own in slots.values()]
        self.table = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(value) for value in self.values))
        self.table.values = self.values  # type: ignore[attr-defined]  # whoever holds the table may launch with it


def _aligned_map() -> TensorMap:
    """At a multiple of 64 bytes, which cuTensorMapEncodeTiled asks for."""
    memory = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 63))()
    return TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)


def _box(name: str, p: Problem, tensor: Tensor, rows: int) -> Box:
    heads, length = (p.Hk, p.Sk) if name in ("K", "V") else (p.H, p.Sq)
    itemsize = ITEMSIZE[p.dtype]
    size, stride = [p.D, length, heads, p.B], [s * itemsize for s in reversed(tensor.strides[:3])]
    for i, dimension in enumerate(("S", "H", "B")):
        if not 0 <= stride[i] < 2**40 or (i == 0 and not stride[i] and length > 1):
            raise UnsupportedProblem(
                f"{name} has a stride of {stride[i] // itemsize} elements in {dimension}: a tensor map takes positive "
                f"strides (pass a contiguous copy, or choose another kernel)"
            )
        if not stride[i] or size[i + 1] == 1:  # every index of a broadcast dimension is 0: the kernel sees to it
            size[i + 1], stride[i] = min(size[i + 1], 1), _BOX_BYTES
    numbers = (ctypes.c_uint64 * 4)(*size), (ctypes.c_uint64 * 3)(*stride)
    return Box(tensor.pointer, *numbers, (ctypes.c_uint32 * 4)(_BOX_BYTES // itemsize, rows, 1, 1), itemsize)
