"""Kills one of several processes: do the others end with an error?"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

# Seconds: limit until the process is killed, timeout of the process group, and limit for the others to end after it.
BEFORE, TIMEOUT, AFTER = 45.0, 10.0, 20.0
FAST_EXIT = {  # defaults that shorten the time between a timeout of PyTorch's watchdog and the end of the process
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # ends the process without aborting communicators
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no traces
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # default 15 s; the watchdog sleeps four times this
    "TORCH_NCCL_ENABLE_MONITORING": "1",  # ends the process when a CUDA or NCCL call blocks the watchdog,
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5",  # after two to three of these
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "TORCH_DISABLE_ADDR2LINE": "1",  # symbols of libtorch in the message of an exception take minutes
}


def kill(command: Sequence[str], count: int) -> int:
    """Starts `count` processes; the last kills itself between two kernels. Reports when and how the others end.

    Exit status 1 unless each of them ends with an error within the timeout of the process group plus AFTER seconds. The
    result is printed within 90 seconds, also after an interrupt.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    began, verdict = time.monotonic(), "interrupted"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        outputs = [files.enter_context(open(Path(folder) / str(n), "w+")) for n in range(count)]
        started = [
            subprocess.Popen(
                command, env={**FAST_EXIT, **os.environ, **where, "RANK": str(n), "LOCAL_RANK": str(n)}, stderr=file
            )
            for n, file in enumerate(outputs)
        ]
        try:
            verdict = followed(started, began)
        finally:
            for process in started:
                process.kill()
            last = time.monotonic() + 5
            for process in started:
                ended(process, last - time.monotonic())  # a process that hangs in the driver is left
            for number, file in enumerate(outputs):
                file.seek(0)
                errors = [text for text in file.read().splitlines() if re.search("[Ee]rror|imeout|erminat", text)]
                print(f"process {number}: {errors[-1] if errors else 'no error'}")
            print(f"result after {time.monotonic() - began:.0f} s: {verdict or 'correct'}", flush=True)
    return int(verdict != "")


def followed(started: Sequence[subprocess.Popen[bytes]], began: float) -> str:
    """A description of the failure, or "": the last process was killed and the others ended with errors."""
    *others, last = started
    while last.poll() is None and time.monotonic() - began < BEFORE and all(p.poll() is None for p in others):
        time.sleep(0.1)
    if last.poll() != -signal.SIGKILL:
        states = ", ".join("runs" if p.poll() is None else f"ended with {p.poll()}" for p in started)
        return f"the last process was not killed within {BEFORE:.0f} s, or not first: {states}"
    died = time.monotonic()
    print(f"process {len(others)} was killed after {died - began:.1f} s", flush=True)
    wrong = ""
    for number, process in enumerate(others):
        status = ended(process, died + TIMEOUT + AFTER - time.monotonic())
        seconds = time.monotonic() - died
        print(f"process {number}: status {status} {seconds:.1f} s after process {len(others)} was killed", flush=True)
        if status is None:
            wrong = f"process {number} still runs"
        elif status == 0:
            wrong = f"process {number} ended without an error"
    return wrong


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status, None while the process runs."""
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
