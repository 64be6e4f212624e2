"""The backward kernels on the `paper` grid beside PyTorch's attention, and the tables and the figure of the rows.

python experiments/012_backward_paper/run.py measure     needs a GPU; some three minutes on an H100
python experiments/012_backward_paper/run.py table       writes the tables (README.md, docs/ladders.md) and paper.png

Options after `measure` are passed to `bench`; the tables use the newest run's rows, as in experiment 003.
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
LADDERS = HERE.parent.parent / "docs" / "ladders.md"
DETERMINISTIC = "bwd_wgmma_deterministic"


def measure(more: list[str]) -> None:
    """The kernels beside FlashAttention-2 and cuDNN as PyTorch has them, in one interleaved run. `bwd_minimal`, which
    would take minutes for long sequences, is measured on the short ones."""
    whole = [name for name, k in registry.kernels().items() if k.computes == "backward" and k.rung > 1]
    bench(*whole, "--grid", "paper", "--peers", "sdpa-flash,sdpa-cudnn", "--seconds", "0.3", *more)
    for causal in ([], ["--causal"]):
        short = [f"{16384 // S},{2048 // D},{S},{D}" for D in (64, 128, 256) for S in (512, 1024)]
        shapes = [option for shape in short for option in ("--shape", shape)]
        bench("bwd_minimal", *shapes, *causal, *more, "--peers", "sdpa-flash", "--seconds", "0.1")


def bench(*arguments: str) -> None:
    options = ["--backward", "--against", "sdpa-flash", "--out", str(HERE / "results.jsonl")]
    subprocess.run([sys.executable, "-m", "sandbox", "bench", *options, *arguments], check=True)


def table() -> None:
    rows = ladder.newest_run(read_rows(HERE / "results.jsonl"))
    ladder.write_table(LADDERS, "backward ladder", Path(__file__), ladder.ladder_markdown(rows, "sdpa-flash"))
    again = markdown.of_chosen(
        read_rows(HERE / "rerun.jsonl"), lambda p: choose.choose_kernel(p, "backward", (9, 0)).name
    )
    narrow = read_rows(HERE / "d64_d128.jsonl")
    points = {
        "points": markdown.points_markdown(rows, "bwd_wgmma", ["sdpa-cudnn", "fa4"]),
        "deterministic": markdown.points_markdown(rows, DETERMINISTIC, ["bwd_wgmma"]),
        "rerun": markdown.points_markdown(again, "attention", ["sdpa-cudnn", "fa4"]),
        "d64 d128": markdown.points_markdown(narrow, "bwd_wgmma", ["sdpa-cudnn", "fa4"]),
        "d64 persistent": markdown.points_markdown(narrow, "bwd_wgmma_persistent", ["sdpa-cudnn", "fa4"]),
    }
    for name, text in points.items():
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
