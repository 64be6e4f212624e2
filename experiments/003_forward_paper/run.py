"""The forward ladder on the `paper` grid beside PyTorch's attention, and the tables of it from its rows.

python experiments/003_forward_paper/run.py measure     needs a GPU; some two minutes on an H100
python experiments/003_forward_paper/run.py table       rewrites the tables in README.md and docs/ from results.jsonl
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
PROJECT = HERE.parent.parent


def measure() -> None:
    """Every forward kernel beside FlashAttention-2 and cuDNN as PyTorch has them, in one interleaved run."""
    options = ["--grid", "paper", "--peers", "sdpa-flash,sdpa-cudnn", "--seconds", "0.3", "--against", "sdpa-flash"]
    files = ["--out", str(HERE / "results.jsonl")]
    kernels = [name for name, kernel in registry.kernels().items() if kernel.computes == "forward"]
    command = [sys.executable, "-m", "sandbox", "bench", *kernels, *options, *files]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "table"])
    if parser.parse_args().what == "measure":
        measure()
    rows = read_rows(HERE / "results.jsonl")
    short = [row for row in rows if row["contender"] != "sdpa-flash"]  # beside the faster of the two peers
    for page, shown, against in (("README.md", short, "sdpa-cudnn"), ("docs/ladders.md", rows, "sdpa-flash")):
        ladder.write_table(PROJECT / page, "ladder", Path(__file__), ladder.ladder_markdown(shown, against))
    plot.draw(rows, HERE / "paper")


if __name__ == "__main__":
    main()
