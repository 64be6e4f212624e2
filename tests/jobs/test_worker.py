"""The worker: whatever a job does to its process, the next job has a working one, and no process is left behind."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

from sandbox.core.process import HEAD
from sandbox.jobs.worker import ReportStage, Worker, WorkerDied


def work(job: str, at: ReportStage) -> tuple[Any, bool]:
    """Does what the name of the job says."""
    at("working", 0.5 if job == "endless" else 60.0)
    if job.startswith("endless "):  # reports through the named pipe
        Path(job.removeprefix("endless ")).write_text("begun")
    if job.startswith("endless"):
        while True:
            pass
    if job == "segfault":
        ctypes.string_at(8)
    if job == "exit":
        os.write(2, b"no more of this\n")
        os._exit(3)
    if job == "forever":
        signal.pause()
    if job == "raises":
        raise ValueError("no\nmore")
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "children":
        child = subprocess.Popen(["sleep", "1000"])
        at(f"{child.pid}", 0.5)
        child.wait()
    if job == "prints":
        os.write(1, b"hello\n")
    if job == "prints much":
        os.write(1, b"0123456789abcde\n" * 2**16)  # 1 MiB, more than a pipe holds
    while job.startswith("floods"):
        if job == "floods from a child":
            subprocess.run(["yes"], check=False)
        os.write(1, b"no end of it\n" * 1000)
    return os.getpid(), job != "poisoned"


def prepare(job: str) -> None:
    assert job == "like this"


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(work, partial(prepare, "like this"))
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
        ("raises", "ValueError: no\nmore", False),
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


def test_much_that_it_prints(worker: Worker) -> None:
    assert worker.do("prints much")[1] == "0123456789abcde\n" * 2**16


@pytest.mark.parametrize("job", ["floods", "floods from a child"])
def test_one_that_prints_without_end_is_ended(worker: Worker, job: str, tmp_path: Path) -> None:
    """At the limit, which the message contains. The start of the output is kept, and no file is written."""
    first, _ = worker.do("a")
    with pytest.raises(WorkerDied, match=r"^it printed more than 16 MiB and was ended") as died:
        worker.do(job)
    assert (died.value.stage, died.value.hung) == ("working", False)
    assert len(died.value.printed) == HEAD
    assert died.value.printed.startswith(("no end of it\n", "y\n"))
    assert gone(first)
    assert worker.do("prints")[1] == "hello\n"


def test_it_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even during a job: its owner may be killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    worker = Worker(work)
    try:
        pid, printed = worker.do("prints")
        opened = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        assert printed == "hello\n"
        assert not [path for path in opened if path.startswith(str(tmp_path))]
        assert list(tmp_path.iterdir()) == []
    finally:
        worker.close()


def test_its_children_end_with_it(worker: Worker) -> None:
    with pytest.raises(WorkerDied) as died:
        worker.do("children")
    assert ends(int(died.value.stage))


def test_a_job_of_a_closed_worker_raises() -> None:
    """A job in another thread, as in a pool that is interrupted."""
    worker, messages = Worker(work), []

    def wait() -> None:
        try:
            worker.do("forever")
        except WorkerDied as death:
            messages.append(str(death))

    waiting = threading.Thread(target=wait)
    waiting.start()
    worker.close()
    waiting.join(30)
    assert messages == ["it was ended"]


OWNER = """
import sys
from functools import partial
sys.path.insert(0, sys.argv[1])
import test_worker
from sandbox.jobs.worker import Worker
if __name__ == "__main__":
    worker = Worker(test_worker.work, partial(test_worker.prepare, "like this"))
    print(worker.do("a")[0], flush=True)
    worker.do(sys.argv[2])
    sys.stdin.readline()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_it_does_not_outlive_an_owner_that_is_killed(busy: bool, tmp_path: Path) -> None:
    script, pipe = tmp_path / "owner.py", tmp_path / "pipe"
    script.write_text(OWNER)
    os.mkfifo(pipe)
    here = Path(__file__).resolve().parent
    owner = subprocess.Popen(
        [sys.executable, str(script), str(here), f"endless {pipe}" if busy else "a"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    pid = int(owner.stdout.readline())
    if busy:
        assert pipe.read_text() == "begun"
    owner.kill()
    owner.communicate()
    assert ends(pid)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def ends(pid: int) -> bool:
    """Whether the process ends within a minute."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([pidfd], [], [], 60)
    os.close(pidfd)
    return bool(ended)
