"""One of several processes is killed: do the others end by an error?"""

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

# Seconds until a process is killed at the latest, after which the process group gives a collective up, and that the
# others then have to end.
BEFORE, TIMEOUT, AFTER = 45.0, 10.0, 20.0
HASTE = {  # unless set otherwise outside: what PyTorch's watchdog does between a timeout and the process's end
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # ends the process, without the communicators' leave
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no traces of all processes
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # else 15 s, of which it sleeps four for the traces, made or not
    "TORCH_NCCL_ENABLE_MONITORING": "1",  # ends the process when a call of CUDA's or NCCL's holds the watchdog:
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5",  # sees that after up to two of these, and waits for a third
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    "TORCH_DISABLE_ADDR2LINE": "1",  # symbols of libtorch in an exception's text take minutes
}


def kill(command: Sequence[str], count: int) -> int:
    """Starts `count` processes, of which the last kills itself between two kernels; says when and how the others end.

    1 unless each of them has ended by an error when the time of the process group and AFTER seconds are over. The
    verdict is said within 90 seconds, and also when somebody interrupts.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    began, verdict = time.monotonic(), "interrupted"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as files:
        said = [files.enter_context(open(Path(folder) / str(n), "w+")) for n in range(count)]
        started = [
            subprocess.Popen(
                command, env={**HASTE, **os.environ, **where, "RANK": str(n), "LOCAL_RANK": str(n)}, stderr=file
            )
            for n, file in enumerate(said)
        ]
        try:
            verdict = followed(started, began)
        finally:
            for process in started:
                process.kill()
            last = time.monotonic() + 5
            for process in started:
                ended(process, last - time.monotonic())  # one that the driver holds is left to it
            for number, file in enumerate(said):
                file.seek(0)
                errors = [text for text in file.read().splitlines() if re.search("[Ee]rror|imeout|erminat", text)]
                print(f"process {number} said: {errors[-1] if errors else 'no error'}")
            print(f"verdict after {time.monotonic() - began:.0f} s: {verdict or 'right'}", flush=True)
    return int(verdict != "")


def followed(started: Sequence[subprocess.Popen[bytes]], began: float) -> str:
    """What went wrong, or nothing: the last process is gone, and each of the others has ended by an error."""
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
            wrong = f"process {number} ended as if all were well"
    return wrong


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its status, None while it runs."""
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
