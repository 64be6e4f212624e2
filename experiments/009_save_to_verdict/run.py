"""The time of `watch` from a save to its result, also after a kernel that hangs. See README.md.

python experiments/009_save_to_verdict/run.py [--backend cpu]    prints a table and appends rows to results.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandbox.bench import environment
from sandbox.core import jsonl, process

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KERNELS = ("fwd_minimal", "fwd_block2d", "fwd_mma")
ENTRY = "extern __shared__"  # a line at the beginning of each kernel; the fault is inserted before it
HANG = "while (score.Sq) __threadfence(); "


class Watched:
    """`watch` on one kernel of a copy of the project."""

    def __init__(self, project: Path, kernel: str, backend: str):
        self.source = project / "kernels_cu" / f"{kernel}.cu"
        options = ["--json", "--backend", backend, "--timeout", "2" if backend == "cuda" else "60"]
        command = [sys.executable, "-m", "sandbox", "watch", kernel, *options]
        self.process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True)

    def verdict(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())  # type: ignore[union-attr]

    def save(self, text: str) -> dict[str, Any]:
        """The result, with the seconds from this save to its arrival here."""
        start, before = time.perf_counter(), self._cpu_seconds()
        self.source.write_text(text)
        verdict = self.verdict()
        return {**verdict, "waited": time.perf_counter() - start, "cpu": self._cpu_seconds() - before}

    def _cpu_seconds(self) -> float:
        """User and system time of all processes, also of those that have ended."""
        ticks = 0
        for pid in (self.process.pid, *process.descendants(self.process.pid)):
            with suppress(OSError):  # it has ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of its children that have ended
        return ticks / os.sysconf("SC_CLK_TCK")


def measure(kernel: str, backend: str, saves: int) -> Iterator[dict[str, Any]]:
    """A row for each kind of save."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        for name in ("sandbox", "kernels_cu"):
            shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
        watched = Watched(project, kernel, backend)
        watched.verdict()
        original = watched.source.read_text()
        edited = [f"{original}constexpr long edit = {time.time_ns()};\n" for _ in range(saves)]
        yield row(kernel, "a correct version", [watched.save(text) for text in edited])
        text = edited[-1]
        yield row(kernel, "a comment", [watched.save(f"// {n}\n{text}") for n in range(saves)])
        yield row(kernel, "a version that does not compile", [watched.save(f"{text}x {n}") for n in range(saves)])
        if backend == "cuda":
            after = []
            for n in range(saves):
                assert watched.save(text.replace(ENTRY, HANG + ENTRY, 1))["found"]["stage"] == "hang"
                after.append(watched.save(f"{text}constexpr int back = {n};\n"))
            yield row(kernel, "a correct version, saved when a hang is reported", after)
        watched.process.terminate()


def row(kernel: str, what: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, in seconds."""
    stages = {verdict["found"]["stage"] for verdict in seen}
    medians = {
        "waited": [verdict["waited"] for verdict in seen],  # until the complete result
        "verdict": [verdict["latency"] for verdict in seen],  # until it is shown
        "compiling": [verdict["found"]["compiling"] for verdict in seen],
        "cpu": [verdict["cpu"] for verdict in seen],  # user and system time of all processes, until the complete result
    }
    return {
        "kernel": kernel,
        "what": what,
        "stage": stages.pop() if len(stages) == 1 else sorted(stages),
        **{name: statistics.median(values) for name, values in medians.items()},
        "slowest": max(medians["waited"]),
        "load": os.getloadavg()[0],  # processes that want a core, of this program and of others
        "cores": len(os.sched_getaffinity(0)),
        "saves": len(seen),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--kernels", nargs="+", default=KERNELS)
    options = parser.parse_args()
    about = {"backend": options.backend, **environment.describe()}
    for kernel in options.kernels:
        for found in measure(kernel, options.backend, options.saves):
            times = (f"{name} {found[name]:5.2f} s" for name in ("verdict", "compiling", "waited", "cpu"))
            print(f"{kernel:12} {found['what']:52}", *times, flush=True)
            jsonl.append(HERE / "results.jsonl", {**found, **about})


if __name__ == "__main__":
    main()
