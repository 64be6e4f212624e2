"""The job of `watch`: what to examine, and on which problems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..launch.dlpack import Device
from ..verify.cases import Case
from ..verify.suite import suite_of


@dataclass(frozen=True)
class Job:
    """What to examine. `problem` replaces the quick cases; `seconds`: time limit of one run. Tiles of the spec that are
    not in `known` are new, and each is examined. `gpu_lock`: a file; of the workers that share it, one at a time uses
    the GPU, so that they do not disturb each other's times. `share`: (index, number of workers) of a first verdict:
    the workers divide the binaries, and with them the cases, among themselves."""

    kernel: str
    device: Device
    problem: Problem | None = None
    tile: Tile | None = None
    seconds: float = 10.0
    known: tuple[Tile, ...] | None = None  # None: all of them
    gpu_lock: Path | None = None
    share: tuple[int, int] = (0, 1)


def quick_cases(kernel: Kernel, device: Device) -> list[Case]:
    """One case to time, and small ones."""
    return suite_of(kernel).quick_cases(kernel, device)


def tile_case(kernel: Kernel, tile: Tile) -> Case:
    """A small case for `tile`."""
    return suite_of(kernel).tile_case(kernel, tile)
