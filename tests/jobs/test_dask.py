"""Jobs of a Dask cluster: what runs in its workers, and what becomes of jobs that are lost. Dask is replaced by fakes;
tests/tune/test_distributed.py has a cluster."""

from __future__ import annotations

import operator
import pickle
import sys
from concurrent.futures import CancelledError
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.jobs import distributed
from sandbox.jobs.distributed import DistributedPool, DistributedUnavailable
from sandbox.jobs.pool import perform
from sandbox.jobs.worker import WorkerDied


class KilledWorker(Exception):
    """Dask's error for a job that several workers did not survive."""


class Future:
    def __init__(self, status: str, result: Any = None, done: bool = True):
        self.status, self._result, self._done = status, result, done

    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        return self._result

    exception = result


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> DistributedPool:
    """A pool whose client has the workers in `pool.there`."""
    monkeypatch.setitem(
        sys.modules, "distributed", SimpleNamespace(wait=lambda *args, **options: None, KilledWorker=KilledWorker)
    )
    made = object.__new__(DistributedPool)
    made.address, made._seconds, made._name = "tcp://a", 3.0, "name"
    made.there = [["tcp://1"]]  # type: ignore[attr-defined]
    made._client = SimpleNamespace(
        as_current=nullcontext, scheduler_info=lambda n_workers: {"workers": dict.fromkeys(made.there[0])},  # type: ignore[attr-defined]
    )  # fmt: skip
    return made


def test_results_of_jobs(pool: DistributedPool) -> None:
    assert pool._result(Future("finished", 7)) == 7
    died = pool._result(Future("error", KilledWorker("x")))
    assert isinstance(died, WorkerDied)
    assert (str(died), died.stage, died.hung) == ("the Dask workers that ran it disappeared", "working", False)
    with pytest.raises(
        DistributedUnavailable,
        match=r"^a worker of tcp://a cannot run jobs of this package \(ImportError: no sandbox\): install it on every",
    ):
        pool._result(Future("error", ImportError("no sandbox")))
    with pytest.raises(DistributedUnavailable, match=r"^the Dask scheduler at tcp://a has lost a job \(cancelled\)$"):
        pool._result(Future("cancelled"))


def test_results_in_the_order_of_completion(pool: DistributedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Future("finished", 1, done=False), Future("finished", 2)
    waited: list[list[Future]] = []

    def wait(futures: list[Future], timeout: float, return_when: str) -> None:
        waited.append(futures)
        if len(waited) == 2:
            raise TimeoutError
        if len(waited) == 3:
            first._done = True

    monkeypatch.setattr(sys.modules["distributed"], "wait", wait)
    assert list(pool._as_they_finish([first, second])) == [second, first]
    assert waited == [[first, second], [first], [first]]
    assert list(pool._as_they_finish([])) == []


def test_a_cluster_that_has_lost_all_workers(pool: DistributedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the second check without any: a worker that restarts is back by then."""
    checks: list[int] = []

    def workers() -> list[str]:
        checks.append(len(there))
        return there.pop(0)

    monkeypatch.setattr(pool, "workers", workers)
    there: list[list[str]] = [[], ["tcp://1"], [], []]
    with pytest.raises(DistributedUnavailable, match=r"^the Dask scheduler at tcp://a has lost all workers: start"):
        list(pool._as_they_finish([Future("pending", done=False)]))
    assert checks == [4, 3, 2, 1]

    def stopped(*args: Any, **options: Any) -> None:
        raise CancelledError

    monkeypatch.setattr(sys.modules["distributed"], "wait", stopped)
    with pytest.raises(DistributedUnavailable, match="has stopped: start it again"):
        list(pool._as_they_finish([Future("pending", done=False)]))


def test_the_workers_and_jobs_of_a_pool(pool: DistributedPool) -> None:
    pool.there[0] = ["tcp://2", "tcp://1"]  # type: ignore[attr-defined]
    assert pool.workers() == ["tcp://1", "tcp://2"]
    assert pickle.loads(pool._pickled(operator.mul, (2, 3))) == (operator.mul, (2, 3), 3.0)
    given: list[Any] = []
    pool._client.submit = lambda *job, pure: given.append((*job, pure)) or Future("finished", len(given))
    cancelled: list[Any] = []
    pool._client.cancel = cancelled.append
    assert list(pool.map(operator.mul, [(1, 2), (3, 4)])) == [((1, 2), 1), ((3, 4), 2)]
    assert [(job[0], job[1], job[3]) for job in given] == [(distributed._run_job, "name", False)] * 2
    assert len(cancelled[0]) == 2
    ran = {"tcp://1": 3, "tcp://2": WorkerDied("x")}
    pool._client.run = lambda *job, on_error: ran if on_error == "return" else None
    assert pool.everywhere(operator.mul, 1, 2) is ran
    ran["tcp://2"] = ImportError("no")
    with pytest.raises(DistributedUnavailable, match="cannot run jobs of this package"):
        pool.everywhere(operator.mul, 1, 2)


class FakeWorker:
    """Runs jobs in this process; "dies" ends it."""

    made = 0

    def __init__(self, work: Any):
        type(self).made += 1
        self.work, self.closed = work, False

    def do(self, job: Any) -> tuple[Any, str]:
        if job[0] is operator.not_:
            raise WorkerDied("it died")
        return self.work(job, lambda stage, limit: None)[0], ""

    def close(self) -> None:
        self.closed = True


class FakeTimer:
    """A timer that never fires."""

    def __init__(self, seconds: float, function: Any, arguments: list[Any]):
        self.made = seconds, function, arguments
        self.started = self.cancelled = False

    def start(self) -> None:
        self.started = True

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(distributed, "Worker", FakeWorker)
    monkeypatch.setattr(distributed.threading, "Timer", FakeTimer)
    process = SimpleNamespace(daemon=True)
    monkeypatch.setattr(distributed.multiprocessing, "current_process", lambda: process)
    FakeWorker.made = 0
    processes: dict[str, Any] = {}
    monkeypatch.setattr(distributed, "_processes", processes)
    return processes


def test_a_dask_worker_keeps_a_process_for_the_jobs_of_a_pool(in_worker: dict[str, Any]) -> None:
    """It ends after a minute without a job; one that is still busy then ends later."""

    def run(name: str, function: Any, *arguments: Any) -> Any:
        return distributed._run_job(name, pickle.dumps((function, arguments, 3.0)))

    assert run("a", operator.mul, 2, 3) == 6
    assert not distributed.multiprocessing.current_process().daemon  # which may not start processes
    worker, timer = in_worker["a"]
    assert timer.made == (60.0, distributed._end, ["a"])
    assert (timer.started, timer.daemon, timer.cancelled) == (True, True, False)
    assert run("a", operator.mul, 2, 4) == 8
    assert (in_worker["a"][0], timer.cancelled, FakeWorker.made) == (worker, True, 1)
    died = run("a", operator.not_, 1)
    assert isinstance(died, WorkerDied)
    assert in_worker["a"][0] is worker
    assert run("b", operator.mul, 1, 1) == 1
    assert FakeWorker.made == 2
    with distributed._gpu_lock:
        distributed._end("a")
    assert not worker.closed
    timer = in_worker["a"][1]
    distributed._end("a")
    assert (worker.closed, timer.cancelled, [*in_worker]) == (True, True, ["b"])
    distributed._end("a")
    assert not distributed._gpu_lock.locked()


def test_what_a_worker_of_a_pool_does() -> None:
    stages: list[Any] = []
    assert perform((operator.mul, (2, 3), 5.0), lambda *stage: stages.append(stage)) == (6, True)
    assert stages == [("working", 5.0)]
