"""The job of `watch`: what to examine, and on which problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..launch.dlpack import HOST, Device
from ..verify.cases import Case

_WIDTHS = (64, 128, 32, 16, 256)


@dataclass(frozen=True)
class Job:
    """What to examine. `problem` replaces the quick cases; `seconds`: time limit of one run. Tiles of the spec that are
    not in `known` are new, and each is examined."""

    kernel: str
    device: Device
    problem: Problem | None = None
    tile: Tile | None = None
    seconds: float = 10.0
    known: tuple[Tile, ...] | None = None  # None: all of them


def quick_cases(kernel: Kernel, device: Device) -> list[Case]:
    """One case to time, and small ones with partial tiles, groups, strides, large scores. They need two compiles."""

    def of(*sizes: int, **fields: Any) -> Problem:
        return _taken(kernel, *sizes, **fields)

    H, S = (2, 192) if device == HOST else (12, 1024)
    M, N = kernel.tiles[0].get("BLOCK_M", 64), kernel.tiles[0].get("BLOCK_N", 64)
    return [
        Case("plain", of(1, H, S, S)),
        Case("causal", of(1, H, S, S, causal="bottom-right")),
        Case("edges", of(1, 1, M + 1, 2 * N - 1)),
        Case("ragged", of(2, 4, 77, 97, Hk=2, causal="bottom-right"), layout="bshd"),
        Case("large", of(1, 2, 97, 77, causal="bottom-right"), inputs="large"),
    ]


def tile_case(kernel: Kernel, tile: Tile) -> Case:
    """A small causal case for `tile`, with two query tiles, the second one partial."""
    M, N = tile.get("BLOCK_M", 64), tile.get("BLOCK_N", 64)
    return Case("new tile", _taken(kernel, 1, 1, M + 1, 2 * N - 1, causal="bottom-right"))


def _taken(kernel: Kernel, B: int, H: int, Sq: int, Sk: int, **fields: Any) -> Problem:
    """The problem with the first head dimension that the kernel supports."""
    dtype = "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]
    problems = [Problem(B, H, Sq, Sk, D, dtype=dtype, **fields) for D in _WIDTHS]
    return next((p for p in problems if not kernel.why_unsupported(p)), problems[0])
