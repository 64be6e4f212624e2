"""Child processes whose output is collected: up to a limit, and none is left behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox.core import process

FLOOD = "import sys\nwhile True: sys.std{}.write('no end of it\\n' * 1000)\n"
# A child of the child does the printing, as the program that a checker examines.
NESTED = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])\n"


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return process.run([sys.executable, "-c", *arguments], **options)


def test_what_it_says() -> None:
    done = python("import sys; print(input()); print('wrong', file=sys.stderr); sys.exit(3)", text="given\n")
    assert (done.stdout, done.stderr, done.returncode) == ("given\n", "wrong\n", 3)
    done = python("import sys; print('one', flush=True); print('two', file=sys.stderr)", merged=True)
    assert (done.stdout, done.stderr) == ("one\ntwo\n", "")


def test_all_of_what_it_may_say_is_kept() -> None:
    done = python("import sys; sys.stdout.write('x' * 600000); sys.stderr.write('y' * 400000)", most=10**6)
    assert (len(done.stdout), len(done.stderr)) == (600_000, 400_000)
    assert process.too_much(process.MOST_OUTPUT) == "printed more than 16 MiB and was ended (a printf in a loop?)"
    with pytest.raises(process.TooMuchOutput):
        python("import sys; sys.stdout.write('x' * 600000); sys.stderr.write('y' * 400001)", most=10**6)


@pytest.mark.parametrize("stream", ["out", "err"])
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "its child"])
def test_one_that_prints_without_end_is_ended(stream: str, nested: bool, tmp_path: Path) -> None:
    """With whatever it has started, which has a mark on its command line here."""
    mark, flood = f"# {tmp_path}", FLOOD.format(stream)
    command = [NESTED, flood + mark] if nested else [flood + mark]
    with pytest.raises(process.TooMuchOutput, match=r" printed more than 1 MiB and was ended") as caught:
        python(*command, most=2**20)
    assert len(caught.value.head) == process.HEAD
    assert caught.value.head.startswith("no end of it\n")
    assert gone(mark)


@pytest.mark.parametrize("nested", [False, True], ids=["itself", "its child"])
def test_one_that_takes_too_long_is_ended(nested: bool, tmp_path: Path) -> None:
    mark = f"# {tmp_path}"
    sleep = "import time; time.sleep(1000)" + mark
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        python(*([NESTED, sleep] if nested else [sleep]), timeout=0.5)
    assert time.monotonic() - started < 20
    assert gone(mark)


def gone(mark: str) -> bool:
    """Whether no process has that mark on its command line, within some seconds."""
    end = time.monotonic() + 20
    while any(mark.encode() in command for command in commands()):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def commands() -> list[bytes]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes())
        except OSError:  # it has ended
            continue
    return found
