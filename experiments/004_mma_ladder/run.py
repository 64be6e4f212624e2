"""The gain of each optimisation in `fwd_mma`: every step of steps.py in one interleaved run.

python experiments/004_mma_ladder/run.py measure     needs a GPU, some two minutes; continues an interrupted run
python experiments/004_mma_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/004_mma_ladder/run.py check       verifies the first and the last step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

from steps import LADDER, VARIANTS, WIDTHS, find

from sandbox.bench.steps import Ladder, problems
from sandbox.spec import Problem

SMALL = Problem(1, 2, 77, 150, 64, Hk=1, dtype="float16", causal="bottom-right")  # grouped heads, partial tiles
OTHERS = {"fwd_mma": "the kernel itself: the last step, and NaN and inf behind a mask do not reach the output",
          "sdpa-flash": "FlashAttention-2, PyTorch's kernel"}  # fmt: skip
MMA = Ladder(LADDER, find, WIDTHS, problems(WIDTHS), VARIANTS, OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=Ladder.COMMANDS)
    for line in MMA.run(
        parser.parse_args().command, Path(__file__), "mma ladder", small=SMALL, checked=(LADDER[0], LADDER[-1])
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
