"""The forward ladder on the `paper` grid beside PyTorch's attention, and the tables of it from its rows.

python experiments/003_forward_paper/run.py measure     needs a GPU; some two minutes on an H100
python experiments/003_forward_paper/run.py table       rewrites the tables in README.md and docs/ from results.jsonl

What follows `measure` goes to `bench`: --resume continues a run that was interrupted, --seconds 0.1 is quicker, --out
keeps the rows elsewhere, --peers sdpa-flash,sdpa-cudnn,sandbox/bench/flash_attention_peers.py has FlashAttention's own
packages beside it. Of the rows in results.jsonl the tables take those of the newest commit and device.
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


NOT_RUNGS = ("fwd_decode",)  # for few queries: it takes these problems, and is not made for them


def measure(more: list[str]) -> None:
    """Every forward kernel beside FlashAttention-2 and cuDNN as PyTorch has them, in one interleaved run."""
    options = ["--grid", "paper", "--peers", "sdpa-flash,sdpa-cudnn", "--seconds", "0.3", "--against", "sdpa-flash"]
    files = ["--out", str(HERE / "results.jsonl")]
    rungs = [k.name for k in registry.kernels().values() if k.computes == "forward" and "float16" in k.dtypes]
    kernels = [name for name in rungs if name not in NOT_RUNGS]
    command = [sys.executable, "-m", "sandbox", "bench", *kernels, *options, *files, *more]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["measure", "table"])
    arguments, more = parser.parse_known_args()
    if arguments.what == "measure":
        measure(more)
    rows = ladder.newest_run(read_rows(HERE / "results.jsonl"))
    short = [row for row in rows if row["contender"] != "sdpa-flash"]  # beside the faster of the two peers
    for page, shown, against in (("README.md", short, "sdpa-cudnn"), ("docs/ladders.md", rows, "sdpa-flash")):
        ladder.write_table(PROJECT / page, "ladder", Path(__file__), ladder.ladder_markdown(shown, against))
    plot.draw(rows, HERE / "paper")


if __name__ == "__main__":
    main()
