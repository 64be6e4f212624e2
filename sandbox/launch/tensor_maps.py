"""Tensor maps: how Hopper's bulk copies are told of a tensor, and of the box of it that one copy moves.

A map names the tensor's address, so that a launch on another address needs another map.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from ..core.dtypes import ITEMSIZE
from ..core.errors import DriverError, UnsupportedProblem
from ..core.problem import Problem


class Tensor(Protocol):
    """What an argument needs of a tensor: its address, and its strides in elements."""

    @property
    def pointer(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


_BOX_BYTES = 128  # a row of a box: the width of the swizzle
RAGGED_ROWS = 2**30  # include/hopper.cuh


class TensorMap(ctypes.Structure):
    """`TensorMap` of include/hopper.cuh: what cuTensorMapEncodeTiled writes, or, on the CPU backend, `Box` itself."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Box(ctypes.Structure):
    """A (B, H, S, D) tensor, innermost dimension first, and the box of it that one copy moves. Strides in bytes. Of a
    ragged batch there is a fifth dimension, and `rank` is 5.

    `cpu::TensorMap` of cpu/runtime.h, and the operands of cuTensorMapEncodeTiled.
    """

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64 * 5),
        ("stride", ctypes.c_uint64 * 4),
        ("box", ctypes.c_uint32 * 5),
        ("itemsize", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, data: int, size: Sequence[int], stride: Sequence[int], rows: int, itemsize: int) -> Box:
        """Boxes of so many rows, and as many columns as fill the width of the swizzle."""
        more = (1,) * (5 - len(size))
        return cls(data, (*size, *more), (*stride, *more), (_BOX_BYTES // itemsize, rows, 1, 1, 1), itemsize, len(size))


class Encode(Protocol):
    """Writes the tensor map for a box, of elements of that dtype, to the 128 bytes at `address`, a multiple of 64."""

    def __call__(self, address: int, box: Box, dtype: str) -> None: ...


def encode_for_host(address: int, box: Box, dtype: str) -> None:
    """What the CPU backend reads a tensor map as."""
    ctypes.memmove(address, ctypes.addressof(box), ctypes.sizeof(box))


def map_slot(place: TensorMap, box: Box, dtype: str, encode: Encode) -> Any:
    """Writes the map of `box` to `place`, and returns what puts the map for a tensor at another address there when its
    `value` is set to that address.

    A map's first word is the address, as the driver lays it out today; nobody promises that, so that it is tried. Then
    that word is all that a launch on other addresses writes: experiment 001 has what it saves.
    """
    if 0 in box.size:  # nothing is ever copied of an empty tensor
        return ctypes.c_void_p()
    if _begins_with_address(place, box, dtype, encode):
        return ctypes.c_void_p.from_buffer(place)
    return _Encoded(ctypes.addressof(place), box, dtype, encode)


def _begins_with_address(place: TensorMap, box: Box, dtype: str, encode: Encode) -> bool:
    """Whether maps of `box` at two addresses that agree in no bit are the same but for the first word, the address.
    Leaves the map of `box` in `place`."""
    here, other = box.data or 0, new_map()
    box.data = here ^ _EVERY_BIT
    try:
        encode(ctypes.addressof(other), box, dtype)
    except DriverError:  # this driver looks at addresses
        return False
    finally:
        box.data = here
        encode(ctypes.addressof(place), box, dtype)
    return [*place.words] == [here, *other.words[1:]] and other.words[0] == here ^ _EVERY_BIT


_EVERY_BIT = (1 << 47) - 16  # of an address that is a multiple of 16


class _Encoded:
    """A map that is encoded for every new address; those that were made are kept."""

    def __init__(self, address: int, box: Box, dtype: str, encode: Encode):
        self._address, self._box, self._dtype, self._encode = address, box, dtype, encode
        self._known: dict[int, bytes] = {}  # an allocator gives out the same addresses again and again

    def _put(self, pointer: int) -> None:
        known = self._known.get(pointer)
        if known is None:
            self._box.data = pointer
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


def box_of(name: str, p: Problem, tensor: Tensor, rows: int) -> Box:
    """The map of a tensor of the problem, with boxes of so many rows.

    Of a ragged batch a box must end where its sequence ends, and a map has one number of rows for all of them. So it
    has RAGGED_ROWS, which every sequence fills up to its end: row i of one of n rows is RAGGED_ROWS - n + i, and the
    hardware neither reads nor writes what is beyond. In place of batch entries comes the row of the tensor where the
    sequence ends, a step of the same size; and a fifth dimension, whose index is always RAGGED_ROWS, takes back the
    RAGGED_ROWS steps that are too many: addresses are sums modulo 2^64, and 2^34 * RAGGED_ROWS is 0. The map begins
    where the tensor does, since copies from one that begins outside of an allocation fault. (The idea is that of
    Triton's ragged descriptors.)
    """
    of_keys = name in ("K", "V", "dK", "dV")
    itemsize, width, heads = (
        ITEMSIZE[p.dtype_of(name)],
        p.Dv if name in ("V", "O", "dO", "dV") else p.D,
        p.Hk if of_keys else p.H,
    )
    size = [width, p.Sk if of_keys else p.Sq, heads, p.B]
    if name == "bias":
        size = [*reversed(p.bias)]
    strides = (0,) * (4 - len(tensor.strides)) + tuple(tensor.strides)
    stride = [s * itemsize for s in reversed(strides[:3])]
    if there := p.ragged and p.rows[of_keys]:
        stride[0] = stride[0] if there > 1 else _BOX_BYTES
        size = [width, RAGGED_ROWS, heads, there + 1, RAGGED_ROWS + 1]
        stride = [*stride[:2], stride[0], 2**34 - stride[0]]
    for i, dimension in enumerate(("S", "H", "B")):
        if size[i + 1] == 1 or (i and not stride[i]):  # broadcast: the kernel makes every index 0
            size[i + 1], stride[i] = min(size[i + 1], 1), _BOX_BYTES
        elif 0 not in size and not 0 < stride[i] < (2**34 if p.ragged else 2**40):
            raise UnsupportedProblem(
                f"{name} has a stride of {stride[i] // itemsize} elements in {dimension}: a tensor map takes positive "
                f"strides (pass a contiguous copy, or choose another kernel)"
            )
    return Box.of(tensor.pointer, size, stride, rows, itemsize)
