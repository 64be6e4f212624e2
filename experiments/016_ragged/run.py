"""The grid `ragged`: ragged batches and dense batches of the same size, forward and backward. See README.md.

python experiments/016_ragged/run.py measure    needs a GPU; one minute on an H200; rows go to results.jsonl
python experiments/016_ragged/run.py table      writes the table of README.md
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from sandbox import Problem
from sandbox.bench import ladder
from sandbox.bench.ragged import DOCUMENTS, DRAWN
from sandbox.bench.rows import by_problem, read_rows

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
PACKAGES = HERE.parents[1] / "sandbox" / "bench" / "flash_attention_peers.py"
KERNELS = {"forward": "fwd_wgmma", "backward": "bwd_wgmma"}
NAMES = {DRAWN: "16 of 359 … 3532", DOCUMENTS: "20 documents"}


def measure() -> int:
    worst = 0
    for computes, kernel in KERNELS.items():
        options = [
            kernel,
            "--sample",
            "0",
            "--grid",
            "ragged",
            "--dtype",
            "bfloat16",
            "--peers",
            f"varlen,{PACKAGES}",
            "--out",
            str(ROWS),
        ]
        options += ["--backward"] if computes == "backward" else []
        worst = max(worst, subprocess.run([sys.executable, "-m", "sandbox", "bench", *options], check=False).returncode)
    return worst


def describe(p: Problem) -> str:
    lengths = tuple(n for n, _ in p.lengths or ())
    name = NAMES.get(lengths) or f"{p.B} of {p.Sq}, {'ragged' if lengths else 'dense'}"
    heads = f"H{p.H}" if p.Hk == p.H else f"H{p.H}/{p.Hk}"
    return f"{name}, {heads} D{p.D}{', causal' if p.causal else ''}"


def table() -> str:
    """TFLOP/s; dense batches follow the ragged ones of the same size."""
    rows = read_rows(ROWS)
    lines = ["| batch, bfloat16 | forward | FlashAttention-4 | backward | FlashAttention-4 |", "| --- |" + " --- |" * 4]
    found = {computes: by_problem([r for r in rows if r["computes"] == computes]) for computes in KERNELS}
    for problem in found["forward"]:
        cells = []
        for computes, kernel in KERNELS.items():
            there = found[computes].get(problem, {})
            cells += [f"{there[name]['tflops']:.0f}" if name in there else "–" for name in (kernel, "fa4")]
        lines.append(f"| {describe(problem)} | {' | '.join(cells)} |")
    last = rows[-1]
    tops = sorted(row["ceiling_tflops"] for row in rows)
    caption = f"{last['device']}, CUDA {last['cuda']}; a matrix product reaches {tops[0]:.0f} … {tops[-1]:.0f} TFLOP/s."
    return "\n".join([*lines, "", f"TFLOP/s; {caption}"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    status = measure() if parser.parse_args().what == "measure" else 0
    ladder.write_table(HERE / "README.md", "batches", Path(__file__), table())
    return status


if __name__ == "__main__":
    sys.exit(main())
