"""One run of a kernel on NumPy arrays, on either backend: poison the outputs, launch, time, copy back."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..engine.staging import Staged
from ..launch import dlpack, driver
from ..launch.dlpack import HOST, Device
from .suite import suite_of

Array = NDArray[Any]


@dataclass(frozen=True)
class Trial:
    """The result of a run: `outputs` by name as NumPy arrays, the names of outputs with writes to the guard memory
    around them, and seconds per launch."""

    prepared: pipeline.Prepared
    outputs: dict[str, Array]
    stray_writes: tuple[str, ...]
    seconds: float


def launch(kernel: Kernel, tile: Tile, problem: Problem, inputs: Mapping[str, Array], device: Device, *,
           repeats: int = 1, before: Callable[[], None] = lambda: None, fast: bool = False,
           fill: int = 0xFF) -> Trial:  # fmt: skip
    """Run a kernel on NumPy arrays; `inputs` by the names in the spec's `args`, including O for a backward.

    Before the launch the outputs, guard memory around them, and scratch are NaN; an output that is also an input has
    the input's values. Scratch of a backward is 3e38 instead: a backward computes rows of NaN again, which would hide
    that it reads dQ_accum too early. If an input has gaps between its rows, the rows of the outputs have gaps, too.
    `before` is called before each launch. `seconds` is the median of `repeats` launches after the first: GPU time
    between events, or wall-clock time on the CPU backend. `fast`: as for `pipeline.load`; then `seconds` means nothing.
    `fill`: the byte of the outputs before the launch.
    """
    gap = 0 if all(array.flags.c_contiguous for array in inputs.values()) else _GAP
    suite = suite_of(kernel)
    made = {
        name: _between_rows(*what, gap, fill) if name in suite.strided else _contiguous(*what, fill)
        for name, what in suite.outputs(problem).items()
    }
    shapes = {name: shape for name, (shape, _) in suite.outputs(problem).items()}
    outputs = {name: memory[inner].reshape(shapes[name]) for name, (memory, inner) in made.items()}
    for name in outputs.keys() & inputs.keys():
        outputs[name][...] = inputs[name]
    scratch = {
        name: _filled(shape, "float32", 0x7F if kernel.computes == "backward" else 0xFF)
        for name, shape in pipeline.scratch_of(kernel, problem, tile, device).items()
    }
    views = {name: dlpack.view(array) for name, array in {**inputs, **outputs, **scratch}.items()}
    if device == HOST:
        prepared = pipeline.prepare(kernel, tile, problem, views, device, fast=fast)
        seconds = _wall_clock(prepared, prepared.pointers(views), repeats, before)
    else:
        staged = {name: Staged(view, device) for name, view in views.items()}
        for copy in staged.values():
            copy.send()
        prepared = pipeline.prepare(kernel, tile, problem, staged, device, fast=fast)
        seconds = _gpu_time(prepared, prepared.pointers(staged), repeats, before)
        for name in outputs:
            staged[name].fetch()
    stray_writes = tuple(name for name, (memory, inner) in made.items() if _guard_changed(memory, inner, fill))
    return Trial(prepared, outputs, stray_writes, seconds)


def outputs_and_scratch(
    kernel: Kernel, problem: Problem, tile: Tile, device: Device = HOST
) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype)} of the outputs of `kernel`, and of the scratch of a launch."""
    sizes = pipeline.scratch_of(kernel, problem, tile, device)
    scratch = {name: (shape, "float32") for name, shape in sizes.items()}
    return {**suite_of(kernel).outputs(problem), **scratch}


_GAP = 8  # columns; preserves the 16-byte alignment of rows
_Index = tuple[slice | EllipsisType, ...]  # of an output inside its guarded memory


def _between_rows(shape: tuple[int, ...], dtype: str, gap: int, fill: int) -> tuple[Array, _Index]:
    """Memory for a (B, H, S, D) output, with guard elements: a row before and after each head's rows, and `gap`
    columns."""
    B, H, S, D = shape
    return _filled((B, H, S + 2, D + gap), dtype, fill), (..., slice(1, -1), slice(D))


def _contiguous(shape: tuple[int, ...], dtype: str, fill: int) -> tuple[Array, _Index]:
    """Memory for a contiguous output, with guard elements before and after: an entry of the first dimension, rounded up
    to a multiple of 64 elements, which preserves the alignment."""
    count, guard = math.prod(shape), -(-max(math.prod(shape[1:]), 1) // 64) * 64
    return _filled((count + 2 * guard,), dtype, fill), (slice(guard, guard + count),)


def _guard_changed(memory: Array, inner: _Index, fill: int) -> bool:
    guard = np.ones(memory.shape, bool)
    guard[inner] = False
    return bool((memory[guard].view(np.uint8) != fill).any())


def _filled(shape: tuple[int, ...], dtype: str, fill: int) -> Array:
    """An array with every byte `fill`; 0xFF is NaN."""
    array = np.empty(shape, dlpack.numpy_dtype(dtype))
    array.view(np.uint8)[...] = fill
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
    prepared.wait()  # raises an error of this launch, with the kernel's name
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
