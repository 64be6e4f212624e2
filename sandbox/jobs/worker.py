"""A process that does jobs and may die of any of them: a fresh one takes its place.

A kernel can hang, trap, run out of memory or take the whole process with it. So it runs in a worker, which keeps its
imports and its CUDA context between jobs; its owner waits with a time limit, ends it when that is over, and reports. A
worker ends when its owner does, even if that was killed. What it prints goes through a pipe and no file, to an owner
who ends it when that becomes too much.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

from ..core.errors import SandboxError
from ..core.process import HEAD, MOST_OUTPUT, too_much

_START_SECONDS = 120.0  # imports and a CUDA context, on a machine that is busy
_REASONS = {
    signal.SIGSEGV: "it accessed memory that is not there",
    signal.SIGBUS: "it accessed memory that is not there",
    signal.SIGILL: "an illegal instruction",
    signal.SIGFPE: "an integer division by zero",
    signal.SIGABRT: "it was aborted",
    signal.SIGKILL: "it was killed: is the machine out of memory?",
}
_LIBC = ctypes.CDLL(None)
_LAST_WORDS = 4096  # bytes that are kept of what a process printed before this job

ReportStage = Callable[
    [str, float | None], None
]  # what is about to be done, and how many seconds it may take (None: any)
Prepare = Callable[[], object]
Work = Callable[
    [Any, ReportStage], tuple[Any, bool]
]  # a job -> its result, and whether this process is fit for another


_spawner: ThreadPoolExecutor


def _new_spawner() -> None:
    """The one thread that starts workers, and lives as long as this process: Linux ends a worker (`_die_with`) together
    with the thread that started it, and whoever happens to ask for one may be a thread of a passing pool."""
    global _spawner  # noqa: PLW0603
    _spawner = ThreadPoolExecutor(1, "sandbox-spawner")


_new_spawner()
os.register_at_fork(after_in_child=_new_spawner)  # a fork has none of its parent's threads


class WorkerDied(SandboxError, RuntimeError):
    """The worker ended, or was ended, because of a job, which may have raised. `stage` is what it was doing, `hung`
    whether it took too long, `printed` what it wrote meanwhile."""

    def __init__(self, message: str, *, stage: str = "", hung: bool = False, printed: str = ""):
        super().__init__(message)
        self.stage, self.hung, self.printed = stage, hung, printed


class Worker:
    """One process at a time that does `work`, a function of a module. When it starts it sets these `environment`
    variables and calls `prepare`. Close it when done."""

    def __init__(self, work: Work, prepare: Prepare | None = None, environment: Mapping[str, str] | None = None):
        self._arguments = work, prepare, dict(environment or {})
        self._closed, self._lock = False, threading.Lock()
        self._context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork
        self._start()

    def do(self, job: Any) -> tuple[Any, str]:
        """(the job's result, what was printed meanwhile). Raises WorkerDied, when a fresh worker is on its way."""
        stage: str = "starting"
        limit: float | None = _START_SECONDS
        output = self._output
        try:
            output.begin()
            self._connection.send(job)
            while True:
                if not output.read_until(self._connection, limit):
                    self._restart()
                    if output.too_much:
                        message, printed = f"it {too_much(MOST_OUTPUT)}", output.text[:HEAD]
                        raise WorkerDied(message, stage=stage, hung=False, printed=printed)
                    message = f"did not finish within {limit:g} s"
                    raise WorkerDied(message, stage=stage, hung=True, printed=output.text)
                kind, *values = self._connection.recv()
                if kind == "at":
                    stage, limit = values
                elif kind == "raised":
                    output.read()
                    self._restart()
                    raise WorkerDied(values[0], stage=stage, hung=False, printed=output.text)
                else:
                    result, fit = values
                    output.read()
                    if not fit:
                        self._restart()
                    return result, output.text
        except (EOFError, OSError):
            reason, printed = ("it was ended", "") if self._closed else (self._reason(), output.text)
            self._restart()
            raise WorkerDied(reason, stage=stage, hung=False, printed=printed) from None

    def close(self) -> None:
        """End the process, and whatever it has started; a job that another thread waits for is lost."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        reader, writer = self._context.Pipe(duplex=False)
        self._output = _Output(reader)
        arguments = (theirs, *self._arguments, writer, os.getpid())
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        _spawner.submit(self._process.start).result()
        theirs.close()  # so that the worker's ends are the only ones, and its death is seen here
        writer.close()

    def _end(self) -> None:
        if self._process.pid and self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # compilers too
            except ProcessLookupError:  # it has not come to be a group of its own
                self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()
        self._output.close()

    def _restart(self) -> None:
        with self._lock:
            if not self._closed:
                self._end()
                self._start()

    def _reason(self) -> str:
        self._process.join(timeout=10)
        status = self._process.exitcode
        self._output.read()
        if status is None or status >= 0:
            said = self._output.last_line
            return f"the worker ended with status {status}{f': {said}' if said else ''}"
        name = signal.Signals(-status)
        return f"{_REASONS.get(name, 'it was ended')} ({name.name})"


class _Output:
    """What a process prints, read from a pipe: no file that it could fill a disk with, and that could be left behind. A
    process that prints while nobody reads waits."""

    def __init__(self, reader: Connection):
        self._reader, self._open = reader, True
        os.set_blocking(reader.fileno(), False)
        self._before, self._parts, self._size = b"", [b""], 0

    def begin(self) -> None:
        """From here on it counts; of what came before, the end is kept for `last_line`."""
        self.read()
        self._before, self._parts, self._size = b"".join(self._parts)[-_LAST_WORDS:], [], 0

    def read(self) -> None:
        """All that is there now, unless it is too much."""
        while self._open and not self.too_much and self._read_part():
            pass

    def _read_part(self) -> bool:
        """Whether there may be more."""
        try:
            part = os.read(self._reader.fileno(), 2**16)
        except BlockingIOError:
            return False
        self._open = bool(part)
        self._parts.append(part)
        self._size += len(part)
        return self._open

    def read_until(self, connection: Connection, seconds: float | None) -> bool:
        """Whether there is something to receive from `connection` within so many seconds (None: any), and before too
        much is printed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([connection, self._reader] if self._open else [connection], left)
            if connection in ready:
                return True
            if not ready:
                return False
            self._read_part()
            if self.too_much:
                return False

    @property
    def too_much(self) -> bool:
        """Since it began."""
        return self._size > MOST_OUTPUT

    @property
    def text(self) -> str:
        """What was printed since it began."""
        return b"".join(self._parts).decode(errors="replace")

    @property
    def last_line(self) -> str:
        """Of all that was printed, "" of nothing."""
        said = b"".join((self._before, *self._parts)).decode(errors="replace").strip()
        return said.splitlines()[-1] if said else ""

    def close(self) -> None:
        """Nothing is read any longer."""
        self._open = False
        self._reader.close()


def _serve(
    connection: Connection, work: Work, prepare: Prepare | None, environment: dict[str, str], output: Connection,
    owner: int,
) -> None:  # fmt: skip
    """The worker: a job, its result, the next job, until nobody asks any more."""
    os.environ.update(environment)
    os.setsid()  # a Ctrl-C is for the owner, who ends this whole group
    _die_with(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (1, 2):  # what a kernel prints would spoil the screen
        os.dup2(output.fileno(), stream)
    output.close()
    sys.dont_write_bytecode = True  # a spec may be saved twice within the second that a .pyc's time stamp resolves
    if prepare:
        prepare()

    def at(stage: str, limit: float | None) -> None:
        connection.send(("at", stage, limit))

    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            done = work(job, at)
        except Exception as error:  # its text alone: an exception may not survive the pipe
            connection.send(("raised", f"{type(error).__name__}: {error}"))
            return
        _LIBC.fflush(None)  # printf's, in a kernel
        connection.send(("done", *done))


def _die_with(owner: int) -> None:
    """However the owner ends, also by SIGKILL, and whatever is running here (Linux): with the thread that started this
    process, which is the owner's spawner."""
    set_death_signal = 1
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != owner:
        os.kill(os.getpid(), signal.SIGKILL)
