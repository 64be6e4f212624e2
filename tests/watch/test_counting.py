"""A verdict does not wait for the disassembler: instruction counts follow later."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sandbox import Problem
from sandbox.core import registry
from sandbox.core.errors import ToolchainMissing
from sandbox.core.tile import Tile
from sandbox.jobs.worker import WorkerDied
from sandbox.launch.dlpack import HOST
from sandbox.toolchain import disassembly, nvrtc
from sandbox.toolchain.arch import Occupancy
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.check import Result
from sandbox.watch import examine, session
from sandbox.watch.figures import Cost, VersionResult
from sandbox.watch.history import History
from sandbox.watch.job import Job

RESULT = Result("fwd_minimal", "plain", Problem(1, 1, 1, 1, 64), "cuda", True, error=1.0, bound=2.0)
COST = Cost("sm_90a", Tile(BLOCK_M=64), Resources(168, 0, 64, 0, 0), 81920, Occupancy(2, 0.125, "registers"), {})
FOUND = VersionResult("ok", results=(RESULT,), cost=COST, pending="counting its instructions")


def test_the_worker_answers_before_it_has_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request returns the counts. If they are ready in time, the verdict has them."""
    try:
        nvrtc.version()
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    free = threading.Event()

    def slow(cubin: bytes) -> dict[str, int]:
        assert free.wait(60)
        return {"HMMA": 3}

    def verify(*args: object) -> tuple[Result, ...]:
        if free.is_set():
            examine._counts.exception()
        return (RESULT,)

    monkeypatch.setattr(disassembly, "opcode_counts", slow)
    monkeypatch.setattr(examine, "_sanitizing", lambda *args: [])
    monkeypatch.setattr(examine, "_verify", verify)
    monkeypatch.setattr(examine.pipeline, "load", lambda *args: None)
    job, at = Job("fwd_minimal", HOST, Problem(1, 1, 64, 64, 64, dtype="float16")), lambda stage, limit: None
    found, _ = examine.examine(job, at)
    assert (found.stage, found.pending, found.cost.opcodes) == ("ok", "counting its instructions", {})
    free.set()
    assert examine.examine(None, at) == ({"HMMA": 3}, True)
    found, _ = examine.examine(job, at)
    assert (found.pending, found.cost.opcodes) == ("", {"HMMA": 3})


@pytest.mark.parametrize("dies", [False, True])
def test_a_verdict_twice(dies: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """First without a number; then recorded, with the counts, or without them if the worker died."""

    def do(job: Job | None) -> tuple[object, str]:
        if job is None and dies:
            raise WorkerDied("it was killed")
        return (FOUND if job else {"HMMA": 3, "FADD": 4}), ""

    worker = SimpleNamespace(do=do, close=lambda: None)
    monkeypatch.setattr(session, "Worker", lambda *args: worker)
    monkeypatch.setattr(session, "History", lambda kernel: History(kernel, tmp_path))
    kernel = registry.get("fwd_minimal")
    begun, first, last = session.watch(kernel, Job(kernel.name, HOST), once=True)
    assert begun is None
    assert (first.number, bool(first.found.pending), "instructions" in first.figures) == (0, True, False)
    assert (last.number, last.found.pending, last.figures.get("instructions")) == (1, "", None if dies else 7.0)
    assert first.latency == last.latency
    assert dataclasses.replace(first.found, pending="", cost=None) == dataclasses.replace(last.found, cost=None)
    (version,) = History(kernel, tmp_path).versions()
    assert version.figures == last.figures
