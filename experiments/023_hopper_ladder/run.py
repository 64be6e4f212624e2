"""The gain of each idea in `fwd_wgmma`: every step of hopper_ladder.py in one interleaved run.

python experiments/023_hopper_ladder/run.py measure     needs a Hopper GPU, about two minutes; continues a run
python experiments/023_hopper_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/023_hopper_ladder/run.py check       verifies every step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from hopper_ladder import LADDER, PLAIN, WIDTHS, tiles

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
registry.add(registry.FOLDER / "course")  # hopper_plain
STEPS = (*PLAIN, *LADDER)
OTHERS = {"fwd_wgmma": "the kernel itself: its tile is chosen for the problem", "sdpa-cudnn": "PyTorch's kernel"}


def find(step: Step, D: int) -> tuple[Kernel, Tile]:
    """The kernel and tile of a step at head dimension D."""
    if step in PLAIN:
        plain = registry.get("hopper_plain")
        return plain, Tile(**{**plain.tiles[0], **step.numbers(D)})
    return registry.get("hopper_ladder"), tiles(D)[step.name]


HOPPER = Ladder(STEPS, find, WIDTHS, PROBLEMS, others=OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table", "check"])
    what = parser.parse_args().what
    if what == "check":  # grouped heads, several work tiles per head, partial tiles
        small = Problem(1, 2, 277, 350, 64, Hk=1, dtype="float16", causal="bottom-right")
        for line in HOPPER.check(small, STEPS):
            print(line, flush=True)
        return
    if what == "measure":
        for line in HOPPER.measure(ROWS):
            print(line, flush=True)
    rows = read_rows(ROWS)
    write_table(HERE / "README.md", "hopper ladder", Path(__file__), HOPPER.gain_table(rows))
    if rows:
        write_table(
            HERE.parent.parent / "docs" / "ladders.md", "hopper ladder", Path(__file__), HOPPER.speed_table(rows)
        )


if __name__ == "__main__":
    main()
