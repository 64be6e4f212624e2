"""The worker pool: a job that ends its worker affects no other job, in this call of `map` or the next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.jobs.pool import WorkerPool
from sandbox.jobs.worker import WorkerDied


def doing(what: str) -> str:
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return what


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool([{}], seconds=60.0) as pool:
        yield pool


def results(pool: WorkerPool, *jobs: str) -> dict[str, Any]:
    found = {job[0]: result for job, result in pool.map(doing, [(job,) for job in jobs])}
    time.sleep(0.5)  # until the threads of this call have ended
    return found


def test_workers_survive_the_call_in_which_another_crashed(pool: WorkerPool) -> None:
    """Linux ends a child with the thread that started it: a thread of this call must not start the new worker."""
    first = results(pool, "crash", "a")
    assert isinstance(first["crash"], WorkerDied)
    assert first["a"] == "a"
    assert results(pool, "b", "c") == {"b": "b", "c": "c"}
    assert results(pool, "d") == {"d": "d"}
