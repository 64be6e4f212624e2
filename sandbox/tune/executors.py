"""Executors of `tune`: they compile tiles with NVRTC in parallel processes, and time them in one process per GPU.

Compiling in parallel needs processes: within a process NVRTC compiles one program at a time (two programs in two
threads take 1.04 times as long as one after the other).
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ..bench import benchmark, environment, operations
from ..bench.benchmark import Expectation
from ..bench.inputs import make_bench_inputs
from ..bench.peers import Ready
from ..bench.timing import Events, Limits, Timing, measure
from ..core import registry
from ..core.errors import (
    CompileError,
    GpuUnavailable,
    SpecError,
    ToolchainMissing,
    UnsupportedProblem,
    without_options,
)
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline, tuned
from ..jobs.distributed import DistributedPool, DistributedUnavailable
from ..jobs.pool import WorkerPool
from ..jobs.worker import WorkerDied
from ..launch import driver
from ..launch.dlpack import HOST
from ..toolchain.nvrtc import Resources
from ..verify.cases import Case
from ..verify.check import verify
from .search import Measured

EMULATION = "cpu emulation"  # used as the GPU's name
_COMPILE_SECONDS, _MEASURE_SECONDS = 120.0, 120.0  # time limits of a worker's job


class GpuExecutor:
    """A `search.Executor` on GPUs of this host, all of the same model. A context manager.

    `ordinals`: which GPUs, by default all. Raises GpuUnavailable, ToolchainMissing without PyTorch, and
    UnsupportedProblem for different GPU models.
    """

    def __init__(self, kernel: Kernel, ordinals: Sequence[int] = ()):
        _need_torch()
        devices = [driver.device(i) for i in ordinals or range(driver.device_count())]
        names = {device.name for device in devices}
        if len(names) != 1:
            raise UnsupportedProblem(
                f"tuning on {', '.join(sorted(names)) or 'no GPU'} is not supported: times are comparable on one GPU "
                "model only (choose GPUs of one model with --gpus)"
            )
        self.gpu, self.arch = names.pop(), pipeline.arch_name(kernel, devices[0].arch)
        self._stack = ExitStack()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        handles = [visible[d.ordinal] if len(visible) > d.ordinal and visible[0] else str(d.ordinal) for d in devices]
        self._pool = WorkerPool([{"CUDA_VISIBLE_DEVICES": handle} for handle in handles], _MEASURE_SECONDS)
        self._measure = measure_on_gpu

    def __enter__(self) -> GpuExecutor:
        self._stack.enter_context(self._pool)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def describe(self) -> dict[str, Any]:
        """See `search.Executor`."""
        return environment.describe()

    def compile(
        self, kernel: Kernel, problem: Problem, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Resources | str]]:
        """See `search.Executor`."""
        jobs = [(kernel.name, problem, tile, self.arch) for tile in tiles]
        with self._compilers(len(jobs)) as pool:
            for job, found in pool.map(compile_tile, jobs):
                yield job[2], str(found) if isinstance(found, WorkerDied) else found

    def _compilers(self, jobs: int) -> AbstractContextManager[Any]:
        return WorkerPool([{}] * min(len(os.sched_getaffinity(0)), jobs), _COMPILE_SECONDS)

    def measure(
        self, kernel: Kernel, problem: Problem, groups: Sequence[tuple[Tile, ...]], samples: int
    ) -> Iterator[tuple[tuple[Tile, ...], Sequence[Measured]]]:
        """See `search.Executor`."""
        jobs = [(kernel.name, problem, group, samples) for group in groups]
        for job, found in self._pool.map(self._measure, jobs):
            lost = isinstance(found, WorkerDied)
            yield job[2], [Measured(False, f"{kernel.name} {t}: {found}", lost=True) for t in job[2]] if lost else found


class CpuExecutor(GpuExecutor):
    """The CPU backend in place of a GPU, to test `tune` itself: its times are those of an emulation."""

    def __init__(self, kernel: Kernel):
        self.gpu, self.arch = EMULATION, pipeline.DEFAULT_ARCH
        self._stack = ExitStack()
        self._pool = WorkerPool([{}], _MEASURE_SECONDS)
        self._measure = measure_on_cpu


class DistributedExecutor(GpuExecutor):
    """The workers of a Dask cluster, each with one GPU, all of the same model; with `backend` "cpu" without GPUs.

    They also compile, so that this machine needs neither GPU nor NVRTC. Entering raises DistributedUnavailable (also if
    a worker has another source of the kernel, or workers share a GPU), and UnsupportedProblem for different GPU models.
    """

    def __init__(self, kernel: Kernel, address: str, backend: str | None):
        self._kernel, self._backend = kernel, backend
        self._stack = ExitStack()
        self._pool: Any = DistributedPool(address, _MEASURE_SECONDS)
        self._measure = measure_on_cpu if backend == "cpu" else measure_on_gpu

    def __enter__(self) -> DistributedExecutor:
        with ExitStack() as stack:
            stack.enter_context(self._pool)
            found = self._pool.everywhere(worker_info, self._kernel.name, self._backend)
            self._setting = self._validated(found)
            self._stack = stack.pop_all()
        return self

    def _validated(self, found: Mapping[str, WorkerInfo | WorkerDied]) -> dict[str, Any]:
        """Checks that the workers are consistent, sets `gpu` and `arch`, and returns the first worker's environment."""
        infos: dict[str, WorkerInfo] = {}
        for worker, it in found.items():
            if isinstance(it, WorkerDied):
                raise DistributedUnavailable(f"the worker {worker} cannot tune {self._kernel.name}: {it}")
            if it.digest != tuned.digest(self._kernel):
                raise DistributedUnavailable(
                    f"the worker {worker} on {it.host} has another source of {self._kernel.name}: use the same version "
                    "of the project on every machine, for instance in a shared folder"
                )
            infos[worker] = it
        if len(models := sorted({it.gpu for it in infos.values()})) != 1:
            raise UnsupportedProblem(
                f"tuning on {', '.join(models)} is not supported: times are comparable on one GPU model only (use "
                "workers with the same model)"
            )
        workers_of_gpu = Counter((it.host, it.handle) for it in infos.values() if it.handle)
        for (host, handle), workers in workers_of_gpu.items():
            if workers > 1:
                raise DistributedUnavailable(
                    f"{workers} workers on {host} share GPU {handle}: start `dask cuda worker`, which assigns one GPU "
                    "to each worker, or set CUDA_VISIBLE_DEVICES for each"
                )
        first = next(iter(infos.values()))
        self.gpu, self.arch = first.gpu, first.arch
        return first.setting

    def describe(self) -> dict[str, Any]:
        """The environment of one of the workers."""
        return self._setting

    def _compilers(self, jobs: int) -> AbstractContextManager[Any]:
        return nullcontext(self._pool)


def make_executor(
    kernel: Kernel, backend: str | None, ordinals: Sequence[int], cluster: str | None = None
) -> GpuExecutor:
    """The executor: on the Dask cluster with the scheduler address `cluster`, or on this machine. Raises GpuUnavailable
    without a GPU, unless backend is "cpu", and ToolchainMissing."""
    if cluster:
        return DistributedExecutor(kernel, cluster, backend)
    if backend == "cpu":
        return CpuExecutor(kernel)
    if not driver.available():
        raise GpuUnavailable(
            "tune needs a GPU to time kernels, and there is none (--backend cpu only tests the command: its times are "
            "meaningless)"
        )
    return GpuExecutor(kernel, ordinals)


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ToolchainMissing("tune needs PyTorch, for its tensors and its timing: make setup")


# ---- in the workers


@dataclass(frozen=True)
class WorkerInfo:
    """The environment of a cluster's worker. `handle`: its GPU on `host`, "" for the CPU backend."""

    host: str
    handle: str
    gpu: str
    arch: str
    digest: str  # of the kernel's source there
    setting: dict[str, Any]


def worker_info(kernel: str, backend: str | None) -> WorkerInfo:
    """The WorkerInfo of the calling process. Raises GpuUnavailable, UnknownKernel."""
    spec, host, setting = registry.get(kernel), platform.node(), environment.describe()
    if backend == "cpu":
        return WorkerInfo(host, "", EMULATION, pipeline.DEFAULT_ARCH, tuned.digest(spec), setting)
    _need_torch()
    gpu, handle = driver.device(), os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return WorkerInfo(host, handle or "0", gpu.name, pipeline.arch_name(spec, gpu.arch), tuned.digest(spec), setting)


def compile_tile(kernel: str, problem: Problem, tile: Tile, arch: str) -> Resources | str:
    """The resources of a tile, or why it does not compile. Afterwards the cubin is in the cache."""
    try:
        compiled = pipeline.compile_problem(registry.get(kernel), problem, tile, arch)
        return Resources.worst(c.resources for c in compiled)
    except (CompileError, SpecError) as error:
        return without_options(str(error))


@lru_cache(maxsize=1)
def _inputs_on_gpu(problem: Problem, computes: str) -> tuple[Any, Any, Events]:
    inputs = benchmark.make_inputs(problem, computes=computes)
    option_tensors = {} if problem.plain else {"option_tensors": make_bench_inputs(problem, inputs[0])}
    return (inputs, option_tensors), benchmark.expectation(problem, inputs, computes, **option_tensors), Events()


@lru_cache(maxsize=1)
def _operation_on_gpu(problem: Problem, kernel: Kernel) -> tuple[operations.Bench, Events]:
    return operations.Bench(kernel, problem), Events()


def _contenders_on_gpu(
    kernel: Kernel, problem: Problem, tiles: tuple[Tile, ...]
) -> tuple[dict[Tile, Callable[[], Ready]], Expectation, Events]:
    """How to prepare each tile, the expected results, and the stopwatch."""
    if kernel.custom:
        bench, stopwatch = _operation_on_gpu(problem, kernel)
        return {tile: partial(bench.prepare, tile) for tile in tiles}, bench.expected, stopwatch
    (inputs, option_tensors), expected, stopwatch = _inputs_on_gpu(problem, kernel.operation.name)
    contenders = dict(zip(tiles, benchmark.kernel_contenders([kernel], tiles), strict=True))
    prepares: dict[Tile, Callable[[], Ready]] = {}
    prepares |= {t: partial(c.prepare, problem, *inputs, **option_tensors) for t, c in contenders.items()}
    return prepares, expected, stopwatch


def measure_on_gpu(kernel: str, problem: Problem, tiles: tuple[Tile, ...], samples: int) -> list[Measured]:
    """Checks each tile, and times the correct ones in turns, after L2 flushes, on the only visible GPU."""
    prepares, expected, stopwatch = _contenders_on_gpu(registry.get(kernel), problem, tiles)
    timed, wrong = {}, {}
    for tile, prepare in prepares.items():
        try:
            ready = prepare()
            verdict = expected.check(ready.poison, ready.launch)
        except UnsupportedProblem as reason:
            wrong[tile] = str(reason)
        else:
            if verdict.message:
                wrong[tile] = verdict.message
            else:
                timed[tile] = stopwatch.ready(ready.launch)
    limits = Limits(noise=0.0, rounds=samples, noise_samples=samples, warmup=2)
    times = measure(timed, stopwatch, limits) if timed else {}
    return [Measured(True, "", Timing.of(times[t])) if t in times else Measured(False, wrong[t]) for t in tiles]


def measure_on_cpu(kernel: str, problem: Problem, tiles: tuple[Tile, ...], samples: int) -> list[Measured]:
    """The same on the CPU backend, without quartiles."""
    case = Case("tune", problem)
    found = []
    for tile in tiles:
        result = verify(registry.get(kernel), case, HOST, tile, repeats=samples)
        seconds = result.seconds or 0.0
        timing = Timing(seconds, seconds, seconds, samples, math.inf) if result.ok else None
        found.append(Measured(bool(result.ok), result.message, timing))
    return found
