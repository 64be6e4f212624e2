"""Kernel arguments: what each name in a spec's `args` is in C, and where its value comes from.

One row of `ARGUMENTS` is one kind of argument. Values are packed by their declared C type, once, into memory whose
addresses form the `void**` table that both cuLaunchKernelEx and the CPU backend take; a launch refills pointers only.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from ..core.errors import SpecError, UnsupportedProblem
from ..core.kernel import Entry, Kernel
from ..core.operation import Operation
from ..core.options import score_numbers, score_structure, score_tensors
from ..core.problem import Problem
from ..core.score import BLOCK_MAP
from ..core.tile import Tile
from .array_view import dense_strides
from .tensor_maps import Box, Encode, Tensor, TensorMap, box_of, encode_for_host, map_slot, matrix_box, new_map


class View(ctypes.Structure):
    """`View<T>` of include/view.cuh: a (B, H, S, D) tensor with unit stride in D; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_b", ctypes.c_int64),
        ("stride_h", ctypes.c_int64),
        ("stride_s", ctypes.c_int64),
    )


class Launch(Protocol):
    """Launches a prepared kernel on a CUDA stream, with tensors at these addresses: the order of the tensors is fixed
    when the Launch is made.

    Safe from several threads. On the CPU backend the call returns when the work is done.
    """

    def __call__(self, pointers: tuple[int, ...], stream: int = 0) -> None: ...


class Row(NamedTuple):
    """One kind of argument: its C type, and either the name of a tensor or a value computed from the problem."""

    ctype: type
    value: Callable[[Problem], object] | None = None  # None: the address of `tensor`, set at launch
    tensor: str = ""  # name of the tensor that the argument points to
    rows: Callable[[Tile], int] | None = None  # rows of a tensor map's box
    used: Callable[[Problem], bool] = lambda p: True  # False: the argument is all zeros
    optional: bool = False  # True: if the tensor is absent, a null pointer is passed
    described: Callable[[Problem, Tensor, int], tuple[Box, str]] | None = None  # of an operation's map: (box, dtype)


def _view(name: str) -> Row:
    """A tensor view: any strides, unit stride in D."""
    return Row(View, tensor=name)


def _pointer(name: str) -> Row:
    """A contiguous array whose shape the problem fixes: (B, H, Sq) fp32, or as SCRATCH defines."""
    return Row(ctypes.c_void_p, tensor=name)


def _map(name: str, rows: Callable[[Tile], int]) -> Row:
    """A tensor map whose boxes have `rows` rows and 64 columns."""
    return Row(TensorMap, tensor=name, rows=rows)


def _bias_size(axis: int, problem: Problem) -> ctypes.c_int32:
    return ctypes.c_int32(problem.bias[axis])


_WARPGROUP_ROWS = 64  # rows of one wgmma

ARGUMENTS: dict[str, Row] = {
    **{name: _view(name) for name in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")},
    **{name: _pointer(name) for name in ("LSE", "delta", "dQ_accum", "dbias", "dsink", "block_map")},
    **{f"{name}_map": _map(name, lambda t: _WARPGROUP_ROWS) for name in ("Q", "O")},
    **{f"{name}_warp_map": _map(name, lambda t: _WARPGROUP_ROWS // 4) for name in ("Q", "O")},
    **{f"{name}_map": _map(name, lambda t: t.BLOCK_N) for name in ("K", "V")},
    **{f"{name}_tile_map": _map(name, lambda t: t.BLOCK_M) for name in ("Q", "dO")},
    **{f"{name}_map": _map(name, lambda t: _WARPGROUP_ROWS) for name in ("dK", "dV")},
    "bias_map": Row(TensorMap, tensor="bias", rows=lambda t: _WARPGROUP_ROWS, used=lambda p: p.bias_tiles),
    "dLSE": Row(ctypes.c_void_p, tensor="dLSE", optional=True),
    "tile_counter": Row(ctypes.c_void_p, tensor="tile_counter"),
    "work_tiles": Row(ctypes.c_void_p, tensor="work_tiles"),
    "partials": Row(ctypes.c_void_p, tensor="partials"),
    "dKV_partials": Row(ctypes.c_void_p, tensor="dKV_partials"),
    "score": Row(ctypes.Structure),  # its fields depend on the problem
    "group": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.group)),
    "B": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.batches)),
    "H": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.H)),
    "Hk": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.Hk)),
    **{f"bias_{axis}": Row(ctypes.c_int32, partial(_bias_size, i)) for i, axis in enumerate("bhij")},
    "map_rows": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.block_map[2])),
    "heads": Row(ctypes.c_int32, lambda p: ctypes.c_int32(p.batches * p.H)),
}


def _with_scratch(row: Row, name: str) -> Row:
    """The row of scratch that some problems do not need."""
    return row._replace(used=lambda p: SCRATCH[name].shape(p) is not None)


OPTIONAL_OUTPUTS = ("dbias", "dsink")  # an entry that writes one is launched only if the caller passes the array


class Scratch(NamedTuple):
    """Temporary memory of a launch: contiguous, four bytes per element, allocated by the code that launches. `shape`
    returns None for a problem that does not need it: the kernel then receives a null pointer."""

    shape: Callable[[Problem], tuple[int, ...] | None]
    zeroed: bool  # by the launch, on its stream


SCRATCH: dict[str, Scratch] = {
    "block_map": Scratch(lambda p: p.block_map, zeroed=False),
    # The counter of a dynamic tile scheduler (include/tile_scheduler.cuh). An entry of the kernel clears it.
    "tile_counter": Scratch(lambda p: (1,) if p.ragged or p.has_block_map else None, zeroed=False),
    # Work tiles of a ragged batch, listed by an earlier entry (include/tile_scheduler.cuh). The kernel's `scratch`
    # gives the size.
    "work_tiles": Scratch(lambda p: (0,), zeroed=False),
    # Partial results of split-KV or stream-K blocks, before they are combined. The kernel's `scratch` gives the size
    # and how much of it must be zero.
    "partials": Scratch(lambda p: (0,), zeroed=True),
    # dK and dV per query head, before they are added. The kernel's `scratch` gives the size.
    "dKV_partials": Scratch(lambda p: (0,), zeroed=False),
    "delta": Scratch(lambda p: (p.batches, p.H, p.rows[0]), zeroed=False),
    # The fp32 accumulator of dQ; its layout is the kernel's own. It has room for whole tiles of up to 128 rows, with D
    # padded to a power of two, at least 32. A kernel that pads in another way gives the size in its `scratch`.
    "dQ_accum": Scratch(
        lambda p: (p.batches, p.H, p.query_tiles(128) * 128, 1 << max(p.D - 1, 31).bit_length()), zeroed=True
    ),
}


ARGUMENTS |= {name: _with_scratch(ARGUMENTS[name], name) for name in SCRATCH}


def scratch_of(kernel: Kernel, problem: Problem, tile: Tile) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the scratch that `kernel` needs."""
    if kernel.custom:
        return {name: sizes(problem, tile)[:1] for name, sizes in kernel.scratch.items()}
    named = {name: None for entry in kernel.entries for name in entry.args if name in SCRATCH}
    if problem.has_block_map:
        named["block_map"] = None  # `score` points to it
    own = {name: sizes(problem, tile)[:1] for name, sizes in kernel.scratch.items()}
    written = kernel.operation.writes
    shapes = {name: own.get(name) or SCRATCH[name].shape(problem) for name in named if name not in written}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def zeroed_of(kernel: Kernel, problem: Problem, tile: Tile) -> dict[str, int]:
    """{name: bytes} of the scratch, and of an operation's outputs, that must be zero before a launch."""
    if isinstance(kernel.computes, Operation):
        zeroed = {name: 4 * sizes(problem, tile)[1] for name, sizes in kernel.scratch.items()}
        return zeroed | {name: kernel.computes.outputs[name].nbytes(problem) for name in kernel.zeroed}  # type: ignore[arg-type]
    own = {name: sizes(problem, tile)[1] for name, sizes in kernel.scratch.items()}
    shapes = {name: shape for name, shape in scratch_of(kernel, problem, tile).items() if SCRATCH[name].zeroed}
    return {name: 4 * own.get(name, math.prod(shape)) for name, shape in shapes.items()}


def argument_kinds(kernel: Kernel) -> Mapping[str, Row]:
    """The kinds of arguments that the entries of `kernel` may name."""
    operation = kernel.computes
    if not isinstance(operation, Operation):
        return ARGUMENTS

    def size(name: str) -> Row:
        return Row(ctypes.c_int32, lambda p: ctypes.c_int32(p[name]))  # type: ignore[index]

    def described(tensor: str, p: Any, of: Tensor, rows: int) -> tuple[Box, str]:
        matrix = operation.tensors[tensor]
        return matrix_box(tensor, matrix.shape(p), matrix.dtype_in(p), of, rows), matrix.dtype_in(p)

    return {
        **{name: _view(name) if tensor.strided else _pointer(name) for name, tensor in operation.tensors.items()},
        **{name: _pointer(name) for name in kernel.scratch},
        **{name: size(name) for name in operation.dims},
        **{
            name: Row(TensorMap, tensor=box.tensor, rows=box.rows, described=partial(described, box.tensor))
            for name, box in kernel.maps.items()
        },
    }


class ArgumentBlock:
    """The arguments of one entry point for one problem, packed. `kinds`: `argument_kinds` the kernel.

    `table` is the `void**` of the launch. `slots` hold the addresses of `tensor_names`, in the order of the spec; a
    tensor occurs once per argument that points to it. `encode` writes the tensor maps. Raises UnsupportedProblem for a
    tensor that a tensor map cannot describe.
    """

    def __init__(
        self, entry: Entry, problem: Problem, tile: Tile, tensors: Mapping[str, Tensor],
        encode: Encode = encode_for_host, kinds: Mapping[str, Row] = ARGUMENTS,
    ):  # fmt: skip
        unknown = [name for name in entry.args if name not in kinds and name not in entry.numbers]
        if unknown:
            raise SpecError(
                f"{entry.name}: args: {unknown[0]!r} is not known: choose one of {', '.join(kinds)}, or define it in "
                "`numbers` of the spec"
            )
        slots: list[tuple[str, Any]] = []
        self.values: list[Any] = []
        unused = entry.unused(problem, tile)
        if unknown := [name for name in unused if name not in entry.args]:
            raise SpecError(f"{entry.name}: unused: {unknown[0]!r} is not one of its args: {', '.join(entry.args)}")
        for name in entry.args:
            if name in entry.numbers:
                self.values.append(ctypes.c_int32(entry.numbers[name](problem, tile)))
                continue
            row = kinds[name]
            absent = (row.optional and row.tensor not in tensors) or not row.used(problem) or name in unused
            if row.value is not None or absent:
                self.values.append(row.value(problem) if row.value is not None else row.ctype())
                continue
            if row.ctype is ctypes.Structure:  # the score
                value, within = score_argument(problem, tensors)
                self.values.append(value)
                slots += within.items()
                continue
            tensor, value = tensors.get(row.tensor), new_map() if row.rows else row.ctype()
            slot: Any = ctypes.c_void_p.from_buffer(value)  # the address is the first word of a view and of a pointer
            if row.ctype is not ctypes.c_void_p:
                assert tensor is not None, "the caller passes every tensor whose strides are needed"
                if row.rows:
                    described = row.described or partial(_described, row.tensor)
                    slot = map_slot(value, *described(problem, tensor, row.rows(tile)), encode)
                else:
                    value.stride_b, value.stride_h, value.stride_s = tensor.strides[:3]
                    if problem.ragged and not (problem.page_size and row.tensor in ("K", "V")):
                        value.stride_b = 0  # a ragged batch is one batch entry
            if tensor:
                slot.value = tensor.pointer
            self.values.append(value)
            slots.append((row.tensor, slot))
        self.tensor_names = tuple(name for name, _ in slots)
        self.slots = [slot for _, slot in slots]
        self.table = (ctypes.c_void_p * len(self.values))(*(ctypes.addressof(value) for value in self.values))
        self.table.values = self.values  # type: ignore[attr-defined]  # the table keeps the values alive


def _described(name: str, problem: Problem, tensor: Tensor, rows: int) -> tuple[Box, str]:
    return box_of(name, problem, tensor, rows), problem.dtype_of(name)


class PackedArguments:
    """The arguments of a kernel that has no spec: ctypes values. The addresses of tensors do not change."""

    def __init__(self, values: Sequence[Any]):
        self.slots: list[Any] = []
        self.table = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.table.values = values  # type: ignore[attr-defined]  # the table keeps the values alive


Arguments = ArgumentBlock | PackedArguments


def score_argument(problem: Problem, tensors: Mapping[str, Tensor]) -> tuple[ctypes.Structure, dict[str, Any]]:
    """`Score` of include/score.cuh, and its fields that hold addresses, by the names of the tensors."""
    value = score_structure(problem)()
    for name, number in score_numbers(problem).items():
        setattr(value, name, number)
    slots = {}
    for wanted in score_tensors(problem):
        name, sizes = wanted.name, wanted.shape
        if name == "block_map" and BLOCK_MAP in tensors:
            name = BLOCK_MAP
        tensor = tensors.get(name)  # scratch may be absent
        own = tensor.strides if tensor else dense_strides(sizes)
        strides = (0,) * (len(sizes) - len(own)) + tuple(own)
        if len(wanted.strides) < len(sizes) and sizes[-1] > 1 and strides[-1] != 1:
            raise UnsupportedProblem(
                f"{wanted.name} with stride {strides[-1]} in its last dimension is not supported: the stride must be 1 "
                "(pass a contiguous copy)"
            )
        for stride_field, size, stride in zip(wanted.strides, sizes, strides, strict=False):
            setattr(value, stride_field, stride if size > 1 else 0)
        slot = ctypes.c_void_p.from_buffer(value, getattr(type(value), wanted.pointer).offset)
        slot.value = tensor.pointer if tensor else 0
        slots[name] = slot
    return value, slots


def describe(value: Any) -> str:
    """A packed argument as text, for the log."""
    if isinstance(value, ctypes.Structure):
        return ", ".join(f"{field[0]} {getattr(value, field[0])}" for field in value._fields_)
    return str(value.value)
