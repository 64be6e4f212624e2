"""One run of a kernel on NumPy arrays, on either backend: poison the outputs, launch, time, copy back."""

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


_STRIDED = ("O", "dQ", "dK", "dV")  # outputs with any strides


@dataclass(frozen=True)
class Trial:
    """The result of a run: `outputs` by name as NumPy arrays, the names of outputs with writes to the guard memory
    around them, and seconds per launch."""

    prepared: pipeline.Prepared
    outputs: dict[str, Array]
    stray_writes: tuple[str, ...]
    seconds: float


def launch(kernel: Kernel, tile: Tile, problem: Problem, inputs: Mapping[str, Array], device: Device, *,
           repeats: int = 1, before: Callable[[], None] = lambda: None) -> Trial:  # fmt: skip
    """Run a kernel on NumPy arrays; `inputs` by the names in the spec's `args`, including O for a backward.

    Before the launch every byte of the outputs, of guard memory around them, and of scratch is NaN. If an input has
    gaps between its rows, the rows of the outputs have gaps, too. `before` is called before each launch. `seconds` is
    the median of `repeats` launches after the first: GPU time between events, or wall-clock time on the CPU backend.
    """
    gap = 0 if all(array.flags.c_contiguous for array in inputs.values()) else _GAP
    made = {name: _with_guard(name, *what, gap) for name, what in outputs_of(kernel, problem).items()}
    outputs = {name: memory[inner] for name, (memory, inner) in made.items()}
    scratch = {name: _filled(shape, "float32") for name, shape in scratch_of(kernel, problem, tile).items()}
    views = {name: dlpack.view(array) for name, array in {**inputs, **outputs, **scratch}.items()}
    if device == HOST:
        prepared = pipeline.prepare(kernel, tile, problem, views, device)
        seconds = _wall_clock(prepared, prepared.pointers(views), repeats, before)
    else:
        staged = {name: Staged(view, device) for name, view in views.items()}
        for copy in staged.values():
            copy.send()
        prepared = pipeline.prepare(kernel, tile, problem, staged, device)
        seconds = _gpu_time(prepared, prepared.pointers(staged), repeats, before)
        for name in outputs:
            staged[name].fetch()
    stray_writes = tuple(name for name, (memory, inner) in made.items() if _guard_changed(memory, inner))
    return Trial(prepared, outputs, stray_writes, seconds)


def outputs_of(kernel: Kernel, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype)} of the outputs of `kernel`: tensors in the problem's dtype, LSE and delta in fp32; for a
    backward also the gradients of bias and sink, if the problem has these."""
    optional = {"dbias": problem.bias, "dsink": problem.sink} if kernel.computes == "backward" else {}
    names = (*COMPUTATIONS[kernel.computes].writes, *(name for name, present in optional.items() if present))
    dtypes = {
        "O": problem.dtype_of("O"),
        "dbias": problem.bias_dtype or problem.dtype,
        "block_map": "int32",
        **dict.fromkeys(("LSE", "delta", "dsink"), "float32"),
    }
    return {name: (_SHAPES[name](problem), dtypes.get(name, problem.dtype)) for name in names}


def outputs_and_scratch(kernel: Kernel, problem: Problem, tile: Tile) -> dict[str, tuple[tuple[int, ...], str]]:
    """`outputs_of`, plus the scratch of a launch."""
    scratch = {name: (shape, "float32") for name, shape in scratch_of(kernel, problem, tile).items()}
    return {**outputs_of(kernel, problem), **scratch}


_GAP = 8  # columns; preserves the 16-byte alignment of rows
_Index = tuple[slice | EllipsisType, ...]  # of an output inside its guarded memory


def _with_guard(name: str, shape: tuple[int, ...], dtype: str, gap: int) -> tuple[Array, _Index]:
    """Memory for an output, with guard elements: for a strided tensor a row before and after each head's rows, and
    `gap` columns; for any other output, which must be contiguous, one entry before and after."""
    if name in _STRIDED:
        B, H, S, D = shape
        return _filled((B, H, S + 2, D + gap), dtype), (..., slice(1, -1), slice(D))
    return _filled((shape[0] + 2, *shape[1:]), dtype), (slice(1, -1),)


def _guard_changed(memory: Array, inner: _Index) -> bool:
    guard = np.ones(memory.shape, bool)
    guard[inner] = False
    return bool((memory[guard].view(np.uint8) != 0xFF).any())


def _filled(shape: tuple[int, ...], dtype: str) -> Array:
    """An array of NaN: every byte is 0xFF."""
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
