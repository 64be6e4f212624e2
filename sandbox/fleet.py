"""Worker processes, each with its own environment variables, say its own GPU, that take jobs in turn.

A job that hangs, raises or ends its process costs that job: the worker is replaced, since its GPU's context may be lost
with it, and the others go on. A worker ends when the process that started it does, even if that was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Any, TypeVar

from .errors import SandboxError

Job = TypeVar("Job")


class WorkerLost(SandboxError, RuntimeError):
    """A job raised, took too long, or ended the process that did it."""


class _Worker:
    def __init__(self, environment: Mapping[str, str]):
        self._environment = environment
        self._process: Any = None

    def do(self, function: Callable[..., Any], arguments: tuple, seconds: float) -> Any:
        if self._process is None:
            self._start()
        try:
            self._pipe.send((function, arguments))
            if not self._pipe.poll(seconds):
                raise WorkerLost(f"no answer within {seconds:.0f} s")
            failure, result = self._pipe.recv()
            if failure:
                raise WorkerLost(failure)
        except WorkerLost:
            self.stop()
            raise
        except (EOFError, OSError) as lost:
            self.stop()
            raise WorkerLost("its process ended") from lost
        return result

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(self._environment)), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when either side does

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # first: whoever waits at the pipe wakes up
            process.join()
            self._pipe.close()


def _serve(pipe: Any, environment: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started it, who then closes the pipe
    os.environ.update(environment)
    with suppress(EOFError, BrokenPipeError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = "", function(*arguments)
            except Exception as error:  # its text alone: an exception may not survive the pipe
                answer = f"{type(error).__name__}: {error}", None
            pipe.send(answer)


class Fleet:
    """As many workers as `environments`. A job may take `seconds`. Use it in a `with` statement, which ends them."""

    def __init__(self, environments: Sequence[Mapping[str, str]], seconds: float):
        self._workers = [_Worker(environment) for environment in environments]
        self._seconds = seconds

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.stop()

    def map(self, function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
        """(job, function(*job)) for every job, a tuple of arguments, as they finish; the result of a job that failed is
        its WorkerLost. Functions and arguments are pickled."""
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def do(job: Any) -> Any:
            worker = idle.get()
            try:
                return worker.do(function, job, self._seconds)
            except WorkerLost as error:
                return error
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(self._workers))
        try:
            waiting = {pool.submit(do, job): job for job in jobs}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
