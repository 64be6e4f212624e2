"""At the end of a process autograd's device threads are waited for."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from project import ROOT

from sandbox.api import torch_exit

# What autograd's device thread does after a backward, by a thread of that name which works for a while and then needs
# Python once more. A daemon, too, is not joined, and is ended when it asks for Python after the end.
ENDS = """
import ctypes, os, sys, threading, time
import sandbox.api.{module}

def work():
    ctypes.CDLL(None).prctl(15, b"pt_autograd_0")  # PR_SET_NAME
    began.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.sleep(0.001)
    os.write(1, b"ended by itself")
    time.sleep(1000)

began = threading.Event()
threading.Thread(target=work, daemon=True).start()
began.wait()
"""


@pytest.mark.parametrize("module", ["torch_ops", "torch_slot"])
@pytest.mark.sampled(2)
def test_a_process_waits_for_autograd_when_it_ends(module: str) -> None:
    """Wherever autograd may run kernels of ours."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(module=module)], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    assert done.stdout == "ended by itself", done.stderr


@pytest.mark.parametrize("how", ["runs", "waits in turns"])
def test_a_thread_that_is_at_work_is_waited_for(how: str) -> None:
    began, ended, at_end = threading.Event(), threading.Event(), []

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_autograd_9")
        began.set()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            if how != "runs":
                time.sleep(0.001)
        at_end.append(time.monotonic())
        ended.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(30)
    torch_exit.wait_for_autograd()
    returned = time.monotonic()
    ended.set()
    thread.join()
    assert at_end[0] <= returned


def test_one_that_does_not_come_to_rest_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_exit, "_MOST_SECONDS", 0.2)
    monkeypatch.setattr(torch_exit, "_device_threads", lambda: {"1": ("R", "0", "0")})
    torch_exit.wait_for_autograd()


def test_without_such_threads_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_exit, "_device_threads", dict)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    torch_exit.wait_for_autograd()


def test_the_state_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of autograd's own; one that ends meanwhile is left out."""
    status = (
        "Name:\t{}\nUmask:\t0022\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t3\n"
    )
    for number, text in (
        ("1", status.format("pt_autograd_0", 7)),
        ("2", status.format("python", 8)),
        ("3", "Name:\tx"),
    ):
        (tmp_path / number).mkdir()
        (tmp_path / number / "status").write_text(text)
    (tmp_path / "4").mkdir()
    monkeypatch.setattr(torch_exit, "_TASKS", tmp_path)
    assert torch_exit._device_threads() == {"1": ("S", "7", "3")}


def test_threads_must_rest_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asleep both times, and never awake meanwhile."""
    looks = [
        {"1": ("R", "1", "0")},
        {"1": ("R", "1", "0")},
        {"1": ("S", "1", "0")},
        {"1": ("S", "2", "0")},
        {"1": ("S", "2", "0")},
        {},
    ]
    monkeypatch.setattr(torch_exit, "_device_threads", lambda: looks.pop(0))
    torch_exit.wait_for_autograd()
    assert looks == [{}]
