"""The gain of each optimisation in `fwd_mma`: every step of steps.py in one interleaved run.

python experiments/004_mma_ladder/run.py measure     needs a GPU, some two minutes; continues an interrupted run
python experiments/004_mma_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/004_mma_ladder/run.py check       verifies the first and the last step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from steps import LADDER, VARIANTS, WIDTHS, find

from sandbox.bench.ladder import write_table
from sandbox.bench.rows import read_rows
from sandbox.bench.steps import Ladder
from sandbox.spec import Problem

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
PROBLEMS = [
    Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)
    for D, causal, S in itertools.product(WIDTHS, (False, "bottom-right"), (1024, 4096, 16384))
]
OTHERS = {"fwd_mma": "the kernel itself: the last step, and NaN and inf behind a mask do not reach the output",
          "sdpa-flash": "FlashAttention-2, PyTorch's kernel"}  # fmt: skip
MMA = Ladder(LADDER, find, WIDTHS, PROBLEMS, VARIANTS, OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table", "check"])
    what = parser.parse_args().what
    if what == "check":  # grouped heads, causal, ragged tiles
        small = Problem(1, 2, 77, 150, 64, Hk=1, dtype="float16", causal="bottom-right")
        for line in MMA.check(small, (LADDER[0], LADDER[-1])):
            print(line, flush=True)
        return
    if what == "measure":
        for line in MMA.measure(ROWS):
            print(line, flush=True)
    rows = read_rows(ROWS)
    write_table(HERE / "README.md", "mma ladder", Path(__file__), MMA.gain_table(rows))
    if rows:
        write_table(HERE.parent.parent / "docs" / "ladders.md", "mma ladder", Path(__file__), MMA.speed_table(rows))


if __name__ == "__main__":
    main()
