"""One kernel on inputs inputs, on either backend: outputs poisoned, launched, timed, fetched."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.kernel import COMPUTATIONS, Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..engine.staging import Staged
from ..launch import dlpack, driver
from ..launch.arguments import scratch_of
from ..launch.dlpack import HOST, Device

Array = NDArray[Any]


_SHAPES: dict[str, Callable[[Problem], tuple[int, ...]]] = {
    "O": lambda p: (p.batches, p.H, p.rows[0], p.Dv),
    "dQ": lambda p: (p.batches, p.H, p.rows[0], p.D),
    "dK": lambda p: (p.batches, p.Hk, p.rows[1], p.D),
    "dV": lambda p: (p.batches, p.Hk, p.rows[1], p.Dv),
    **dict.fromkeys(("LSE", "delta"), lambda p: (p.batches, p.H, p.rows[0])),
    "dbias": lambda p: p.bias,
    "dsink": lambda p: (p.H,),
    "block_map": lambda p: p.block_map,
}


_BORDERED = ("O", "dQ", "dK", "dV")  # tensors of any strides


@dataclass(frozen=True)
class Trial:
    """What came out: `outputs` by name as NumPy arrays, those that something was written beside, seconds a launch."""

    prepared: pipeline.Prepared
    outputs: dict[str, Array]
    stray_writes: tuple[str, ...]
    seconds: float


def launch(kernel: Kernel, tile: Tile, problem: Problem, inputs: Mapping[str, Array], device: Device, *,
           repeats: int = 1, before: Callable[[], None] = lambda: None) -> Trial:  # fmt: skip
    """Run a kernel on NumPy arrays, which `inputs` has by the names in its `args`: O too for a backward.

    Every byte of the outputs, of a border around them, and of scratch is NaN before the launch. Where an input has gaps
    between its rows, the outputs' rows have gaps of their own. `before` is called before each
    launch. `seconds` is the median of `repeats` launches after the first: GPU time between events, or the wall clock on
    the CPU backend.
    """
    gap = 0 if all(array.flags.c_contiguous for array in inputs.values()) else _GAP
    made = {name: _bordered(name, *what, gap) for name, what in outputs_of(kernel, problem).items()}
    outputs = {name: memory[within] for name, (memory, within) in made.items()}
    scratch = {name: _filled(shape, "float32") for name, shape in scratch_of(kernel, problem, tile).items()}
    views = {name: dlpack.view(array) for name, array in {**inputs, **outputs, **scratch}.items()}
    if device == HOST:
        prepared = pipeline.prepare(kernel, tile, problem, views, device)
        seconds = _wall_clock(prepared, prepared.pointers(views), repeats, before)
    else:
        staged = {name: Staged(view, device) for name, view in views.items()}
        for twin in staged.values():
            twin.send()
        prepared = pipeline.prepare(kernel, tile, problem, staged, device)
        seconds = _gpu_time(prepared, prepared.pointers(staged), repeats, before)
        for name in outputs:
            staged[name].fetch()
    stray_writes = tuple(name for name, (memory, within) in made.items() if _written_beside(memory, within))
    return Trial(prepared, outputs, stray_writes, seconds)


def outputs_of(kernel: Kernel, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype)} of what `kernel` writes: tensors in the problem's dtype, a number for each row in fp32; of
    a backward the gradients of bias and sink among them, where the problem has them."""
    asked = {"dbias": problem.bias, "dsink": problem.sink} if kernel.computes == "backward" else {}
    names = (*COMPUTATIONS[kernel.computes].writes, *(name for name, there in asked.items() if there))
    dtypes = {
        "O": problem.dtype_of("O"),
        "dbias": problem.bias_dtype or problem.dtype,
        "block_map": "int32",
        **dict.fromkeys(("LSE", "delta", "dsink"), "float32"),
    }
    return {name: (_SHAPES[name](problem), dtypes.get(name, problem.dtype)) for name in names}


def outputs_and_scratch(kernel: Kernel, problem: Problem, tile: Tile) -> dict[str, tuple[tuple[int, ...], str]]:
    """`outputs_of`, and the scratch that a launch needs beside them."""
    scratch = {name: (shape, "float32") for name, shape in scratch_of(kernel, problem, tile).items()}
    return {**outputs_of(kernel, problem), **scratch}


_GAP = 8  # columns: rows that begin at multiples of 16 bytes still do
_Place = tuple[slice | EllipsisType, ...]  # where an output lies in memory with a border


def _bordered(name: str, shape: tuple[int, ...], dtype: str, gap: int) -> tuple[Array, _Place]:
    """Memory for an output, with a border: of a tensor, a row before and one after each head's, and `gap` columns; of
    anything else, which has to be contiguous, an entry before and one after."""
    if name in _BORDERED:
        B, H, S, D = shape
        return _filled((B, H, S + 2, D + gap), dtype), (..., slice(1, -1), slice(D))
    return _filled((shape[0] + 2, *shape[1:]), dtype), (slice(1, -1),)


def _written_beside(memory: Array, within: _Place) -> bool:
    border = np.ones(memory.shape, bool)
    border[within] = False
    return bool((memory[border].view(np.uint8) != 0xFF).any())


def _filled(shape: tuple[int, ...], dtype: str) -> Array:
    """Every byte 0xFF: NaN."""
    array = np.empty(shape, dlpack.numpy_dtype(dtype))
    array.view(np.uint8)[...] = 0xFF
    return array


def _wall_clock(
    prepared: pipeline.Prepared, pointers: tuple[int, ...], repeats: int, before_each: Callable[[], None]
) -> float:
    times = []
    for _ in range(repeats):
        before_each()
        start = time.perf_counter()
        prepared.launch(pointers)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gpu_time(
    prepared: pipeline.Prepared, pointers: tuple[int, ...], repeats: int, before_each: Callable[[], None]
) -> float:
    before_each()
    prepared.launch(pointers)
    prepared.wait()  # a fault of the kernel is raised here, with its name
    times = []
    with driver.device(prepared.device[1]).current():
        for _ in range(repeats):
            before_each()
            before, after = driver.Event(), driver.Event()
            before.record()
            prepared.launch(pointers)
            after.record()
            after.synchronize()
            times.append(after.seconds_since(before))
    return statistics.median(times)
