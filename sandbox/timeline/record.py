"""One launch of a kernel, and when each warp of a few blocks began which step of it."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.errors import UnsupportedProblem
from ..core.kernel import Dim3, Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..launch import driver
from ..launch.dlpack import HOST, Device
from ..verify import trial
from ..verify.cases import Case, inputs_of
from .notes import MACRO, Notes, steps_of

DONE = "done"  # the mark that ends a warp's last step, and begins none
WAIT = "wait"  # how the name of a step that waits begins
_SHOWN = 4  # blocks, unless somebody names them
_REPEATS = 20  # launches, of which the median counts


@dataclass(frozen=True)
class Step:
    """From tick `begin` to tick `end`; ticks are the timeline's unit, 0 is the first mark of all."""

    name: str
    begin: int
    end: int

    @property
    def ticks(self) -> int:
        """How long it took."""
        return self.end - self.begin

    @property
    def waits(self) -> bool:
        """Whether it is a wait."""
        return self.name.startswith(WAIT)


@dataclass(frozen=True)
class Lane:
    """What one warp of a block did. Warps of one `role` have the same steps; `lost` of its marks found no room."""

    block: int
    warp: int
    sm: int
    role: str
    steps: tuple[Step, ...]
    lost: int


@dataclass(frozen=True)
class Timeline:
    """A launch of a kernel's first entry. `unit` of ticks: "cycles" of an SM, `rate` of them a second; on the CPU
    backend "marks", the order in which the block's fibers came to them, where `rate` is None and nothing is timed.

    `seconds`: a launch without marks, and with them; None on the CPU backend. `same`: whether both gave the same bits;
    None where a kernel does not promise that.
    """

    kernel: str
    problem: Problem
    tile: Tile
    device: str
    unit: str
    rate: int | None
    lanes: tuple[Lane, ...]
    blocks: int  # of the whole grid
    seconds: tuple[float, float] | None
    same: bool | None

    @property
    def slowdown(self) -> float | None:
        """What marks cost, as a share of the time without them."""
        return self.seconds[1] / self.seconds[0] - 1 if self.seconds else None

    @property
    def lost(self) -> int:
        """Marks that found no room."""
        return sum(lane.lost for lane in self.lanes)


def record(
    kernel: Kernel, problem: Problem, tile: Tile, device: Device, blocks: Sequence[int] | None = None
) -> Timeline:
    """Launch `kernel` with and without marks; what warps of `blocks` (numbers in the grid; some, if None) did.

    Raises what `prepare` raises; UnsupportedProblem for a kernel without marks, or a block that there is not.
    """
    names, first = steps_of(kernel.source), _alone(kernel)
    marked = with_marks(first)
    grid, block = kernel.grid(problem, tile), kernel.block(tile)
    chosen = _blocks(math.prod(grid), blocks)
    inputs = inputs_of(kernel.computes, Case("timeline", problem))
    repeats = _REPEATS if device != HOST else 1
    plain = trial.launch(first, tile, problem, inputs, device, repeats=repeats)
    notes = Notes(pipeline.load(marked, tile, problem, device).functions[0], grid, block, chosen, device)
    try:
        noted = trial.launch(marked, tile, problem, inputs, device, repeats=repeats, before=notes.begin)
    finally:
        notes.close()
    gpu = driver.device(device[1]) if device != HOST else None
    pairs = [(plain.outputs[name], noted.outputs[name]) for name in plain.outputs if name in first.args]
    same = all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs) if kernel.deterministic else None
    rate = gpu.clock_rate() if gpu else None
    return Timeline(
        kernel.name, problem, tile, gpu.name if gpu else "the CPU backend", "cycles" if gpu else "marks", rate,
        tuple(_lanes(notes, names, rate)), math.prod(grid), (plain.seconds, noted.seconds) if gpu else None, same,
    )  # fmt: skip


def _no_blocks(problem: Problem, tile: Tile) -> Dim3:
    return 0, 0, 0


def _alone(kernel: Kernel) -> Kernel:
    """The kernel's first entry: the later ones, which have marks of their own, are not launched."""
    return dataclasses.replace(kernel, then=tuple(dataclasses.replace(e, grid=_no_blocks) for e in kernel.then))


def with_marks(kernel: Kernel) -> Kernel:
    """The kernel with its marks compiled in."""
    return dataclasses.replace(kernel, macros={**kernel.macros, MACRO: 1})


def _blocks(count: int, wanted: Sequence[int] | None) -> list[int]:
    if wanted is None:
        return sorted({i * count // _SHOWN for i in range(_SHOWN)}) if count else []
    for number in wanted:
        if not 0 <= number < count:
            raise UnsupportedProblem(f"block {number}: the grid has blocks 0 to {count - 1}")
    return sorted({*wanted})


def _lanes(notes: Notes, names: dict[int, str], rate: int | None) -> Iterator[Lane]:
    """Clocks differ between SMs: a block's marks are placed by its own, and blocks by the clock that SMs share."""
    every = [*notes.read()]
    firsts: dict[int, tuple[int, int]] = {}  # of a block: its first mark's (nanoseconds, clock)
    for block, _, warp, events, _ in every:
        first = int(warp["nanoseconds"]), int(events["clock"][0])
        firsts[block] = min(first, firsts.get(block, first))
    start = min((nanoseconds for nanoseconds, _ in firsts.values()), default=0)
    placed = []
    for block, number, warp, events, lost in every:
        nanoseconds, clock = firsts[block]
        offset = round((nanoseconds - start) * 1e-9 * rate) if rate else 0
        since = (int(events["clock"][0]) - clock + 2**31) % 2**32 - 2**31  # the clock has 32 bits
        steps = np.diff(events["clock"]).astype(np.int64)  # modulo 2^32, as unsigned numbers are
        placed.append(
            (block, number, int(warp["sm"]), events["step"], offset + since + np.append(0, steps.cumsum()), lost)
        )
    begin = min((int(ticks[0]) for *_, ticks, _ in placed), default=0)
    ends: dict[int, int] = defaultdict(int)  # of a block: its last mark
    for block, *_, ticks, _ in placed:
        ends[block] = max(ends[block], int(ticks[-1]))
    found = []
    for block, number, sm, numbers, ticks, lost in placed:
        marks = [(names.get(int(n), f"step_{int(n):x}"), int(t) - begin) for n, t in zip(numbers, ticks, strict=True)]
        after = [at for _, at in marks[1:]] + [marks[-1][1] if lost else ends[block] - begin]
        steps_ = tuple(Step(name, at, end) for (name, at), end in zip(marks, after, strict=True) if name != DONE)
        if steps_:
            found.append(Lane(block, number, sm, "", steps_, lost))
    roles = _roles(found)
    return (dataclasses.replace(lane, role=roles[lane.warp]) for lane in found)


def _roles(lanes: Sequence[Lane]) -> dict[int, str]:
    """{warp: "warps 4-11"}: together those that had the same steps, in whichever block."""
    steps: dict[int, set[str]] = defaultdict(set)
    for lane in lanes:
        steps[lane.warp] |= {step.name for step in lane.steps}
    alike: dict[frozenset[str], list[int]] = defaultdict(list)
    for warp in sorted(steps):
        alike[frozenset(steps[warp])].append(warp)
    named = {warp: _numbers(warps) for warps in alike.values() for warp in warps}
    return {warp: f"{'warp' if text.isdecimal() else 'warps'} {text}" for warp, text in named.items()}


def _numbers(warps: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for warp in warps:
        if runs and warp == runs[-1][1] + 1:
            runs[-1][1] = warp
        else:
            runs.append([warp, warp])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
