"""Ladders of steps: what is measured, and the tables of speeds and gains."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.bench import benchmark, peers, steps
from sandbox.bench.rows import Row, read_rows
from sandbox.bench.steps import Ladder, Step
from sandbox.bench.timing import Timing
from sandbox.core import registry
from sandbox.core.errors import SandboxError, UnsupportedProblem
from sandbox.spec import Problem, Tile

KERNEL = registry.get("fwd_mma")
FIRST = Step("first", "nothing", (1.0, 1.0))
SECOND = Step("second", "pipelining", (1.25, 1.5), {"STAGES": 2}, at_128={"SUB_N": 16})
AT_64 = Step("at 64", "only at D = 64", (1.1, 1.0))
VARIANT = Step("variant", "slower", (0.9, 0.95))
PROBLEMS = [Problem(1, 2, 256, 256, D, dtype="float16", causal=causal) for D in (64, 128)
            for causal in (False, "bottom-right")]  # type: ignore[arg-type] # fmt: skip


def find(step: Step, D: int) -> tuple[Any, Tile] | None:
    return None if step is AT_64 and D == 128 else (KERNEL, Tile(D=D, **step.numbers(D)))


LADDER = Ladder(
    (FIRST, AT_64, SECOND), find, (64, 128), PROBLEMS, (VARIANT,), {"sdpa-flash": "PyTorch", "fwd_minimal": "simple"}
)


def row(name: str, problem: Problem, tflops: float | None, ok: bool | None = True, **setting: Any) -> Row:
    seconds = problem.flops / tflops * 1e-12 if tflops else None
    timing = Timing(seconds, seconds, seconds, 10, 0.0) if seconds else None
    common = {"device": "a GPU", "cuda": "13.0", "ceiling_tflops": 700.4}
    return Row(name, "fwd_mma", problem, ok, "why" if not ok else "", timing=timing, setting={**common, **setting})


def stored() -> list[dict[str, Any]]:
    """Speeds without a mask, by step and D; with one they are half as high, of the second a quarter,
    and of the peer equal."""
    speeds = {"first": (100, 50), "at 64": (110, None), "second": (220, 100), "variant": (110, 50),
              "sdpa-flash": (440, None)}  # fmt: skip
    costs = {"first": (100, 0), "second": (200, 8), "variant": (168, 0)}  # registers, and at D = 128 spills
    rows = []
    for problem in PROBLEMS:
        for name, by_width in speeds.items():
            speed = by_width[problem.D == 128]
            factor = {"sdpa-flash": 1, "second": 0.25}.get(name, 0.5) if problem.causal else 1
            cost = {}
            if name in costs:
                registers, spills = costs[name]
                cost = {"registers": registers + bool(problem.causal), "spills": spills * (problem.D == 128)}
            rows.append(row(name, problem, speed and speed * factor, speed and True, **cost).as_json())
    return rows


def test_a_step_may_change_more_at_128() -> None:
    assert SECOND.numbers(64) == SECOND.numbers(256) == {"STAGES": 2}
    assert SECOND.numbers(128) == {"STAGES": 2, "SUB_N": 16}


def test_problems_of_a_ladder() -> None:
    found = steps.problems((64, 128))
    assert [(p.B, p.H, p.Sq, p.D, p.causal) for p in found[:7]] == [
        (16, 32, 1024, 64, False), (4, 32, 4096, 64, False), (1, 32, 16384, 64, False),
        (16, 32, 1024, 64, "bottom-right"), (4, 32, 4096, 64, "bottom-right"), (1, 32, 16384, 64, "bottom-right"),
        (16, 16, 1024, 128, False),
    ]  # fmt: skip
    assert len(found) == 12
    assert {(p.Sk - p.Sq, p.dtype) for p in found} == {(0, "float16")}


def test_the_problem_that_steps_are_verified_on() -> None:
    """Grouped heads, partial tiles, and a mask."""
    p = steps.SMALL
    assert p.B > 0
    assert p.group > 1
    assert p.Sq % 64 > 0 < p.Sk % 64
    assert p.causal


def test_gains() -> None:
    """Over the last step before it that is timed; those of variants and others over the last step."""
    assert LADDER.gains(stored(), 64) == {
        "first": "–", "at 64": "×1.10", "second": "×1.41", "variant": "×0.71", "sdpa-flash": "×4.00", "fwd_minimal": "–"
    }  # fmt: skip
    assert LADDER.gains(stored(), 128) == {
        "first": "–", "at 64": "–", "second": "×1.41", "variant": "×0.71", "sdpa-flash": "–", "fwd_minimal": "–"
    }  # fmt: skip
    assert [LADDER.gains(stored(), 64, causal)["sdpa-flash"] for causal in (False, True)] == ["×2.00", "×8.00"]
    wrong = [{**r, "ok": r["contender"] != "second"} for r in stored()]
    assert LADDER.gains(wrong, 64)["second"] == "–"
    assert LADDER.gains(wrong, 64)["variant"] == "×1.00"  # over "at 64"


def test_tables(tmp_path: Path) -> None:
    """In the README.md beside the script, and in docs/ladders.md."""
    script, begin, end = tmp_path / "experiments" / "001_x" / "run.py", "<!-- mine: written by", "<!-- end of mine -->"
    page, docs = script.with_name("README.md"), tmp_path / "docs" / "ladders.md"
    for file in (page, docs):
        file.parent.mkdir(parents=True)
        file.write_text(f"{begin} experiments/001_x/run.py table -->\nold\n{end}\n")
    earlier, *later = stored()
    rows = [earlier | {"ceiling_tflops": 600.0}, *later]
    script.with_name("results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [*LADDER.run("table", script, "mine")] == []
    assert page.read_text().splitlines()[1:-1] == [
        "| step | D = 64: predicted | no mask | causal | D = 128: predicted | no mask | causal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| at 64 | ×1.10 | ×1.10 | ×1.10 | ×1.00 | – | – |",
        "| second | ×1.25 | ×2.00 | ×1.00 | ×1.50 | ×2.00 | ×1.00 |",
        "| variant | ×0.90 | ×0.50 | ×1.00 | ×0.95 | ×0.50 | ×1.00 |",
    ]
    assert docs.read_text().splitlines()[1:-1] == [
        "|  | step | idea | D = 64 | gain | D = 128 | gain | registers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0 | first | nothing | 70.7 | – | 35.4 | – | 101 / 101 |",
        "| 1 | at 64 | only at D = 64 | 77.8 | ×1.10 | – | – |  |",
        "| 2 | second | pipelining | 110 | ×1.41 | 50 | ×1.41 | 201 / 201* |",
        "| not kept | variant | slower | 77.8 | ×0.71 | 35.4 | ×0.71 | 169 / 169 |",
        "|  | sdpa-flash | PyTorch | 440 | ×4.00 | – | – |  |",
        "|  | fwd_minimal | simple | – | – | – | – |  |",
        "",
        (
            "TFLOP/s, float16, geometric means over S 256 with and without causal mask (16k tokens, hidden size 2048). "
            "A gain is relative to the step before; in the rows after step 2, to that step. “–”: the step changes "
            "nothing at this D. Registers at D = 64 / 128, the maximum over the problems; “*”: some are spilled. "
            "a GPU, CUDA 13.0; a matrix product reaches 700 in the same run."
        ),
    ]
    without = [{k: x for k, x in r.items() if k != "spills" or r["D"] == 64} for r in stored()]
    assert "| 201 / – |" in LADDER.speed_table(without)
    script.with_name("results.jsonl").unlink()
    before = docs.read_text()
    assert [*LADDER.run("table", script, "mine")] == []
    assert docs.read_text() == before  # without rows there is no table of speeds
    assert "| second | ×1.25 | – | – | ×1.50 | – | – |" in page.read_text()


def test_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step with its tile under its own name, then kernels and peers."""
    prepared: list[Any] = []

    def kernel_contenders(kernels: Any, tiles: Any = ()) -> list[peers.Contender]:
        def prepare(*given: Any) -> Any:
            return prepared.append((kernels, tiles, given))

        return [peers.Contender(kernels[0].name, prepare, kernels[0].name)]

    monkeypatch.setattr(benchmark, "kernel_contenders", kernel_contenders)
    found = LADDER.contenders()
    assert [(c.name, c.kernel) for c in found] == [
        ("first", "fwd_mma"), ("at 64", "fwd_mma"), ("second", "fwd_mma"), ("variant", "fwd_mma"), ("sdpa-flash", ""),
        ("fwd_minimal", "fwd_minimal"),
    ]  # fmt: skip
    assert found[4] is peers.PEERS["sdpa-flash"]
    found[2].prepare(PROBLEMS[3], "q", "k", "v")
    assert prepared == [([KERNEL], [Tile(D=128, STAGES=2, SUB_N=16)], (PROBLEMS[3], "q", "k", "v"))]
    with pytest.raises(UnsupportedProblem, match="at 64: changes nothing at D=128"):
        found[1].prepare(PROBLEMS[3])


class Compiled:
    """Replaces the compiler: records what is compiled."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> SimpleNamespace:
        self.calls.append(given)
        return SimpleNamespace(resources=SimpleNamespace(registers=168, spill_stores=12, spill_loads=6))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    made = Compiled()
    monkeypatch.setattr(steps.pipeline, "compile", made)
    monkeypatch.setattr(steps.driver, "device", lambda: SimpleNamespace(arch=(9, 0)))
    return made


def test_each_binary_is_compiled_once(compiled: Compiled) -> None:
    LADDER.compile_all()
    tiles = {64: (Tile(D=64), Tile(D=64, STAGES=2)), 128: (Tile(D=128), Tile(D=128, STAGES=2, SUB_N=16))}
    expected = [(KERNEL, p.D, "float16", p.causal, "sm_90", tile) for p in PROBLEMS for tile in tiles[p.D]]
    assert len(compiled.calls) == len(expected) == 8
    assert {*compiled.calls} == {*expected}


def test_a_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: Compiled) -> None:
    """Rows have the registers of the tile. It continues where it was interrupted, and ends with an error if a result is
    wrong."""
    asked: list[tuple[Any, ...]] = []
    tile = str(Tile(D=64))
    found = [
        dataclasses.replace(row("first", PROBLEMS[0], 123.44), tile=tile, arch="sm_90"),
        row("second", PROBLEMS[0], None, ok=False),
        row("variant", PROBLEMS[1], None, ok=None),
        row("sdpa-flash", PROBLEMS[1], None, ok=False),
    ]

    def run(contenders: Any, problems: Any, computes: str, mode: str, limits: Any) -> Iterator[Row]:
        asked.append((problems, computes, mode, limits.seconds))
        return iter(found)

    monkeypatch.setattr(benchmark, "run_contenders", run)
    monkeypatch.setattr(benchmark, "matching_rows", lambda rows, *_, computes: rows)
    monkeypatch.setattr(Ladder, "compile_all", lambda self: asked.append(("compile",)))
    file, lines = tmp_path / "rows.jsonl", list[str]()
    with pytest.raises(SandboxError, match=r"^2 results are wrong or failed$"):
        lines.extend(LADDER.measure(file, 0.5))
    assert lines == [
        "S256 D64 causal=False        first              123.4 TFLOP/s",
        "S256 D64 causal=False        second             why",
        "S256 D64 causal=bottom-right variant            why",
        "S256 D64 causal=bottom-right sdpa-flash         why",
    ]
    assert asked == [("compile",), (PROBLEMS, "forward", "events", 0.5)]
    assert compiled.calls == [(KERNEL, 64, "float16", False, "sm_90", tile)]
    assert [(r.get("registers"), r.get("spills")) for r in read_rows(file)] == [(168, 18), *[(None, None)] * 3]
    every = [json.dumps(row(c.name, p, 1.0).as_json()) + "\n" for p in PROBLEMS for c in LADDER.contenders()]
    file.write_text("".join(every[:-1]))
    found = []
    assert [*LADDER.measure(file)] == []
    assert asked[2:] == [("compile",), (PROBLEMS[3:], "forward", "events", 0.2)]
    file.write_text("".join(every))
    assert [*LADDER.measure(file)] == []
    assert asked[4:] == [([], "forward", "events", 0.2)]


def test_steps_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default all of them, up to the first that is wrong."""
    verified: list[tuple[Any, ...]] = []

    def verify(kernel: Any, case: Any, device: Any, tile: Tile) -> SimpleNamespace:
        verified.append((kernel, case.name, case.problem, device, tile))
        return SimpleNamespace(error=1.0, bound=2.0, message="said", ok=case.name != "at 64")

    monkeypatch.setattr(steps.checking, "verify", verify)
    lines: list[str] = []
    with pytest.raises(SandboxError, match="at 64 is wrong"):
        lines.extend(LADDER.run("check", Path("run.py"), "mine"))
    assert [v[1] for v in verified] == ["first", "at 64"]
    assert verified[0] == (KERNEL, "first", steps.SMALL, ("cpu", 0), Tile(D=64))
    assert lines == [f"{name}: error 1.0 bound 2.0 said" for name in ("first", "at 64")]
    only = [*LADDER.run("check", Path("run.py"), "mine", small=PROBLEMS[3], checked=(SECOND,))]
    assert only == ["second: error 1.0 bound 2.0 said"]
    assert verified[2][2:] == (PROBLEMS[3], ("cpu", 0), Tile(D=128, STAGES=2, SUB_N=16))


def test_measuring_then_writes_the_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Ladder, "measure", lambda self, *given: asked.append(given) or iter(["a line"]))
    monkeypatch.setattr(steps, "write_table", lambda path, *_: asked.append(path.name))
    script = tmp_path / "run.py"
    assert [*LADDER.run("measure", script, "mine", seconds=0.3)] == ["a line"]
    assert asked == [(tmp_path / "results.jsonl", 0.3), "README.md"]
    assert [*LADDER.run("measure", script, "mine")] == ["a line"]
    assert asked[2] == (tmp_path / "results.jsonl", 0.2)
