"""The time of `watch` from a save to its result, also after a kernel that hangs. See README.md.

python experiments/009_save_to_verdict/run.py [--backend cpu]    prints a table and appends rows to results.jsonl
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sandbox.bench import environment
from sandbox.core import jsonl

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ("fwd_minimal", "fwd_block2d", "fwd_mma")
ENTRY = "extern __shared__"  # a line at the beginning of each kernel; the fault is inserted before it
HANG = "while (score.Sq) __threadfence(); "


class Watched:
    """`watch` on one kernel of a copy of the project."""

    def __init__(self, project: Path, kernel: str, backend: str):
        self.source = project / "kernels_cu" / f"{kernel}.cu"
        command = [sys.executable, "-m", "sandbox", "watch", kernel, "--json", "--backend", backend, "--timeout", "2"]
        self.process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True)

    def verdict(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())  # type: ignore[union-attr]

    def save(self, text: str) -> dict[str, Any]:
        """The result, with the seconds from this save to its arrival here."""
        start = time.perf_counter()
        self.source.write_text(text)
        return {**self.verdict(), "waited": time.perf_counter() - start}


def measure(kernel: str, backend: str, saves: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of save."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        for name in ("sandbox", "kernels_cu"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        watched = Watched(project, kernel, backend)
        watched.verdict()
        text = watched.source.read_text()
        seen = [watched.save(f"{text}// {time.time_ns()}\n") for _ in range(saves)]
        yield row(kernel, "a correct version", seen)
        yield row(kernel, "a version that does not compile", [watched.save(f"{text}x {n}") for n in range(saves)])
        if backend == "cuda":
            after = []
            for n in range(saves):
                assert watched.save(text.replace(ENTRY, HANG + ENTRY, 1))["found"]["stage"] == "hang"
                after.append(watched.save(f"{text}// back {n} {time.time_ns()}\n"))
            yield row(kernel, "a correct version, saved when a hang is reported", after)
        watched.process.terminate()


def row(kernel: str, what: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, in seconds."""
    stages = {verdict["found"]["stage"] for verdict in seen}
    return {
        "kernel": kernel,
        "what": what,
        "stage": stages.pop() if len(stages) == 1 else sorted(stages),
        "waited": statistics.median(verdict["waited"] for verdict in seen),  # until the complete result
        "verdict": statistics.median(verdict["latency"] for verdict in seen),  # until it is shown
        "slowest": max(verdict["waited"] for verdict in seen),
        "compiling": statistics.median(verdict["found"]["compiling"] for verdict in seen),
        "saves": len(seen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--saves", type=int, default=7)
    options = parser.parse_args()
    about = {"backend": options.backend, **environment.describe()}
    for kernel in KERNELS:
        for found in measure(kernel, options.backend, options.saves):
            times = (f"{name} {found[name]:5.2f} s" for name in ("verdict", "compiling", "waited"))
            print(f"{kernel:12} {found['what']:52}", *times, flush=True)
            jsonl.append(HERE / "results.jsonl", {**found, **about})


if __name__ == "__main__":
    main()
