"""A worker process for jobs that may crash or hang. A new process replaces one that ended.

A kernel can hang, trap, run out of memory or crash the process. Therefore it runs in a worker, which keeps its imports
and its CUDA context between jobs. The owner waits with a time limit, ends the worker when it is exceeded, and reports.
A worker ends with its owner, even if the owner is killed. Its output goes to the owner through a pipe, not a file; the
owner ends a worker that prints too much.
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

_START_SECONDS = 120.0  # limit for imports and a CUDA context, on a busy machine
_REASONS = {
    signal.SIGSEGV: "it accessed memory that is not there",
    signal.SIGBUS: "it accessed memory that is not there",
    signal.SIGILL: "an illegal instruction",
    signal.SIGFPE: "an integer division by zero",
    signal.SIGABRT: "it was aborted",
    signal.SIGKILL: "it was killed: is the machine out of memory?",
}
_LIBC = ctypes.CDLL(None)
_KEPT_OUTPUT = 4096  # bytes of output before the current job that are kept

ReportStage = Callable[[str, float | None], None]  # the next stage of a job, and its time limit in s (None: no limit)
Prepare = Callable[[], object]
Work = Callable[[Any, ReportStage], tuple[Any, bool]]  # a job -> (result, whether the process can run another job)


_spawner: ThreadPoolExecutor


def _new_spawner() -> None:
    """The one thread that starts workers. It lives as long as this process: Linux ends a worker (`_end_with`) when the
    thread that started it ends, and the calling thread may be short-lived."""
    global _spawner  # noqa: PLW0603
    _spawner = ThreadPoolExecutor(1, "sandbox-spawner")


_new_spawner()
os.register_at_fork(after_in_child=_new_spawner)  # a fork does not inherit threads


class WorkerDied(SandboxError, RuntimeError):
    """The worker ended, or was ended, during a job, or the job raised an exception. `stage`: what the job was doing;
    `hung`: it exceeded its time limit; `printed`: its output."""

    def __init__(self, message: str, *, stage: str = "", hung: bool = False, printed: str = ""):
        super().__init__(message)
        self.stage, self.hung, self.printed = stage, hung, printed


class Worker:
    """A process that calls `work`, a module-level function, for each job; it is replaced when it ends. At its start it
    sets the `environment` variables and calls `prepare`. `close` ends it."""

    def __init__(self, work: Work, prepare: Prepare | None = None, environment: Mapping[str, str] | None = None):
        self._arguments = work, prepare, dict(environment or {})
        self._closed, self._lock = False, threading.Lock()
        self._context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork
        self._start()

    def do(self, job: Any) -> tuple[Any, str]:
        """(the job's result, the output during the job). Raises WorkerDied; then a new process has been started."""
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
        """End the process and its children. A running job raises WorkerDied in its thread."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        self._connection, theirs = self._context.Pipe()
        reader, writer = self._context.Pipe(duplex=False)
        self._output = _Output(reader)
        arguments = (theirs, *self._arguments, writer, os.getpid())
        self._process = self._context.Process(target=_worker_main, args=arguments, daemon=True)
        _spawner.submit(self._process.start).result()
        theirs.close()  # only the worker has these ends now, so that its death closes the pipe
        writer.close()

    def _end(self) -> None:
        if self._process.pid and self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # also its children, such as compilers
            except ProcessLookupError:  # the process has not called setsid yet
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
            last = self._output.last_line
            return f"the worker ended with status {status}{f': {last}' if last else ''}"
        name = signal.Signals(-status)
        return f"{_REASONS.get(name, 'it was ended')} ({name.name})"


class _Output:
    """The output of a process, read from a pipe rather than a file, which could fill the disk or be left behind. While
    the pipe is full, the process blocks."""

    def __init__(self, reader: Connection):
        self._reader, self._open = reader, True
        os.set_blocking(reader.fileno(), False)
        self._before, self._parts, self._size = b"", [b""], 0

    def begin(self) -> None:
        """Start of a job. The end of earlier output is kept for `last_line`."""
        self.read()
        self._before, self._parts, self._size = b"".join(self._parts)[-_KEPT_OUTPUT:], [], 0

    def read(self) -> None:
        """Read all available output, up to the limit."""
        while self._open and not self.too_much and self._read_part():
            pass

    def _read_part(self) -> bool:
        """Read once; returns whether there may be more."""
        try:
            part = os.read(self._reader.fileno(), 2**16)
        except BlockingIOError:
            return False
        self._open = bool(part)
        self._parts.append(part)
        self._size += len(part)
        return self._open

    def read_until(self, connection: Connection, seconds: float | None) -> bool:
        """Read output until `connection` has a message. False after `seconds` (None: no limit), or if there is too
        much output."""
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
        """Whether the output of this job exceeds the limit."""
        return self._size > MOST_OUTPUT

    @property
    def text(self) -> str:
        """The output of this job."""
        return b"".join(self._parts).decode(errors="replace")

    @property
    def last_line(self) -> str:
        """The last line of all output, "" if there is none."""
        printed = b"".join((self._before, *self._parts)).decode(errors="replace").strip()
        return printed.splitlines()[-1] if printed else ""

    def close(self) -> None:
        """Stop reading."""
        self._open = False
        self._reader.close()


def _worker_main(
    connection: Connection, work: Work, prepare: Prepare | None, environment: dict[str, str], output: Connection,
    owner: int,
) -> None:  # fmt: skip
    """The main loop of the worker process: receives a job, sends its result; returns when the owner closes the
    connection."""
    os.environ.update(environment)
    os.setsid()  # Ctrl-C reaches only the owner, which ends this process group
    _end_with(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (1, 2):  # output of a kernel must not go to the owner's terminal
        os.dup2(output.fileno(), stream)
    output.close()
    sys.dont_write_bytecode = True  # a .pyc's time stamp has a resolution of one second; a spec may be saved twice
    if prepare:
        prepare()

    def report_stage(stage: str, limit: float | None) -> None:
        connection.send(("at", stage, limit))

    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            done = work(job, report_stage)
        except Exception as error:  # sent as text, because not every exception can be pickled
            connection.send(("raised", f"{type(error).__name__}: {error}"))
            return
        _LIBC.fflush(None)  # flushes printf output of kernels
        connection.send(("done", *done))


def _end_with(owner: int) -> None:
    """Makes the kernel (Linux) kill this process when the owner ends in any way, also by SIGKILL: more precisely, when
    the thread ends that started this process, the owner's spawner."""
    set_death_signal = 1
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != owner:
        os.kill(os.getpid(), signal.SIGKILL)
