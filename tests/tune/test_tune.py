"""Tuning: workers that may die, the search, and the use of its results."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from project import ROOT, check_stored, drawn, printed
from rich.console import Console

import sandbox
from sandbox.bench.timing import Timing
from sandbox.cli import cli
from sandbox.core import jsonl, log, registry
from sandbox.core.errors import SpecError, UnsupportedProblem
from sandbox.engine import choose, pipeline, tuned
from sandbox.jobs.pool import WorkerPool
from sandbox.jobs.worker import WorkerDied
from sandbox.launch import driver
from sandbox.pages import reports
from sandbox.spec import Kernel, Problem, Tile
from sandbox.toolchain.nvrtc import Resources
from sandbox.tune import report as tune_report
from sandbox.tune.search import Measured, Search

GPU = "a GPU"
PROBLEM = Problem(1, 4, 500, 500, 64, dtype="float16")
MINIMAL = registry.get("fwd_minimal")
BEST = Tile(BLOCK_M=128, BLOCK_N=16)


# ---- the store


def test_problems_of_a_class() -> None:
    of = tuned.problem_class
    assert of(PROBLEM) == "D64 float16 Sq<=512 Sk<=512 heads<=4"
    assert of(dataclasses.replace(PROBLEM, B=2, H=2, Sq=257, Sk=512, Hk=1)) == of(PROBLEM)
    for other in ({"Sq": 513}, {"Sk": 256}, {"H": 5, "Hk": 5}, {"D": 128}, {"dtype": "bfloat16"}, {"causal": True}):
        assert of(dataclasses.replace(PROBLEM, **other)) != of(PROBLEM)
    alignments = [dataclasses.replace(PROBLEM, Sk=400, causal=causal) for causal in ("bottom-right", "top-left")]
    assert of(alignments[0]) != of(alignments[1])
    assert of(Problem(1, 1, 0, 1, 64)) == "D64 float32 Sq<=1 Sk<=1 heads<=1"


# ---- workers


def double(n: int) -> int:
    return 2 * n


def visible(n: int) -> str:
    return os.environ["WHICH"]


def fails(n: int) -> None:
    raise ValueError(f"job {n}")


def ends(n: int) -> None:
    os._exit(3)


def hangs(n: int) -> None:
    threading.Event().wait()


def test_jobs_are_spread_over_workers() -> None:
    with WorkerPool([{"WHICH": "one"}, {"WHICH": "two"}], 60) as pool:
        assert dict(pool.map(double, [(n,) for n in range(8)])) == {(n,): 2 * n for n in range(8)}
        assert {result for _, result in pool.map(visible, [(n,) for n in range(50)])} == {"one", "two"}


@pytest.mark.parametrize(
    ("fault", "limit", "message"),
    [
        (fails, 60, "ValueError: job 7"),
        (ends, 60, "the worker ended with status 3"),
        (hangs, 1, "did not finish within 1 s"),
    ],
)
@pytest.mark.sampled(2)
def test_a_lost_worker_costs_one_job(fault: Callable[[int], None], limit: float, message: str) -> None:
    with WorkerPool([{}], limit) as pool:
        ((_, lost),) = pool.map(fault, [(7,)])
        assert isinstance(lost, WorkerDied)
        assert str(lost) == message
        pool._seconds = 60
        assert list(pool.map(double, [(4,)])) == [((4,), 8)]  # by a new worker


# ---- the search


class FakeExecutor:
    """An executor with computed times: BEST takes 1 ms, other tiles more; one spills, one is wrong."""

    gpu, arch = GPU, "sm_90a"
    spilling, wrong = Tile(BLOCK_M=256, BLOCK_N=64), Tile(BLOCK_M=64, BLOCK_N=64)

    def __init__(self, noise: float = 0.01, gain: float = 1.0) -> None:
        self.requested: list[tuple[tuple[Tile, ...], int]] = []
        self.noise, self.gain = noise, gain
        self.dies_after = math.inf

    def describe(self) -> dict[str, object]:
        return {"device": GPU}

    def compile(
        self, kernel: Kernel, problem: Problem, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Resources | str]]:
        for tile in tiles:
            yield (
                tile,
                "no" if tile.BLOCK_M == 32 == tile.BLOCK_N else Resources(64, 0, 0, 8 * (tile == self.spilling), 0),
            )

    def measure(
        self, kernel: Kernel, problem: Problem, groups: Sequence[tuple[Tile, ...]], samples: int
    ) -> Iterator[tuple[tuple[Tile, ...], Sequence[Measured]]]:
        for group in groups:
            if len(self.requested) >= self.dies_after:
                raise KeyboardInterrupt
            self.requested.append((group, samples))
            yield group, [self._time(tile) for tile in group]

    def _time(self, tile: Tile) -> Measured:
        if tile == self.wrong:
            return Measured(False, "error 1 against a bound of 0")
        away = abs(math.log2(tile.BLOCK_M / BEST.BLOCK_M)) + abs(math.log2(tile.BLOCK_N / BEST.BLOCK_N))
        return Measured(True, "", Timing(1e-3 * (1 + self.gain * away), 1e-3, 2e-3, 10, self.noise))


def finished(executor: FakeExecutor, **options: object) -> Search:
    search = Search(MINIMAL, PROBLEM, executor, **options)  # type: ignore[arg-type]
    list(search)
    return search


def test_the_search_finds_the_best(own_cache: Path) -> None:
    executor = FakeExecutor()
    search = finished(executor)
    assert search.winner
    assert search.winner.tile == BEST
    assert search.own
    assert search.own.tile == MINIMAL.tiles[0]
    states = Counter(c.state for c in search.candidates.values())
    assert states == {"timed": 13, "spills": 1, "fails": 1, "does not compile": 1}
    assert search.candidates[executor.wrong].message == "error 1 against a bound of 0"
    rounds = Counter(samples for _, samples in executor.requested)
    assert rounds == {
        4: 14,
        8: 7,
        100: 1,
    }  # 14 that compile without spilling, 13 right, the better 7, then 4 and the spec's
    finalists, _ = executor.requested[-1]
    assert BEST in finalists
    assert MINIMAL.tiles[0] in finalists
    assert executor.spilling not in {tile for group, _ in executor.requested for tile in group}
    assert tuned.winner(MINIMAL, PROBLEM, GPU) == BEST


def test_an_interrupted_search_goes_on(own_cache: Path) -> None:
    executor = FakeExecutor()
    executor.dies_after = 17
    with pytest.raises(KeyboardInterrupt):
        finished(executor)
    assert tuned.winner(MINIMAL, PROBLEM, GPU) is None
    again = FakeExecutor()
    assert finished(again).winner.tile == BEST  # type: ignore[union-attr]
    assert not set(again.requested) & set(executor.requested)
    assert len(again.requested) + len(executor.requested) == 22
    fresh = FakeExecutor()
    finished(fresh, fresh=True)
    assert len(fresh.requested) == 22


def test_what_was_lost_is_tried_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's death is not stored as a measurement: the next search measures that tile again."""
    whole = FakeExecutor._time
    monkeypatch.setattr(
        FakeExecutor,
        "_time",
        lambda executor, tile: Measured(False, "died", lost=True) if tile == BEST else whole(executor, tile),
    )
    search = finished(FakeExecutor())
    assert search.candidates[BEST].state == "fails"
    assert search.winner.tile != BEST  # type: ignore[union-attr]
    monkeypatch.setattr(FakeExecutor, "_time", whole)
    assert finished(FakeExecutor()).winner.tile == BEST  # type: ignore[union-attr]


def test_what_was_measured_counts_for_its_problem_alone(own_cache: Path) -> None:
    """Only for the same source and GPU: anything else is measured."""
    finished(FakeExecutor())
    again = FakeExecutor()
    finished(again)
    assert not again.requested
    for search in (
        Search(MINIMAL, dataclasses.replace(PROBLEM, Sk=499), FakeExecutor()),  # of one class with PROBLEM
        Search(MINIMAL, PROBLEM, type("", (FakeExecutor,), {"gpu": "another GPU"})()),
    ):
        list(search)
        assert len(search.executor.requested) == 22  # type: ignore[attr-defined]


@pytest.mark.parametrize(("noise", "own_wins"), [(0.01, False), (0.6, True), (math.inf, True)])
def test_the_specs_tile_stays_within_the_noise(own_cache: Path, noise: float, own_wins: bool) -> None:
    search = finished(FakeExecutor(noise, gain=0.2))  # the spec's own is two steps away: 1.4 times the best's time
    assert (search.winner is search.own) is own_wins
    text = tune_report.verdict(search)[1].plain
    shown = Console(width=200, no_color=True)
    with shown.capture() as table:
        shown.print(tune_report.tune_table(search, 200))
    assert ("more had a median up to" in text) is own_wins  # "best", and why not the fastest
    assert table.get().count("no faster within the noise") == (len(tune_report.faster(search)) if own_wins else 0)
    assert bool(tune_report.faster(search)) is own_wins


@pytest.mark.parametrize("loud", [BEST, MINIMAL.tiles[0]], ids=["the best", "the spec's own"])
def test_the_noise_of_either_counts(loud: Tile, own_cache: Path) -> None:
    class Executor(FakeExecutor):
        def _time(self, tile: Tile) -> Measured:
            measured = super()._time(tile)
            noise = 0.6 if tile == loud else 0.01
            return dataclasses.replace(
                measured, timing=measured.timing and dataclasses.replace(measured.timing, noise=noise)
            )

    search = finished(Executor(gain=0.2))
    assert search.winner is search.own


def test_spilled_loads_are_spills(own_cache: Path) -> None:
    class Executor(FakeExecutor):
        def compile(self, *requested) -> Iterator[tuple[Tile, Resources | str]]:
            return ((tile, Resources(64, 0, 0, 0, 8 * (tile == BEST))) for tile, _ in super().compile(*requested))

    search = finished(Executor())
    assert search.candidates[BEST].state == "spills"
    assert search.winner
    assert search.winner.tile != BEST


def test_numbers_held_fixed(own_cache: Path) -> None:
    search = finished(FakeExecutor(), fixed={"BLOCK_N": 8})
    assert {tile.BLOCK_N for tile in search.candidates} == {8}
    assert search.combinations == 4
    assert search.own is None
    with pytest.raises(
        UnsupportedProblem, match=r"--fix WARPS=4 is not supported: its tiles have the numbers BLOCK_M, BLOCK_N"
    ):
        finished(FakeExecutor(), fixed={"WARPS": 4})


def test_no_tile_is_legal_or_right(own_cache: Path) -> None:
    with pytest.raises(UnsupportedProblem, match=r"none of 4 tiles is valid for .* needs \d+ bytes of shared memory"):
        Search(MINIMAL, dataclasses.replace(PROBLEM, D=256), FakeExecutor(), {"BLOCK_M": 256}).legal()
    with pytest.raises(UnsupportedProblem, match=r"no tile is correct on .*: error 1 against a bound of 0"):
        finished(FakeExecutor(), fixed=dict(FakeExecutor.wrong))
    with pytest.raises(
        UnsupportedProblem, match=r"no tile can be timed on .* spills: 8 bytes of spill stores and loads per thread"
    ):
        finished(FakeExecutor(), fixed=dict(FakeExecutor.spilling))


def test_a_space_names_what_a_tile_names() -> None:
    with pytest.raises(SpecError, match="fwd_minimal: space must name BLOCK_M, BLOCK_N, not BLOCK_M"):
        dataclasses.replace(MINIMAL, space={"BLOCK_M": (64,)})


@pytest.mark.parametrize("name", registry.kernels())
def test_spaces_of_the_kernels_hold_their_tiles(name: str) -> None:
    kernel = registry.get(name)
    for tile in kernel.tiles if kernel.space else ():
        assert all(tile[number] in values for number, values in kernel.space.items()), tile


# ---- who heeds it


def test_choose_tile_heeds_what_was_found(own_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finished(FakeExecutor())
    arch, other = (9, 0), dataclasses.replace(PROBLEM, Sk=9000)
    caplog.set_level(log.CHOICES, "sandbox")
    assert choose.choose_tile(MINIMAL, PROBLEM, arch, gpu=GPU) == BEST
    assert f"tile {BEST}, tuned on {GPU}" in caplog.text
    assert choose.choose_tile(MINIMAL, PROBLEM, arch) == MINIMAL.tiles[0]
    assert choose.choose_tile(MINIMAL, PROBLEM, arch, gpu="another GPU") == MINIMAL.tiles[0]
    assert choose.choose_tile(MINIMAL, other, arch, gpu=GPU) == MINIMAL.tiles[0]
    assert choose.choose_tile(MINIMAL, PROBLEM, arch, MINIMAL.tiles[1], gpu=GPU) == MINIMAL.tiles[1]
    edited = tmp_path / MINIMAL.source.name
    edited.write_text(MINIMAL.source.read_text() + "\n")
    stale = dataclasses.replace(MINIMAL, source=edited)
    assert choose.choose_tile(stale, PROBLEM, arch, gpu=GPU) == MINIMAL.tiles[0]
    edited.write_text(MINIMAL.source.read_text())  # the same source, elsewhere
    assert choose.choose_tile(stale, PROBLEM, arch, gpu=GPU) == BEST
    refusing = dataclasses.replace(MINIMAL, check_tile=lambda p, t, a: "no" if t == BEST else None)
    assert choose.choose_tile(refusing, PROBLEM, arch, gpu=GPU) == MINIMAL.tiles[0]


def test_the_latest_winner_counts(own_cache: Path) -> None:
    """After tuning again, the latest result is used."""
    key = {"digest": tuned.digest(MINIMAL), "gpu": GPU, "class": tuned.problem_class(PROBLEM)}
    for tile in ("BLOCK_M=32,BLOCK_N=8", "BLOCK_M=64,BLOCK_N=16"):
        jsonl.append(tuned.path(MINIMAL, "winners"), {**key, "tile": tile})
    jsonl.append(tuned.path(MINIMAL, "winners"), {**key, "gpu": "another GPU", "tile": "BLOCK_M=32,BLOCK_N=32"})
    assert tuned.winner(MINIMAL, PROBLEM, GPU) == Tile(BLOCK_M=64, BLOCK_N=16)


def test_an_edited_header_is_another_source(tmp_path: Path) -> None:
    """Results of an earlier source are ignored."""
    source, header, other = (tmp_path / name for name in ("k.cu", "own.cuh", "other.cuh"))
    source.write_text('#include "own.cuh"\n')
    header.write_text("// one\n")
    other.write_text("// one\n")
    kernel = dataclasses.replace(MINIMAL, source=source)
    before = tuned.digest(kernel)
    other.write_text("// another\n")
    assert tuned.digest(kernel) == before
    header.write_text("// two\n")
    assert tuned.digest(kernel) != before


def test_an_edited_header_of_the_project_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers in kernels_cu/include, which is not the kernel's folder, and the headers that they include."""
    project, folder = tmp_path / "include", tmp_path / "kernels"
    project.mkdir()
    folder.mkdir()
    monkeypatch.setattr(tuned, "INCLUDE_DIR", project)
    (folder / "k.cu").write_text("#include <first.cuh>\n")
    (project / "first.cuh").write_text('#include "second.cuh"\n')
    (project / "second.cuh").write_text("// one\n")
    kernel = dataclasses.replace(MINIMAL, source=folder / "k.cu")
    digests = [tuned.digest(kernel)]
    for header in ("first.cuh", "second.cuh"):
        with (project / header).open("a") as file:
            file.write("// edited\n")
        digests.append(tuned.digest(kernel))
    assert len(set(digests)) == 3


@pytest.mark.parametrize("line", ["not JSON", "[]", '{"tile": 7}', '{"tile": "BLOCK_M=x"}'])
def test_a_spoilt_store_is_no_reason_to_fail(own_cache: Path, line: str) -> None:
    finished(FakeExecutor())
    file = tuned.path(MINIMAL, "winners")
    row = jsonl.read(file)[-1]
    non_finite = json.loads(line) if line.startswith("{") else None
    file.write_text(json.dumps(row | non_finite) + "\n" if non_finite else line + "\n")
    assert choose.choose_tile(MINIMAL, PROBLEM, (9, 0), gpu=GPU) == MINIMAL.tiles[0]


@pytest.mark.gpu
def test_attention_heeds_what_was_found(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1, 1, 64, 64, 64, dtype="float16")
    key = {"digest": tuned.digest(MINIMAL), "gpu": driver.device().name, "class": tuned.problem_class(problem)}
    jsonl.append(tuned.path(MINIMAL, "winners"), {**key, "tile": "BLOCK_M=32,BLOCK_N=8"})
    requested = []
    load = pipeline.load
    monkeypatch.setattr(pipeline, "load", lambda k, tile, *rest: requested.append(tile) or load(k, tile, *rest))
    q = np.zeros((1, 1, 64, 64), np.float16)
    sandbox.attention(q, q, q, kernel=MINIMAL, backend="cuda")
    assert requested == [Tile(BLOCK_M=32, BLOCK_N=8)]


# ---- for people


def test_the_table_and_the_picture(own_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    search = finished(FakeExecutor())
    ranked = tune_report.ranked(search)
    assert ranked[0].tile == BEST
    assert all(c.finalist for c in ranked[:5])
    assert "16 tiles, 16 valid: 13 timed, 1 fails, 1 spills, 1 does not compile" in tune_report.verdict(search)[0].plain
    assert "BLOCK_M=128,BLOCK_N=16, 3.00 times as fast as the spec's own BLOCK_M=64,BLOCK_N=32" in "".join(
        text.plain for text in tune_report.verdict(search)
    )
    png, svg = tune_report.draw(search, tmp_path / "space")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "does not compile" in svg.read_text()
    pytest.importorskip("jinja2")
    page = reports.tune([search])
    assert page.count('">best<') == 1
    assert "3.00 times as fast" in page
    assert page.count('src="data:image/svg+xml;base64,') == 1
    for one in ({"BLOCK_N": 8}, {"BLOCK_N": 16, "BLOCK_M": 128}):  # one number left to vary, and none
        assert len(tune_report.draw(finished(FakeExecutor(), fixed=one), tmp_path / "narrow")) == 2


def test_stored_tables_and_pictures(own_cache: Path) -> None:
    """Their whole text, numbers and styles: of all tiles, of one number that varies, and of small differences."""
    pytest.importorskip("matplotlib")
    lines = []
    for options in ({}, {"fixed": {"BLOCK_N": 8}}):
        search = finished(FakeExecutor(), **options)
        lines += printed(100, *tune_report.verdict(search), tune_report.tune_table(search, 100))
        lines += printed(79, tune_report.tune_table(search, 79))
        lines += drawn(lambda search=search: tune_report.draw(search, ""))  # type: ignore[misc]
    close = finished(FakeExecutor(noise=0.2, gain=0.02))
    lines += printed(100, *tune_report.verdict(close), tune_report.tune_table(close, 100))
    lines.append(json.dumps(tune_report.as_json(close), default=str))
    check_stored("tune.txt", lines)


# ---- end to end, with the CPU backend in place of a GPU

OPTIONS = ("fwd_minimal", "--shape", "1,1,40,16", "--fix", "BLOCK_N=8", "--backend", "cpu")
LINE_BY_LINE = """
from sandbox.core import registry
from sandbox.spec import Problem
from sandbox.tune import executors
from sandbox.tune.search import Search
kernel = registry.get("fwd_minimal")
with executors.CpuExecutor(kernel) as executor:
    for candidate in Search(kernel, Problem(1, 1, 40, 40, 16, dtype="float16"), executor, {"BLOCK_N": 8}):
        print(candidate.tile, flush=True)
        input()
"""


def test_killed_and_begun_again(own_cache: Path) -> None:
    """After SIGKILL the rows of completed measurements exist, and the next search reuses them."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", LINE_BY_LINE], cwd=ROOT, **pipes)
    first = process.stdout.readline().strip()
    process.kill()
    process.communicate()
    file = tuned.path(MINIMAL, "measurements")
    rows = jsonl.read(file)
    assert rows[0]["tile"] == first
    result = CliRunner().invoke(cli, ["tune", *OPTIONS, "--json"])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["tile"] in [c["tile"] for c in found["candidates"] if c["state"] == "timed"]
    assert Problem.from_json(found["problem"]) == Problem(1, 1, 40, 40, 16, dtype="float16")
    assert jsonl.read(file) == rows
    assert len(jsonl.read(tuned.path(MINIMAL, "winners"))) == 1


@pytest.mark.complete
def test_two_searches_at_a_time(own_cache: Path) -> None:
    """Both measure everything, and no row is lost."""
    command = [sys.executable, "-m", "sandbox", "tune", *OPTIONS, "--fresh", "--json"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(json.loads(output)[0]["tile"] for output in outputs)
    file = tuned.path(MINIMAL, "measurements")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(line["ok"] for line in lines)
    assert len(lines) == 2 * len({line["tile"] for line in lines})


def test_the_command_without_a_problem_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "available", lambda: False)
    result = CliRunner().invoke(cli, ["tune", "fwd_minimal"])
    assert result.exit_code == 2
    assert "tune needs a problem: pass --shape B,H,S,D (of a custom operation: its dims) or --grid" in result.stderr
    result = CliRunner().invoke(cli, ["tune", "fwd_minimal", "--shape", "1,1,64,64"])
    assert result.exit_code == 1
    assert result.stderr == (
        "sandbox: tune needs a GPU to time kernels, and there is none (--backend cpu only tests the command: its "
        "times are meaningless)\n"
    )


@pytest.mark.gpu
def test_tuning_on_a_gpu(own_cache: Path) -> None:
    options = ["fwd_minimal", "--shape", "1,4,256,64", "--fix", "BLOCK_N=32", "--json"]
    result = CliRunner().invoke(cli, ["tune", *options])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert found["gpu"] == driver.device().name
    timed = [c for c in found["candidates"] if c["state"] == "timed"]
    assert timed
    assert all(c["timing"]["median"] > 0 for c in timed)
    problem = Problem(1, 4, 256, 256, 64, dtype="float16")
    assert tuned.winner(MINIMAL, problem, driver.device().name) == Tile(**found["tile"])
