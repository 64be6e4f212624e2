"""What marks cost each kernel, and the timelines that they show. See README.md beside this file.

python experiments/018_timeline/run.py           a minute on a GPU; rows and lanes beside it
python experiments/018_timeline/run.py --draw    pictures and traces of the lanes that are there, on any machine
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
from pathlib import Path

from sandbox.bench import environment
from sandbox.core import jsonl, registry
from sandbox.core.errors import SandboxError, UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.launch.dlpack import Device
from sandbox.spec import Problem, Tile
from sandbox.timeline import plot, record, report, trace
from sandbox.verify.check import pick_device

HERE = Path(__file__).resolve().parent
KERNELS = ("fwd_wgmma", "bwd_wgmma", "fwd_mma", "bwd_mma")
BETWEEN = (20_000, 30_000)  # cycles since the block's first mark that a picture shows


def problems(small: bool) -> list[Problem]:
    """8k tokens in each of two widths and masks; small ones for the CPU backend."""
    sizes = [(1, 1, 256, 64)] if small else [(2, 16, 4096, 128), (2, 32, 4096, 64)]
    plain = [Problem(B, H, S, S, D, dtype="float16") for B, H, S, D in sizes]
    return [*plain, *(dataclasses.replace(p, causal="bottom-right") for p in plain)]


def measure(name: str, problem: Problem, device: Device, prefix: Path) -> None:
    """Adds a row beside `prefix`, and the lanes of two blocks to PREFIX.lanes.json.gz."""
    kernel = registry.get(name)
    try:
        tile = pipeline.tile_on(device, kernel, problem)
    except UnsupportedProblem as error:
        print(error)
        return
    found = record.record(kernel, problem, tile, device, [0, math.prod(kernel.grid(problem, tile)) // 2])
    row = {**report.as_json(found), "problem": str(problem), "tile": str(tile)}
    del row["lanes"], row["longest_waits"]
    row["shares"] = [dataclasses.asdict(share) for share in row["shares"]]
    jsonl.append(prefix.parent / "results.jsonl", {**environment.describe(), **row})
    lanes = [{**vars(lane), "steps": [dataclasses.astuple(step) for step in lane.steps]} for lane in found.lanes]
    held = {**vars(found), "problem": None, "tile": str(tile), "lanes": lanes}
    prefix.with_suffix(".lanes.json.gz").write_bytes(gzip.compress(json.dumps(held).encode()))
    slowdown = "-" if found.slowdown is None else f"{found.slowdown:+.1%}"
    print(f"{name:10} {problem!s:36} {slowdown:>7}  same bits: {found.same}", flush=True)


def held(problem: Problem, prefix: Path) -> record.Timeline:
    """What `measure` kept."""
    found = json.loads(gzip.decompress(prefix.with_suffix(".lanes.json.gz").read_bytes()))
    lanes = (
        record.Lane(**{**lane, "steps": tuple(record.Step(*step) for step in lane["steps"])}) for lane in found["lanes"]
    )
    return record.Timeline(**{**found, "problem": problem, "tile": Tile.parse(found["tile"]), "lanes": tuple(lanes)})


def draw(found: record.Timeline, prefix: Path) -> None:
    """The picture shows the last of the blocks, the trace all of them."""
    lanes = tuple(lane for lane in found.lanes if lane.block == found.lanes[-1].block)
    begin = min(lane.steps[0].begin for lane in lanes)
    window = (begin + BETWEEN[0], begin + BETWEEN[1]) if found.rate else None
    plot.draw(dataclasses.replace(found, lanes=lanes), prefix, window)
    trace.write(found, prefix.with_suffix(".trace.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--draw", action="store_true", help="measure nothing, draw what was measured")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for rows, lanes, pictures and traces")
    asked = parser.parse_args()
    small = asked.backend == "cpu"
    entries = [
        (name, problem, asked.out / f"{name}-D{problem.D}{'-causal' if problem.causal else ''}")
        for name in KERNELS
        for problem in problems(small)
    ]
    if asked.draw:
        for _, problem, prefix in entries:
            if prefix.with_suffix(".lanes.json.gz").is_file():
                draw(held(problem, prefix), prefix)
        return
    try:
        device = pick_device(asked.backend)
    except SandboxError as error:
        parser.exit(1, f"{error}\n")
    for name, problem, prefix in entries:
        measure(name, problem, device, prefix)


if __name__ == "__main__":
    main()
