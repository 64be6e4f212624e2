"""A ladder of steps: one kernel with its optimisations as switches of the tile, which are enabled one after another.

Used by experiments: times every step in one interleaved run, and writes tables of speeds and gains from stored rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, ClassVar

from ..core import registry
from ..core.errors import SandboxError, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.normalise import Causal
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..launch import driver
from ..launch.dlpack import HOST
from ..verify import check as checking
from ..verify.cases import Case
from . import benchmark, peers
from .ladder import project_of, write_table
from .peers import Contender, Ready
from .rows import Row, by_problem, read_rows, recorded
from .timing import Limits

Speeds = dict[Problem, float]  # TFLOP/s


@dataclass(frozen=True)
class Step:
    """One optimisation. `predicted`: gain over the step before (variants: over the last step) for each head dimension
    of the ladder, written before the measurement. `changes`: numbers of the tile that differ from that step; `at_128`:
    in addition at D = 128."""

    name: str
    idea: str
    predicted: tuple[float, float]
    changes: dict[str, int] = field(default_factory=dict)
    at_128: dict[str, int] = field(default_factory=dict)

    def numbers(self, D: int) -> dict[str, int]:
        """The numbers that this step changes at head dimension D."""
        return {**self.changes, **(self.at_128 if D == 128 else {})}


def problems(widths: Iterable[int]) -> list[Problem]:
    """The problems of a ladder: 16k tokens, hidden size 2048, without and with a causal mask."""
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)
        for D, causal, S in itertools.product(widths, _MASKS, (1024, 4096, 16384))
    ]


_MASKS: tuple[Causal, ...] = (False, "bottom-right")
# Grouped heads, several work tiles per head, partial tiles.
SMALL = Problem(1, 2, 277, 350, 64, Hk=1, dtype="float16", causal="bottom-right")


@dataclass(frozen=True)
class Ladder:
    """`find(step, D)`: the kernel and tile of a step at head dimension D; None if the step changes nothing there.
    `others`: {kernel or peer: its line in the table}, timed in the same run."""

    steps: tuple[Step, ...]
    find: Callable[[Step, int], tuple[Kernel, Tile] | None]
    widths: tuple[int, ...]
    problems: Sequence[Problem]
    variants: tuple[Step, ...] = ()
    others: Mapping[str, str] = field(default_factory=dict)

    COMMANDS: ClassVar = ("measure", "table", "check")

    def run(
        self, command: str, script: Path, name: str, *, seconds: float = 0.2, small: Problem = SMALL,
        checked: Sequence[Step] = (),
    ) -> Iterator[str]:  # fmt: skip
        """One of COMMANDS of an experiment's `script`; yields a line per result. `name`: of the table of gains in the
        README.md next to it, and of the table of speeds in docs/ladders.md.

        "measure" appends to results.jsonl and then writes the tables, as "table" does, from its rows. "check" verifies
        `checked` (default: all steps) on `small`, without a GPU.
        """
        if command == "check":
            yield from self.check(small, checked or self.steps)
            return
        stored = script.with_name("results.jsonl")
        if command == "measure":
            yield from self.measure(stored, seconds)
        rows = read_rows(stored)
        write_table(script.with_name("README.md"), name, script, self.gain_table(rows))
        if rows:
            write_table(project_of(script) / "docs" / "ladders.md", name, script, self.speed_table(rows))

    # ---- measuring

    def contender(self, step: Step) -> Contender:
        """A step as a contender of `bench`, under its own name."""

        def prepare(problem: Problem, *inputs: Any) -> Ready:
            found = self.find(step, problem.D)
            if found is None:
                raise UnsupportedProblem(f"{step.name}: changes nothing at D={problem.D}")
            [entry] = benchmark.kernel_contenders([found[0]], [found[1]])
            return entry.prepare(problem, *inputs)

        return Contender(step.name, prepare, self._kernel(step).name)

    def _kernel(self, step: Step) -> Kernel:
        return next(found[0] for D in self.widths if (found := self.find(step, D)))

    def contenders(self) -> list[Contender]:
        """All steps and variants, then the others."""
        found = [*map(self.contender, (*self.steps, *self.variants))]
        for name in self.others:
            known = registry.kernels().get(name)
            found += benchmark.kernel_contenders([known]) if known else [self._peer(name)]
        return found

    def _peer(self, name: str) -> Contender:
        return peers.backward(peers.PEERS[name]) if self.computes == "backward" else peers.PEERS[name]

    @property
    def computes(self) -> str:
        """What the steps compute: "forward" or "backward"."""
        return self._kernel(self.steps[0]).operation.name

    def compile_all(self) -> None:
        """Fills the compile cache in parallel: compiled one after another, the steps would take most of the run."""
        capability, every = driver.device().arch, (*self.steps, *self.variants)
        jobs = {
            (found, p.D, p.dtype, p.causal) for p in self.problems for step in every if (found := self.find(step, p.D))
        }

        def compile_one(job: Any) -> None:
            (kernel, tile), D, dtype, causal = job
            pipeline.compile(kernel, D, dtype, causal, pipeline.arch_name(kernel, capability), tile)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, jobs))

    def measure(self, file: Path, seconds: float = 0.2) -> Iterator[str]:
        """Time everything in one interleaved run, each result verified before and after; continues an interrupted run.
        Appends rows to `file` and yields a line per row. Raises SandboxError at the end if a result is wrong."""
        contenders, problems = self.contenders(), [*self.problems]
        rows = benchmark.matching_rows(read_rows(file), problems, "events", computes=self.computes)
        left = benchmark.unmeasured(rows, problems, contenders)
        if left:
            self.compile_all()
        wrong = 0
        timed = benchmark.run_contenders(contenders, left, self.computes, "events", Limits(seconds=seconds))
        for row in recorded(self._with_registers(timed), file):
            speed = f"{row['tflops']:.1f} TFLOP/s" if row["ms"] else row["message"]
            yield f"S{row['Sq']} D{row['D']} causal={row['causal']!s:12} {row['contender']:18} {speed}"
            wrong += row["ok"] is False
        if wrong:
            raise SandboxError(f"{wrong} results are wrong or failed")

    def _with_registers(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Adds the registers and spills that the compiler reports."""
        kernels = {**registry.kernels(), **{k.name: k for k in map(self._kernel, (*self.steps, *self.variants))}}
        for row in rows:
            if not row.tile:
                yield row
                continue
            p = row.problem
            r = pipeline.compile(kernels[row.kernel], p.D, p.dtype, p.causal, row.arch, row.tile).resources
            cost = {"registers": r.registers, "spills": r.spill_stores + r.spill_loads}
            yield replace(row, setting={**row.setting, **cost})

    def check(self, problem: Problem, steps: Iterable[Step]) -> Iterator[str]:
        """Verify steps on the CPU backend; yields a line per step. Raises SandboxError if one is wrong."""
        for step in steps:
            found = self.find(step, problem.D)
            assert found, step
            result = checking.verify(found[0], Case(step.name, problem, layout="bshd"), HOST, found[1])
            yield f"{step.name}: error {result.error} bound {result.bound} {result.message}"
            if not result.ok:
                raise SandboxError(f"{step.name} is wrong")

    # ---- tables

    def gains(self, rows: list[dict[str, Any]], D: int, causal: bool | None = None) -> dict[str, str]:
        """{step: its gain over the last timed step before it; variants and others: over the last step}."""
        found, below = {}, Speeds()
        for step in self.steps:
            there = _speeds(rows, step.name, D, causal)
            found[step.name], below = _gain(there, below), there or below
        last = (*(step.name for step in self.variants), *self.others)
        return found | {name: _gain(_speeds(rows, name, D, causal), below) for name in last}

    def _registers(self, rows: list[dict[str, Any]], name: str) -> str:
        """The maximum over the problems, for each head dimension; * where registers are spilled."""
        cells = []
        for D in self.widths:
            counts = [r[name] for p, r in by_problem(rows).items() if p.D == D and "spills" in r.get(name, ())]
            mark = "*" if any(r["spills"] for r in counts) else ""
            cells.append(f"{max(r['registers'] for r in counts)}{mark}" if counts else "–")
        return "" if set(cells) == {"–"} else " / ".join(cells)

    def speed_table(self, rows: list[dict[str, Any]]) -> str:
        """The speed of each step, its gain over the step before, and its registers."""
        columns = ["", "step", "idea", *(cell for D in self.widths for cell in (f"D = {D}", "gain")), "registers"]
        lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        all_gains = {D: self.gains(rows, D) for D in self.widths}
        contenders = [
            *((str(n), step.name, step.idea) for n, step in enumerate(self.steps)),
            *(("not kept", step.name, step.idea) for step in self.variants),
            *(("", name, idea) for name, idea in self.others.items()),
        ]
        for place, name, idea in contenders:
            cells = [place, name, idea]
            for D in self.widths:
                there = _speeds(rows, name, D).values()
                cells += [f"{geometric_mean(there):.3g}" if there else "–", all_gains[D][name]]
            lines.append(f"| {' | '.join([*cells, self._registers(rows, name)])} |")
        r, lengths = rows[-1], ", ".join(str(S) for S in sorted({p.Sq for p in by_problem(rows)}))
        caption = (
            f"TFLOP/s, {r['dtype']}, geometric means over S {lengths} with and without causal mask (16k tokens, hidden"
            f" size 2048). A gain is relative to the step before; in the rows after step {len(self.steps) - 1}, to that"
            f" step. “–”: the step changes nothing at this D. Registers at D = {' / '.join(map(str, self.widths))}, the"
            f" maximum over the problems; “*”: some are spilled. {r['device']}, CUDA {r['cuda']}; a matrix product"
            f" reaches {r['ceiling_tflops']:.0f} in the same run."
        )
        return "\n".join([*lines, "", caption]) + "\n"

    def gain_table(self, rows: list[dict[str, Any]]) -> str:
        """Predicted and measured gains, by head dimension and mask."""
        head = [f"D = {D}: predicted | no mask | causal" for D in self.widths]
        lines = [f"| step | {' | '.join(head)} |", "| --- " * (1 + 3 * len(self.widths)) + "|"]
        measured = {(D, causal): self.gains(rows, D, causal) for D in self.widths for causal in (False, True)}
        for step in (*self.steps[1:], *self.variants):
            cells = [
                f"×{step.predicted[i]:.2f} | {measured[D, False][step.name]} | {measured[D, True][step.name]}"
                for i, D in enumerate(self.widths)
            ]
            lines.append(f"| {step.name} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def _speeds(rows: list[dict[str, Any]], name: str, D: int, causal: bool | None = None) -> Speeds:
    """TFLOP/s of `name` at head dimension D, with or without mask or (None) both; {} where it was not timed."""
    found = {p: there[name] for p, there in by_problem(rows).items() if p.D == D and name in there}
    return {p: r["tflops"] for p, r in found.items() if r["ok"] and causal in (None, bool(p.causal))}


def _gain(fast: Speeds, slow: Speeds) -> str:
    """The geometric mean of the ratios, as ×1.23."""
    ratios = [fast[p] / slow[p] for p in fast if p in slow]
    return f"×{geometric_mean(ratios):.2f}" if ratios else "–"
