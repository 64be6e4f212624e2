"""`compile --sweep`: compiles tiles with options, and writes which of them spill registers (engine/spills.py).

For each problem, tiles are compiled in the order of automatic selection, up to the first that does not spill: later
ones are not selected. Without options first, then each option alone, then pairs of options: a tile that spills is not
compiled with more options. With options the causal variant is compiled first, and the other one only if it spills.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

from ..core import registry
from ..core.dtypes import FLOAT8
from ..core.errors import CompileError, SpecError, UnsupportedProblem
from ..core.kernel import Arch, Kernel
from ..core.problem import Problem
from ..core.score import Score, TensorLike
from ..core.tile import Tile
from ..engine import choose, pipeline, spills
from ..toolchain import arch as architectures
from ..toolchain import nvrtc
from ..verify.scores import OPTIONS

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100")
FLOAT8_ONLY, WITHOUT_OPTIONS = "sm_89", "sm_100"
# (B, H, Hk, Sq, Sk): the order of tiles depends on them.
SHAPES = (
    (2, 16, 16, 8192, 8192), (8, 16, 16, 2048, 2048), (32, 16, 16, 512, 512), (1, 16, 16, 1280, 1280),
    (1, 32, 8, 1, 8192), (64, 32, 8, 4, 8192), (128, 64, 8, 8, 2048), (16, 32, 8, 1, 8192),
)  # fmt: skip
ALONE: dict[str, Callable[[Problem], dict[str, Any]]] = {
    **{name: option for name, option in OPTIONS.items() if name != "all dropped"},
    "right window": lambda p: {"window": (None, 100)},
    "condition": lambda p: {"score": Score(mask="doc(i) == doc(j)", tensors={"doc": TensorLike((p.Sk,), "int32")})},
    "expression": lambda p: {
        "score": Score("x - slope(h) * abs(i - j)", tensors={"slope": TensorLike((p.H,), "float32")})
    },
    "copied bias": lambda p: {"bias": (1, p.H, p.Sq, p.Sk), "bias_boxes": False},
    "lengths": lambda p: {"lengths": ((p.Sq, p.Sk),) * p.B},
    "pages": lambda p: {"page_size": 64, "key_lengths": True},
    "descale": lambda p: {"descale": ((p.B, p.H), (p.B, p.Hk), (p.B, p.Hk))} if p.float8 else {},
}
PAIRS = (
    ("softcap", "left window"), ("sink", "left window"), ("alibi", "key_lengths"), ("bias", "mask"),
    ("dropout", "padding"), ("lengths", "left window"), ("lengths", "softcap"), ("lengths", "alibi"),
    ("lengths", "dropout"), ("mask", "Dv"), ("condition", "Dv"),
)  # fmt: skip
CASES: tuple[tuple[str, ...], ...] = ((), *((name,) for name in ALONE), *PAIRS)


class Job(NamedTuple):
    """All options of one kernel, architecture, dtype and head dimension: they are compiled one after the other."""

    kernel: str
    arch: str
    dtype: str
    D: int

    @property
    def cases(self) -> tuple[tuple[str, ...], ...]:
        """The names of the options of each problem."""
        return CASES[:1] if self.arch == WITHOUT_OPTIONS else CASES


class Result(NamedTuple):
    """The rows of a job, each with one head dimension; the number of compilations; messages of those that failed."""

    job: Job
    rows: list[spills.Row]
    compiled: int
    errors: list[str]


def problem_of(job: Job, case: tuple[str, ...], causal: bool, shape: tuple[int, ...]) -> Problem | None:
    """The problem with these options; None if the combination is invalid."""
    B, H, Hk, Sq, Sk = shape
    mask = "bottom-right" if causal else False
    try:
        problem = registry.get(job.kernel).adapted(Problem(B, H, Sq, Sk, job.D, Hk, job.dtype, mask))  # type: ignore[arg-type]
        for name in case:
            problem = replace(problem, **ALONE[name](problem))
    except (SpecError, UnsupportedProblem):
        return None
    return problem


def jobs(kernel: Kernel, archs: Iterable[str]) -> Iterator[Job]:
    """Every job that has a problem which the kernel supports."""
    for name in archs:
        classes = {spills.dtype_of(Problem(1, 1, 1, 1, 16, dtype=of)): of for of in reversed(kernel.dtypes)}
        for dtype in classes.values():
            if name == FLOAT8_ONLY and dtype not in FLOAT8:
                continue
            for D in spills.PLAIN_WIDTHS:
                job = Job(kernel.name, name, dtype, D)
                if any(True for case in job.cases for causal in (True, False) for _ in problems(job, case, causal)):
                    yield job


def problems(job: Job, case: tuple[str, ...], causal: bool) -> Iterator[Problem]:
    """The problems of all shapes that the kernel supports, if this head dimension is compiled with these options."""
    kernel, arch = registry.get(job.kernel), architectures.parse(job.arch)
    for shape in SHAPES:
        problem = problem_of(job, case, causal, shape)
        if problem is None or job.D not in spills.widths_for(spills.options_of(problem)):
            continue
        if not kernel.why_unsupported(problem, arch):
            yield problem


def run(job: Job) -> Result:
    """Compile the tiles of one job."""
    return _Run(job).result()


class _Run:
    """One job: the rows found so far, and the spilled bytes of what was compiled."""

    def __init__(self, job: Job):
        self.job, self.kernel = job, registry.get(job.kernel)
        self.arch: Arch = architectures.parse(job.arch)
        self.table = spills.Table([job.arch], ())
        self.rows: list[spills.Row] = []
        self.known: dict[tuple[Tile, frozenset[str]], int] = {}
        self.errors: list[str] = []

    def result(self) -> Result:
        for case in self.job.cases:
            for causal in (True, False) if case else (False, True):
                for problem in problems(self.job, case, causal):
                    self._tiles_of(problem, case)
        return Result(self.job, self.rows, len(self.known), self.errors)

    def _tiles_of(self, problem: Problem, case: tuple[str, ...]) -> None:
        """Compile in the order of selection, up to the first tile that does not spill."""
        for tile in choose.ranked(self.kernel, problem):
            if choose.why_tile_unsupported(self.kernel, problem, tile, self.arch):
                continue
            if self.table.spilled(problem, tile, self.arch):
                continue
            if not (bytes_ := self._spilled(problem, tile)):
                return
            without = replace(problem, causal=False)
            if case and problem.causal and (n := self._spilled(without, tile)):
                problem, bytes_ = without, n
            options = " ".join(sorted(spills.options_of(problem)))
            width = max(problem.D, problem.Dv)
            row = spills.Row(self.job.arch, spills.text_of(tile), spills.dtype_of(problem), options, {width: bytes_})
            self.table.add(row)
            self.rows.append(row)

    def _spilled(self, problem: Problem, tile: Tile) -> int:
        options = spills.options_of(problem)
        if (tile, options) not in self.known:
            try:
                self.known[tile, options] = spilled(self.kernel, problem, tile, self.job.arch)
            except (CompileError, SpecError) as error:
                self.known[tile, options] = 0
                self.errors.append(f"{self.kernel.name} {self.job.arch} {problem.variant} {tile}: {error}")
        return self.known[tile, options]


def spilled(kernel: Kernel, problem: Problem, tile: Tile, arch: str) -> int:
    """Bytes per thread of spill stores and loads, of the worst entry. Raises as `pipeline.compile_problem` does."""
    target = pipeline.arch_name(kernel, architectures.parse(arch))
    resources = (one.resources for one in pipeline.compile_problem(kernel, problem, tile, target))
    return max(r.spill_stores + r.spill_loads for r in resources)


def sweep(kernels: Iterable[Kernel], archs: Iterable[str], processes: int | None = None) -> Iterator[Result]:
    """Compile all jobs and write the tables; yields each job's result when it is finished. `processes`: None is one per
    core. Raises UnsupportedProblem for an architecture that this NVRTC does not support."""
    todo = {kernel.name: [*jobs(kernel, archs)] for kernel in kernels}
    finished: dict[str, list[Result]] = {name: [] for name in todo}
    longest = sorted(itertools.chain(*todo.values()), key=lambda job: job.D not in spills.WIDTHS)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run, job) for job in longest]
        try:
            for future in as_completed(futures):
                result = future.result()
                name = result.job.kernel
                finished[name].append(result)
                if len(finished[name]) == len(todo[name]):
                    store(registry.get(name), finished[name])
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


def store(kernel: Kernel, results: Iterable[Result]) -> None:
    """Write the table of one kernel; without rows there is no file. Architectures that were not compiled keep their
    rows."""
    found: dict[tuple[str, str, str, str], dict[int, int]] = defaultdict(dict)
    archs = set()
    for result in results:
        archs.add(result.job.arch)
        for row in result.rows:
            found[row[:4]] |= row.spilled
    file = spills.path(kernel)
    old = spills.read(file)
    kept = [row for row in old["rows"] if row.arch not in archs]
    rows = [*kept, *(spills.Row(*key, dict(sorted(n.items()))) for key, n in found.items())]
    if rows:
        spills.write(file, nvrtc.version(), {*old["archs"], *archs}, rows)
    else:
        file.unlink(missing_ok=True)
