"""Where `tune` compiles and times: NVRTC in parallel processes, and one worker process for each GPU.

NVRTC compiles one program at a time in a process, whatever the number of threads (two in two threads: 1.04 times the
time of one after the other), so that parallel means processes.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..bench import benchmark, environment
from ..bench.inputs import make_bench_inputs
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

EMULATION = "cpu emulation"  # in place of a GPU's name
_COMPILE_SECONDS, _MEASURE_SECONDS = 120.0, 120.0  # after which a worker is given up


class GpuExecutor:
    """GPUs of this host, all of one kind, as a `search.Lab`. Use it in a `with` statement.

    `ordinals`: which, by default all. Raises GpuUnavailable, ToolchainMissing without PyTorch, and UnsupportedProblem
    for GPUs that differ.
    """

    def __init__(self, kernel: Kernel, ordinals: Sequence[int] = ()):
        _need_torch()
        devices = [driver.device(i) for i in ordinals or range(driver.device_count())]
        names = {device.name for device in devices}
        if len(names) != 1:
            raise UnsupportedProblem(
                f"times of {', '.join(sorted(names)) or 'no GPU'} cannot be compared: name one kind"
            )
        self.gpu, self.arch = names.pop(), pipeline.arch_name(kernel, devices[0].arch)
        self._stack = ExitStack()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        handles = [visible[d.ordinal] if len(visible) > d.ordinal and visible[0] else str(d.ordinal) for d in devices]
        self._fleet = WorkerPool([{"CUDA_VISIBLE_DEVICES": handle} for handle in handles], _MEASURE_SECONDS)
        self._measure = measure_on_gpu

    def __enter__(self) -> GpuExecutor:
        self._stack.enter_context(self._fleet)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def describe(self) -> dict[str, Any]:
        """As `search.Lab` says."""
        return environment.describe()

    def compile(
        self, kernel: Kernel, problem: Problem, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Resources | str]]:
        """As `search.Lab` says."""
        jobs = [(kernel.name, problem, tile, self.arch) for tile in tiles]
        with self._compilers(len(jobs)) as pool:
            for job, found in pool.map(compile_tile, jobs):
                yield job[2], str(found) if isinstance(found, WorkerDied) else found

    def _compilers(self, jobs: int) -> AbstractContextManager[Any]:
        return WorkerPool([{}] * min(len(os.sched_getaffinity(0)), jobs), _COMPILE_SECONDS)

    def measure(
        self, kernel: Kernel, problem: Problem, groups: Sequence[tuple[Tile, ...]], samples: int
    ) -> Iterator[tuple[tuple[Tile, ...], Sequence[Measured]]]:
        """As `search.Lab` says."""
        jobs = [(kernel.name, problem, group, samples) for group in groups]
        for job, found in self._fleet.map(self._measure, jobs):
            lost = isinstance(found, WorkerDied)
            yield job[2], [Measured(False, f"{kernel.name} {t}: {found}", lost=True) for t in job[2]] if lost else found


class CpuExecutor(GpuExecutor):
    """The CPU backend in place of a GPU: to try `tune` itself, since the times of an emulation say nothing."""

    def __init__(self, kernel: Kernel):
        self.gpu, self.arch = EMULATION, pipeline.DEFAULT_ARCH
        self._stack = ExitStack()
        self._fleet = WorkerPool([{}], _MEASURE_SECONDS)
        self._measure = measure_on_cpu


class DistributedExecutor(GpuExecutor):
    """The workers of a Dask cluster, each with one GPU, all of one kind; with `backend` "cpu" without any.

    They compile too, so that this machine needs neither GPU nor NVRTC. Entering raises DistributedUnavailable, also
    for workers that have another source of the kernel or share a GPU, and UnsupportedProblem for GPUs that differ.
    """

    def __init__(self, kernel: Kernel, address: str, backend: str | None):
        self._kernel, self._backend = kernel, backend
        self._stack = ExitStack()
        self._fleet: Any = DistributedPool(address, _MEASURE_SECONDS)
        self._measure = measure_on_cpu if backend == "cpu" else measure_on_gpu

    def __enter__(self) -> DistributedExecutor:
        with ExitStack() as stack:
            stack.enter_context(self._fleet)
            found = self._fleet.everywhere(worker_info, self._kernel.name, self._backend)
            self._setting = self._examined(found)
            self._stack = stack.pop_all()
        return self

    def _examined(self, found: Mapping[str, WorkerInfo | WorkerDied]) -> dict[str, Any]:
        """Takes `gpu` and `arch` from the workers' stations, if these fit together; where the first measures."""
        stations: dict[str, WorkerInfo] = {}
        for worker, it in found.items():
            if isinstance(it, WorkerDied):
                raise DistributedUnavailable(f"the worker {worker} cannot tune {self._kernel.name}: {it}")
            if it.digest != tuned.digest(self._kernel):
                raise DistributedUnavailable(
                    f"the worker {worker} on {it.host} has another source of {self._kernel.name}: let every machine "
                    "have the same state of the project, in a shared folder, say"
                )
            stations[worker] = it
        if len(kinds := sorted({it.gpu for it in stations.values()})) != 1:
            raise UnsupportedProblem(f"times of {', '.join(kinds)} cannot be compared: let the cluster have one kind")
        places = Counter((it.host, it.handle) for it in stations.values() if it.handle)
        for (host, handle), workers in places.items():
            if workers > 1:
                raise DistributedUnavailable(
                    f"{workers} workers on {host} share GPU {handle}: start `dask cuda worker`, which gives each one "
                    "of its own, or set CUDA_VISIBLE_DEVICES for each"
                )
        first = next(iter(stations.values()))
        self.gpu, self.arch = first.gpu, first.arch
        return first.setting

    def describe(self) -> dict[str, Any]:
        """As `search.Lab` says: of one of the workers."""
        return self._setting

    def _compilers(self, jobs: int) -> AbstractContextManager[Any]:
        return nullcontext(self._fleet)


def make_executor(
    kernel: Kernel, backend: str | None, ordinals: Sequence[int], cluster: str | None = None
) -> GpuExecutor:
    """Where to tune: on the Dask `cluster` of that address, or here. Raises GpuUnavailable without a GPU, unless
    backend is "cpu", and ToolchainMissing."""
    if cluster:
        return DistributedExecutor(kernel, cluster, backend)
    if backend == "cpu":
        return CpuExecutor(kernel)
    if not driver.available():
        raise GpuUnavailable("tune times kernels on a GPU and there is none (--backend cpu times the emulation)")
    return GpuExecutor(kernel, ordinals)


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ToolchainMissing("tune needs PyTorch, for its tensors and its timing: make setup")


# ---- in the workers


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker of a cluster measures with. `handle`: its GPU among those of `host`, "" for the CPU backend."""

    host: str
    handle: str
    gpu: str
    arch: str
    digest: str  # of the kernel's source there
    setting: dict[str, Any]


def worker_info(kernel: str, backend: str | None) -> WorkerInfo:
    """This worker's. Raises GpuUnavailable, UnknownKernel."""
    spec, host, setting = registry.get(kernel), platform.node(), environment.describe()
    if backend == "cpu":
        return WorkerInfo(host, "", EMULATION, pipeline.DEFAULT_ARCH, tuned.digest(spec), setting)
    _need_torch()
    gpu, handle = driver.device(), os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return WorkerInfo(host, handle or "0", gpu.name, pipeline.arch_name(spec, gpu.arch), tuned.digest(spec), setting)


def compile_tile(kernel: str, problem: Problem, tile: Tile, arch: str) -> Resources | str:
    """What a tile costs, or why it does not compile. The cubin is in the cache afterwards."""
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


def measure_on_gpu(kernel: str, problem: Problem, tiles: tuple[Tile, ...], samples: int) -> list[Measured]:
    """Each tile checked, and those that are right timed in turns after an L2 flush, on the one GPU that is visible."""
    (inputs, option_tensors), expected, stopwatch = _inputs_on_gpu(problem, registry.get(kernel).computes)
    contenders = dict(zip(tiles, benchmark.kernel_contenders([registry.get(kernel)], tiles), strict=True))
    timed, wrong = {}, {}
    for tile, contender in contenders.items():
        try:
            ready = contender.prepare(problem, *inputs, **option_tensors)
            verdict = expected.check(ready.poison, ready.launch)
        except UnsupportedProblem as refusal:
            wrong[tile] = str(refusal)
        else:
            if verdict.message:
                wrong[tile] = verdict.message
            else:
                timed[tile] = stopwatch.ready(ready.launch)
    limits = Limits(noise=0.0, rounds=samples, noise_samples=samples, warmup=2)
    times = measure(timed, stopwatch, limits) if timed else {}
    return [Measured(True, "", Timing.of(times[t])) if t in times else Measured(False, wrong[t]) for t in tiles]


def measure_on_cpu(kernel: str, problem: Problem, tiles: tuple[Tile, ...], samples: int) -> list[Measured]:
    """The same on the CPU backend: the median alone."""
    case = Case("tune", problem)
    found = []
    for tile in tiles:
        result = verify(registry.get(kernel), case, HOST, tile, repeats=samples)
        seconds = result.seconds or 0.0
        timing = Timing(seconds, seconds, seconds, samples, math.inf) if result.ok else None
        found.append(Measured(bool(result.ok), result.message, timing))
    return found
