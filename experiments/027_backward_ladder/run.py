"""The gain of the ideas in the mainloop of `bwd_wgmma`: every step of bwd_ladder.py in one interleaved run.

python experiments/027_backward_ladder/run.py measure     needs a Hopper GPU, about a minute; continues a run
python experiments/027_backward_ladder/run.py table       writes the tables in README.md and docs/ladders.md
python experiments/027_backward_ladder/run.py check       verifies every step on a small problem, no GPU
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bwd_ladder import LADDER, WIDTHS, tiles

from sandbox.bench.steps import Ladder, Step, problems
from sandbox.core import registry
from sandbox.spec import Kernel, Tile

registry.add(Path(__file__).resolve().parent)
OTHERS = {
    "bwd_wgmma": "the kernel itself",
    "bwd_wgmma_persistent": "persistent blocks; D = 64",
    "sdpa-cudnn": "PyTorch's kernel",
}


def find(step: Step, D: int) -> tuple[Kernel, Tile] | None:
    """The kernel and tile of a step at head dimension D."""
    tile = tiles(D).get(step.name)
    return (registry.get("bwd_ladder"), tile) if tile else None


BACKWARD = Ladder(LADDER, find, WIDTHS, problems(WIDTHS), others=OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=Ladder.COMMANDS)
    for line in BACKWARD.run(parser.parse_args().command, Path(__file__), "backward steps", seconds=0.1):
        print(line, flush=True)


if __name__ == "__main__":
    main()
