"""Edit and relaunch: every save of a kernel's sources is a version, examined and compared with those before it."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..core import registry
from ..core.errors import ToolchainMissing
from ..core.kernel import Kernel
from ..jobs.worker import Worker, WorkerDied
from . import examine
from .figures import VersionResult, figures
from .history import History, Texts, Version, read_texts, unreadable
from .job import Job

_DEBOUNCE_MS = 20  # an editor's save is several events
_START_MS = 200  # time for the library to start


@dataclass(frozen=True)
class Iteration:
    """A version and its result. `latency`: seconds from the save (or the start) to this verdict. `previous`: the latest
    correct version before it; `best`: the best one before it; both on the same device and problem.

    `number` is 0 for a verdict before the version is recorded, while its instructions are counted."""

    number: int
    kernel: str
    found: VersionResult
    figures: Mapping[str, float]
    latency: float
    previous: Version | None = None
    best: Version | None = None


def watch(kernel: Kernel, job: Job, *, once: bool = False) -> Generator[Iteration | None, None, None]:
    """Examine the kernel now, and again after every save of its `.cu`, its spec or a header, until closed.

    Yields None when it detects a save, and then the verdict. If the instructions are not counted yet, it yields the
    verdict immediately, and again with the counts. Raises ToolchainMissing without the watchfiles package, unless
    `once`.
    """
    history = History(kernel)
    with closing(Worker(examine.examine, partial(examine.prepare, job))) as worker:
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
                found = _examined(worker, job)
                latency = time.time() - saved
                if read_texts(kernel) == texts:  # otherwise the result may be of another text, and a save is pending
                    if found.counting:
                        yield _compared(history, 0, found, latency)
                        found = _with_counts(worker, found)
                    yield _recorded(history, texts, found, latency)
            if once:
                return
            next(saved_again)


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


def _examined(worker: Worker, job: Job) -> VersionResult:
    started = time.perf_counter()
    try:
        found, printed = worker.do(job)
        return replace(found, output=printed)
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
    return replace(found, cost=cost, counting=False)


def _recorded(history: History, texts: Texts, found: VersionResult, latency: float) -> Iteration:
    version = history.append(
        texts, ok=found.ok, stage=found.stage, message=found.message, setting=found.setting, figures=figures(found)
    )
    return _compared(history, version.number, found, latency)


def _compared(history: History, number: int, found: VersionResult, latency: float) -> Iteration:
    """The result of a version with the earlier versions to compare; with number 0, all versions are earlier."""
    comparable = [v for v in history.versions() if v.ok and v.setting == found.setting]
    earlier = [v for v in comparable if not number or v.number < number]
    best = min(earlier, key=_rank, default=None)
    previous = earlier[-1] if earlier else None
    return Iteration(number, history.kernel.name, found, figures(found), latency, previous, best)


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
