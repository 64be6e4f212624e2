"""The end of a process in which PyTorch's autograd has had threads of its own. Imported on demand.

For each GPU, autograd's engine has a C++ thread, `pt_autograd_N`, that nothing joins. When a backward is done, this
thread notifies the main thread, and then destroys the GraphTask, whose thread-local state holds Python objects. If
Python finalizes then, taking the GIL ends the thread in the middle of that destructor, and C++ ends the process:
"terminate called without an active exception" (PyTorch 2.13, Python 3.11). So the main thread waits at exit until these
threads are idle.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

_NAMES = "pt_autograd_"
_MOST_SECONDS, _LOOK_SECONDS = 2.0, 0.005
_TASKS = Path("/proc/self/task")  # of Linux; elsewhere nothing is waited for


def wait_for_autograd() -> None:
    """Waits until all of autograd's device threads sleep and have not run between two checks; at most two seconds."""
    deadline = time.monotonic() + _MOST_SECONDS
    before = _device_threads()
    while before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)  # without the GIL, which they may want
        now = _device_threads()
        if now == before and all(state == "S" for state, _, _ in now.values()):
            return
        before = now


def _device_threads() -> dict[str, tuple[str, str, str]]:
    """{thread: (state, voluntary context switches, involuntary context switches)}."""
    found = {}
    for task in _TASKS.glob("*"):
        with suppress(OSError, KeyError):  # it has ended meanwhile
            lines = (task / "status").read_text().splitlines()
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if status["Name"].startswith(_NAMES):
                switches = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"]
                found[task.name] = (status["State"][:1], *switches)
    return found


atexit.register(wait_for_autograd)
