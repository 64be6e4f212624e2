"""Several workers, each with its own environment variables, say its own GPU, that take jobs in turn."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from .worker import ReportStage, Worker, WorkerDied

Job = TypeVar("Job")


class WorkerPool:
    """As many workers as `environments`. A job may take `seconds`. Use it in a `with` statement, which ends them."""

    def __init__(self, environments: Sequence[Mapping[str, str]], seconds: float):
        self._environments, self._seconds = environments, seconds

    def __enter__(self) -> WorkerPool:
        self._workers = [Worker(perform, environment=environment) for environment in self._environments]
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.close()

    def map(self, function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
        """(job, function(*job)) for every job, a tuple of arguments, as they finish; where a worker died of it, its
        WorkerDied. Functions and arguments are pickled."""
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def do(job: Any) -> Any:
            worker = idle.get()
            try:
                result, _ = worker.do((function, job, self._seconds))
                return result
            except WorkerDied as death:
                return death
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(self._workers))
        try:
            waiting = {pool.submit(do, job): job for job in jobs}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def perform(job: tuple[Callable[..., Any], Iterable[Any], float], at: ReportStage) -> tuple[Any, bool]:
    """What a worker of a fleet does: a function, its arguments, and the seconds that they may take."""
    function, arguments, seconds = job
    at("working", seconds)
    return function(*arguments), True
