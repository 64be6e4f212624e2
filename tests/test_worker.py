"""The worker: whatever a job does to its process, the next job finds one that works, and none is left behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.worker import At, Worker, WorkerDied


def work(job: str, at: At) -> tuple[Any, bool]:
    """One of the things that can happen to a process."""
    at("working", 0.5 if job == "endless" else 60.0)
    if job == "endless":
        while True:
            pass
    if job == "segfault":
        ctypes.string_at(8)
    if job == "exit":
        os.write(2, b"no more of this\n")
        os._exit(3)
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "children":
        child = subprocess.Popen(["sleep", "1000"])
        at("waiting for a child", 0.5)
        child.wait()
    if job == "prints":
        os.write(1, b"hello\n")
    return os.getpid(), job != "poisoned"


def prepare(job: str) -> None:
    assert job == "like this"


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(work, prepare, "like this")
    yield worker
    worker.close()


def test_it_stays(worker: Worker) -> None:
    assert worker.do("a") == worker.do("b")
    assert worker.do("a")[0] != os.getpid()


def test_one_that_is_unfit_is_replaced(worker: Worker) -> None:
    first, _ = worker.do("poisoned")
    assert worker.do("a")[0] != first
    assert gone(first)


@pytest.mark.parametrize(
    ("job", "message", "hung"),
    [
        ("endless", "did not finish within 0.5 s", True),
        ("segfault", r"memory that is not there \(SIGSEGV\)", False),
        ("exit", "the worker ended with status 3: no more of this", False),
        ("killed", r"is the machine out of memory\? \(SIGKILL\)", False),
    ],
)
def test_it_dies_and_the_next_one_works(worker: Worker, job: str, message: str, hung: bool) -> None:
    first, _ = worker.do("a")
    with pytest.raises(WorkerDied, match=message) as died:
        worker.do(job)
    assert (died.value.stage, died.value.hung) == ("working", hung)
    assert gone(first)
    assert worker.do("a")[0] != first


def test_what_it_prints(worker: Worker) -> None:
    assert worker.do("prints")[1] == "hello\n"
    assert worker.do("a")[1] == ""
    assert worker.do("prints")[1] == "hello\n"


def test_its_children_end_with_it(worker: Worker) -> None:
    pid, _ = worker.do("a")
    with pytest.raises(WorkerDied) as died:
        worker.do("children")
    assert died.value.stage == "waiting for a child"
    assert not any(group(each) == pid for each in os.listdir("/proc") if each.isdecimal())


OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
import test_worker
from sandbox.worker import Worker
if __name__ == "__main__":
    worker = Worker(test_worker.work, test_worker.prepare, "like this")
    print(worker.do("a")[0], flush=True)
    sys.stdin.readline()
    worker.do("endless" if sys.argv[2] == "busy" else "a")
    sys.stdin.readline()
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_it_does_not_outlive_an_owner_that_is_killed(state: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    here = Path(__file__).resolve().parent
    owner = subprocess.Popen(
        [sys.executable, str(script), str(here), state],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(here.parent)},
    )  # fmt: skip
    pid = int(owner.stdout.readline())
    watched = os.pidfd_open(pid)
    if state == "busy":
        owner.stdin.write("\n")
        owner.stdin.flush()
    owner.kill()
    owner.communicate()
    ended, _, _ = select.select([watched], [], [], 60)
    os.close(watched)
    assert ended


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def group(pid: str) -> int | None:
    """Its process group, when it is alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[2])
