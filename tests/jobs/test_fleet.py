"""A fleet: a job that takes its worker with it costs that job alone, in this round and in the next."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sandbox.jobs.fleet import Fleet
from sandbox.jobs.worker import WorkerDied


def doing(what: str) -> str:
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return what


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet([{}], seconds=60.0) as fleet:
        yield fleet


def results(fleet: Fleet, *jobs: str) -> dict[str, Any]:
    found = {job[0]: result for job, result in fleet.map(doing, [(job,) for job in jobs])}
    time.sleep(0.5)  # the threads of this round have ended
    return found


def test_after_a_crash_the_next_round_finds_its_workers_alive(fleet: Fleet) -> None:
    """Linux ends a child with the thread that started it: a fresh worker must not be a round's own."""
    first = results(fleet, "crash", "a")
    assert isinstance(first["crash"], WorkerDied)
    assert first["a"] == "a"
    assert results(fleet, "b", "c") == {"b": "b", "c": "c"}
    assert results(fleet, "d") == {"d": "d"}
