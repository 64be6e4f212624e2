"""Tensor maps: how Hopper's bulk copies are told of a tensor, and of the box of it that one copy moves.

A map names the tensor's address, so that a launch on another address needs another map; those that were made are kept.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from ..core.dtypes import ITEMSIZE
from ..core.errors import UnsupportedProblem
from ..core.problem import Problem


class Tensor(Protocol):
    """What an argument needs of a tensor: its address, and its strides in elements."""

    @property
    def pointer(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


_BOX_BYTES = 128  # a row of a box: the width of the swizzle


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


class MapSlot:
    """Where a tensor map is for one launch; setting `value`, the tensor's address, puts the map for it there. It begins
    `before` bytes before the tensor."""

    def __init__(self, address: int, box: Box, before: int, dtype: str, encode: Encode):
        self._address, self._box, self._before, self._dtype, self._encode = address, box, before, dtype, encode
        self._known: dict[int, bytes] = {}  # an allocator gives out the same addresses again and again
        if box.data:
            self.value = box.data

    def _put(self, pointer: int) -> None:
        known = self._known.get(pointer)
        if known is None:
            self._box.data = pointer - self._before
            if 0 not in self._box.size:  # nothing is ever copied of an empty tensor
                self._encode(self._address, self._box, self._dtype)
            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            self._known[pointer] = ctypes.string_at(self._address, ctypes.sizeof(TensorMap))
        else:
            ctypes.memmove(self._address, known, len(known))

    value = property(None, _put)


_MOST_MAPS = 1024  # of 128 bytes


def new_map() -> TensorMap:
    """At a multiple of 64 bytes, which cuTensorMapEncodeTiled asks for."""
    memory = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 63))()
    return TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)


def box_of(name: str, p: Problem, tensor: Tensor, rows: int) -> tuple[Box, int]:
    """The map of a tensor of the problem, with boxes of so many rows, and how many bytes before the tensor it begins.

    Of a ragged batch it has room for a sequence of the greatest length, and begins that many rows before the tensor. A
    box at row greatest - length + i of batch entry first + length then lies at row first + i of the tensor, and what of
    it is beyond `length` rows is outside of the map: the hardware keeps sequences apart. Nothing before the tensor is
    ever touched.
    """
    of_keys = name in ("K", "V", "dK", "dV")
    itemsize, width, heads = ITEMSIZE[p.dtype_of(name)], p.Dv if name in ("V", "O") else p.D, p.Hk if of_keys else p.H
    size = [width, p.Sk if of_keys else p.Sq, heads, p.B]
    stride, before = [s * itemsize for s in reversed(tensor.strides[:3])], 0
    if p.ragged:
        if p.rows[of_keys] == 1:
            stride[0] = _BOX_BYTES
        size[3], stride[2], before = p.rows[of_keys] + 1, stride[0], size[1] * stride[0]
    for i, dimension in enumerate(("S", "H", "B")):
        if (size[i + 1] == 1 and not (p.ragged and i == 0)) or (i and not stride[i]):
            # Broadcast: the kernel makes every index 0.
            size[i + 1], stride[i] = min(size[i + 1], 1), _BOX_BYTES
        elif 0 not in size and not 0 < stride[i] < 2**40:
            raise UnsupportedProblem(
                f"{name} has a stride of {stride[i] // itemsize} elements in {dimension}: a tensor map takes positive "
                f"strides (pass a contiguous copy, or choose another kernel)"
            )
    numbers = (ctypes.c_uint64 * 4)(*size), (ctypes.c_uint64 * 3)(*stride)
    box = Box(tensor.pointer, *numbers, (ctypes.c_uint32 * 4)(_BOX_BYTES // itemsize, rows, 1, 1), itemsize)
    return box, before
