"""The verdict comes first; sanitizers, registers and times follow. Unchanged code compiles nothing."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.core import registry
from sandbox.core.errors import NoFastCompilation
from sandbox.core.kernel import Kernel
from sandbox.jobs.worker import WorkerDied
from sandbox.launch.dlpack import HOST, Device
from sandbox.spec import Problem
from sandbox.verify.findings import Finding
from sandbox.watch import examine, session
from sandbox.watch.figures import VersionResult
from sandbox.watch.history import code_digest, read_texts
from sandbox.watch.job import Job

GPU: Device = ("cuda", 0)
OK = VersionResult("ok")
Answer = Callable[[Job], VersionResult | None]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """fwd_minimal in a folder of its own."""
    shipped, folder = registry.get("fwd_minimal"), tmp_path / "kernels_cu"
    folder.mkdir()
    for suffix in (".cu", ".py"):
        shutil.copy(shipped.source.with_suffix(suffix), folder)
    monkeypatch.setattr(registry, "root", lambda kernel: tmp_path)
    return dataclasses.replace(shipped, source=folder / "fwd_minimal.cu")


class Workers:
    """Stands for all workers: `first` and `complete` answer their jobs."""

    def __init__(self, first: Answer, complete: Answer, ended: threading.Event | None = None):
        self.answers = {examine.first_verdict: first, examine.examine: complete}
        self.ended = ended or threading.Event()  # set when a worker is closed
        self.started: list[object] = []

    def __call__(self, work: Any, prepare: object) -> SimpleNamespace:
        self.started.append(work)
        closed = threading.Event()

        def do(job: Job) -> tuple[VersionResult | None, str]:
            found = self.answers[work](job)
            if closed.is_set():
                raise WorkerDied("it was ended")
            return found, ""

        return SimpleNamespace(do=do, close=lambda: (closed.set(), self.ended.set()))


@pytest.fixture
def watched(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[session.Iteration]]:
    """`watch` with these answers of the workers, after edits of the source that `saves` makes."""

    def watched(workers: Workers, device: Device = HOST, saves: Iterable[None] = ()) -> Iterator[session.Iteration]:
        monkeypatch.setattr(session, "Worker", workers)
        monkeypatch.setattr(session, "saves", lambda folder: iter(saves))
        monkeypatch.setattr(session, "_POLL_SECONDS", 0.01)
        with suppress(RuntimeError):  # there are no more saves
            yield from filter(None, session.watch(kernel, Job(kernel.name, device)))

    return watched


def test_the_verdict_precedes_the_complete_result(watched: Callable[..., Iterator[session.Iteration]]) -> None:
    shown = threading.Event()
    complete = dataclasses.replace(OK, setting="complete")
    workers = Workers(lambda job: OK, lambda job: (shown.wait(60), complete)[1])
    results = watched(workers)
    first = next(results)
    assert (first.number, first.found.stage) == (0, "ok")
    assert first.found.pending == "running the sanitizers, and compiling for a GPU"
    shown.set()
    (last,) = results
    assert (last.number, last.found) == (1, complete)
    assert last.latency == first.latency <= first.elapsed <= last.elapsed


def test_all_compile_at_the_same_time_on_a_gpu(watched: Callable[..., Iterator[session.Iteration]]) -> None:
    """Two workers for the first verdict and one for the complete result. They launch in turn: all jobs name the same
    lock."""
    together, locks = threading.Barrier(3, timeout=60), set()

    def answer(job: Job) -> VersionResult:
        together.wait()
        locks.add(job.gpu_lock)
        return OK

    *_, last = watched(Workers(answer, answer), GPU)
    assert last.number == 1
    assert len(locks) == 1
    assert None not in locks


def test_a_kernel_without_fast_compilation_has_one_verdict(
    watched: Callable[..., Iterator[session.Iteration]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise NoFastCompilation("no")

    monkeypatch.setattr(examine.pipeline, "load", refuse)
    monkeypatch.setattr(examine, "device_usable", lambda device: True)
    job = Job("fwd_minimal", HOST, Problem(1, 1, 8, 8, 16, dtype="float16"))
    assert examine.first_verdict(job, lambda *stage: None) == (None, True)
    (only,) = watched(Workers(lambda job: None, lambda job: OK), GPU)
    assert (only.number, only.found.pending) == (1, "")


def test_a_new_version_ends_the_examination_of_the_old_one(
    kernel: Kernel, watched: Callable[..., Iterator[session.Iteration]]
) -> None:
    """Not that of a comment, whose verdict is known."""
    replaced = threading.Event()
    workers = Workers(lambda job: OK, lambda job: (replaced.wait(60), OK)[1])
    results = watched(workers, saves=[None])
    assert next(results).number == 0
    source = kernel.source.read_text()
    edited = source.replace("float m = -INF", "float m = -INF  ")
    assert edited != source
    kernel.source.write_text(edited)
    close = threading.Timer(0.2, replaced.set)
    close.start()
    first, last = results
    assert (first.number, last.number) == (0, 1)
    assert [version.texts["kernels_cu/fwd_minimal.cu"] for version in session.History(kernel).versions()] == [edited]
    assert workers.started == [examine.examine, examine.first_verdict, examine.examine]


def test_an_end_between_the_verdict_and_the_complete_result(
    watched: Callable[..., Iterator[session.Iteration]],
) -> None:
    ended = threading.Event()
    workers = Workers(lambda job: OK, lambda job: (ended.wait(60), OK)[1], ended)
    results = watched(workers)
    assert next(results).found.pending
    results.close()
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watching")]


def test_findings_replace_the_process_that_ran_the_kernel(
    watched: Callable[..., Iterator[session.Iteration]],
) -> None:
    """A store out of bounds may have changed its memory."""
    unsafe = VersionResult("sanitize", findings=(Finding("out of bounds"),))
    workers = Workers(lambda job: OK, lambda job: unsafe)
    *_, last = watched(workers)
    assert last.found.stage == "sanitize"
    assert last.latency == last.elapsed  # it differs from the first verdict
    assert workers.started == [examine.examine, examine.first_verdict, examine.first_verdict]


@pytest.mark.parametrize(
    ("found", "again"),
    [
        (OK, False),
        (VersionResult("wrong"), True),
        (dataclasses.replace(OK, notes=("an array that is indexed by a variable, at fwd_minimal.cu:3",)), True),
    ],
)
def test_unchanged_code_compiles_nothing(
    found: VersionResult, again: bool, kernel: Kernel, watched: Callable[..., Iterator[session.Iteration]]
) -> None:
    """A comment that moves all lines. The lines that a fault names would be others."""
    jobs: list[Job] = []

    def saves() -> Iterator[None]:
        kernel.source.write_text("// a comment\n" + kernel.source.read_text())
        yield

    workers = Workers(lambda job: None, lambda job: (jobs.append(job), found)[1])
    first, second = watched(workers, saves=saves())
    assert (first.number, second.number, second.found.stage) == (1, 2, found.stage)
    assert len(jobs) == 1 + again
    if not again:
        assert second.found.notes == ("the code is that of #1: this is its result",)


def test_what_counts_as_code(kernel: Kernel) -> None:
    spec, other = kernel.source.with_suffix(".py"), kernel.source.with_name("preprocess.cu")
    digest = lambda: code_digest(kernel, read_texts(kernel))  # noqa: E731
    before = digest()
    for path, comment in ((kernel.source, "// why\n"), (spec, "# why\n\n")):
        path.write_text(comment + path.read_text())
        assert digest() == before
    for path in (kernel.source, spec):
        text = path.read_text()
        path.write_text(text + "\nint x;" if path == kernel.source else text + "\nx = 1\n")
        assert digest() != before
        path.write_text(text)
        assert digest() == before
    other.write_text("// it may run before this kernel\n")
    assert digest() != before
