"""Compare the speed of attention in several checkouts, alternating between them on one GPU.

python scripts/compare_speed.py old=../old new=. --shape 2,16,8192,128 --causal --backward --processes 3

Each checkout has processes of its own, which import it and make the same inputs. In each round of a problem every
process times it once, in an order that rotates: replays of a CUDA graph of many calls, without an L2 flush. Printed are
the median over rounds, then over processes, and the range of the processes' ratios to the first checkout. Two processes
of the same checkout differ by 1 to 3%: smaller differences need several `--processes`. Without a GPU, the CPU backend's
times show only that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

GRAPH_SECONDS = 2e-3  # duration of a graph's calls


# ---- a process of one checkout: reads a number of a problem, times it, prints µs and the sum of the result


def call_of(given: dict[str, Any], shape: str) -> Callable[[], object]:
    """A call of the checkout's public functions, whose inputs exist."""
    import torch

    import sandbox
    from sandbox.spec import Problem

    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = Problem.from_shape(shape, dtype=given["dtype"])
    torch.manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device).to(getattr(torch, p.dtype))

    q, options = drawn(p.B, p.H, p.Sq, p.D), {"causal": given["causal"], **given["options"]}
    if given["kernel"]:
        options["kernel"] = given["kernel"]
    if size := given["page_size"]:
        table = torch.randperm(p.B * p.Sk // size, device=device).to(torch.int32).view(p.B, -1)
        lengths = torch.full((p.B,), p.Sk, dtype=torch.int32, device=device)
        k, v = (drawn(p.B * p.Sk // size, size, p.Hk, width) for width in (p.D, p.Dv))
        return lambda: sandbox.attention_paged(q, k, v, table, lengths, **options)
    k, v = (drawn(p.B, p.Hk, p.Sk, width) for width in (p.D, p.Dv))
    if not given["backward"]:
        return lambda: sandbox.attention_forward(q, k, v, **options)
    dout, forward = drawn(p.B, p.H, p.Sq, p.Dv), {name: x for name, x in options.items() if name != "kernel"}
    out, lse = sandbox.attention_forward(q, k, v, **forward)
    return lambda: sandbox.attention_backward(dout, q, k, v, out, lse, **options)


def timer_of(call: Callable[[], object], seconds: float) -> Callable[[], float]:
    """A function that times the call for so many seconds and returns µs per call."""
    import torch

    def elapsed(run: Callable[[], object]) -> float:
        if not torch.cuda.is_available():
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) * 1e-3

    call()  # compiles
    one = elapsed(call)
    count = max(1, min(200, round(GRAPH_SECONDS / one)))
    repeats = max(1, min(1000, round(seconds / (one * count))))

    def calls() -> None:
        for _ in range(count):
            call()

    if torch.cuda.is_available():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return lambda: statistics.median(elapsed(graph.replay) for _ in range(repeats)) / count * 1e6
    return lambda: statistics.median(elapsed(calls) for _ in range(repeats)) / count * 1e6


def total_of(result: Any) -> float:
    """The sum of the absolute values of the first array of a result."""
    first = result[0] if isinstance(result, tuple) else result
    return float(first.double().abs().sum())


def serve(given: dict[str, Any]) -> None:
    """Times problem i for each line i of standard input; keeps the inputs of the last one."""
    import torch

    import sandbox
    from sandbox.core.errors import SandboxError

    if Path(sandbox.__file__).resolve().parents[1] != Path.cwd():
        raise SystemExit(f"{Path.cwd()} has no package sandbox: {sandbox.__file__} was imported")
    timers: dict[str, tuple[Callable[[], float], float]] = {}
    for line in sys.stdin:
        if line not in timers:
            timers.clear()
            gc.collect()
            torch.cuda.empty_cache()  # the other processes need the memory of the inputs
            try:
                call = call_of(given, given["shapes"][int(line)])
                timers[line] = timer_of(call, given["seconds"]), total_of(call())
            except (SandboxError, TypeError) as error:
                raise SystemExit(f"{Path.cwd()}: {error}") from None
        timer, total = timers[line]
        print(timer(), total, flush=True)


# ---- the process that alternates


class Worker(NamedTuple):
    """A process of a checkout."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, tree: Path, given: dict[str, Any]) -> Worker:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", json.dumps(given)]
        return cls(name, subprocess.Popen(command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE,
                                          stdout=subprocess.PIPE))  # fmt: skip

    def time(self, i: int) -> tuple[float, float]:
        """µs of problem i, and the sum of its result. Raises SystemExit if the process has ended; it has said why."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{i}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of {self.name} ended with status {self.process.wait()}")
        us, total = map(float, answer.split())
        return us, total


def compare(workers: Sequence[Worker], i: int, rounds: int) -> dict[str, list[float]]:
    """The median µs of problem i in each process, by the checkout's name."""
    times: dict[int, list[float]] = {n: [] for n in range(len(workers))}
    totals = [worker.time(i)[1] for worker in workers]  # compiles, and warms up
    if not max(totals) <= 1.01 * min(totals):
        found = ", ".join(f"{worker.name} {total:g}" for worker, total in zip(workers, totals, strict=True))
        print(f"the results differ: sums of the absolute values are {found}", file=sys.stderr)
    for turn in range(rounds):
        for n in (*range(turn % len(workers), len(workers)), *range(turn % len(workers))):
            times[n].append(workers[n].time(i)[0])
    medians: dict[str, list[float]] = {}
    for n, worker in enumerate(workers):
        medians.setdefault(worker.name, []).append(statistics.median(times[n]))
    return medians


def line_of(shape: str, found: dict[str, list[float]]) -> str:
    """The times of a problem, and the speed relative to the first checkout."""
    first, *others = found
    base = statistics.median(found[first])
    parts = [f"{first} {base:.1f} us"]
    for name in others:
        ratios = [a / b for a, b in zip(found[first], found[name], strict=True)]
        spread = f" ({min(ratios):.3f} ... {max(ratios):.3f})" if len(ratios) > 1 else ""
        us = statistics.median(found[name])
        parts.append(f"{name} {us:.1f} us, speed {base / us:.3f}{spread}")
    return f"{shape:28s} {'; '.join(parts)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="A checkout; the first one is the base.")
    parser.add_argument("--shape", action="append", required=True, dest="shapes", help="As of `sandbox bench`.")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--page-size", type=int, default=0)
    parser.add_argument("--kernel", help="Default: the one that `attention` chooses.")
    parser.add_argument("--options", type=json.loads, default={}, help='Others, as JSON: {"window": [128, 0]}.')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="Of each checkout.")
    parser.add_argument("--seconds", type=float, default=0.1, help="GPU time of a process in a round.")
    parser.add_argument("--json", action="store_true", help="A line of JSON for each problem.")
    given = vars(parser.parse_args(arguments))
    named = [text.partition("=") for text in given.pop("trees")]
    trees = {name: Path(folder).resolve() for name, _, folder in named if name and folder}
    if len(trees) < len(named):
        parser.error("each checkout must be NAME=FOLDER, and each name occur once")
    if min(given["rounds"], given["processes"]) < 1:
        parser.error("--rounds and --processes must be at least 1")
    if given["backward"] and given["page_size"]:
        parser.error("--backward does not support --page-size")
    if missing := [str(tree) for tree in trees.values() if not (tree / "sandbox").is_dir()]:
        parser.error(f"no checkout with a package sandbox: {', '.join(missing)}")
    workers = [Worker.start(name, tree, given) for _ in range(given["processes"]) for name, tree in trees.items()]
    try:
        for i, shape in enumerate(given["shapes"]):
            found = compare(workers, i, given["rounds"])
            print(json.dumps({"shape": shape, "us": found}) if given["json"] else line_of(shape, found), flush=True)
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.communicate()  # closes its pipes


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
