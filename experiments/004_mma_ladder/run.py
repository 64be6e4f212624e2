"""The gain of each optimisation in `fwd_mma`: every step of steps.py in one interleaved run.

python experiments/004_mma_ladder/run.py measure     needs a GPU, some two minutes; continues an interrupted run
python experiments/004_mma_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/004_mma_ladder/run.py check       verifies the first and the last step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from steps import KERNEL, LADDER, VARIANTS, WIDTHS, Step, tiles

from sandbox.bench import benchmark, peers
from sandbox.bench.ladder import write_table
from sandbox.bench.peers import Contender, Ready
from sandbox.bench.rows import Row, by_problem, read_rows, recorded
from sandbox.bench.timing import Limits
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.engine import pipeline
from sandbox.launch import driver
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem
from sandbox.verify import check as checking
from sandbox.verify.cases import Case

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
PROBLEMS = [
    Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)
    for D, causal, S in itertools.product(WIDTHS, (False, "bottom-right"), (1024, 4096, 16384))
]
OTHERS = {"fwd_mma": "the kernel itself: the last step, and NaN and inf behind a mask do not reach the output",
          "sdpa-flash": "FlashAttention-2, PyTorch's kernel"}  # fmt: skip
Speeds = dict[Problem, float]  # TFLOP/s


# ---- measuring


def contender(step: Step) -> Contender:
    """A step as a contender of `bench`, under its own name, with its tile for the problem's head width."""

    def prepare(problem: Problem, *inputs: Any) -> Ready:
        tile = tiles(problem.D).get(step.name)
        if tile is None:
            raise UnsupportedProblem(f"{step.name}: changes nothing at D={problem.D}")
        [entry] = benchmark.kernel_contenders([KERNEL], [tile])
        return entry.prepare(problem, *inputs)

    return Contender(step.name, prepare, KERNEL.name)


def compile_all() -> None:
    """Fills the compile cache in parallel: compiled one after another, the steps would take most of the run."""
    arch = pipeline.arch_name(KERNEL, driver.device().arch)
    jobs = {(tile, p.D, p.causal) for p in PROBLEMS for tile in tiles(p.D).values()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: pipeline.compile(KERNEL, job[1], "float16", job[2], arch, job[0]), jobs))


def with_registers(rows: Iterable[Row]) -> Iterator[Row]:
    """Adds the registers and spills that the compiler reports."""
    kernels = {KERNEL.name: KERNEL, **registry.kernels()}
    for row in rows:
        if not row.tile:
            yield row
            continue
        p = row.problem
        r = pipeline.compile(kernels[row.kernel], p.D, p.dtype, p.causal, row.arch, row.tile).resources
        cost = {"registers": r.registers, "spills": r.spill_stores + r.spill_loads}
        yield replace(row, setting={**row.setting, **cost})


def measure() -> None:
    """Every step, `fwd_mma` and FlashAttention-2 in one interleaved run, each verified before and after."""
    contenders = [*map(contender, (*LADDER, *VARIANTS)), *benchmark.kernel_contenders([registry.get("fwd_mma")])]
    contenders.append(peers.PEERS["sdpa-flash"])
    left = benchmark.unmeasured(benchmark.matching_rows(read_rows(ROWS), PROBLEMS, "events"), PROBLEMS, contenders)
    if left:
        compile_all()
    wrong = 0
    for row in recorded(with_registers(benchmark.run((), left, contenders, limits=Limits(seconds=0.2))), ROWS):
        speed = f"{row['tflops']:.1f} TFLOP/s" if row["ms"] else row["message"]
        print(f"S{row['Sq']} D{row['D']} causal={row['causal']!s:12} {row['contender']:14} {speed}", flush=True)
        wrong += row["ok"] is False
    if wrong:
        sys.exit(f"{wrong} results are wrong or failed")


def check() -> None:
    """The plain kernel and the last step on the CPU backend: grouped heads, causal, ragged tiles."""
    problem = Problem(1, 2, 77, 150, 64, Hk=1, dtype="float16", causal="bottom-right")
    for name in (LADDER[0].name, LADDER[-1].name):
        result = checking.verify(KERNEL, Case(name, problem, layout="bshd"), HOST, tiles(problem.D)[name])
        print(f"{name}: error {result.error} bound {result.bound} {result.message}", flush=True)
        if not result.ok:
            sys.exit(f"{name} is wrong")


# ---- the tables


def speeds(rows: list[dict[str, Any]], name: str, D: int, causal: bool | None = None) -> Speeds:
    """TFLOP/s of `name` at head width D, with or without mask or (None) both; {} where it was not timed."""
    found = {p: there[name] for p, there in by_problem(rows).items() if p.D == D and name in there}
    return {p: r["tflops"] for p, r in found.items() if r["ok"] and causal in (None, bool(p.causal))}


def gain(fast: Speeds, slow: Speeds) -> str:
    """The geometric mean of the ratios, as ×1.23."""
    ratios = [fast[p] / slow[p] for p in fast if p in slow]
    return f"×{geometric_mean(ratios):.2f}" if ratios else "–"


def gains(rows: list[dict[str, Any]], D: int, causal: bool | None = None) -> dict[str, str]:
    """{step: its gain over the last timed step before it; variants and others: over the last step}."""
    found, below = {}, Speeds()
    for step in LADDER:
        there = speeds(rows, step.name, D, causal)
        found[step.name], below = gain(there, below), there or below
    return found | {name: gain(speeds(rows, name, D, causal), below) for name in (*(s.name for s in VARIANTS), *OTHERS)}


def registers(rows: list[dict[str, Any]], name: str) -> str:
    """The maximum over the masks, for each head width; * where registers are spilled."""
    cells = []
    for D in WIDTHS:
        counts = [there[name] for p, there in by_problem(rows).items() if p.D == D and "spills" in there.get(name, ())]
        mark = "*" if any(r["spills"] for r in counts) else ""
        cells.append(f"{max(r['registers'] for r in counts)}{mark}" if counts else "–")
    return "" if cells == ["–"] * len(cells) else " / ".join(cells)


def ladder_table(rows: list[dict[str, Any]]) -> str:
    """For docs/ladders.md: the speed of each step, its gain over the step before, and its registers."""
    columns = ["", "step", "idea", "D = 64", "gain", "D = 128", "gain", "registers"]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    all_gains = {D: gains(rows, D) for D in WIDTHS}
    contenders = [
        *((str(n), step.name, step.idea) for n, step in enumerate(LADDER)),
        *(("not kept", step.name, step.idea) for step in VARIANTS),
        *(("", name, idea) for name, idea in OTHERS.items()),
    ]
    for place, name, idea in contenders:
        cells = [place, name, idea]
        for D in WIDTHS:
            there = speeds(rows, name, D).values()
            cells += [f"{geometric_mean(there):.3g}" if there else "–", all_gains[D][name]]
        lines.append(f"| {' | '.join([*cells, registers(rows, name)])} |")
    r, lengths = rows[-1], ", ".join(str(S) for S in sorted({p.Sq for p in by_problem(rows)}))
    caption = (
        f"TFLOP/s, {r['dtype']}, geometric means over S {lengths} with and without causal mask (16k tokens, hidden"
        f" size 2048). A gain is relative to the step before; in the rows after step {len(LADDER) - 1}, to that step."
        " “–”: the step changes nothing at this D. Registers at D = 64 / 128; “*”: some are spilled."
        f" {r['device']}, CUDA {r['cuda']}; a matrix product reaches {r['ceiling_tflops']:.0f} in the same run."
    )
    return "\n".join([*lines, "", caption]) + "\n"


def gain_table(rows: list[dict[str, Any]]) -> str:
    """For README.md: predicted and measured gains, by head width and mask."""
    lines = ["| step | D = 64: predicted | no mask | causal | D = 128: predicted | no mask | causal |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    measured = {(D, causal): gains(rows, D, causal) for D in WIDTHS for causal in (False, True)}
    for step in (*LADDER[1:], *VARIANTS):
        cells = [
            f"×{step.predicted[i]:.2f} | {measured[D, False][step.name]} | {measured[D, True][step.name]}"
            for i, D in enumerate(WIDTHS)
        ]
        lines.append(f"| {step.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table", "check"])
    what = parser.parse_args().what
    if what == "check":
        check()
        return
    if what == "measure":
        measure()
    rows = read_rows(ROWS)
    write_table(HERE / "README.md", "mma ladder", Path(__file__), gain_table(rows))
    if rows:
        write_table(HERE.parent.parent / "docs" / "ladders.md", "mma ladder", Path(__file__), ladder_table(rows))


if __name__ == "__main__":
    main()
