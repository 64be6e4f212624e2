"""`compile --sweep`, and the tables of spilled registers in the repository."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from project import SEED

from sandbox.core import registry
from sandbox.core.errors import CompileError
from sandbox.disassembly import sweep
from sandbox.engine import choose, spills
from sandbox.spec import Kernel, Problem, Tile
from sandbox.toolchain import arch, nvrtc

WIDE, NARROW = (Tile(BLOCK_M=64, BLOCK_N=n) for n in (64, 32))
PLAIN = Problem(1, 1, 64, 64, 64, dtype="float16")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    """fwd_minimal with two tiles, in a folder without tables."""
    return dataclasses.replace(registry.get("fwd_minimal"), source=tmp_path / "fwd_minimal.cu", tiles=(WIDE, NARROW))


def sampled_rows(count: int) -> list[tuple[Kernel, spills.Row, int]]:
    """(kernel, row, head dimension), from all tables."""
    kernels = registry.kernels().values()
    every = [(k, row, D) for k in kernels for row in spills.read(spills.path(k))["rows"] for D in row.spilled]
    return random.Random(SEED).sample(every, min(count, len(every)))


def problems_of(row: spills.Row, kernel: Kernel, D: int) -> Iterator[Problem]:
    """The problems from which the sweep made the row."""
    dtype = next(of for of in kernel.dtypes if spills.dtype_of(dataclasses.replace(PLAIN, dtype=of)) == row.dtype)
    job = sweep.Job(kernel.name, row.arch, dtype, D)
    for case in job.cases:
        for causal in (False, True):
            for problem in sweep.problems(job, case, causal):
                if spills.options_of(problem) == {*row.options.split()}:
                    yield problem


def test_sampled_rows_still_spill() -> None:
    """With the NVRTC of the table, each tile spills as many bytes as its row says; the seed is SANDBOX_SEED."""
    jobs = []
    for kernel, row, D in sampled_rows(3):
        if spills.read(spills.path(kernel))["nvrtc"] != nvrtc.version():
            continue
        tile = next(tile for tile in kernel.tiles if spills.text_of(tile) == row.tile)
        problem = next(problems_of(row, kernel, D))
        assert spills.spilled(kernel, problem, tile, arch.parse(row.arch)) >= row.spilled[D]
        jobs.append((kernel, problem, tile, row, D))
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda job: sweep.spilled(*job[:3], job[3].arch), jobs)]
    assert found == [row.spilled[D] for *_, row, D in jobs], f"SANDBOX_SEED={SEED}: {jobs}: compile --sweep"


def test_rows_name_tiles_of_the_spec() -> None:
    """A row of a tile that was removed or changed is never read: `compile --sweep` replaces it."""
    for kernel in registry.kernels().values():
        tiles = {spills.text_of(tile) for tile in kernel.tiles}
        assert {row.tile for row in spills.read(spills.path(kernel))["rows"]} <= tiles, f"compile --sweep {kernel.name}"


def test_the_sweep_records_tiles_up_to_one_that_does_not_spill(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that spills without options is not compiled with them."""
    compiled = []

    def spilled(kernel: Kernel, problem: Problem, tile: Tile, arch: str) -> int:
        compiled.append((tile, spills.options_of(problem)))
        if tile == NARROW:
            return 0
        return 8 if problem.D > 128 else 4 if problem.causal and problem.softcap else 16 if problem.dropout else 0

    monkeypatch.setattr(sweep, "spilled", spilled)
    monkeypatch.setattr(registry, "get", lambda name: kernel)
    results = [sweep.run(sweep.Job(kernel.name, "sm_90", "float16", D)) for D in (128, 192)]
    narrow, wide = ({row.options: row.spilled for row in result.rows} for result in results)
    assert wide == {"": {192: 8}}
    assert {options for tile, options in compiled if tile == WIDE and "SOFTCAP=1" in options} >= {
        frozenset({"SOFTCAP=1"})
    }
    assert narrow["CAUSAL=1 SOFTCAP=1"] == {128: 4}
    assert narrow["DROPOUT=1"] == {128: 16}
    assert not any("DROPOUT=1" in options and len(options.split()) > 1 for options in narrow)
    sweep.store(kernel, results)
    lines = spills.path(kernel).read_text().splitlines()
    assert lines[0] == f'{{"nvrtc": "{nvrtc.version()}", "archs": ["sm_90"], "rows": ['
    assert lines[1] == '["sm_90", "BLOCK_M=64,BLOCK_N=64", "float16", "", {"192": 8}],'
    assert lines[1:-1] == sorted(lines[1:-1])
    sweep.store(kernel, [sweep.Result(sweep.Job(kernel.name, "sm_80", "float16", 64), [], 1, [])])
    found = spills.read(spills.path(kernel))
    assert (found["archs"], len(found["rows"])) == (["sm_80", "sm_90"], len(narrow) + 1)
    sweep.store(kernel, [sweep.Result(sweep.Job(kernel.name, "sm_90", "float16", 64), [], 1, [])])
    assert not spills.path(kernel).exists()


def test_the_sweep_reports_what_does_not_compile(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def spilled(*_: object) -> int:
        raise CompileError("no", source="", options=(), log="")

    monkeypatch.setattr(sweep, "spilled", spilled)
    assert any("fwd_minimal sm_100 D64 float16 " in error for error in sweep.run(
        sweep.Job("fwd_minimal", "sm_100", "float16", 64)).errors)  # fmt: skip


def test_rows_apply_to_more_options_and_smaller_head_dimensions(kernel: Kernel) -> None:
    """Of both 16-bit dtypes, of the CPU backend, and of later architectures; not of earlier ones."""
    tile = dataclasses.replace
    rows = [
        spills.Row("sm_90", spills.text_of(WIDE), "float16", "SOFTCAP=1", {128: 8}),
        spills.Row("sm_80", spills.text_of(WIDE), "float16", "", {48: 4, 256: 12}),
    ]
    spills.write(spills.path(kernel), "13.5", ["sm_80", "sm_90"], rows)
    of = lambda arch, D, **more: spills.spilled(kernel, tile(PLAIN, D=D, Dv=D, **more), WIDE, arch)  # noqa: E731
    assert of((9, 0), 128, softcap=2.0) == of((9, 0), 104, softcap=2.0) == of((12, 0), 104, softcap=2.0) == 8
    assert (
        of((9, 0), 104, softcap=2.0, causal="top-left", sink=True, dtype="bfloat16") == of(None, 128, softcap=2.0) == 8
    )
    assert of((9, 0), 128) == of((9, 0), 96, softcap=2.0) == of((8, 0), 128, softcap=2.0) == 0
    assert of((8, 6), 40) == of((7, 5), 48) == 4
    assert of((8, 0), 64) == of((8, 0), 32) == of((8, 0), 256, dtype="float32") == 0
    assert spills.spilled(kernel, PLAIN, NARROW, (8, 0)) == 0
    assert spills.text_of(Tile(BLOCK_M=64, BLOCKS=132)) == spills.text_of(Tile(BLOCK_M=64, BLOCKS=78)) == "BLOCK_M=64"


FLOAT8 = dataclasses.replace(PLAIN, dtype="float8_e4m3")
ADDED = {  # options of a problem, and options of which it has all, in one macro whose value is a sum
    "right bound": (PLAIN, {"window": (3, 5)}, {"window": (3, None)}),
    "left bound": (PLAIN, {"window": (3, 5)}, {"window": (None, 5)}),
    "descale arrays": (FLOAT8, {"descale": ((1, 1),) * 3}, {"descale": (1.0, 1.0, 1.0)}),
    "a descale array": (FLOAT8, {"descale": ((1, 1),) * 3}, {"descale": (1.0, (1, 1), 1.0)}),
}


@pytest.mark.parametrize(("problem", "more", "fewer"), ADDED.values(), ids=ADDED)
def test_rows_apply_to_macros_with_more_bits(kernel: Kernel, problem: Problem, more: dict, fewer: dict) -> None:
    """And not to those with fewer."""
    more, fewer = (dataclasses.replace(problem, **options) for options in (more, fewer))
    for row_of, expected in ((fewer, (8, 8)), (more, (0, 8))):
        options = " ".join(sorted(spills.options_of(row_of)))
        row = spills.Row("sm_90", spills.text_of(WIDE), spills.dtype_of(problem), options, {64: 8})
        table = spills.Table(["sm_90"], [row])
        assert tuple(table.spilled(each, WIDE, (9, 0)) for each in (fewer, more)) == expected


def test_selection_avoids_tiles_that_spill(kernel: Kernel) -> None:
    """A tile that is requested is used; of tiles that all spill, the one that spills least."""
    wide, narrow = (spills.text_of(tile) for tile in (WIDE, NARROW))
    chosen = lambda *tile: choose.choose_tile(kernel, PLAIN, (9, 0), *tile)  # noqa: E731
    assert chosen() == WIDE
    spills.write(spills.path(kernel), "13.5", ["sm_90"], [spills.Row("sm_90", wide, "float16", "", {64: 16})])
    assert chosen() == NARROW
    assert chosen(WIDE) == WIDE
    both = [spills.Row("sm_90", tile, "float16", "", {64: n}) for tile, n in ((wide, 16), (narrow, 300))]
    spills.write(spills.path(kernel), "13.5.1", ["sm_90"], both)
    assert chosen() == WIDE


@pytest.mark.parametrize(
    ("spilled", "first", "name"), [(200, 0, "high"), (300, 0, "low"), (4, 1, "low"), (0, 1, "high")]
)
def test_a_kernel_that_spills_much_is_tried_last(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, spilled: int, first: int, name: str
) -> None:
    """A kernel for certain problems is not first for them if it spills at all."""
    high = dataclasses.replace(kernel, name="high", rung=4, first_for=lambda p: bool(first), tiles=(WIDE,))
    low = dataclasses.replace(kernel, name="low", rung=1)
    row = spills.Row("sm_90", spills.text_of(WIDE), "float16", "", {64: spilled})
    spills.write(spills.path(high), "13.5", ["sm_90"], [row])
    monkeypatch.setattr(registry, "kernels", lambda: {"low": low, "high": high})
    assert choose.choose_kernel(PLAIN, "forward", (9, 0)).name == name
    monkeypatch.setattr(registry, "kernels", lambda: {"high": high})
    assert choose.choose_kernel(PLAIN, "forward", (9, 0)).name == "high"


# ---- which problems are compiled


def test_jobs_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dtype of 16 bits; float8 also for sm_89, on which other dtypes give the code of sm_80."""
    narrow = dataclasses.replace(registry.get("fwd_minimal"), dtypes=("float32", "float16", "bfloat16", "float8_e4m3"))
    supported = lambda job: (job.arch, job.dtype) != ("sm_80", "float8_e4m3")  # noqa: E731
    monkeypatch.setattr(sweep, "problems", lambda job, *given: iter([PLAIN] if supported(job) else []))
    found = [*sweep.jobs(narrow, sweep.ARCHS)]
    widths = [*spills.PLAIN_WIDTHS]
    kinds = list(dict.fromkeys((job.arch, job.dtype) for job in found))
    assert {job.kernel for job in found} == {"fwd_minimal"}
    assert {arch for arch, _ in kinds} == {*sweep.ARCHS}
    assert [dtype for arch, dtype in kinds if arch == "sm_89"] == ["float8_e4m3"]
    assert sorted(dtype for arch, dtype in kinds if arch == "sm_80") == ["float16", "float32"]
    assert sorted(dtype for arch, dtype in kinds if arch == "sm_90") == ["float16", "float32", "float8_e4m3"]
    assert all([job.D for job in found if (job.arch, job.dtype) == kind] == widths for kind in kinds)


def test_only_jobs_with_a_supported_problem(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for mask, count in ((True, 1), (False, 1), (None, 0)):
        refusing = dataclasses.replace(
            kernel, dtypes=("float16",),
            supports=lambda p, arch, mask=mask: None if (bool(p.causal), p.D) == (mask, 64) else "no",
        )  # fmt: skip
        monkeypatch.setattr(registry, "get", lambda name, refusing=refusing: refusing)
        assert [job.D for job in sweep.jobs(refusing, ["sm_100"])] == [64] * count


def test_options_of_a_job() -> None:
    assert sweep.Job("k", "sm_100", "float16", 64).cases == ((),)
    cases = sweep.Job("k", "sm_90", "float16", 64).cases
    assert cases[0] == ()
    assert {len(case) for case in cases[1:]} == {1, 2}
    assert {name for case in cases for name in case} == {*sweep.ALONE}


def test_problems_of_a_case() -> None:
    """The first shape is B, H, Hk, Sq, Sk; a combination that is invalid has none."""
    job = sweep.Job("fwd_minimal", "sm_90", "float16", 64)
    problem = sweep.problem_of(job, ("softcap",), True, (2, 16, 4, 100, 200))
    assert problem
    assert (problem.B, problem.H, problem.Hk, problem.Sq, problem.Sk, problem.D) == (2, 16, 4, 100, 200, 64)
    assert (problem.causal, problem.dtype) == ("bottom-right", "float16")
    assert problem.softcap
    plain = sweep.problem_of(job, (), False, (2, 16, 4, 100, 200))
    assert plain == Problem(2, 16, 100, 200, 64, 4, "float16")
    assert sweep.problem_of(job, ("pages",), True, (2, 16, 4, 100, 200)) is None  # 200 keys are no whole pages
    assert len([*sweep.problems(job, (), True)]) == len(sweep.SHAPES)
    assert [*sweep.problems(job._replace(D=7), ("softcap",), True)] == []


def test_tables_are_written_when_all_jobs_of_a_kernel_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent head dimensions are compiled first."""
    done: list[str] = []
    kernels = [registry.get(name) for name in ("fwd_minimal", "fwd_mma")]

    class Pool(ThreadPoolExecutor):
        def __init__(self, processes: int | None, **how: object):
            super().__init__(1)

    def run(job: sweep.Job) -> sweep.Result:
        done.append(f"{job.kernel} {job.D}")
        return sweep.Result(job, [], 1, [])

    def store(kernel: Kernel, results: list[sweep.Result]) -> None:
        done.append(f"store {kernel.name} {sorted(result.job.D for result in results)}")

    often, seldom = spills.WIDTHS[0], next(D for D in spills.PLAIN_WIDTHS if D not in spills.WIDTHS)
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(sweep, "store", store)
    monkeypatch.setattr(
        sweep, "jobs", lambda kernel, archs: [sweep.Job(kernel.name, archs[0], "float16", D) for D in (seldom, often)]
    )
    results = [*sweep.sweep(kernels, ["sm_90"])]
    assert len(results) == 4
    launched = [each for each in done if not each.startswith("store")]
    assert launched == [f"{name} {D}" for D in (often, seldom) for name in ("fwd_minimal", "fwd_mma")]
    stored = [each for each in done if each.startswith("store")]
    assert sorted(stored) == [f"store {name} {sorted((often, seldom))}" for name in ("fwd_minimal", "fwd_mma")]


def test_the_spilled_bytes_of_the_worst_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [SimpleNamespace(resources=nvrtc.Resources(40, 0, 0, *spilled)) for spilled in ((1, 2), (4, 8), (3, 0))]
    monkeypatch.setattr(sweep.pipeline, "compile_problem", lambda *given: compiled)
    assert sweep.spilled(registry.get("fwd_minimal"), PLAIN, WIDE, "sm_90") == 12


def test_tiles_that_are_not_supported_are_not_compiled(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is."""
    compiled: set[Tile] = set()
    refusing = dataclasses.replace(kernel, check_tile=lambda p, tile, arch: "no" if tile == WIDE else None)
    monkeypatch.setattr(registry, "get", lambda name: refusing)
    monkeypatch.setattr(sweep, "spilled", lambda kernel, problem, tile, arch: compiled.add(tile) or 0)
    result = sweep.run(sweep.Job("fwd_minimal", "sm_100", "float16", 64))
    assert compiled == {NARROW}
    assert result.compiled == 2  # causal and not
    assert (result.rows, result.errors) == ([], [])


def test_the_next_tile_is_compiled_with_options_that_the_first_one_need_not(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one spills without options."""
    compiled: set[tuple[Tile, frozenset[str]]] = set()

    def spilled(kernel: Kernel, problem: Problem, tile: Tile, arch: str) -> int:
        compiled.add((tile, spills.options_of(problem)))
        return 8 if tile == WIDE else 0

    monkeypatch.setattr(registry, "get", lambda name: kernel)
    monkeypatch.setattr(sweep, "spilled", spilled)
    result = sweep.run(sweep.Job("fwd_minimal", "sm_90", "float16", 192))
    assert {row.tile for row in result.rows} == {spills.text_of(WIDE)}
    options = {tile: {name for of, names in compiled if of == tile for name in names} for tile in (WIDE, NARROW)}
    assert options[WIDE] <= {"CAUSAL=1"}
    assert {"CAUSAL=1", "SOFTCAP=1", "SINK=1"} <= options[NARROW]
    assert result.compiled == len(compiled)
