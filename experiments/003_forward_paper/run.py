"""The forward kernels on the `paper` grid beside PyTorch's attention, and the tables and the figure of the rows.

python experiments/003_forward_paper/run.py measure     needs a GPU; some two minutes on an H100
python experiments/003_forward_paper/run.py table       writes the tables in README.md and docs/, and paper.png

Options after `measure` are passed to `bench`: --resume continues an interrupted run, --seconds 0.1 is quicker, --out
writes to another file, --peers sdpa-flash,sdpa-cudnn,sandbox/bench/flash_attention_peers.py adds FlashAttention's
packages. The tables use the rows of the newest commit and device in results.jsonl.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from sandbox.bench import ladder, markdown, plot
from sandbox.bench.rows import read_rows
from sandbox.core import picture, registry
from sandbox.engine import choose

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent
NOT_RUNGS = ("fwd_decode", "fwd_decode_wgmma")  # made for few queries


def measure(more: list[str]) -> None:
    """Every forward kernel beside FlashAttention-2 and cuDNN as PyTorch has them, in one interleaved run."""
    options = ["--grid", "paper", "--peers", "sdpa-flash,sdpa-cudnn", "--seconds", "0.3", "--against", "sdpa-flash"]
    files = ["--out", str(HERE / "results.jsonl")]
    rungs = [k.name for k in registry.kernels().values() if k.computes == "forward" and "float16" in k.dtypes]
    kernels = [name for name in rungs if name not in NOT_RUNGS]
    command = [sys.executable, "-m", "sandbox", "bench", *kernels, *options, *files, *more]
    subprocess.run(command, check=True)


def table() -> None:
    rows = ladder.newest_run(read_rows(HERE / "results.jsonl"))
    short = [row for row in rows if row["contender"] != "sdpa-flash"]  # README.md: the faster of PyTorch's two
    for page, shown, against in (("README.md", short, "sdpa-cudnn"), ("docs/ladders.md", rows, "sdpa-flash")):
        ladder.write_table(PROJECT / page, "ladder", Path(__file__), ladder.ladder_markdown(shown, against))
    again = markdown.of_chosen(
        read_rows(HERE / "rerun.jsonl"), lambda p: choose.choose_kernel(p, "forward", (9, 0)).name
    )
    texts = {
        "points": markdown.points_markdown(rows, "fwd_wgmma", ["sdpa-cudnn", "fa4"]),
        "rerun": markdown.points_markdown(again, "attention", ["sdpa-cudnn", "fa4"]),
        "problems": markdown.problems_markdown(read_rows(HERE / "real.jsonl"), ["fwd_wgmma", "sdpa-cudnn", "fa4"]),
    }
    for name, text in texts.items():
        ladder.write_table(HERE / "README.md", name, Path(__file__), text)
    picture.compact(plot.draw(rows, HERE / "paper"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    arguments, more = parser.parse_known_args()
    if arguments.what == "measure":
        measure(more)
    table()


if __name__ == "__main__":
    main()
