"""What marks cost each kernel, and the timelines that they show. See README.md beside this file.

python experiments/018_timeline/run.py     a minute on a GPU; rows, pictures and traces beside it
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from sandbox.bench import environment
from sandbox.core import jsonl, registry
from sandbox.core.errors import SandboxError, UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.spec import Problem
from sandbox.timeline import plot, record, report, trace
from sandbox.verify.check import pick_device

HERE = Path(__file__).resolve().parent
KERNELS = ("fwd_wgmma", "bwd_wgmma", "fwd_mma", "bwd_mma")


def problems(small: bool) -> list[Problem]:
    """16k tokens in each of two widths and masks; small ones for the CPU backend."""
    sizes = [(1, 1, 256, 64)] if small else [(4, 32, 4096, 64), (4, 16, 4096, 128)]
    plain = [Problem(B, H, S, S, D, dtype="float16") for B, H, S, D in sizes]
    return [*plain, *(dataclasses.replace(p, causal="bottom-right") for p in plain)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for rows, pictures and traces")
    asked = parser.parse_args()
    try:
        device = pick_device(asked.backend)
    except SandboxError as error:
        parser.exit(1, f"{error}\n")
    for name in KERNELS:
        for problem in problems(small=asked.backend == "cpu"):
            kernel = registry.get(name)
            try:
                tile = pipeline.tile_on(device, kernel, problem)
            except UnsupportedProblem as error:
                print(error)
                continue
            found = record.record(kernel, problem, tile, device)
            row = {**report.as_json(found), "problem": str(problem), "tile": str(tile)}
            del row["lanes"], row["longest_waits"]
            row["shares"] = [dataclasses.asdict(share) for share in row["shares"]]
            jsonl.append(asked.out / "results.jsonl", {**environment.describe(), **row})
            prefix = asked.out / f"{name}-D{problem.D}{'-causal' if problem.causal else ''}"
            plot.draw(found, prefix)
            trace.write(found, prefix.with_suffix(".trace.json"))
            slowdown = "-" if found.slowdown is None else f"{found.slowdown:+.1%}"
            print(f"{name:10} {problem!s:36} {slowdown:>7}  same bits: {found.same}", flush=True)


if __name__ == "__main__":
    main()
