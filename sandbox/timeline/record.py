"""Records one launch of a kernel: when each warp of a few blocks began each step."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import UnsupportedProblem
from ..core.kernel import Dim3, Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..engine.choose import choose_kernel
from ..launch import driver
from ..launch.dlpack import HOST, Device
from ..verify import trial
from ..verify.cases import Case, inputs_of
from ..verify.suite import suite_of
from .mark_buffers import CLOCKS_A_MARK, DONE, MOST_BLOCKS, MarkBuffer, MarkBuffers, macros, steps_of

WAIT = "wait"  # prefix of the names of steps that wait
_REPEATS = 10  # launches; the median is used


@dataclass(frozen=True)
class Step:
    """A step from tick `begin` to tick `end`, in the timeline's unit. 0 is the first mark of the launch."""

    name: str
    begin: int
    end: int

    @property
    def ticks(self) -> int:
        """Duration in ticks."""
        return self.end - self.begin

    @property
    def waits(self) -> bool:
        """Whether this step is a wait."""
        return self.name.startswith(WAIT)


@dataclass(frozen=True)
class Track:
    """The steps of one warp of a block. `sm`: its SM, None without TIMELINE(done); `role`: warps with the same set of
    steps; `lost`: minimum number of overwritten earlier marks."""

    block: int
    warp: int
    sm: int | None
    role: str
    steps: tuple[Step, ...]
    lost: int

    def packed(self, numbers: Mapping[str, int]) -> list[int]:
        """The steps as [number of the name, begin, ticks, …], given the number of each name."""
        return [n for s in self.steps for n in (numbers[s.name], s.begin, s.ticks)]


@dataclass(frozen=True)
class Timeline:
    """A launch of a kernel's first entry point. `unit` of ticks: "cycles" of an SM, with `rate` in Hz; on the CPU
    backend "marks" (the order in which the block's threads reached the marks), where `rate` is None.

    `seconds`: time of a launch without and with marks; None on the CPU backend. `same`: whether both results are
    bitwise equal; None for kernels that are not deterministic.
    """

    kernel: str
    problem: Problem
    tile: Tile
    device: str
    unit: str
    rate: int | None
    tracks: tuple[Track, ...]
    blocks: int  # number of blocks in the grid
    seconds: tuple[float, float] | None
    same: bool | None
    without_marks: tuple[int, ...] = ()  # chosen blocks that had no work

    @property
    def timed(self) -> bool:
        """Whether ticks are time. On the CPU backend they are only the order of marks."""
        return self.rate is not None

    @property
    def slowdown(self) -> float | None:
        """Additional time with marks, relative to the time without them."""
        return self.seconds[1] / self.seconds[0] - 1 if self.seconds else None

    @property
    def lost(self) -> int:
        """Minimum number of overwritten marks."""
        return sum(track.lost for track in self.tracks)


def record(
    kernel: Kernel, problem: Problem, tile: Tile, device: Device, blocks: Sequence[int] | None = None
) -> Timeline:
    """Launch `kernel` with and without marks, and record the warps of `blocks` (numbers in the grid; default: four).

    Raises what `prepare` raises; UnsupportedProblem for a kernel without marks or a block outside the grid.
    """
    names, first = steps_of(kernel.source), _alone(kernel)
    grid, block = kernel.grid(problem, tile), kernel.block(tile)
    marked = dataclasses.replace(first, macros={**kernel.macros, **macros(names, grid, block, device)})
    chosen = _blocks(math.prod(grid), blocks)
    inputs = _inputs(kernel, problem, device)
    repeats = _REPEATS if device != HOST else 1
    buffers = MarkBuffers(pipeline.load(marked, tile, problem, device).functions[0], block, chosen, device)
    order = (marked, first, first, marked) if device != HOST else (first, marked)  # a GPU's clock drifts
    runs = [trial.launch(v, tile, problem, inputs, device, repeats=repeats, before=buffers.clear) for v in order]
    plain, recorded = ([run for run, v in zip(runs, order, strict=True) if v is which] for which in (first, marked))
    gpu = driver.device(device[1]) if device != HOST else None
    pairs = [(plain[0].outputs[name], recorded[-1].outputs[name]) for name in plain[0].outputs if name in first.args]
    same = all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs) if kernel.deterministic else None
    rate = gpu.clock_rate() if gpu else None
    tracks = tuple(_tracks([*buffers.read()], names, rate))
    if chosen and not tracks:
        raise UnsupportedProblem(no_marks(chosen))
    return Timeline(
        kernel.name, problem, tile, gpu.name if gpu else "the CPU backend", "cycles" if gpu else "marks", rate, tracks,
        math.prod(grid), (_mean(plain), _mean(recorded)) if gpu else None, same,
        tuple(block for block in chosen if block not in {track.block for track in tracks}),
    )  # fmt: skip


def _inputs(kernel: Kernel, problem: Problem, device: Device) -> dict[str, Any]:
    """The inputs of the kernel. On a GPU, O and LSE for a backward come from a forward kernel: the reference would take
    minutes, and the timeline does not check errors."""
    case = Case("timeline", problem)
    if device == HOST or kernel.custom or kernel.computes in ("forward", "block_map"):
        return suite_of(kernel).inputs(case)
    given, forward = inputs_of("forward", case), choose_kernel(problem, "forward", pipeline.arch_of(device))
    right = trial.launch(forward, pipeline.tile_on(device, forward, problem), problem, given, device).outputs
    dO = np.random.default_rng(1).standard_normal(right["O"].shape, np.float32).astype(right["O"].dtype)
    return {**given, **right, "dO": dO}


def _mean(runs: Sequence[trial.Trial]) -> float:
    return statistics.fmean(run.seconds for run in runs)


def _no_blocks(problem: Problem, tile: Tile) -> Dim3:
    return 0, 0, 0


def _alone(kernel: Kernel) -> Kernel:
    """The kernel without its later entry points, which have their own marks: their grids are empty."""
    then = (e if e.launch_first else dataclasses.replace(e, grid=_no_blocks) for e in kernel.then)
    return dataclasses.replace(kernel, then=tuple(then))


def _blocks(count: int, wanted: Sequence[int] | None) -> list[int]:
    if wanted is None:
        return sorted({i * count // MOST_BLOCKS for i in range(MOST_BLOCKS)}) if count else []
    for number in wanted:
        if not 0 <= number < count:
            has = f"{count} blocks, numbers 0 to {count - 1}" if count > 1 else "1 block, number 0"
            raise UnsupportedProblem(f"block {number} does not exist: the grid has {has}")
    if len({*wanted}) > MOST_BLOCKS:
        raise UnsupportedProblem(f"{len({*wanted})} blocks cannot be recorded at once: at most {MOST_BLOCKS}")
    return sorted({*wanted})


def no_marks(blocks: Sequence[int]) -> str:
    """What is said of blocks without work."""
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}: no marks, as no work was assigned"


def _since(clock: int, earlier: int) -> int:
    """Difference of two 32-bit clocks, with wrap-around."""
    return (clock - earlier + 2**31) % 2**32 - 2**31


def _tracks(buffers: Sequence[MarkBuffer], names: Sequence[str], rate: int | None) -> Iterator[Track]:
    """Convert marks to tracks with a common origin. Clocks differ between SMs: within a block, ticks come from its SM's
    clock; blocks are aligned by the global timer at TIMELINE(done). Blocks without it start at 0."""
    blocks: dict[int, list[MarkBuffer]] = defaultdict(list)
    for buffer in buffers:
        blocks[buffer.block].append(buffer)
    begins = {block: _begin(own, rate) for block, own in blocks.items()}
    start = min((at for _, at in begins.values() if at is not None), default=0)
    found = []
    for block, own in blocks.items():
        first, at = begins[block]
        offset = 0 if at is None else at - start
        of_tick = 1 if rate else CLOCKS_A_MARK
        ticks = [[(_since(int(at), first) + offset) // of_tick for at in buffer.marks["clock"]] for buffer in own]
        last = max(times[-1] for times in ticks)
        for buffer, times in zip(own, ticks, strict=True):
            begun = zip(buffer.marks["step"], times, [*times[1:], last], strict=True)
            named = [Step(names[number], begin, end) for number, begin, end in begun]
            steps = tuple(step for step in named if step.name != DONE)
            if steps:
                found.append(
                    Track(block, buffer.warp, buffer.anchor[0] if buffer.anchor else None, "", steps, buffer.lost)
                )
    roles = _roles(found)
    return (dataclasses.replace(track, role=roles[track.warp]) for track in found)


def _begin(buffers: Sequence[MarkBuffer], rate: int | None) -> tuple[int, int | None]:
    """(clock of the block's first mark, its time in ticks of the global timer or None)."""
    some = int(buffers[0].marks["clock"][0])
    first = some + min(_since(int(buffer.marks["clock"][0]), some) for buffer in buffers)
    for buffer in buffers:
        if buffer.anchor and rate:
            _, clock, nanoseconds = buffer.anchor
            return first, nanoseconds * rate // 10**9 - _since(clock, first)
    return first, None


def _roles(tracks: Sequence[Track]) -> dict[int, str]:
    """{warp: role}, such as "warps 4-11" for warps with the same set of steps over all blocks."""
    steps: dict[int, set[str]] = defaultdict(set)
    for track in tracks:
        steps[track.warp] |= {step.name for step in track.steps}
    by_steps: dict[frozenset[str], list[int]] = defaultdict(list)
    for warp in sorted(steps):
        by_steps[frozenset(steps[warp])].append(warp)
    named = {warp: _numbers(warps) for warps in by_steps.values() for warp in warps}
    return {warp: f"{'warp' if text.isdecimal() else 'warps'} {text}" for warp, text in named.items()}


def _numbers(warps: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for warp in warps:
        if runs and warp == runs[-1][1] + 1:
            runs[-1][1] = warp
        else:
            runs.append([warp, warp])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
