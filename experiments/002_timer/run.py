"""Does `sandbox.bench.timing` agree with `triton.testing.do_bench`? See README.md beside this file. Needs a GPU.

python experiments/002_timer/run.py            prints a table and appends rows to results.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from sandbox import Problem
from sandbox.bench import benchmark, environment
from sandbox.bench.timing import Events, Limits, Timing, measure
from sandbox.core import registry

HERE = Path(__file__).resolve().parent
PROBLEMS = [
    Problem(B, H, S, S, D, dtype="float16", causal=causal)
    for B, H, S, D in (
        (1, 12, 256, 64),
        (1, 12, 1024, 64),
        (4, 32, 1024, 64),
        (4, 32, 4096, 64),
        (4, 16, 4096, 128),
        (1, 8, 16384, 256),
    )
    for causal in (False, "bottom-right")
]
REPEATS = 15


def ours(launch: Callable[[], object], stopwatch: Events) -> float:
    """Median in milliseconds of samples over 20 ms, as `do_bench` below, without stopping early."""
    samples = measure({"": stopwatch.ready(launch)}, stopwatch, Limits(noise=-1, rounds=500, seconds=0.02))
    return Timing.of(samples[""]).median * 1e3


def theirs(launch: Callable[[], object], stopwatch: Events) -> float:
    """Median in milliseconds by Triton."""
    from triton.testing import do_bench

    return do_bench(launch, warmup=5, rep=20, return_mode="median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl", help="append rows to this file")
    out = parser.parse_args().out
    where, stopwatch = environment.describe(), Events()
    timers = {"sandbox": ours, "do_bench": theirs}
    (contender,) = benchmark.kernel_contenders([registry.get("fwd_mma")])
    worst = 0.0
    with out.open("a") as file:
        for problem in PROBLEMS:
            q, k, v = benchmark.make_inputs(problem)
            launch = contender.prepare(problem, q, k, v).launch
            times: dict[str, list[float]] = {name: [] for name in timers}
            for repeat in range(REPEATS + 1):  # alternating; the first is the warm-up
                for name, timer in timers.items():
                    ms = timer(launch, stopwatch)
                    times[name] += [ms] if repeat else []
            medians = {name: statistics.median(values) for name, values in times.items()}
            ratio = medians["sandbox"] / medians["do_bench"]
            worst = max(worst, abs(ratio - 1))
            spread = {name: (max(values) - min(values)) / medians[name] for name, values in times.items()}
            row = {
                "problem": str(problem),
                "contender": contender.name,
                "ratio": ratio,
                "ms": times,
                "clocks_after": environment.clocks(),
                **where,
            }
            file.write(json.dumps(row) + "\n")
            print(
                f"{problem!s:36}  sandbox {medians['sandbox']:8.4f} ms  do_bench {medians['do_bench']:8.4f} ms  "
                f"ratio {ratio:.4f}  spread {spread['sandbox']:.1%}, {spread['do_bench']:.1%}",
                flush=True,
            )
    print(f"largest difference {worst:.1%}")


if __name__ == "__main__":
    main()
