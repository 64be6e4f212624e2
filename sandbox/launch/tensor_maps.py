"""TMA tensor maps: the description of a tensor and of the box that one TMA copy moves.

A map contains the tensor's address: a launch on another address needs another map.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Protocol

from ..core.dtypes import ITEMSIZE
from ..core.errors import DriverError, UnsupportedProblem
from ..core.problem import Problem


class Tensor(Protocol):
    """The properties of a tensor that arguments need: its address, and its strides in elements."""

    @property
    def pointer(self) -> int: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


_BOX_BYTES = 128  # bytes of a box row: the width of the swizzle
RAGGED_OFFSET = 2**30  # include/tma.cuh


class TensorMap(ctypes.Structure):
    """`TensorMap` of include/tma.cuh: a CUtensorMap, or, on the CPU backend, a `Box`."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Box(ctypes.Structure):
    """A (B, H, S, D) tensor, innermost dimension first, and the box that one copy moves. Strides in bytes. For a ragged
    batch there is a fifth dimension, and `rank` is 5.

    The layout is that of `cpu::TensorMap` in cpu/runtime.h; the fields are the operands of cuTensorMapEncodeTiled.
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
        """A box with `rows` rows, and as many columns as fill the width of the swizzle."""
        more = (1,) * (5 - len(size))
        return cls(data, (*size, *more), (*stride, *more), (_BOX_BYTES // itemsize, rows, 1, 1, 1), itemsize, len(size))


class Encode(Protocol):
    """Writes the tensor map of a box to the 128 bytes at `address`, a multiple of 64."""

    def __call__(self, address: int, box: Box, dtype: str) -> None: ...


def encode_for_host(address: int, box: Box, dtype: str) -> None:
    """Writes the tensor map of the CPU backend: the box itself."""
    ctypes.memmove(address, ctypes.addressof(box), ctypes.sizeof(box))


def map_slot(target: TensorMap, box: Box, dtype: str, encode: Encode) -> Any:
    """Writes the map of `box` to `target`, and returns a slot: setting its `value` to another address writes the map
    for a tensor at that address.

    In current drivers the first word of a map is the address. This is undocumented, and therefore tested here. Where it
    holds, a launch on other addresses writes that word only: experiment 001 has the gain.
    """
    if 0 in box.size:  # an empty tensor is never copied
        return ctypes.c_void_p()
    if _begins_with_address(target, box, dtype, encode):
        return ctypes.c_void_p.from_buffer(target)
    return _Encoded(ctypes.addressof(target), box, dtype, encode)


def _begins_with_address(target: TensorMap, box: Box, dtype: str, encode: Encode) -> bool:
    """Whether the maps of `box` at two addresses that differ in every bit are equal except for the first word, the
    address. Leaves the map of `box` in `target`."""
    address, other = box.data or 0, new_map()
    box.data = address ^ _EVERY_BIT
    try:
        encode(ctypes.addressof(other), box, dtype)
    except DriverError:  # this driver validates addresses
        return False
    finally:
        box.data = address
        encode(ctypes.addressof(target), box, dtype)
    return [*target.words] == [address, *other.words[1:]] and other.words[0] == address ^ _EVERY_BIT


_EVERY_BIT = (1 << 47) - 16  # all bits of an address that is a multiple of 16


class _Encoded:
    """A slot that encodes the map for every new address, and caches the results."""

    def __init__(self, address: int, box: Box, dtype: str, encode: Encode):
        self._address, self._box, self._dtype, self._encode = address, box, dtype, encode
        self._known: dict[int, bytes] = {}  # allocators reuse addresses

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


_MOST_MAPS = 1024  # cached maps, 128 bytes each


def new_map() -> TensorMap:
    """Memory for a map, aligned to 64 bytes, as cuTensorMapEncodeTiled requires."""
    memory = (ctypes.c_char * (ctypes.sizeof(TensorMap) + 63))()
    return TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)


def matrix_box(name: str, shape: tuple[int, ...], dtype: str, tensor: Tensor, rows: int) -> Box:
    """The map of a contiguous matrix (rows, columns), with boxes of `rows` rows. Kernels address it as a (1, 1, rows,
    columns) tensor. Raises UnsupportedProblem for rows that are not a multiple of 16 bytes."""
    height, width = shape
    itemsize = ITEMSIZE[dtype]
    if width * itemsize % 16:
        raise UnsupportedProblem(
            f"{name} with rows of {width} elements is not supported: a tensor map needs rows of a multiple of 16 bytes "
            "(reject such problems in `supports` of the spec)"
        )
    return Box.of(tensor.pointer, (width, height, 1, 1), (width * itemsize, *(_BOX_BYTES,) * 2), rows, itemsize)


def box_of(name: str, p: Problem, tensor: Tensor, rows: int) -> Box:
    """The map of a tensor of the problem, with boxes of `rows` rows.

    In a ragged batch, a box must end where its sequence ends, but a map has one number of rows for all sequences.
    Therefore the row dimension has RAGGED_OFFSET rows, and each sequence occupies its end: row i of a sequence of n
    rows has index RAGGED_OFFSET - n + i. The hardware neither reads nor writes beyond the last row. The batch dimension
    is replaced by the tensor row at which the sequence ends, with the row stride. A fifth dimension, with the constant
    index RAGGED_OFFSET, subtracts the additional RAGGED_OFFSET row strides: addresses are sums modulo 2^64, and
    2^34 * RAGGED_OFFSET is 0. The map starts at the tensor's address, because copies from a map that starts outside of
    an allocation fault. (Triton's ragged descriptors use the same idea.)

    Keys in pages are the rows of all pages, one after the other. A box is in one page, and must end where the keys of
    its batch entry end. Latent keys have the plain map of (pages, Hk, page_size, D).
    """
    of_keys = name in ("K", "V", "dK", "dV")
    in_pages = of_keys and p.page_size and not p.latent
    itemsize, width = ITEMSIZE[p.dtype_of(name)], p.Dv if name in ("V", "O", "dO", "dV") else p.D
    entries, heads, length = p.key_shape if of_keys else (p.B, p.H, p.Sq)
    size = [width, length, heads, entries]
    if name == "bias":
        size = [*reversed(p.bias)]
    strides = (0,) * (4 - len(tensor.strides)) + tuple(tensor.strides)
    stride = [s * itemsize for s in reversed(strides[:3])]
    if in_pages:
        rows = math.gcd(rows, p.page_size)
    if there := p.pages * p.page_size if in_pages else p.ragged and p.rows[of_keys]:
        stride[0] = stride[0] if there > 1 else _BOX_BYTES
        size = [width, RAGGED_OFFSET, heads, there + 1, RAGGED_OFFSET + 1]
        stride = [*stride[:2], stride[0], 2**34 - stride[0]]
    for i, dimension in enumerate(("S", "H", "B")):
        if size[i + 1] == 1 or (i and not stride[i]):  # broadcast: the kernel always uses index 0
            size[i + 1], stride[i] = min(size[i + 1], 1), _BOX_BYTES
        elif 0 not in size and not 0 < stride[i] < (2**34 if there else 2**40):
            raise UnsupportedProblem(
                f"{name} with a stride of {stride[i] // itemsize} elements in {dimension} is not supported: a tensor "
                f"map needs positive strides below 2^{34 if there else 40} bytes (pass a contiguous copy, or choose "
                "another kernel)"
            )
    return Box.of(tensor.pointer, size, stride, rows, itemsize)
