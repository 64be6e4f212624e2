"""Search for the fastest tile: the spec's space, without tiles that do not fit or spill, timed by successive halving.

Every candidate is timed with few samples, the faster half with twice as many, and so on (Karnin, Koren and Somekh 2013;
Jamieson and Talwalkar 2016, arXiv:1502.07943). Then the finalists and the spec's own tile are timed in turns on one
GPU. Each measurement is stored at once, so that an interrupted search can be resumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from ..bench.timing import Timing
from ..core import jsonl
from ..core.errors import UnsupportedProblem
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import choose, pipeline, tuned
from ..toolchain import arch as architectures
from ..toolchain.arch import Occupancy
from ..toolchain.nvrtc import Resources

FIRST, LAST = 4, 100  # samples of a candidate in the first round, of a finalist in the last
FINALISTS = 4
STATES = ("timed", "fails", "spills", "too large", "does not compile")  # too large: no block fits on an SM


@dataclass(frozen=True)
class Candidate:
    """A tile of the search and its state, one of STATES ("": not timed yet). Finalists are timed in turns with each
    other."""

    tile: Tile
    state: str = ""
    message: str = ""
    resources: Resources | None = None
    smem: int = 0  # dynamic shared memory, bytes
    occupancy: Occupancy | None = None
    timing: Timing | None = None
    finalist: bool = False


@dataclass(frozen=True)
class Measured:
    """An executor's result for one tile: whether it is correct, and its time. `lost`: its worker died. Such a result
    counts for this search only and is not stored, because the cause may be the machine, such as a lack of memory."""

    ok: bool
    message: str = ""
    timing: Timing | None = None
    lost: bool = False


class Executor(Protocol):
    """Compiles and times candidates. `gpu`: name under which results are stored; `arch`: compile target."""

    gpu: str
    arch: str

    def describe(self) -> dict[str, Any]:
        """The environment of the measurements, as `environment.describe`."""

    def compile(
        self, kernel: Kernel, problem: Problem, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Resources | str]]:
        """Each tile's resources, or why it does not compile, in order of completion."""

    def measure(
        self, kernel: Kernel, problem: Problem, groups: Sequence[tuple[Tile, ...]], samples: int
    ) -> Iterator[tuple[tuple[Tile, ...], Sequence[Measured]]]:
        """Checks and times each group on one GPU, its tiles in turns. Groups in order of completion."""


class Search:
    """The search for one problem. Iterating over it to the end runs the search.

    `fixed`: tile numbers with fixed values; `fresh`: ignore stored measurements. `candidates`: all tiles and their
    results so far. At the end, `winner` is the best tile and `own` the spec's own tile.
    """

    def __init__(
        self,
        kernel: Kernel,
        problem: Problem,
        executor: Executor,
        fixed: Mapping[str, int] | None = None,
        fresh: bool = False,
    ):
        self.kernel, self.problem, self.executor = kernel, problem, executor
        self.fixed, self.fresh = fixed or {}, fresh
        self.candidates: dict[Tile, Candidate] = {}
        self.combinations = 0  # how many tiles the space has, valid or not
        self.winner: Candidate | None = None
        self.own: Candidate | None = None
        self._setting = executor.describe()
        self._key = {"digest": tuned.digest(kernel), "gpu": executor.gpu, "problem": problem.as_json()}
        self._known: dict[tuple[str, int, bool], dict[str, Any]] = {}  # (tile, requested samples, final) -> row

    def __iter__(self) -> Iterator[Candidate]:
        """Yields a candidate when it is dropped, and each time it has been timed.

        Raises UnsupportedProblem if no tile is valid, or none is correct.
        """
        if not self.fresh:
            self._recall()
        alive = []
        for candidate in self._compiled():
            self.candidates[candidate.tile] = candidate
            if candidate.state:
                yield candidate
            else:
                alive.append(candidate.tile)
        default = next((tile for tile in self.kernel.tiles if tile in alive), None)
        samples = FIRST
        alive.sort(key=str)  # independent of the order of completion, so that a resumed search is the same
        while len(alive) > FINALISTS and samples < LAST:
            yield from self._timed([(tile,) for tile in alive], samples)
            alive = self._better_half(alive)
            samples *= 2
        finalists = list(dict.fromkeys([*alive, *([default] if default else [])]))
        if not finalists:
            states = "; ".join(sorted({f"{c.tile} {c.state}: {c.message}" for c in self.candidates.values()})[:3])
            raise UnsupportedProblem(f"{self.kernel.name}: no tile can be timed on {self.problem}: {states}")
        yield from self._timed([tuple(finalists)], LAST)
        self._decide([self.candidates[tile] for tile in finalists], default)

    # ---- the tiles to search

    def legal(self) -> list[Tile]:
        """Tiles of the space, and the spec's own tiles, that the kernel supports for this problem."""
        arch = architectures.parse(self.executor.arch)
        if reason := choose.why_unsupported(self.kernel, self.problem, arch):
            raise UnsupportedProblem(reason)
        names = list(self.kernel.tiles[0])
        if unknown := [name for name in self.fixed if name not in names]:
            raise UnsupportedProblem(
                f"{self.kernel.name}: --fix {unknown[0]}={self.fixed[unknown[0]]} is not supported: its tiles have the "
                f"numbers {', '.join(names)}"
            )
        choices = {name: tuple({tile[name] for tile in self.kernel.tiles}) for name in names} | dict(self.kernel.space)
        choices |= {name: (value,) for name, value in self.fixed.items()}
        combinations = itertools.product(*(choices[name] for name in names))
        product = [Tile(**dict(zip(names, values, strict=True))) for values in combinations]
        own = [tile for tile in self.kernel.tiles if all(tile[n] == v for n, v in self.fixed.items())]
        tiles = list(dict.fromkeys([*own, *product]))
        self.combinations = len(tiles)
        reasons = {tile: choose.why_tile_unsupported(self.kernel, self.problem, tile, arch) for tile in tiles}
        legal = [tile for tile, reason in reasons.items() if reason is None]
        if not legal:
            raise UnsupportedProblem(
                f"none of {len(tiles)} tiles is valid for {self.problem}; for example, {reasons[tiles[0]]}"
            )
        return legal

    def _compiled(self) -> Iterator[Candidate]:
        arch = architectures.parse(self.executor.arch)
        for tile, found in self.executor.compile(self.kernel, self.problem, self.legal()):
            smem = max(entry.smem_bytes(self.problem, tile) for entry in self.kernel.entries)
            if isinstance(found, str):
                yield Candidate(tile, "does not compile", found, smem=smem)
                continue
            each = [pipeline.occupancy(entry, self.problem, tile, found, arch) for entry in self.kernel.entries]
            occupancy = min(each, key=lambda o: o.fraction)
            spilled = found.spill_stores + found.spill_loads
            state, message = "", ""
            if spilled:
                state, message = "spills", f"{spilled} bytes of spill stores and loads per thread"
            elif not occupancy.blocks_per_sm:
                state, message = "too large", f"no block fits on an SM: {occupancy.limiter}"
            yield Candidate(tile, state, message, found, smem, occupancy)

    # ---- timing, and stored measurements

    def _timed(self, groups: list[tuple[Tile, ...]], samples: int) -> Iterator[Candidate]:
        final = samples == LAST
        missing = [group for group in groups if not all((str(t), samples, final) in self._known for t in group)]
        for group in groups:
            if group not in missing:
                for tile in group:
                    yield self._learn(tile, self._known[str(tile), samples, final], final)
        for group, results in self.executor.measure(self.kernel, self.problem, missing, samples):
            rows = [self._row(tile, result, samples, final) for tile, result in zip(group, results, strict=True)]
            for result, row in zip(results, rows, strict=True):
                if not result.lost:
                    jsonl.append(tuned.path(self.kernel, "measurements"), row)
            for tile, row in zip(group, rows, strict=True):
                yield self._learn(tile, row, final)

    def _row(self, tile: Tile, result: Measured, samples: int, final: bool) -> dict[str, Any]:
        timing = asdict(result.timing) if result.timing else None
        if timing and not math.isfinite(timing["noise"]):  # JSON has no infinity
            timing["noise"] = None
        return {
            **self._key, "tile": str(tile), "samples": samples, "final": final, "ok": result.ok,
            "message": result.message, "timing": timing, **self._setting, "time": _now(),
        }  # fmt: skip

    def _recall(self) -> None:
        """Loads the stored measurements of this source, GPU model and problem."""
        for row in jsonl.read(tuned.path(self.kernel, "measurements")):
            if all(row.get(name) == value for name, value in self._key.items()):
                self._known[row["tile"], row["samples"], row["final"]] = row

    def _learn(self, tile: Tile, row: Mapping[str, Any], final: bool) -> Candidate:
        t = row["timing"]
        timing = Timing(**{**t, "noise": math.inf if t["noise"] is None else t["noise"]}) if t else None
        state = "timed" if row["ok"] and timing else "fails"
        found = replace(self.candidates[tile], state=state, message=row["message"], timing=timing, finalist=final)
        self.candidates[tile] = found
        return found

    def _better_half(self, tiles: Iterable[Tile]) -> list[Tile]:
        right = {tile: t for tile in tiles if (t := self.candidates[tile].timing)}
        return sorted(right, key=lambda tile: (right[tile].median, str(tile)))[
            : max(FINALISTS, math.ceil(len(right) / 2))
        ]

    def _decide(self, finalists: list[Candidate], default: Tile | None) -> None:
        """The fastest tile wins, but the spec's own tile is kept unless it is slower by more than the noise."""
        correct = {c.tile: (c, c.timing) for c in finalists if c.timing}
        if not correct:
            raise UnsupportedProblem(
                f"{self.kernel.name}: no tile is correct on {self.problem}: {finalists[0].message}"
            )
        best, time = min(correct.values(), key=lambda pair: pair[1].median)
        own, own_time = correct.get(default, (None, time)) if default else (None, time)
        keep_own = own and own_time.median <= time.median * (1 + max(time.noise, own_time.noise))
        self.own, self.winner = own, own if keep_own else best
        assert self.winner
        assert self.winner.timing
        row = {
            **self._key, "class": tuned.problem_class(self.problem), "tile": str(self.winner.tile),
            "ms": self.winner.timing.median * 1e3, "own_tile": str(own.tile) if own else None,
            "own_ms": own_time.median * 1e3 if own else None, **self._setting, "time": _now(),
        }  # fmt: skip
        jsonl.append(tuned.path(self.kernel, "winners"), row)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
