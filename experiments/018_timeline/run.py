"""The cost of TIMELINE marks in each kernel, and timelines of one block. See README.md beside this file.

python experiments/018_timeline/run.py           one minute on a GPU; writes rows and tracks
python experiments/018_timeline/run.py --draw    draws the stored tracks, on any machine
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from sandbox.bench import environment
from sandbox.core import jsonl, picture, registry
from sandbox.core.errors import SandboxError, UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.launch.dlpack import Device
from sandbox.spec import Problem
from sandbox.timeline import plot, record, recording, report
from sandbox.verify.check import pick_device

HERE = Path(__file__).resolve().parent
KERNELS = ("fwd_wgmma", "bwd_wgmma", "fwd_mma", "bwd_mma")
BETWEEN = (20_000, 30_000)  # cycles since the block's first mark that a figure shows


def problems(small: bool) -> list[Problem]:
    """8k tokens at two head widths, with and without mask; small problems for the CPU backend."""
    sizes = [(1, 1, 256, 64)] if small else [(2, 16, 4096, 128), (2, 32, 4096, 64)]
    plain = [Problem(B, H, S, S, D, dtype="float16") for B, H, S, D in sizes]
    return [*plain, *(dataclasses.replace(p, causal="bottom-right") for p in plain)]


def measure(name: str, problem: Problem, device: Device, prefix: Path) -> None:
    """Appends a row to results.jsonl; stores the tracks of a block in PREFIX.json.gz."""
    kernel = registry.get(name)
    try:
        tile = pipeline.tile_on(device, kernel, problem)
    except UnsupportedProblem as error:
        print(error)
        return
    found = record.record(kernel, problem, tile, device, [0, math.prod(kernel.grid(problem, tile)) // 2])
    row = {**report.as_json(found), "problem": str(problem), "tile": str(tile)}
    del row["tracks"], row["longest_waits"]
    row["shares"] = [dataclasses.asdict(share) for share in row["shares"]]
    jsonl.append(prefix.parent / "results.jsonl", {**environment.describe(), **row})
    last = found.tracks[-1].block
    tracks = tuple(track for track in found.tracks if track.block == last)
    recording.save(dataclasses.replace(found, tracks=tracks), prefix.with_suffix(".json.gz"))
    slowdown = "-" if found.slowdown is None else f"{found.slowdown:+.1%}"
    print(f"{name:10} {problem!s:36} {slowdown:>7}  same bits: {found.same}", flush=True)


def draw(found: record.Timeline, prefix: Path) -> None:
    begin = min(track.steps[0].begin for track in found.tracks)
    window = (begin + BETWEEN[0], begin + BETWEEN[1]) if found.rate else None
    picture.compact(plot.draw(found, prefix, window))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--draw", action="store_true", help="draw stored tracks, measure nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for rows, tracks and figures")
    options = parser.parse_args()
    small = options.backend == "cpu"
    entries = [
        (name, problem, options.out / f"{name}-D{problem.D}{'-causal' if problem.causal else ''}")
        for name in KERNELS
        for problem in problems(small)
    ]
    if options.draw:
        for _, _, prefix in entries:
            if (stored := prefix.with_suffix(".json.gz")).is_file():
                draw(recording.load(stored), prefix)
        return
    try:
        device = pick_device(options.backend)
    except SandboxError as error:
        parser.exit(1, f"{error}\n")
    for name, problem, prefix in entries:
        measure(name, problem, device, prefix)


if __name__ == "__main__":
    main()
