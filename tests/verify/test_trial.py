"""The memory around outputs, and problems that a kernel takes."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sandbox.core import registry
from sandbox.engine import pipeline
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem
from sandbox.verify import attention, trial
from sandbox.verify.cases import Case
from sandbox.verify.suite import suite_of

KERNEL = registry.get("fwd_minimal")


@pytest.mark.parametrize(
    ("shape", "guard"), [((2, 4, 100), 448), ((3, 64), 64), ((3, 65), 128), ((500,), 64), ((2, 0, 5), 64)]
)
def test_guard_memory_of_a_contiguous_output(shape: tuple[int, ...], guard: int) -> None:
    """Before and after it: an entry of the first dimension, rounded up to 64 elements."""
    memory, (inner,) = trial._contiguous(shape, "float32", 0xFF)
    assert isinstance(inner, slice)
    assert (inner.start, inner.stop) == (guard, guard + np.prod(shape))
    assert len(memory) == 2 * guard + np.prod(shape)
    assert np.isnan(memory).all()


@pytest.mark.parametrize("at", [0, 63, 64, 191, 192, -1])
def test_a_write_to_guard_memory(at: int) -> None:
    memory, inner = trial._contiguous((2, 64), "float32", 0xFF)
    memory[at] = 0
    assert trial._guard_changed(memory, inner, 0xFF) == (not 64 <= at < 192)


@pytest.mark.parametrize("gap", [0, 8])
def test_guard_memory_between_rows(gap: int) -> None:
    memory, inner = trial._between_rows((2, 3, 5, 16), "float16", gap, 0xFF)
    assert memory[inner].shape == (2, 3, 5, 16)
    assert memory.shape == (2, 3, 7, 16 + gap)
    memory[inner] = 0
    assert not trial._guard_changed(memory, inner, 0xFF)
    assert np.isnan(memory[:, :, [0, -1]]).all()
    assert np.isnan(memory[..., 16:]).all()


@pytest.mark.parametrize("D", [16, 32, 64, 128, 256])
def test_a_kernel_of_one_head_dimension_gets_it(D: int) -> None:
    only = dataclasses.replace(KERNEL, supports=lambda p, arch: None if p.D == D else "not supported")
    problems = [case.problem for case in attention.quick_cases(only, HOST)]
    problems += [attention.tile_case(only, only.tiles[0]).problem, *attention.small_problems(only, only.tiles[0])]
    assert {p.D for p in problems} == {D}


# ---- what a launch gets; without a launch


class Prepared:
    """In place of `pipeline.prepare`: the memory of every tensor when it is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any = None):
        self.seen: dict[str, np.ndarray] = {}
        self.calls: list[str] = []
        self.fast: Any = None
        self._change = change
        monkeypatch.setattr(trial.pipeline, "prepare", self.prepare)

    def prepare(self, kernel: Any, tile: Any, problem: Any, views: Any, device: Any, *, fast: bool) -> Prepared:
        self._views, self.fast = views, fast
        return self

    def pointers(self, views: Any) -> tuple[int, ...]:
        return ()

    def launch(self, pointers: Any) -> None:
        self.calls.append("launch")
        self.seen = {name: view.owner.copy() for name, view in self._views.items()}
        if self._change:
            self._change({name: view.owner for name, view in self._views.items()})


def launched(name: str, monkeypatch: pytest.MonkeyPatch, change: Any = None, layout: str = "bhsd", **how: Any) -> Any:
    """(what was prepared, the trial)"""
    kernel = registry.get(name)
    problem = Problem(1, 2, 40, 24, 64, dtype="float16")
    prepared = Prepared(monkeypatch, change)
    given = suite_of(kernel).inputs(Case("x", problem, layout=layout))
    tile = pipeline.tile_on(HOST, kernel, problem)
    return prepared, trial.launch(kernel, tile, problem, given, HOST, **how)


def test_outputs_and_scratch_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN; in the scratch of a backward large numbers."""
    prepared, done = launched("fwd_minimal", monkeypatch)
    assert np.isnan(prepared.seen["O"]).all()
    assert np.isnan(done.outputs["LSE"]).all()
    assert {name: x.shape for name, x in done.outputs.items()} == {"O": (1, 2, 40, 64), "LSE": (1, 2, 40)}
    assert (done.stray_writes, prepared.fast) == ((), False)
    prepared, done = launched("fwd_minimal", monkeypatch, fill=0, fast=True)
    assert not prepared.seen["O"].any()
    assert (done.stray_writes, prepared.fast) == ((), True)
    prepared, _ = launched("bwd_mma", monkeypatch)
    assert (prepared.seen["dQ_accum"] > 3e38).all()
    assert np.isnan(prepared.seen["dQ"]).all()


@pytest.mark.parametrize(("layout", "gap"), [("bhsd", 0), ("offset", 8), ("bshd", 8)])
def test_outputs_have_gaps_if_inputs_have(layout: str, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, done = launched("fwd_minimal", monkeypatch, layout=layout)
    assert done.outputs["O"].strides[2] == 2 * (64 + gap)
    assert done.outputs["LSE"].flags.c_contiguous


@pytest.mark.parametrize("name", ["O", "LSE"])
def test_a_write_beside_an_output_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        memory = arrays[name].base
        assert memory is not None
        memory.reshape(-1)[0] = 1

    _, done = launched("fwd_minimal", monkeypatch, change)
    assert done.stray_writes == (name,)


def test_the_median_of_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """`before` is not timed."""
    now = iter([1.0, 1.5, 2.0, 2.25, 3.0, 7.0])
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    calls: list[str] = []
    prepared = Prepared(monkeypatch)
    prepared.calls = calls
    kernel = registry.get("fwd_minimal")
    problem = Problem(1, 1, 8, 8, 64, dtype="float16")
    given = suite_of(kernel).inputs(Case("x", problem))
    done = trial.launch(kernel, kernel.tiles[0], problem, given, HOST, repeats=3, before=lambda: calls.append("before"))
    assert calls == ["before", "launch"] * 3
    assert done.seconds == 0.5


def test_a_launch_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are sent, outputs come back; launches after the first are timed by events."""
    log: list[str] = []
    seconds = iter([0.5, 0.125, 0.25])

    class Staged:
        def __init__(self, view: Any, device: Any):
            self.size = view.owner.size

        def send(self) -> None:
            log.append(f"send {self.size}")

        def fetch(self) -> None:
            log.append(f"fetch {self.size}")

    class Event:
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("synchronize")

        def seconds_since(self, before: Event) -> float:
            return next(seconds)

    prepared = SimpleNamespace(
        pointers=tuple, launch=lambda pointers: log.append("launch"),
        wait=lambda: log.append("wait"), device=("cuda", 0),
    )  # fmt: skip
    monkeypatch.setattr(trial, "Staged", Staged)
    monkeypatch.setattr(trial.driver, "Event", Event)
    monkeypatch.setattr(trial.driver, "device", lambda n: SimpleNamespace(current=contextlib.nullcontext))
    monkeypatch.setattr(trial.pipeline, "prepare", lambda *given, fast: prepared)
    problem = Problem(1, 1, 3, 5, 64, dtype="float16")
    given = suite_of(KERNEL).inputs(Case("x", problem))
    before = lambda: log.append("before")  # noqa: E731
    done = trial.launch(KERNEL, KERNEL.tiles[0], problem, given, ("cuda", 0), repeats=3, before=before)
    assert done.seconds == 0.25
    assert sorted(log[:5]) == sorted(f"send {n}" for n in (3 * 64, 5 * 64, 5 * 64, 3 * 64, 3))
    timed = ["before", "record", "launch", "record", "synchronize"]
    assert log[5:] == ["before", "launch", "wait", *timed * 3, f"fetch {3 * 64}", "fetch 3"]
