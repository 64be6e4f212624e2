"""Versions of a kernel: which are compared, what a worker's death means, and what a save is."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.core import registry
from sandbox.core.errors import ToolchainMissing
from sandbox.core.tile import Tile
from sandbox.jobs.worker import WorkerDied
from sandbox.launch.dlpack import HOST, Device
from sandbox.toolchain.arch import Occupancy
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.findings import Finding
from sandbox.watch import examine, session
from sandbox.watch.figures import Cost, VersionResult
from sandbox.watch.history import History, Version
from sandbox.watch.job import Job

KERNEL = registry.get("fwd_minimal")
COST = Cost("sm_90a", Tile(BLOCK_M=64), Resources(168, 0, 64, 0, 0), 81920, Occupancy(2, 0.125, "registers"), {})
OK = VersionResult("ok", setting="here")


# ---- versions


def version(number: int, **figures: float) -> Version:
    return Version(number, "", True, "ok", "", "here", figures, {})


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"seconds": 1.0, "spills": 8.0}, {"seconds": 2.0}),
        ({"seconds": 1.0, "instructions": 9.0}, {"seconds": 1.0, "spills": 8.0}),
        ({"occupancy": 0.5, "instructions": 9.0}, {"occupancy": 0.25}),
        ({"occupancy": 0.25}, {}),
        ({"instructions": 8.0}, {"instructions": 9.0}),
    ],
)
def test_the_best_version(better: dict[str, float], worse: dict[str, float]) -> None:
    """Time, then spills, occupancy and instructions; of equal ones the first."""
    assert session._rank(version(2, **better)) < session._rank(version(1, **worse))
    assert session._rank(version(1, **better)) < session._rank(version(2, **better))


def test_which_versions_are_compared(tmp_path: Path) -> None:
    """Correct ones on the same device and problem, that are older."""
    history = History(KERNEL, tmp_path)
    for n, (ok, setting, seconds) in enumerate(
        ((True, "there", 1.0), (True, "here", 2.0), (True, "here", 4.0), (False, "here", 0.5), (True, "here", 3.0))
    ):
        history.append({"a": str(n)}, ok=ok, stage="", setting=setting, figures={"seconds": seconds})
    for number, previous, best in ((5, 3, 2), (3, 2, 2), (2, None, None), (0, 5, 2)):
        now = session._compared(history, number, OK, 1.5, 2.5)
        assert (now.number, now.kernel, now.latency, now.elapsed) == (number, "fwd_minimal", 1.5, 2.5)
        assert now.previous == (history.get(previous) if previous else None)
        assert now.best == (history.get(best) if best else None)


def test_the_time_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the newest file. The current time while a file is replaced."""
    monkeypatch.setattr(registry, "root", lambda kernel: tmp_path)
    for n, name in enumerate("abc"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 1000 + (n == 1)))
    assert session._saved_at(KERNEL, dict.fromkeys("abc", "")) == 1001
    before = time.time()
    assert before <= session._saved_at(KERNEL, dict.fromkeys("abcd", "")) <= time.time()


def test_the_result_of_the_same_code() -> None:
    """Also of a version whose result was that of another: it names the latest. Nothing was compiled."""
    known, found = session._Known(), dataclasses.replace(OK, notes=("a note",), seconds=3.0, compiling=2.0)
    assert known.result("code") == []
    known.keep("code", session.Iteration(1, "k", found, {}, 1.0))
    (first,) = known.result("code")
    same = "the code is that of #{}: this is its result"
    assert first == dataclasses.replace(found, notes=("a note", same.format(1)), seconds=0, compiling=0)
    known.keep("code", session.Iteration(2, "k", first, {}, 1.0))
    assert known.result("code")[0].notes == ("a note", same.format(2))
    assert known.result("other") == []
    known.keep("other", session.Iteration(3, "k", VersionResult("wrong"), {}, 1.0))
    assert known.result("other") == []
    assert known.result("code")


# ---- workers


def dead(message: str, **more: Any) -> SimpleNamespace:
    def do(job: Job | None) -> Any:
        raise WorkerDied(message, **more)

    return SimpleNamespace(do=do)


def test_a_worker_that_dies_is_a_result() -> None:
    job = Job("fwd_minimal", HOST)
    hung = session._examined(dead("did not finish within 3 s", stage="running B1", hung=True), job)
    assert hung
    assert (hung.stage, hung.message) == ("hang", "did not finish within 3 s while running B1; --timeout allows more")
    assert 0 <= hung.seconds < 10
    crashed = session._examined(dead("it was killed", stage="compiling"), job)
    assert crashed
    assert (crashed.stage, crashed.message) == ("crash", "it was killed while compiling")
    alive = SimpleNamespace(do=lambda job: (OK, "row 1"))
    assert session._examined(alive, job) == dataclasses.replace(OK, output="row 1")
    assert session._examined(SimpleNamespace(do=lambda job: (None, "")), job) is None


def test_counts_are_added_to_a_result() -> None:
    found = dataclasses.replace(OK, cost=COST, pending="counting")
    counting = SimpleNamespace(do=lambda job: ({"HMMA": 3}, "") if job is None else None)
    expected = dataclasses.replace(OK, cost=dataclasses.replace(COST, opcodes={"HMMA": 3}))
    assert session._with_counts(counting, found) == expected
    assert session._with_counts(counting, dataclasses.replace(found, cost=None)) == OK
    assert session._with_counts(dead("it was killed"), found) == dataclasses.replace(OK, cost=COST)


class Workers:
    """Replaces both workers; `events` has what happens to them."""

    def __init__(self, **answers: Callable[[Job | None], Any]):
        self.answers, self.events = answers, list[str]()

    def __call__(self, work: Any, prepare: Any) -> SimpleNamespace:
        name = {examine.first_verdict: "first", examine.examine: "complete"}[work]
        self.events.append(f"start {name}")
        closed = threading.Event()

        def do(job: Job | None) -> tuple[Any, str]:
            found = self.answers[name](job)
            if found == "until closed":
                assert closed.wait(60)
                raise WorkerDied("it was ended")
            return found, ""

        return SimpleNamespace(do=do, close=lambda: (self.events.append(f"close {name}"), closed.set()))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[list[VersionResult], list[str]]]]:
    """The results of one version with these answers of the workers, and what happened to the workers."""
    made: list[session._Examiners] = []
    monkeypatch.setattr(session, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(session, "_HEAD_START_SECONDS", 60)

    def results(
        device: Device = HOST, both: bool = True, unchanged: Callable[[], bool] = lambda: True, **answers: Any
    ) -> tuple[list[VersionResult], list[str]]:
        workers = Workers(**answers)
        monkeypatch.setattr(session, "Worker", workers)
        made.append(session._Examiners(Job("fwd_minimal", device), both))
        return [*made[-1].results(unchanged)], workers.events

    yield results
    for each in made:
        each.close()


SLOW = dataclasses.replace(OK, setting="complete")
STARTED = ["start complete", "start first"]
GPU: Device = ("cuda", 0)
STARTED_ON_GPU = [*STARTED, "start first"]  # two workers for first verdicts


@pytest.mark.parametrize(
    ("device", "pending"),
    [
        (HOST, "running the sanitizers, and compiling for a GPU"),
        (("cuda", 0), "compiling with full optimisation, for registers, spills and time"),
    ],
)
def test_what_follows_a_verdict(device: Device, pending: str, results: Any) -> None:
    shown = threading.Event()  # the version is compared with its text after the verdict was shown
    complete = lambda job: shown.wait(60) and SLOW  # noqa: E731
    found, events = results(device, unchanged=lambda: shown.set() or True, first=lambda job: OK, complete=complete)  # type: ignore[func-returns-value]
    assert found == [dataclasses.replace(OK, pending=pending), SLOW]
    assert events == (STARTED if device == HOST else STARTED_ON_GPU)


def test_first_verdicts_are_shared_on_a_gpu(results: Any) -> None:
    """Each worker has its share, and one wrong result decides."""
    shown, jobs = threading.Event(), list[Job]()
    wrong = VersionResult("wrong", "row 3")

    def first(job: Job) -> VersionResult:
        jobs.append(job)
        return wrong if job.share[0] == 1 else OK

    complete = lambda job: shown.wait(60) and SLOW  # noqa: E731
    found, _ = results(GPU, unchanged=lambda: shown.set() or True, first=first, complete=complete)  # type: ignore[func-returns-value]
    assert [(each.stage, each.message) for each in found] == [("wrong", "row 3"), ("ok", "")]
    assert sorted(job.share for job in jobs) == [(0, 2), (1, 2)]
    found, _ = results(GPU, first=lambda job: None if job.share[0] else OK, complete=lambda job: SLOW)
    assert found == [SLOW]  # no fast compilation: no first verdict


def test_a_complete_result_that_comes_first(results: Any) -> None:
    """It is the only one. The processes that still run the kernel are replaced."""
    found, events = results(GPU, first=lambda job: "until closed", complete=lambda job: SLOW)
    assert found == [SLOW]
    assert events == [*STARTED_ON_GPU, *["close first", "start first"] * 2]
    assert results(both=False, complete=lambda job: SLOW) == ([SLOW], ["start complete"])


def test_findings_and_counts(results: Any) -> None:
    """A result without counts precedes the one with them. A store out of bounds may have damaged the first process."""
    waiting = dataclasses.replace(SLOW, cost=COST, pending="counting")
    counted = dataclasses.replace(SLOW, cost=dataclasses.replace(COST, opcodes={"HMMA": 3}))
    found, events = results(first=lambda job: None, complete=lambda job: waiting if job else {"HMMA": 3})
    assert (found, events) == ([waiting, counted], STARTED)
    unsafe = VersionResult("sanitize", findings=(Finding("out of bounds"),))
    found, events = results(first=lambda job: None, complete=lambda job: unsafe)
    assert (found, events) == ([unsafe], [*STARTED, "close first", "start first"])


def test_an_edit_ends_an_examination(results: Any) -> None:
    found, events = results(
        unchanged=lambda: False, first=lambda job: OK, complete=lambda job: "until closed"
    )  # fmt: skip
    assert [each.pending != "" for each in found] == [True]
    assert events == [*STARTED, "close complete", "start complete"]


@pytest.mark.parametrize(
    ("device", "first", "locked"), [(HOST, True, False), (("cuda", 0), True, True), (("cuda", 0), False, False)]
)
def test_two_workers_take_turns_on_a_gpu(
    device: Device, first: bool, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is a file, which is deleted at the end; one worker needs none."""
    monkeypatch.setattr(session, "Worker", Workers())
    examiners = session._Examiners(Job("fwd_minimal", device), first)
    lock = examiners._job.gpu_lock
    assert bool(lock and lock.is_file()) == locked
    examiners.close()
    assert not (lock and lock.exists())
    count = 0 if not first else 1 if device == HOST else 2
    assert session.Worker.events[1 + count :] == ["close first"] * count + ["close complete"]  # type: ignore[attr-defined]


# ---- saves


def test_saves_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has begun to watch before the first save is awaited; its time limits are no saves."""
    asked: list[Any] = []

    def watch(folder: Path, **options: Any) -> Iterator[set[object]]:
        asked.append((folder, options["yield_on_timeout"]))
        yield from (set(), set(), {"a"}, set(), {"b", "c"})

    monkeypatch.setitem(sys.modules, "watchfiles", SimpleNamespace(watch=watch))
    saves = session.saves(tmp_path)
    assert asked == [(tmp_path, True)]
    assert [*saves] == [None, None]
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    with pytest.raises(ToolchainMissing) as missing:
        session.saves(tmp_path)
    how = 'pip install "attention-sandbox[watch]" (watch --once does not need it)'
    assert str(missing.value) == f"watch needs the watchfiles package: {how}"


def test_texts_that_cannot_be_read_are_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file is not: an editor replaces it."""
    unread, spec = "a.cu cannot be read: no", "a.py cannot be read: no"
    reasons = iter(["", unread, unread, "", spec, unread])
    monkeypatch.setattr(session, "Worker", Workers())
    monkeypatch.setattr(session, "read_texts", lambda kernel: None)
    monkeypatch.setattr(session, "unreadable", lambda kernel: next(reasons))
    monkeypatch.setattr(session, "saves", lambda folder: iter([None] * 4))
    monkeypatch.setattr(session, "History", lambda kernel: History(kernel, tmp_path))
    found: list[Any] = []
    with suppress(RuntimeError):  # there are no more saves
        for now in session.watch(KERNEL, Job(KERNEL.name, HOST)):
            found.append((now.number, now.found.stage, now.found.message) if now else None)
    assert found == [(0, "spec", unread), (0, "spec", spec)]
    (only,) = session.watch(KERNEL, Job(KERNEL.name, HOST), once=True)
    assert only
    assert only.found.message == unread


def test_only_another_text_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latency of the first one counts from the start, and that of others from the save."""
    texts, place = [{"a": "1"}, {"a": "1"}, {"a": "2"}], iter([None, None])
    at = [0]

    def saves(folder: Path) -> Iterator[None]:
        for _ in place:
            at[0] += 1
            yield

    monkeypatch.setattr(session, "Worker", Workers(first=lambda job: None, complete=lambda job: OK))
    monkeypatch.setattr(session, "read_texts", lambda kernel: dict(texts[at[0]]))
    monkeypatch.setattr(session, "saves", saves)
    monkeypatch.setattr(session, "History", lambda kernel: History(kernel, tmp_path))
    monkeypatch.setattr(session, "code_digest", lambda kernel, texts: texts["a"])
    monkeypatch.setattr(session, "_saved_at", lambda kernel, texts: time.time() - 1000)
    found: list[session.Iteration | None] = []
    with suppress(RuntimeError):  # there are no more saves
        for now in session.watch(KERNEL, Job(KERNEL.name, HOST)):
            found.append(now)
    assert [now and now.number for now in found] == [None, 1, None, 2]
    assert [bool(now and now.latency > 500) for now in found] == [False, False, False, True]
