"""The gain of the ideas in the mainloop of `bwd_wgmma`: every step of bwd_ladder.py in one interleaved run.

python experiments/027_backward_ladder/run.py measure     needs a Hopper GPU, about a minute; continues a run
python experiments/027_backward_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/027_backward_ladder/run.py check       verifies every step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from bwd_ladder import LADDER, WIDTHS, tiles

from sandbox.bench.ladder import write_table
from sandbox.bench.rows import read_rows
from sandbox.bench.steps import Ladder, Step
from sandbox.core import registry
from sandbox.spec import Kernel, Problem, Tile

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
PROBLEMS = [
    Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)
    for D, causal, S in itertools.product(WIDTHS, (False, "bottom-right"), (1024, 4096, 16384))
]
registry.add(HERE)
OTHERS = {
    "bwd_wgmma": "the kernel itself",
    "bwd_wgmma_persistent": "persistent blocks; D = 64",
    "sdpa-cudnn": "PyTorch's kernel",
}


def find(step: Step, D: int) -> tuple[Kernel, Tile] | None:
    """The kernel and tile of a step at head dimension D."""
    tile = tiles(D).get(step.name)
    return (registry.get("bwd_ladder"), tile) if tile else None


BACKWARD = Ladder(LADDER, find, WIDTHS, PROBLEMS, others=OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table", "check"])
    what = parser.parse_args().what
    if what == "check":  # grouped heads, several work tiles per head, partial tiles
        small = Problem(1, 2, 277, 350, 64, Hk=1, dtype="float16", causal="bottom-right")
        for line in BACKWARD.check(small, LADDER):
            print(line, flush=True)
        return
    if what == "measure":
        for line in BACKWARD.measure(ROWS, seconds=0.1):
            print(line, flush=True)
    rows = read_rows(ROWS)
    write_table(HERE / "README.md", "backward steps", Path(__file__), BACKWARD.gain_table(rows))
    if rows:
        page = HERE.parent.parent / "docs" / "ladders.md"
        write_table(page, "backward steps", Path(__file__), BACKWARD.speed_table(rows))


if __name__ == "__main__":
    main()
