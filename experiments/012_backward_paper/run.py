"""The backward ladder on the `paper` grid beside PyTorch's attention, and the table of it from its rows.

python experiments/012_backward_paper/run.py measure     needs a GPU; some three minutes on an H100
python experiments/012_backward_paper/run.py table       rewrites the table in docs/ladders.md from results.jsonl

What follows `measure` goes to `bench`, and the table takes the newest run's rows, as in experiment 003.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from sandbox.bench import ladder, plot
from sandbox.bench.rows import read_rows
from sandbox.core import registry

HERE = Path(__file__).resolve().parent
LADDERS = HERE.parent.parent / "docs" / "ladders.md"


def measure(more: list[str]) -> None:
    """The rungs beside FlashAttention-2 and cuDNN as PyTorch has them, in one interleaved run; then the first, which
    would need minutes for the long problems, on the short ones."""
    whole = [name for name, k in registry.kernels().items() if k.computes == "backward" and k.rung > 1]
    bench(*whole, "--grid", "paper", "--peers", "sdpa-flash,sdpa-cudnn", "--seconds", "0.3", *more)
    for causal in ([], ["--causal"]):
        short = [f"{16384 // S},{2048 // D},{S},{D}" for D in (64, 128, 256) for S in (512, 1024)]
        shapes = [option for shape in short for option in ("--shape", shape)]
        bench("bwd_minimal", *shapes, *causal, *more, "--peers", "sdpa-flash", "--seconds", "0.1")


def bench(*arguments: str) -> None:
    options = ["--backward", "--against", "sdpa-flash", "--out", str(HERE / "results.jsonl")]
    subprocess.run([sys.executable, "-m", "sandbox", "bench", *options, *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "table"])
    arguments, more = parser.parse_known_args()
    if arguments.what == "measure":
        measure(more)
    rows = ladder.newest_run(read_rows(HERE / "results.jsonl"))
    ladder.write_table(LADDERS, "backward ladder", Path(__file__), ladder.ladder_markdown(rows, "sdpa-flash"))
    plot.draw(rows, HERE / "paper")


if __name__ == "__main__":
    main()
