"""A pool of workers, each with its own environment variables, such as CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from .worker import ReportStage, Worker, WorkerDied

Job = TypeVar("Job")


class WorkerPool:
    """One worker per element of `environments`. Time limit of a job: `seconds`. A context manager, which ends the
    workers."""

    def __init__(self, environments: Sequence[Mapping[str, str]], seconds: float):
        self._environments, self._seconds = environments, seconds

    def __enter__(self) -> WorkerPool:
        self._workers = [Worker(perform, environment=environment) for environment in self._environments]
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.close()

    def map(self, function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
        """(job, function(*job)) for every job, a tuple of arguments, in order of completion. If a job ended its worker,
        the result is WorkerDied. Functions and arguments are pickled."""
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


def perform(job: tuple[Callable[..., Any], Iterable[Any], float], report_stage: ReportStage) -> tuple[Any, bool]:
    """The work function of pool workers. A job is a function, its arguments, and its time limit in seconds."""
    function, arguments, seconds = job
    report_stage("working", seconds)
    return function(*arguments), True
