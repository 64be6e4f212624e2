"""The gain of each idea in `fwd_wgmma`: every step of hopper_ladder.py in one interleaved run.

python experiments/023_hopper_ladder/run.py measure     needs a Hopper GPU, about two minutes; continues a run
python experiments/023_hopper_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/023_hopper_ladder/run.py check       verifies every step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hopper_ladder import LADDER, PLAIN, WIDTHS, tiles

from sandbox.bench.steps import Ladder, Step, problems
from sandbox.core import registry
from sandbox.spec import Kernel, Tile

registry.add(Path(__file__).resolve().parent)
registry.add(registry.FOLDER / "course")  # hopper_plain
STEPS = (*PLAIN, *LADDER)
OTHERS = {"fwd_wgmma": "the kernel itself: its tile is chosen for the problem", "sdpa-cudnn": "PyTorch's kernel"}


def find(step: Step, D: int) -> tuple[Kernel, Tile]:
    """The kernel and tile of a step at head dimension D."""
    if step in PLAIN:
        plain = registry.get("hopper_plain")
        return plain, Tile(**{**plain.tiles[0], **step.numbers(D)})
    return registry.get("hopper_ladder"), tiles(D)[step.name]


HOPPER = Ladder(STEPS, find, WIDTHS, problems(WIDTHS), others=OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=Ladder.COMMANDS)
    for line in HOPPER.run(parser.parse_args().command, Path(__file__), "hopper ladder"):
        print(line, flush=True)


if __name__ == "__main__":
    main()
