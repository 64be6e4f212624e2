"""The forward ladder on the `paper` grid beside PyTorch's attention, and the README's ladder table from its rows.

python experiments/003_forward_paper/run.py measure     needs a GPU; some two minutes on an H100
python experiments/003_forward_paper/run.py table       rewrites the table in README.md from results.jsonl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

from sandbox import registry

HERE = Path(__file__).resolve().parent
README = HERE.parent.parent / "README.md"
BEGIN, END = "<!-- ladder: written by experiments/003_forward_paper/run.py table -->\n", "<!-- end of ladder -->"
WIDTHS = (64, 128, 256)


def measure() -> None:
    """Every forward kernel beside FlashAttention-2 and cuDNN as PyTorch has them, in one interleaved run."""
    options = ["--grid", "paper", "--peers", "sdpa-flash,sdpa-cudnn", "--seconds", "0.3", "--against", "sdpa-flash"]
    files = ["--out", str(HERE / "results.jsonl"), "--plot", str(HERE / "paper")]
    kernels = [name for name, kernel in registry.kernels().items() if kernel.computes == "forward"]
    subprocess.run([sys.executable, "-m", "sandbox", "bench", *kernels, *options, *files], check=True)


def table(rows: list[dict]) -> str:
    """Geometric means over the grid: TFLOP/s for each head width, and the ratio to FlashAttention-2."""
    speed = {(r["contender"], r["D"], r["Sq"], r["causal"]): r["tflops"] for r in rows if r["ok"]}
    contenders = [*dict.fromkeys(r["contender"] for r in rows)]
    lines = [
        "| rung | kernel | idea | D = 64 | D = 128 | D = 256 | of FlashAttention-2 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in contenders:
        points = {D: {key[2:]: t for key, t in speed.items() if key[:2] == (name, D)} for D in WIDTHS}
        means = [f"{geometric_mean(points[D].values()):.3g}" for D in WIDTHS]
        ratios = [
            f"{geometric_mean(t / speed['sdpa-flash', D, *point] for point, t in points[D].items()):.2f}"
            for D in WIDTHS
        ]
        kernel = registry.kernels().get(name)
        rung, idea = (str(kernel.rung), kernel.summary) if kernel else ("", "PyTorch's own")
        label = f"`{name}`" if kernel else {"sdpa-flash": "FlashAttention-2", "sdpa-cudnn": "cuDNN"}.get(name, name)
        lines.append(f"| {rung} | {label} | {idea} | {' | '.join(means)} | {' / '.join(ratios)} |")
    r = rows[0]
    grid = f"{len(speed) // len(contenders)} problems (16k tokens, hidden size 2048, S 512 … 16k, both masks)"
    ceiling = f"a matrix product reaches {r['ceiling_tflops']:.0f} in the same run"
    lines += ["", f"TFLOP/s, {r['dtype']}, geometric means over {grid}; {r['device']}, CUDA {r['cuda']}; {ceiling}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "table"])
    if parser.parse_args().what == "measure":
        measure()
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines()]
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{README} has no place for the table, between {BEGIN.strip()} and {END}")
    README.write_text(before + begin + table(rows) + end + after)


if __name__ == "__main__":
    main()
