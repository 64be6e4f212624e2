"""Child processes whose output is collected, up to a limit at which the child is ended: a kernel that prints in a loop
would fill the memory otherwise."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .errors import SandboxError

MOST_OUTPUT = 16 * 2**20  # bytes that a process which runs a kernel may print
HEAD = 16 * 2**10  # bytes of too much output that are kept


def too_much(most: int) -> str:
    """The message for a process that printed more than this many bytes."""
    return f"printed more than {most / 2**20:g} MiB and was ended (a printf in a loop?)"


class TooMuchOutput(SandboxError, RuntimeError):
    """A child process was ended since it printed more than it may. `head`: the text that it began with."""

    def __init__(self, message: str, *, head: str):
        super().__init__(message)
        self.head = head


def run(
    command: Sequence[str], *, text: str = "", timeout: float | None = None, most: int = MOST_OUTPUT,
    merged: bool = False, cwd: Path | None = None, env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As subprocess.run with captured text, of which stdout and stderr may have `most` bytes together.

    `text` is its standard input; `merged`: stderr goes where stdout goes. Raises TooMuchOutput, and
    subprocess.TimeoutExpired after `timeout` seconds; the child and whatever it has started are ended then.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with tempfile.TemporaryFile() as given:
        given.write(text.encode())
        given.seek(0)
        errors = subprocess.STDOUT if merged else subprocess.PIPE
        with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=errors, cwd=cwd, env=env) as process:
            try:
                said = _collected(process, deadline, most)
                process.wait(_left(process, deadline))
            except BaseException:
                _end(process)
                raise
    out, err = (b"".join(parts).decode(errors="replace") for parts in said)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _collected(process: subprocess.Popen[bytes], deadline: float | None, most: int) -> tuple[list[bytes], list[bytes]]:
    said: tuple[list[bytes], list[bytes]] = ([], [])
    collected = 0
    with selectors.DefaultSelector() as selector:
        for stream, parts in zip((process.stdout, process.stderr), said, strict=True):
            if stream:
                selector.register(stream, selectors.EVENT_READ, parts)
        while selector.get_map():
            for key, _ in selector.select(_left(process, deadline)):
                part = os.read(key.fd, 2**16)
                if not part:
                    selector.unregister(key.fileobj)
                key.data.append(part)
                collected += len(part)
                if collected > most:
                    head = b"".join(b"".join(parts)[:HEAD] for parts in reversed(said)).decode(errors="replace")
                    raise TooMuchOutput(f"{Path(str(process.args[0])).name} {too_much(most)}", head=head)  # type: ignore[index]
    return said


def _left(process: subprocess.Popen[bytes], deadline: float | None) -> float | None:
    """Seconds until the deadline. Raises TimeoutExpired after it."""
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise subprocess.TimeoutExpired(process.args, 0.0)
    return left


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the child and its descendants, which would otherwise go on printing: a checker runs the kernel in a child of
    its own. They have no process group of their own: a signal to the group of this process ends them, too."""
    for pid in [*descendants(process.pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, directly or indirectly, and that still exist."""
    children = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])  # "pid (name) state parent …"
            children[parent].append(int(file.parent.name))
    waiting = [*children[pid]]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children[found]
