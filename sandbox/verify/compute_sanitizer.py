"""compute-sanitizer, NVIDIA's correctness checker for kernels on a GPU: runs it and parses its report."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..core import process
from ..core.errors import ToolchainMissing
from ..core.score import Score
from ..toolchain import tools
from .findings import Finding, parse_compute_sanitizer, resolve_expressions

TOOLS = {
    "memcheck": "accesses out of bounds or misaligned",
    "racecheck": "races on shared memory",
    "initcheck": "reads of uninitialised global memory",
    "synccheck": "barriers that some thread does not reach",
}
_FOUND = 91  # the exit status if it has findings; the program itself returns 0 to 2


def run(
    tool: str, command: Sequence[str], timeout: float, cwd: Path, folders: Sequence[Path], score: Score | None = None
) -> tuple[list[Finding], str]:
    """Runs a program under one tool -> (findings, complete output). `folders`: those of the sources; `score`: the
    problem's Score, whose expressions are located in its file.

    Raises ToolchainMissing if the tool or the program itself fails.
    """
    checker = [tools.need("compute-sanitizer"), "--tool", tool, "--report-api-errors", "no", "--show-backtrace",
               "device", "--error-exitcode", str(_FOUND), "--print-limit", "100"]  # fmt: skip
    try:
        done = process.run([*checker, *command], cwd=cwd, timeout=timeout, merged=True)
    except subprocess.TimeoutExpired:
        return [Finding(f"did not finish within {timeout:g} s under {tool}: does the kernel end?")], ""
    except process.TooMuchOutput as error:
        found = parse_compute_sanitizer(error.head, folders)
        return [*found, Finding(f"the kernel under {tool} {process.too_much(process.MOST_OUTPUT)}")], error.head
    if done.returncode == 0:
        return [], done.stdout
    found = parse_compute_sanitizer(resolve_expressions(done.stdout, score)[0], folders)
    if done.returncode == _FOUND and not found:  # in a format that the parser does not know
        summary = [line.lstrip("= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
        found = [Finding(f"errors that are not listed: {', '.join(summary) or 'no summary'}")]
    if done.returncode == _FOUND or any(finding.places for finding in found):
        return found, done.stdout
    # Indented lines are the frames of a Python traceback.
    last = "\n".join([line for line in done.stdout.splitlines() if line.strip() and not line.startswith(" ")][-8:])
    raise ToolchainMissing(f"compute-sanitizer --tool {tool} ended with status {done.returncode}:\n{last}")
