"""A fleet: a job that takes its worker with it costs that job alone, in this round and in the next."""

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
    time.sleep(0.5)  # the threads of this round have ended
    return found


def test_after_a_crash_the_next_round_finds_its_workers_alive(pool: WorkerPool) -> None:
    """Linux ends a child with the thread that started it: a fresh worker must not be a round's own."""
    first = results(pool, "crash", "a")
    assert isinstance(first["crash"], WorkerDied)
    assert first["a"] == "a"
    assert results(pool, "b", "c") == {"b": "b", "c": "c"}
    assert results(pool, "d") == {"d": "d"}
