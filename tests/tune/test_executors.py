"""Executors of `tune`: which GPUs and processes they use, and what they do with results; without a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.bench.timing import Limits, Timing
from sandbox.core import registry
from sandbox.core.errors import CompileError, GpuUnavailable, SpecError, ToolchainMissing, UnsupportedProblem
from sandbox.engine import pipeline, tuned
from sandbox.jobs.worker import WorkerDied
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem, Tile
from sandbox.toolchain.nvrtc import Resources
from sandbox.tune import executors
from sandbox.tune.search import Measured

KERNEL = registry.get("fwd_minimal")
PROBLEM = Problem(1, 1, 40, 40, 16, dtype="float16")
TILES = (Tile(BLOCK_M=32, BLOCK_N=8), Tile(BLOCK_M=64, BLOCK_N=8), Tile(BLOCK_M=64, BLOCK_N=16))


class Pool:
    """In place of a WorkerPool: runs jobs in this process. `died`: the job that ends its worker."""

    made: list[tuple[list[dict[str, str]], float]] = []  # noqa: RUF012
    died: int | None = None

    def __init__(self, environments: list[dict[str, str]], seconds: float):
        self.made.append((environments, seconds))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.made.append(([], 0))

    def map(self, function: Any, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        for n, job in enumerate(jobs):
            yield job, WorkerDied("it ended") if n == self.died else function(*job)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, str]], float]]:
    monkeypatch.setattr(executors, "WorkerPool", Pool)
    monkeypatch.setattr(Pool, "made", [])
    return Pool.made


def gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    devices = [SimpleNamespace(name=name, arch=(9, 0), ordinal=n) for n, name in enumerate(names)]
    monkeypatch.setattr(executors.driver, "device", lambda n=0: devices[n])
    monkeypatch.setattr(executors.driver, "device_count", lambda: len(devices))
    monkeypatch.setattr(executors.driver, "available", lambda: bool(devices))


@pytest.mark.parametrize(
    ("visible", "ordinals", "handles"),
    [
        (None, (), ["0", "1", "2"]),
        ("", (), ["0", "1", "2"]),
        (None, (2, 0), ["2", "0"]),
        ("5,3,7", (), ["5", "3", "7"]),
        ("5,3,7", (1,), ["3"]),
        ("GPU-a,GPU-b", (0, 2), ["GPU-a", "2"]),
    ],
)
def test_a_process_for_each_gpu(
    visible: str | None,
    ordinals: tuple[int, ...],
    handles: list[str],
    monkeypatch: pytest.MonkeyPatch,
    pools: list[Any],
) -> None:
    gpus(monkeypatch, "an H100", "an H100", "an H100")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with executors.GpuExecutor(KERNEL, ordinals) as executor:
        assert (executor.gpu, executor.arch) == ("an H100", pipeline.arch_name(KERNEL, (9, 0)))
        assert pools == [([{"CUDA_VISIBLE_DEVICES": handle} for handle in handles], 120.0)]
    assert pools[1:] == [([], 0)]  # closed


@pytest.mark.parametrize(
    ("names", "ordinals", "said"),
    [
        (["an H100", "an A100"], (), "tuning on an A100, an H100 is not supported"),
        ([], (), "tuning on no GPU is not supported"),
        (["an H100", "an A100", "an H100"], (1, 2), "tuning on an A100, an H100 is not supported"),
        (["an H100", "an A100", "an H100"], (0, 2), ""),
    ],
)
def test_gpus_of_one_model(
    names: list[str], ordinals: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch, pools: list[Any]
) -> None:
    gpus(monkeypatch, *names)
    if said:
        with pytest.raises(UnsupportedProblem, match=said):
            executors.GpuExecutor(KERNEL, ordinals)
    else:
        assert executors.GpuExecutor(KERNEL, ordinals).gpu == "an H100"


def test_which_executor(monkeypatch: pytest.MonkeyPatch, pools: list[Any]) -> None:
    gpus(monkeypatch, "an H100")
    made = executors.make_executor(KERNEL, None, ())
    assert (type(made), made.gpu) == (executors.GpuExecutor, "an H100")
    made = executors.make_executor(KERNEL, "cpu", ())
    assert (type(made), made.gpu, made.arch) == (executors.CpuExecutor, "cpu emulation", pipeline.DEFAULT_ARCH)
    assert pools[-1] == ([{}], 120.0)
    monkeypatch.setattr(executors, "DistributedPool", lambda *given: given)
    made = executors.make_executor(KERNEL, "cpu", (), "tcp://a:1")
    assert (type(made), made._pool, made._measure) == (
        executors.DistributedExecutor, ("tcp://a:1", 120.0), executors.measure_on_cpu
    )  # fmt: skip
    made = executors.make_executor(KERNEL, None, (), "tcp://a:1")
    assert made._measure is executors.measure_on_gpu
    gpus(monkeypatch)
    for backend in (None, "cuda"):
        with pytest.raises(GpuUnavailable, match="tune needs a GPU to time kernels, and there is none"):
            executors.make_executor(KERNEL, backend, ())


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainMissing, match="tune needs PyTorch"):
        executors.GpuExecutor(KERNEL)


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_tiles_are_compiled_in_parallel(cores: int, monkeypatch: pytest.MonkeyPatch, pools: list[Any]) -> None:
    """By as many processes as cores, at most one for each tile. A lost process costs its tile."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(Pool, "died", 1)
    given: list[Any] = []
    monkeypatch.setattr(executors, "compile_tile", lambda *job: given.append(job) or Resources(40, 0, 0, 0, 0))
    executor = executors.CpuExecutor(KERNEL)
    pools.clear()
    found = [*executor.compile(KERNEL, PROBLEM, TILES)]
    assert found == [
        (TILES[0], Resources(40, 0, 0, 0, 0)),
        (TILES[1], "it ended"),
        (TILES[2], Resources(40, 0, 0, 0, 0)),
    ]
    assert given == [("fwd_minimal", PROBLEM, tile, executor.arch) for tile in (TILES[0], TILES[2])]
    assert pools == [([{}] * min(cores, 3), 120.0), ([], 0)]


def test_a_lost_measurement(monkeypatch: pytest.MonkeyPatch, pools: list[Any]) -> None:
    """Counts for all tiles of its group."""
    monkeypatch.setattr(Pool, "died", 1)
    monkeypatch.setattr(executors, "measure_on_cpu", lambda *job: [job])
    executor = executors.CpuExecutor(KERNEL)
    groups = [TILES[:1], TILES[1:]]
    first, second = executor.measure(KERNEL, PROBLEM, groups, 8)
    assert first == (TILES[:1], [("fwd_minimal", PROBLEM, TILES[:1], 8)])
    lost = [Measured(False, f"fwd_minimal {tile}: it ended", lost=True) for tile in TILES[1:]]
    assert second == (TILES[1:], lost)


@pytest.mark.parametrize(("visible", "handle"), [(None, "0"), ("", "0"), ("3", "3"), ("GPU-a,GPU-b", "GPU-a")])
def test_the_environment_of_a_worker(visible: str | None, handle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, "an H100")
    monkeypatch.setattr(executors.environment, "describe", lambda: {"a": 1})
    monkeypatch.setattr(executors.platform, "node", lambda: "here")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    digest = tuned.digest(KERNEL)
    arch = pipeline.arch_name(KERNEL, (9, 0))
    assert executors.worker_info("fwd_minimal", None) == executors.WorkerInfo(
        "here", handle, "an H100", arch, digest, {"a": 1}
    )
    assert executors.worker_info("fwd_minimal", "cpu") == executors.WorkerInfo(
        "here", "", "cpu emulation", pipeline.DEFAULT_ARCH, digest, {"a": 1}
    )


# ---- in the workers


def test_a_tile_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    each = [SimpleNamespace(resources=Resources(*numbers)) for numbers in ((40, 8, 0, 4, 0), (30, 9, 0, 0, 0))]
    monkeypatch.setattr(executors.pipeline, "compile_problem", lambda *given: each)
    found = executors.compile_tile("fwd_minimal", PROBLEM, TILES[0], "sm_90a")
    assert found == Resources.worst(one.resources for one in each)
    for error in (CompileError("no\n\noptions: -D1", source="", options=(), log=""), SpecError("no")):

        def fails(*given: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(executors.pipeline, "compile_problem", fails)
        assert executors.compile_tile("fwd_minimal", PROBLEM, TILES[0], "sm_90a") == "no"


def test_tiles_are_timed_on_a_gpu_if_they_are_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    """All correct ones in turns, in as many rounds as samples."""
    verdicts = ["", "error 1 against a bound of 0", ""]
    given: list[Any] = []

    def prepare(tile: Tile) -> Any:
        if tile == TILES[2]:
            raise UnsupportedProblem("not supported")
        return SimpleNamespace(poison=f"poison {tile}", launch=f"launch {tile}")

    def check(poison: str, launch: str) -> Any:
        assert poison.removeprefix("poison") == launch.removeprefix("launch")
        return SimpleNamespace(message=verdicts[[str(tile) for tile in TILES].index(launch.removeprefix("launch "))])

    def measure(timed: dict[Tile, Any], stopwatch: Any, limits: Limits) -> dict[Tile, list[float]]:
        given.append((timed, stopwatch, limits))
        return {tile: [1e-3] * 3 for tile in timed}

    stopwatch = SimpleNamespace(ready=lambda launch: f"ready to {launch}")
    prepares = {tile: lambda tile=tile: prepare(tile) for tile in TILES}
    contenders = prepares, SimpleNamespace(check=check), stopwatch
    monkeypatch.setattr(executors, "_contenders_on_gpu", lambda *job: contenders)
    monkeypatch.setattr(executors, "measure", measure)
    found = executors.measure_on_gpu("fwd_minimal", PROBLEM, TILES, 7)
    assert found == [
        Measured(True, "", Timing.of([1e-3] * 3)), Measured(False, verdicts[1]), Measured(False, "not supported")
    ]  # fmt: skip
    limits = Limits(noise=0.0, rounds=7, noise_samples=7, warmup=2)
    assert given == [({TILES[0]: f"ready to launch {TILES[0]}"}, stopwatch, limits)]
    verdicts[0] = "wrong"
    assert [one.ok for one in executors.measure_on_gpu("fwd_minimal", PROBLEM, TILES, 7)] == [False] * 3
    assert len(given) == 1


def test_tiles_are_timed_by_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [SimpleNamespace(ok=True, seconds=0.25, message=""), SimpleNamespace(ok=False, seconds=0.5, message="no"),
               SimpleNamespace(ok=None, seconds=None, message="not supported")]  # fmt: skip
    given: list[Any] = []

    def verify(kernel: Any, case: Any, device: Any, tile: Tile, **how: Any) -> Any:
        given.append((kernel.name, case.problem, device, tile, how))
        return results[len(given) - 1]

    monkeypatch.setattr(executors, "verify", verify)
    right = Measured(True, "", Timing(0.25, 0.25, 0.25, 7, math.inf))
    expected = [right, Measured(False, "no"), Measured(False, "not supported")]
    assert executors.measure_on_cpu("fwd_minimal", PROBLEM, TILES, 7) == expected
    assert given == [("fwd_minimal", PROBLEM, HOST, tile, {"repeats": 7}) for tile in TILES]
