"""The speed with invariant=True on sampled problems, relative to the default, or in a backward to deterministic=True.

python experiments/029_invariant/run.py measure     needs a GPU; 90 s with 16 cores; --count N drawn ones of a grid
python experiments/029_invariant/run.py table       writes the table in README.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import sandbox
from sandbox.api import plan
from sandbox.bench import environment
from sandbox.bench.ladder import write_table
from sandbox.bench.rows import read_rows
from sandbox.bench.sampled_shapes import sampled
from sandbox.bench.timing import Events, Limits, Timed, Timing, measure
from sandbox.core.errors import UnsupportedProblem
from sandbox.engine import choose, pipeline
from sandbox.spec import Problem

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
LIMITS = Limits(seconds=0.05, rounds=15)
FIXED = {
    "prefill": [
        Problem(16384 // S, 2048 // D, S, S, D, dtype="bfloat16", causal="bottom-right")
        for D in (64, 128, 256)
        for S in (1024, 4096, 16384)
    ],
    "decode": [
        Problem(B, H, 1, Sk, D, Hk=Hk, dtype="bfloat16")
        for B, H, Hk, Sk, D in (
            (1, 32, 8, 2048, 128), (1, 32, 8, 8192, 128), (1, 64, 8, 131072, 128), (8, 32, 8, 32768, 128),
            (16, 32, 8, 8192, 128), (128, 32, 8, 2048, 128), (4, 16, 16, 8192, 64), (8, 16, 4, 8192, 256),
        )
    ],
}  # fmt: skip


def problems(grid: str, count: int, seed: int) -> list[Problem]:
    """`count` problems that are drawn with `seed` ("real": training, prefill, …; "decode"), or the fixed ones."""
    drawn = "decode" if grid == "decode" else "real"
    return [*FIXED.get(grid, FIXED["prefill"][:6]), *sampled(drawn, count, seed, "bfloat16")]


def calls(p: Problem, grid: str) -> dict[str, Callable[[], object]]:
    """One call with invariant=True, and one, "default", without; of a backward, with deterministic=True."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((p.B, p.H, p.Sq, p.D), (p.B, p.Hk, p.Sk, p.D), (p.B, p.Hk, p.Sk, p.Dv))
    )
    options: dict[str, Any] = {"causal": p.causal}
    if p.key_lengths:
        options["key_lengths"] = torch.randint(
            1, p.Sk + 1, (p.B,), generator=generator, device="cuda", dtype=torch.int32
        )
    if grid != "backward":
        attend = partial(sandbox.attention_forward, q, k, v, **options)
        return {"default": attend, "invariant": partial(attend, invariant=True)}
    out, lse = sandbox.attention_forward(q, k, v, **options)
    dout = torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    gradients = partial(sandbox.attention_backward, dout, q, k, v, out, lse, **options)
    return {"default": partial(gradients, deterministic=True), "invariant": partial(gradients, invariant=True)}


def load(p: Problem, grid: str, invariant: bool) -> None:
    """Compiles and loads the kernel of a call."""
    p, device = replace(p, invariant=invariant), ("cuda", 0)
    if grid != "backward":
        p = plan.with_packed_heads(p)
    computes, deterministic = ("backward", not invariant) if grid == "backward" else ("forward", False)
    try:
        kernel = choose.choose_kernel(p, computes, pipeline.arch_of(device), deterministic)
        pipeline.load(kernel, pipeline.tile_on(device, kernel, p, tuned=True), p, device)
    except UnsupportedProblem:
        return  # the call reports it


def load_all(grids: list[str], count: int, seed: int) -> None:
    """All kernels, compiled in parallel."""
    jobs = [(p, grid, invariant) for grid in grids for p in problems(grid, count, seed) for invariant in (False, True)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: load(*job), jobs))


def rows(grid: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The measured rows of a grid."""
    import torch

    stopwatch, where = Events(), environment.describe()
    for p in problems(grid, count, seed):
        try:
            contenders = calls(p, grid)
            for call in contenders.values():
                call()
        except (UnsupportedProblem, torch.cuda.OutOfMemoryError) as reason:
            print(f"{grid} {p}: {reason}", flush=True)
            continue
        samples = measure({name: Timed(call) for name, call in contenders.items()}, stopwatch, LIMITS)
        seconds = {name: Timing.of(x).median for name, x in samples.items()}
        flops = p.flops_of("backward" if grid == "backward" else "forward")
        yield {"grid": grid, "problem": str(p), "D": p.D, "Sq": p.Sq, "flops": flops, "seconds": seconds, **where}


def ratio(row: dict[str, Any]) -> float:
    """The speed with invariant=True relative to the other call."""
    return float(row["seconds"]["default"] / row["seconds"]["invariant"])


def table(found: list[dict[str, Any]]) -> str:
    """Geometric means, lowest ratios and TFLOP/s of each grid."""
    if not found:
        return "Not measured yet.\n"
    lines = [
        "| grid | problems | invariant / default | lowest | TFLOP/s, default → invariant |",
        "| --- |" + " --- |" * 4,
    ]
    for grid in dict.fromkeys(row["grid"] for row in found):
        own = [row for row in found if row["grid"] == grid]
        speeds = [
            statistics.geometric_mean(row["flops"] / row["seconds"][name] * 1e-12 for row in own)
            for name in ("default", "invariant")
        ]
        worst = min(own, key=ratio)
        mean = statistics.geometric_mean(map(ratio, own))
        title = "backward, relative to `deterministic=True`" if grid == "backward" else grid
        lines.append(
            f"| {title} | {len(own)} | {mean:.3f} | {ratio(worst):.2f}: {worst['problem']} | "
            f"{speeds[0]:.1f} → {speeds[1]:.1f} |"
        )
    return "\n".join([*lines, "", f"bfloat16, {found[0]['device']}, geometric means."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("grids", nargs="*", default=["prefill", "decode", "backward"])
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROWS, help="its rows of the measured grids are replaced")
    given = parser.parse_args()
    found = read_rows(given.out)
    if given.what == "measure":
        load_all(given.grids, given.count, given.seed)
        for grid in given.grids:
            measured = []
            for row in rows(grid, given.count, given.seed):
                print(f"{grid} {row['problem']}: {ratio(row):.3f}", flush=True)
                measured.append(row)
            found = [row for row in found if row["grid"] != grid] + measured  # an interruption loses this grid only
            given.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(table(found))
    if given.what == "table":
        for page in (HERE / "README.md", HERE.parent.parent / "docs" / "bits.md"):
            write_table(page, "cost", Path(__file__), table(found))


if __name__ == "__main__":
    main()
