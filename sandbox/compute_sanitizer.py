"""compute-sanitizer, NVIDIA's checker of kernels on a GPU: found, run, read."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import ToolchainMissing
from .findings import Finding, of_compute_sanitizer

TOOLS = {
    "memcheck": "accesses out of bounds or misaligned",
    "racecheck": "races on shared memory",
    "initcheck": "reads of global memory that nobody wrote",
    "synccheck": "barriers that some thread does not reach",
}
_FOUND = 91  # the exit status that says so; the program's own are 0 to 2
_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def find() -> str:
    """The program, on the PATH or beside CUDA. Raises ToolchainMissing with how to get it."""
    homes = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    path = os.pathsep.join((os.environ.get("PATH", ""), *homes, *_FOLDERS))
    if found := shutil.which("compute-sanitizer", path=path):
        return found
    raise ToolchainMissing(
        "compute-sanitizer is not on the PATH nor in $CUDA_HOME/bin: it comes with the CUDA toolkit "
        "(apt-get install cuda-sanitizer-12-9, or conda install -c nvidia cuda-sanitizer-api); "
        "--backend cpu needs none of it"
    )


def run(
    tool: str, command: Sequence[str], timeout: float, cwd: Path, folders: Sequence[Path]
) -> tuple[list[Finding], str]:
    """One program under one tool -> (what it found, all that was said). `folders`: where the sources lie.

    Raises ToolchainMissing when the tool or the program fails by itself.
    """
    checker = [find(), "--tool", tool, "--report-api-errors", "no", "--show-backtrace", "device",
               "--error-exitcode", str(_FOUND), "--print-limit", "100"]  # fmt: skip
    try:
        done = subprocess.run(
            [*checker, *command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [Finding(f"did not finish within {timeout:g} s under {tool}: does the kernel end?")], ""
    if done.returncode == 0:
        return [], done.stdout
    found = of_compute_sanitizer(done.stdout, folders)
    if done.returncode == _FOUND or any(finding.places for finding in found):
        return found, done.stdout
    last = "\n".join(done.stdout.strip().splitlines()[-8:])
    raise ToolchainMissing(f"compute-sanitizer --tool {tool} ended with status {done.returncode}:\n{last}")
