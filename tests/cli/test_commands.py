"""What commands print and their exit status, for results that are made up: nothing is compiled or launched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sandbox.cli import cli, compile, course, new, sanitize, verify, watch
from sandbox.core import registry
from sandbox.core.errors import CompileError, UnsupportedProblem
from sandbox.core.source_line import SourceLine
from sandbox.course import faults
from sandbox.disassembly import sweep
from sandbox.engine import spills
from sandbox.spec import Problem, Tile
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify import check
from sandbox.verify.findings import Finding
from sandbox.verify.sanitize import Inspection

PROBLEM, TILE = Problem(1, 1, 8, 8, 16, dtype="float16"), Tile(BLOCK_M=32)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env={"COLUMNS": None}, prog_name="sandbox")


# ---- run


@pytest.mark.parametrize("named", [(), ("fwd_minimal", "fwd_mma")])
def test_an_unsupported_problem_has_a_line_only_if_its_kernel_is_named(
    named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a name it has only a note."""
    found = [
        check.Result("fwd_minimal", "gpt2", PROBLEM, "cpu", True, TILE, error=0.0, bound=1.0, seconds=1.0),
        check.Result("fwd_mma", "gpt2", PROBLEM, "cpu", None, message="too small"),
    ]
    monkeypatch.setattr(verify.checking, "run_cases", lambda *arguments: iter(found))
    done = call("run", *named, "--backend", "cpu")
    assert done.exit_code == 0, done.output
    rows = [line.split()[0] for line in done.stdout.splitlines() if str(PROBLEM) in line]
    assert rows == ["fwd_minimal", "fwd_mma"][: 2 if named else 1]
    assert "note fwd_mma on gpt2 [cpu]: too small" in done.output


# ---- compile


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("errors", [[], ["no\n\noptions: -O2", "no\n\noptions: -O3", "never"]])
def test_a_sweep(as_json: bool, errors: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that differ in the options only are reported once."""
    file, asked = tmp_path / "table.json", []
    spills.write(file, "13", ["sm_90"], [spills.Row("sm_90", "A=1", "float16", "", {64: 1})])
    monkeypatch.setattr(compile.spills, "path", lambda kernel: file)
    job = sweep.Job("fwd_minimal", "sm_90", "float16", 64)
    results = [
        sweep.Result(job, [], 3, errors),
        sweep.Result(job, [], 4, []),
        sweep.Result(job._replace(kernel="x"), [], 5, []),
    ]

    def swept(kernels: Any, archs: Any, processes: Any) -> Any:
        asked.append(([kernel.name for kernel in kernels], archs, processes))
        return iter(results)

    monkeypatch.setattr(compile.sweeping, "sweep", swept)
    monkeypatch.setattr(compile.sweeping, "jobs", lambda kernel, archs: iter([job]))  # all take seconds to count
    options = ("--arch", "sm_90a,sm_80", "--arch", "sm_90", "--jobs", "2", *(["--json"] if as_json else []))
    done = call("compile", "--sweep", "fwd_minimal", *options)
    assert asked == [(["fwd_minimal"], ["sm_90", "sm_80"], 2)]
    if as_json:
        assert json.loads(done.stdout) == [{"kernel": "fwd_minimal", "compiled": 7, "rows": 1}]
    else:
        assert done.stdout == "fwd_minimal: 7 variants compiled, 1 rows of tiles that spill\n"
    said = done.stderr.split("not compiled: ")[1:]
    assert sorted(said) == (["never\n", "no\n\noptions: -O2\n"] if errors else [])
    assert done.exit_code == (1 if errors else 0)
    assert call("compile", "--sweep", "fwd_minimal", "--arch", "sm_80").exit_code == done.exit_code
    assert asked[-1] == (["fwd_minimal"], ["sm_80"], None)
    assert call("compile", "--sweep", "fwd_minimal").exit_code == done.exit_code
    assert asked[-1] == (["fwd_minimal"], sweep.ARCHS, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sweep", "--tile", "BLOCK_M=32"), "--tile is not supported with --sweep"),
        (("--sweep", "--shape", "1,1,1,8"), "--shape is not supported with --sweep"),
        (("--jobs", "2"), "--jobs needs --sweep"),
        (("sm_90", "--arch", "sm_80"), "sm_90 is an architecture, not a kernel: write --arch sm_80 --arch sm_90"),
        (("-D", "x"), "'x' must be numbers with commas between, such as 64,128"),
    ],
)
def test_options_of_compile_that_do_not_fit(arguments: tuple[str, ...], message: str) -> None:
    done = call("compile", *arguments)
    assert (done.exit_code, message in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_costs_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile and architecture; those that do not compile, or are not supported, with the reason."""
    tried: list[tuple[Any, ...]] = []

    def compiled(kernel: Any, problem: Problem, tile: Tile, target: str) -> Any:
        tried.append((problem.D, tile.BLOCK_M, target))
        if target == "sm_86":
            raise UnsupportedProblem("not there")
        if tile.BLOCK_M == 32:
            raise CompileError("broken", source="", options=(), log="")
        return [SimpleNamespace(resources=Resources(40, 8, 0, 0, 0), seconds=0.5, cached=True)]

    monkeypatch.setattr(compile.pipeline, "compile_problem", compiled)
    done = call("compile", "fwd_minimal", "--arch", "sm_80,sm_86", "--json", "--tile", "BLOCK_M=64,BLOCK_N=32")
    assert tried == [(64, 64, "sm_80"), (128, 64, "sm_80"), (64, 64, "sm_86"), (128, 64, "sm_86")]
    rows = json.loads(done.stdout)
    assert [(row["ok"], row["message"]) for row in rows] == [(True, "")] * 2 + [(None, "not there")] * 2
    assert done.exit_code == 0
    tried.clear()
    done = call("compile", "fwd_minimal", "-D", "64", "--tile", "BLOCK_M=32,BLOCK_N=16")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "not compiled: broken\n")
    assert tried == [(64, 32, "sm_90a")]
    done = call("compile", "fwd_minimal", "--shape", "1,1,1,64", "--arch", "sm_86", "--tile", "BLOCK_M=32,BLOCK_N=16")
    assert (done.exit_code, done.stderr) == (2, "not compiled: not there\n")


# ---- sanitize


def test_findings_of_sanitize(monkeypatch: pytest.MonkeyPatch) -> None:
    """By problem and tile; at most six places of a finding."""
    places = tuple(SourceLine("/none/k.cu", n) for n in range(1, 9))
    results = [
        Inspection("k", PROBLEM, TILE, "address", True),
        Inspection("k", PROBLEM, TILE, "thread", False, (Finding("a race", places), Finding("another"))),
        Inspection("k", PROBLEM, Tile(BLOCK_M=64), "order", None, message="no time"),
    ]
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sanitize.sanitize, "inspect", lambda *arguments: asked.append(arguments) or iter(results))
    done = call("sanitize", "fwd_minimal", "--backend", "cpu", "--timeout", "7", "--tile", "BLOCK_M=32")
    assert asked == [(registry.get("fwd_minimal"), ("cpu", 0), TILE, 7.0, None)]
    assert done.stdout == (
        f"k on {PROBLEM}, tile BLOCK_M=32\n"
        "  address        clean\n"
        "  thread         2 found\n"
        "    a race\n"
        + "".join(f"      k.cu:{n}  \n" for n in range(1, 7))
        + f"    another\nk on {PROBLEM}, tile BLOCK_M=64\n"
        "  order          not used: no time\n"
    )
    assert done.exit_code == 1
    done = call("sanitize", "fwd_minimal", "--backend", "cpu", "--json", "--shape", "1,1,8,8", "--causal")
    assert [row["clean"] for row in json.loads(done.stdout)] == [True, False, None]
    assert asked[1][2:] == (None, 120.0, Problem(1, 1, 8, 8, 8, dtype="float16", causal="bottom-right"))
    done = call("sanitize", "fwd_minimal", "--backend", "cpu", "--causal")
    assert (done.exit_code, "--causal needs --shape" in done.stderr) == (2, True)


# ---- course and new


def test_the_faults_of_the_course(tmp_path: Path) -> None:
    listed = json.loads(call("course", "list", "--json").stdout)
    assert [row["number"] for row in listed] == [*faults.every()]
    assert {*listed[0]} == {"number", "kernel", "topic"}
    lines = call("course", "list").stdout.splitlines()
    assert lines[0].split()[:2] == [str(listed[0]["number"]), listed[0]["kernel"]]
    assert len(lines) == len(listed)
    folder = tmp_path / "course"
    done = call("course", "start", "1", str(folder))
    files = [str(folder / f"course_01{suffix}") for suffix in (".cu", ".py")]
    assert sorted(done.stdout.splitlines()) == files
    assert done.stderr == (
        f"find the fault: SANDBOX_KERNELS={folder} python -m sandbox watch course_01\n"
        f"then: python -m sandbox course check 1 {done.stdout.splitlines()[0]}\n"
    )
    done = call("course", "start", "2", str(folder), "--json")
    assert sorted(Path(file).name for file in json.loads(done.stdout)["files"]) == ["course_02.cu", "course_02.py"]
    assert call("course", "solution", "1").stdout == faults.solution(1)
    assert json.loads(call("course", "solution", "1", "--json").stdout) == {"solution": faults.solution(1)}


@pytest.mark.parametrize("wrong", [[], ["a race", "another"]])
def test_the_check_of_a_correction(wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "")
    checked: list[str] = []
    monkeypatch.setattr(course, "_wrong", lambda kernel: checked.append(kernel.name) or iter(wrong))
    try:
        call("course", "start", "1", str(tmp_path))
        file = tmp_path / "course_01.cu"
        done = call("course", "check", "1", str(file))
        assert (done.exit_code, done.stdout) == (bool(wrong), "\n".join(wrong or ["correct"]) + "\n")
        done = call("course", "check", "1", str(file), "--json")
        assert (done.exit_code, json.loads(done.stdout)) == (bool(wrong), {"correct": not wrong, "wrong": wrong})
        assert checked == ["course_01"] * 2
        done = call("course", "check", "2", str(file))
        assert (done.exit_code, f"{file} is not the file of fault 2: pass course_02.cu" in done.stderr) == (2, True)
        done = call("course", "check", "1", str(tmp_path))
        assert (done.exit_code, "is a directory" in done.stderr) == (2, True)
        done = call("course", "check", "1", str(tmp_path / "none.cu"))
        assert (done.exit_code, "does not exist" in done.stderr) == (2, True)
    finally:
        monkeypatch.delenv(registry.VARIABLE)
        registry.forget()


def test_new_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their paths, one per line or as JSON."""
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(new.new, "kernel", lambda *names: given.append(names) or [Path("/p/a.cu"), Path("/p/a.py")])
    monkeypatch.setattr(new.new, "experiment", lambda *names: given.append(names) or [Path("/p/run.py")])
    assert call("new", "kernel", "a").stdout == "/p/a.cu\n/p/a.py\n"
    assert json.loads(call("new", "kernel", "b", "--like", "fwd_mma", "--json").stdout) == {
        "files": ["/p/a.cu", "/p/a.py"]
    }
    assert call("new", "experiment", "c").stdout == "/p/run.py\n"
    assert json.loads(call("new", "experiment", "d", "--json").stdout) == {"files": ["/p/run.py"]}
    assert given == [("a", "fwd_minimal"), ("b", "fwd_mma"), ("c",), ("d",)]


# ---- watch


class Recorded:
    """A history of two versions."""

    kernel = registry.get("fwd_minimal")

    def __init__(self, kernel: Any = None, empty: bool = False):
        self.empty, self.restored = empty, []

    def versions(self) -> list[Any]:
        return []

    def get(self, number: int) -> Any:
        return SimpleNamespace(number=number, texts={"a.cu": f"text {number}\n", "b.py": "no end"})

    def diff(self, old: dict[str, str], new: dict[str, str], names: tuple[str, str]) -> str:
        return f"{old['a.cu']}{new['a.cu']}{names}\n"

    def restore(self, number: int) -> tuple[Any, list[str]]:
        return (SimpleNamespace(number=9), ["a.cuh", "b.cuh"]) if number == 1 else (None, [])


def test_earlier_versions_of_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "History", Recorded)
    monkeypatch.setattr(watch, "read_texts", lambda kernel: {"a.cu": "now\n"})
    look = lambda *arguments: call("watch", "fwd_minimal", *arguments)  # noqa: E731
    assert look("--restore", "1").stdout == (
        "restored version 1; the replaced files are version 9\n"
        "not restored, because other kernels include them: a.cuh, b.cuh\n"
    )
    assert look("--restore", "0").stdout == "restored version 0\n"
    assert look("--diff", "0").stdout == "text 0\nnow\n('#0', 'now')\n"
    assert look("--diff", "2", "0").stdout == "text 2\ntext 0\n('#2', '#0')\n"
    assert look("--show", "0").stdout == "==> a.cu <==\ntext 0\n==> b.py <==\nno end\n"
    assert json.loads(look("--show", "0", "--json").stdout)["number"] == 0
    assert json.loads(look("--history", "--json").stdout) == []
    done = look("--history")
    assert (done.stdout, done.stderr) == ("", "fwd_minimal has no versions yet: watch stores one at every save\n")
    for arguments, message in (
        (("3",), "unexpected argument 3: only --diff takes a second version"),
        (("--show", "1", "--once"), "--once is not supported with --show"),
        (("--diff", "1", "--json"), "--json is not supported with --diff"),
        (("--restore", "1", "--tile", "BLOCK_M=1"), "--tile is not supported with --restore"),
        (("--dtype", "bfloat16"), "--dtype needs --shape"),
    ):
        done = look(*arguments)
        assert (done.exit_code, message in " ".join(done.stderr.split())) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("verdicts", "status"), [([True], 0), ([True, False], 1), ([False, True], 0), ([], 1), (KeyboardInterrupt, 0)]
)
@pytest.mark.parametrize("as_json", [False, True])
def test_versions_that_are_followed(verdicts: Any, status: int, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, when it is complete; the exit status is that of the last."""
    jobs: list[Any] = []

    def session(kernel: Any, job: Any, once: bool) -> Any:
        jobs.append((kernel.name, job, once))
        if verdicts is KeyboardInterrupt:
            raise KeyboardInterrupt
        for ok in verdicts:
            yield None
            for pending in (True, False):
                yield SimpleNamespace(found=SimpleNamespace(pending=pending, ok=ok))

    monkeypatch.setattr(watch.session, "watch", session)
    monkeypatch.setattr(watch, "plain", lambda now: [now.found.pending, now.found.ok])
    monkeypatch.setattr(watch.watch_report, "screen", lambda now: f"pending {now.found.pending}, ok {now.found.ok}")
    done = call("watch", "fwd_minimal", "--backend", "cpu", "--timeout", "2", *(["--json"] if as_json else []))
    made = [] if verdicts is KeyboardInterrupt else verdicts
    expected = [f"[false, {str(ok).lower()}]" if as_json else f"pending False, ok {ok}" for ok in made]
    assert (done.stdout.splitlines(), done.exit_code) == (expected, status)
    ((name, job, once),) = jobs
    assert (name, job.device, job.problem, job.tile, once) == ("fwd_minimal", ("cpu", 0), None, None, False)
