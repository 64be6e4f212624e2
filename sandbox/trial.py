"""One kernel on given inputs, on either backend: outputs poisoned, launched, timed, fetched."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import dlpack, driver, run
from .dlpack import HOST, Device
from .spec import Kernel, Problem, Tile
from .staging import Staged

Array = NDArray[Any]


@dataclass(frozen=True)
class Trial:
    """What came out: `out` and `lse` as NumPy arrays, whether anything around `out` was written, seconds a launch."""

    prepared: run.Prepared
    out: Array
    lse: Array
    trespassed: bool
    seconds: float


def forward(kernel: Kernel, tile: Tile, problem: Problem, q: Array, k: Array, v: Array, device: Device, *,
            repeats: int = 1) -> Trial:  # fmt: skip
    """Run a forward kernel on NumPy arrays.

    Every byte of the outputs, and of a border around `out`, is NaN before the launch. `seconds` is the median of
    `repeats` launches after the first: GPU time between events, or the wall clock on the CPU backend.
    """
    bordered = np.empty((problem.B, problem.H, problem.Sq + 2, problem.D), dlpack.numpy_dtype(problem.dtype))
    lse = np.empty((problem.B, problem.H, problem.Sq), np.float32)
    for array in (bordered, lse):
        array.view(np.uint8)[...] = 0xFF
    arrays = {"Q": q, "K": k, "V": v, "O": bordered[:, :, 1:-1], "LSE": lse}
    views = {name: dlpack.view(array) for name, array in arrays.items()}
    if problem.B * problem.H * problem.Sq == 0:
        prepared = run.prepare(kernel, tile, problem, views, device)
        return Trial(prepared, arrays["O"], lse, False, 0.0)
    if device == HOST:
        prepared = run.prepare(kernel, tile, problem, views, device)
        seconds = _wall_clock(prepared, prepared.pointers(views), repeats)
    else:
        staged = {name: Staged(view, device) for name, view in views.items()}
        for twin in staged.values():
            twin.send()
        prepared = run.prepare(kernel, tile, problem, staged, device)
        seconds = _gpu_time(prepared, prepared.pointers(staged), repeats)
        staged["O"].fetch()
        staged["LSE"].fetch()
    border = bordered[:, :, [0, -1]].view(np.uint8)
    return Trial(prepared, arrays["O"], lse, bool((border != 0xFF).any()), seconds)


def _wall_clock(prepared: run.Prepared, pointers: tuple[int, ...], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        prepared.launch(pointers)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gpu_time(prepared: run.Prepared, pointers: tuple[int, ...], repeats: int) -> float:
    prepared.launch(pointers)
    prepared.wait()  # a fault of the kernel is raised here, with its name
    times = []
    with driver.device(prepared.device[1]).current():
        for _ in range(repeats):
            before, after = driver.Event(), driver.Event()
            before.record()
            prepared.launch(pointers)
            after.record()
            after.synchronize()
            times.append(after.seconds_since(before))
    return statistics.median(times)
