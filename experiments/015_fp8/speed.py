"""The speed of the float8 forward beside the bfloat16 forward in one run, and its tables and figure.

python experiments/015_fp8/speed.py measure [--out ROWS.jsonl]   needs an H200, one minute; rows go to speed.jsonl
python experiments/015_fp8/speed.py table     writes the tables in README.md and docs/ladders.md, and speed.png

The tables and the figure use the newest run's rows of speed.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from statistics import geometric_mean

from sandbox import Problem
from sandbox.bench import benchmark, ladder, plot
from sandbox.bench.rows import read_rows, recorded
from sandbox.bench.timing import Limits
from sandbox.core import picture, registry

HERE = Path(__file__).resolve().parent
ROWS, LADDERS = HERE / "speed.jsonl", HERE.parent.parent / "docs" / "ladders.md"
WIDTHS, LENGTHS, MASKS = (64, 128, 256), (1024, 4096, 16384), (False, "bottom-right")
KERNELS = {"float8_e4m3": "fwd_wgmma_fp8", "bfloat16": "fwd_wgmma"}


def problems() -> list[Problem]:
    """16k tokens, hidden size 2048, each in float8 and in bfloat16."""
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for D, causal, S, dtype in itertools.product(WIDTHS, MASKS, LENGTHS, KERNELS)
    ]


def measure(file: Path) -> None:
    """Appends the rows of one run to `file` and prints them."""
    kernels = [registry.get(name) for name in KERNELS.values()]
    rows = benchmark.run(kernels, problems(), limits=Limits(seconds=0.1, rounds=60))
    for row in recorded((row for row in rows if row.contender == KERNELS[row.problem.dtype]), file):
        speed = f"{row['tflops']:.0f} TFLOP/s, product {row['ceiling_tflops']:.0f}" if row["ok"] else row["message"]
        print(row["dtype"], f"D{row['D']} S{row['Sq']} causal={row['causal']}", row["tile"], speed, flush=True)


def speeds(rows: list[ladder.Row]) -> dict[tuple[str, int, int, bool | str], float]:
    return {(r["dtype"], r["D"], r["Sq"], r["causal"]): r["tflops"] for r in rows if r["ok"]}


def means_table(rows: list[ladder.Row]) -> str:
    """Geometric means over the problems that both dtypes have a time for."""
    speed = speeds(rows)
    points = [key[1:] for key in speed if key[0] == "bfloat16" and ("float8_e4m3", *key[1:]) in speed]
    lines = [
        f"| rung | kernel | idea | {' | '.join(f'D = {D}' for D in WIDTHS)} | relative to bfloat16 |",
        f"| --- | --- | --- |{' --- |' * len(WIDTHS)} --- |",
    ]
    means = {
        dtype: [geometric_mean(speed[(dtype, *p)] for p in points if p[0] == D) for D in WIDTHS] for dtype in KERNELS
    }
    for dtype, name in KERNELS.items():
        kernel, own = registry.get(name), means[dtype]
        beside = " / ".join(f"{mean / of:.2f}" for mean, of in zip(own, means["bfloat16"], strict=True))
        shown = " | ".join(f"{mean:.0f}" for mean in own)
        lines.append(f"| {kernel.rung} | `{name}`, {dtype} | {kernel.summary} | {shown} | {beside} |")
    tops = {dtype: next(r["ceiling_tflops"] for r in rows if r["dtype"] == dtype) for dtype in KERNELS}
    every = [*itertools.product(WIDTHS, LENGTHS, MASKS)]
    left = [point for point in every if point not in points]
    missing = [f"D = {D}, S = {S}{', causal' if causal else ''}" for D, S, causal in left]
    what = "16k tokens, hidden size 2048, S 1024, 4096, 16384, with and without causal mask"
    left_out = f"; not measured: {'; '.join(missing)}" if missing else ""
    grid = f"{len(points)} of {len(every)} problems ({what}{left_out})"
    reached = " and ".join(f"{top:.0f} in {dtype}" for dtype, top in tops.items())
    where = f"{rows[-1]['device']}, CUDA {rows[-1]['cuda']}; matrix products reach {reached} in the same run"
    return "\n".join([*lines, "", f"TFLOP/s of the forward, geometric means for each D, {grid}; {where}."]) + "\n"


def points_table(rows: list[ladder.Row]) -> str:
    """TFLOP/s of float8 at each point, and relative to bfloat16."""
    speed = speeds(rows)
    lines = [f"| float8_e4m3 | {' | '.join(f'S = {S}' for S in LENGTHS)} |", f"| --- |{' --- |' * len(LENGTHS)}"]
    for D, causal in itertools.product(WIDTHS, MASKS):
        cells = []
        for S in LENGTHS:
            own, other = (speed.get((dtype, D, S, causal)) for dtype in KERNELS)
            cells.append(f"{own:.0f} ({own / other:.2f})" if own and other else "–")
        lines.append(f"| D = {D}{', causal' if causal else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("--out", type=Path, default=ROWS, help="append rows to this file")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.out)
    if arguments.out == ROWS:
        rows = ladder.newest_run(read_rows(ROWS))
        ladder.write_table(LADDERS, "float8 ladder", Path(__file__), means_table(rows))
        ladder.write_table(HERE / "README.md", "points", Path(__file__), points_table(rows))
        picture.compact(plot.draw(rows, HERE / "speed"))


if __name__ == "__main__":
    main()
