"""Runs `watch` on the planted faults of the course, on the CPU backend, and stores what it finds.

python scripts/course.py measure [NUMBER ...]    runs the faults, all by default; writes scripts/course.jsonl
python scripts/course.py sanitize [NUMBER ...]   runs compute-sanitizer on them; writes scripts/course_gpu.jsonl
python scripts/course.py table                   writes docs/course.md from the stored rows

`measure` saves each fault over a correct version in a running session, as an editor does. `sanitize` needs a GPU; it
runs a launch of the smallest tile on a small problem under each tool, several at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from mutation import ROOT

from sandbox.bench.ladder import write_table
from sandbox.core import jsonl, registry
from sandbox.course import faults
from sandbox.course.faults import Fault
from sandbox.launch.dlpack import HOST
from sandbox.verify import compute_sanitizer
from sandbox.verify.sanitize import on_gpu, small_problems, small_tile
from sandbox.watch import session
from sandbox.watch.job import Job
from sandbox.watch.session import Iteration

ROWS = Path(__file__).with_name("course.jsonl")
GPU_ROWS = Path(__file__).with_name("course_gpu.jsonl")
TABLE = ROOT / "docs" / "course.md"
LIMIT_SECONDS = 5.0
_TOOL_SECONDS = 25.0  # limit of one tool of compute-sanitizer, for kernels that hang
_AT_ONCE = 10  # tools of compute-sanitizer
_NAME = "course"
Row = dict[str, Any]


def stored() -> list[Row]:
    """The rows of the last run of each fault."""
    return sorted(jsonl.read(ROWS), key=lambda row: row["number"])


def measure(numbers: Iterable[int]) -> Iterator[Row]:
    """A row for each fault, kernel by kernel."""
    chosen = [faults.get(number) for number in numbers]
    for kernel in dict.fromkeys(fault.kernel for fault in chosen):
        yield from _of_kernel([fault for fault in chosen if fault.kernel == kernel])


def _of_kernel(chosen: list[Fault]) -> Iterator[Row]:
    """The faults of one kernel in one session."""
    before = os.environ.get("SANDBOX_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        os.environ["SANDBOX_CACHE_DIR"] = cache  # nothing is compiled in advance
        name = f"{_NAME}_{chosen[0].kernel}"
        source = Path(folder) / f"{name}.cu"
        source.with_suffix(".py").write_text(chosen[0].correct(".py", name))
        source.write_text(chosen[0].correct(".cu", name))
        registry.add(Path(folder))
        kernel = registry.get(name)
        with closing(session.watch(kernel, Job(name, HOST, known=kernel.tiles))) as versions:
            _complete(versions)  # the first version: compiles and starts the workers
            for number, fault in enumerate(chosen):
                if number:
                    source.write_text(fault.correct(".cu", name))
                    _complete(versions)
                seconds = _cpu_seconds()
                source.write_text(fault.faulty(name))
                yield _row(fault, versions, seconds)
    del os.environ["SANDBOX_CACHE_DIR"]
    if before is not None:
        os.environ["SANDBOX_CACHE_DIR"] = before
    others = [path for path in os.environ.pop(registry.VARIABLE).split(os.pathsep) if Path(path).is_dir()]
    if others:
        os.environ[registry.VARIABLE] = os.pathsep.join(others)
    registry.forget()


def _complete(versions: Iterator[Iteration | None]) -> list[tuple[Iteration, float]]:
    """The results of the next version, each with the CPU seconds at its time."""
    found = []
    for now in versions:
        if now is not None:
            found.append((now, _cpu_seconds()))
            if not now.found.pending:
                break
    return found


def _row(fault: Fault, versions: Iterator[Iteration | None], before: float) -> Row:
    """What was found of a fault: the first failing result, and the last result within the limit."""
    failing = [(now, cpu) for now, cpu in _complete(versions) if not now.found.ok]
    row: Row = {
        "number": fault.number,
        "kernel": fault.kernel,
        "date": time.strftime("%Y-%m-%d"),
        "found": bool(failing),
    }
    if failing:
        (first, cpu), shown = failing[0], [now for now, _ in failing if now.latency <= LIMIT_SECONDS] or [failing[0][0]]
        said = sentence(shown[-1])
        row |= {"seconds": round(first.latency, 2), "cpu_seconds": round(cpu - before, 1), "tool": tool(first)}
        row |= {"first": sentence(first), "sentence": said, "said_by": tool(shown[-1])}
        row |= {"at": round(shown[-1].latency, 2), "right": is_right(fault, said)}
        row["ever_right"] = any(is_right(fault, sentence(now)) for now, _ in failing)
    return row


def sentence(now: Iteration) -> str:
    """The first sentence of a result, with the first two places of a finding."""
    found = now.found
    lines = found.message.splitlines()
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])  # where the first thread of a deadlock waits
    if found.findings:
        finding = found.findings[0]
        text = ", ".join([finding.what.partition("\n")[0], *(str(place) for place in finding.places[:2])])
    return text.replace(f"{ROOT}/", "").replace(f"{registry.folders()[-1]}/", "").replace(f"{_NAME}_", "")


def tool(now: Iteration) -> str:
    """Which tool found a fault."""
    stage = now.found.stage
    if stage == "wrong":
        return "comparison"
    if stage != "sanitize":
        return "runtime checks"
    what = now.found.findings[0].what
    return (
        "thread sanitizer"
        if "race" in what
        else "uninitialised memory"
        if "anything was" in what
        else "address sanitizer"
    )


def is_right(fault: Fault, said: str) -> bool:
    """Whether a sentence names the cause, or a line that the fault changes (or one next to it)."""
    lines = {int(number) for number in re.findall(rf"{fault.kernel}\.cu:(\d+)", said)}
    near = range(fault.lines.start - 1, fault.lines.stop + 1)
    return bool(re.search(fault.expected, said)) or bool(lines & {*near})


def sanitize(numbers: Iterable[int]) -> Iterator[Row]:
    """A row for each fault and tool of compute-sanitizer."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        for number in numbers:
            faults.start(number, Path(folder))
        registry.add(Path(folder))

        def inspected(job: tuple[int, str]) -> Row:
            number, tool = job
            kernel, started = registry.get(faults.get(number).name), time.perf_counter()
            tile = small_tile(kernel)
            inspection = on_gpu(tool, kernel, small_problems(kernel, tile)[0], tile, _TOOL_SECONDS)
            found = [
                ", ".join([f.what, *map(str, f.places[:2])]).replace(f"{folder}/", "") for f in inspection.findings
            ]
            seconds = round(time.perf_counter() - started, 1)
            return {
                "number": number,
                "tool": tool,
                "found": found[:1],
                "failed": inspection.message,
                "seconds": seconds,
            }

        yield from pool.map(inspected, [(number, tool) for number in numbers for tool in compute_sanitizer.TOOLS])


def on_the_gpu() -> dict[int, str]:
    """{fault: the tools of compute-sanitizer that report it}."""
    rows = jsonl.read(GPU_ROWS)
    numbers = dict.fromkeys(row["number"] for row in rows)
    return {n: ", ".join(row["tool"] for row in rows if row["number"] == n and row["found"]) or "-" for n in numbers}


def table(rows: list[Row]) -> str:
    """The rows as a table, with the counts below it."""
    titles = ("", "kernel", "topic", "found by", "seconds", "CPU seconds", "cause or line in the first sentence")
    lines = [f"| {' | '.join((*titles, 'compute-sanitizer'))} |", f"|{' --- |' * 8}"]
    gpu = on_the_gpu()
    for row in rows:
        fault = faults.get(row["number"])
        figures = ("-", "-", "-", "no")
        if row["found"]:
            figures = (
                row["tool"],
                f"{row['seconds']:.1f}",
                f"{row['cpu_seconds']:.1f}",
                "yes" if row["right"] else "no",
            )
        cells = (
            f"{fault.number}{' *' if fault.later else ''}",
            f"`{fault.kernel}`",
            fault.topic,
            *figures,
            gpu.get(fault.number, "not run"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", counted(rows), ""])


def counted(rows: list[Row]) -> str:
    """How many faults were found in time, and with the cause."""
    in_time = [row for row in rows if row["found"] and row["seconds"] <= LIMIT_SECONDS]
    right = [row for row in in_time if row["right"]]
    later = [row for row in rows if faults.get(row["number"]).later]
    text = "{} found within {:.0f} s, {} with the cause or the line"
    said = f"{len(in_time)} of {text.format(len(rows), LIMIT_SECONDS, len(right))}"
    if later:
        quick, explained = (sum(row in some for row in later) for some in (in_time, right))
        said += f"; of the {len(later)} planted after the tools were finished (*), "
        said += text.format(quick, LIMIT_SECONDS, explained)
    return f"{said}."


def _cpu_seconds() -> float:
    """CPU time of this process and its descendants."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(ticks.get(pid, 0) for pid in own) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "sanitize", "table"])
    parser.add_argument("numbers", nargs="*", type=int, help="numbers of faults")
    arguments = parser.parse_args()
    if arguments.what == "table":
        write_table(TABLE, "planted faults", Path(__file__), table(stored()))
        return
    chosen = arguments.numbers or list(faults.every())
    measuring = arguments.what == "measure"
    path, kept = (ROWS, stored()) if measuring else (GPU_ROWS, jsonl.read(GPU_ROWS))
    with jsonl.locked(path) as file:
        file.truncate(0)
        for row in kept:
            if row["number"] not in chosen:
                jsonl.add(file, row)
    for row in (measure if measuring else sanitize)(chosen):
        jsonl.append(path, row)
        shown = ("number", "seconds", "cpu_seconds", "tool", "right", "sentence", "found", "failed")
        print(*(row[name] for name in shown if name in row), flush=True)


if __name__ == "__main__":
    main()
