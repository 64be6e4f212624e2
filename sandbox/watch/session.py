"""Edit and relaunch: every save of a kernel's sources is a version, examined and compared with those before it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

from ..core import registry
from ..core.errors import ToolchainMissing
from ..core.kernel import Kernel
from ..jobs.worker import Work, Worker, WorkerDied
from ..launch.dlpack import HOST
from . import examine
from .figures import VersionResult, figures
from .history import History, Texts, Version, code_digest, read_texts, unreadable
from .job import Job

_DEBOUNCE_MS = 20  # an editor's save is several events
_START_MS = 200  # time for the library to start
_HEAD_START_SECONDS = 3.0  # of the first verdict on the CPU backend; a kernel that hangs delays the sanitizers by this
_FIRST_WORKERS = 2  # on a GPU
_POLL_SECONDS = 0.2  # between two checks whether there is a new version
_PENDING = {
    True: "running the sanitizers, and compiling for a GPU",
    False: "compiling with full optimisation, for registers, spills and time",
}
_LINE = re.compile(r"\.cuh?:\d")
_SAME_CODE = "the code is that of"


@dataclass(frozen=True)
class Iteration:
    """A version and its result. `latency`: seconds from the save (or the start) to its verdict; `elapsed`: to this
    result, which may have been preceded by a first verdict. `previous`: the latest correct version before it; `best`:
    the best one before it; both on the same device and problem.

    `number` is 0 for a verdict before the version is recorded, while `found.pending` is being done."""

    number: int
    kernel: str
    found: VersionResult
    figures: Mapping[str, float]
    latency: float
    previous: Version | None = None
    best: Version | None = None
    elapsed: float = 0.0


def watch(kernel: Kernel, job: Job, *, once: bool = False) -> Generator[Iteration | None, None, None]:
    """Examine the kernel now, and again after every save of its `.cu`, its spec or a header, until closed.

    Yields None when it detects a save, then the verdict, then the complete result, with sanitizers, registers, times
    and instruction counts; with `once` no separate verdict. A version whose code is that of the last correct one gets
    its result. Raises ToolchainMissing without the watchfiles package, unless `once`.
    """
    history, known = History(kernel), _Known()
    with closing(_Examiners(job, not once)) as examiners:
        saved_again = iter(()) if once else saves(kernel.source.parent)  # created now, so that no save is missed
        seen: Texts | str | None = None  # the latest texts, or the reason why they could not be read
        while True:
            texts = read_texts(kernel)
            if texts is None and (reason := unreadable(kernel)) and reason != seen:
                seen = reason
                yield Iteration(0, kernel.name, VersionResult("spec", reason), {}, 0.0)
            if texts is not None and texts != seen:
                saved = _saved_at(kernel, texts) if seen is not None else time.time()
                seen = texts
                yield None
                yield from _iterations(history, texts, saved, examiners, known)
            if once:
                return
            next(saved_again)


def _iterations(
    history: History, texts: Texts, saved: float, examiners: _Examiners, known: _Known
) -> Iterator[Iteration]:
    """The results of one version, until it is replaced by another."""
    kernel, code, stage, latency = history.kernel, code_digest(history.kernel, texts), "", 0.0
    unchanged = lambda: read_texts(kernel) == texts  # noqa: E731
    for found in known.result(code) or examiners.results(unchanged):
        elapsed = time.time() - saved
        if found.stage != stage:
            stage, latency = found.stage, elapsed
        if not unchanged():  # the result may be of another text, and a save is pending
            continue
        if found.pending:
            yield _compared(history, 0, found, latency, elapsed)
        else:
            now = _recorded(history, texts, found, latency, elapsed)
            known.keep(code, now)
            yield now


class _Known:
    """The last correct version. A later version with the same code has its result; nothing is compiled."""

    def __init__(self) -> None:
        self._last: tuple[str, Iteration] | None = None

    def keep(self, code: str, now: Iteration) -> None:
        """Keeps a result, unless it is not correct or names lines, which may move without a change of the code."""
        if now.found.ok and not any(_LINE.search(note) for note in now.found.notes):
            self._last = code, now

    def result(self, code: str) -> list[VersionResult]:
        """The result of that code, if it is known."""
        if not self._last or self._last[0] != code:
            return []
        number, found = self._last[1].number, self._last[1].found
        notes = [note for note in found.notes if not note.startswith(_SAME_CODE)]
        return [replace(found, notes=(*notes, f"{_SAME_CODE} #{number}: this is its result"), seconds=0, compiling=0)]


class _Examiners:
    """Worker processes: for first verdicts one, or on a GPU two, and one for complete results. NVRTC compiles one
    program at a time in a process, so two workers compile the two binaries of most kernels in half of the time."""

    def __init__(self, job: Job, first: bool):
        self._gpu_lock = NamedTemporaryFile(prefix="sandbox-watch-") if first and job.device != HOST else None  # noqa: SIM115
        self._job = replace(job, gpu_lock=Path(self._gpu_lock.name)) if self._gpu_lock else job
        count = 0 if not first else 1 if job.device == HOST else _FIRST_WORKERS
        self._threads = ThreadPoolExecutor(2 + count, "watching")
        self._complete = self._worker(examine.examine)
        self._first = [self._worker(examine.first_verdict) for _ in range(count)]

    def _worker(self, work: Work) -> Worker:
        return Worker(work, partial(examine.prepare, self._job))

    def results(self, unchanged: Callable[[], bool]) -> Iterator[VersionResult]:
        """The first verdict, unless the complete result precedes it, then the complete result. When `unchanged` returns
        False, the complete examination is abandoned.

        On a GPU both compile at the same time, with little and with full optimisation. On the CPU backend the cores are
        free for the first verdict; then the sanitizers run."""
        first = self._threads.submit(self._first_verdict) if self._first else None
        if first and self._job.device == HOST:
            wait([first], _HEAD_START_SECONDS)
        complete = self._threads.submit(_examined, self._complete, self._job)
        while not complete.done():
            if first and first.done():
                if verdict := first.result():
                    yield replace(verdict, pending=_PENDING[self._job.device == HOST])
                first = None
            if not first and not unchanged():
                self._complete.close()
                complete.exception()
                self._complete = self._worker(examine.examine)
                return
            wait([first, complete] if first else [complete], _POLL_SECONDS, FIRST_COMPLETED)
        if not (found := complete.result()):
            return
        if found.pending:
            yield found
            found = _with_counts(self._complete, found)
        if found.findings or (first and not first.done()):
            # They may still run, or a store out of bounds may have changed their memory.
            for i, worker in enumerate(self._first):
                worker.close()
                self._first[i] = self._worker(examine.first_verdict)
        yield found

    def _first_verdict(self) -> VersionResult | None:
        """None if there is no fast compilation for this kernel."""
        count = len(self._first)
        jobs = [replace(self._job, share=(i, count)) for i in range(count)]
        parts = [*self._threads.map(_examined, self._first, jobs)]
        there = [part for part in parts if part]
        return examine.merged(there) if len(there) == count else None

    def close(self) -> None:
        """End the processes."""
        for worker in (*self._first, self._complete):
            worker.close()
        self._threads.shutdown()
        if self._gpu_lock:
            self._gpu_lock.close()


def saves(folder: Path) -> Iterator[None]:
    """Yields after every save below `folder`, from now on."""
    try:
        import watchfiles
    except ImportError as error:
        raise ToolchainMissing(
            'watch needs the watchfiles package: pip install "attention-sandbox[watch]" (watch --once does not need it)'
        ) from error
    events = watchfiles.watch(
        folder, step=_DEBOUNCE_MS, debounce=10 * _DEBOUNCE_MS, rust_timeout=_START_MS, yield_on_timeout=True
    )
    next(events)  # the library starts watching at the first call
    return (None for changed in events if changed)


def _examined(worker: Worker, job: Job) -> VersionResult | None:
    started = time.perf_counter()
    try:
        found, printed = worker.do(job)
        return replace(found, output=printed) if found else None
    except WorkerDied as death:
        stage = "hang" if death.hung else "crash"
        message = f"{death} while {death.stage}" + ("; --timeout allows more" if death.hung else "")
        return VersionResult(stage, message, seconds=time.perf_counter() - started)


def _with_counts(worker: Worker, found: VersionResult) -> VersionResult:
    """The result with instruction counts, unless the worker has died in the meantime."""
    try:
        opcodes, _ = worker.do(None)
    except WorkerDied:
        opcodes = {}
    cost = replace(found.cost, opcodes=opcodes) if found.cost else None
    return replace(found, cost=cost, pending="")


def _recorded(history: History, texts: Texts, found: VersionResult, latency: float, elapsed: float) -> Iteration:
    version = history.append(
        texts, ok=found.ok, stage=found.stage, message=found.message, setting=found.setting, figures=figures(found)
    )
    return _compared(history, version.number, found, latency, elapsed)


def _compared(history: History, number: int, found: VersionResult, latency: float, elapsed: float) -> Iteration:
    """The result of a version with the earlier versions to compare; with number 0, all versions are earlier."""
    comparable = [v for v in history.versions() if v.ok and v.setting == found.setting]
    earlier = [v for v in comparable if not number or v.number < number]
    best = min(earlier, key=_rank, default=None)
    previous = earlier[-1] if earlier else None
    return Iteration(number, history.kernel.name, found, figures(found), latency, previous, best, elapsed)


def _rank(version: Version) -> tuple[float, ...]:
    """Sort key: fastest first; without times, as on the CPU backend, by compiler figures; then by number."""
    f = version.figures
    return (
        f.get("seconds", 0.0), f.get("spills", 0.0), -f.get("occupancy", 0.0), f.get("instructions", 0.0),
        version.number,
    )  # fmt: skip


def _saved_at(kernel: Kernel, texts: Texts) -> float:
    """The newest modification time of the files; the current time if a file is missing."""
    try:
        return max((registry.root(kernel) / name).stat().st_mtime for name in texts)
    except OSError:
        return time.time()
