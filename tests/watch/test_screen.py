"""The screen of `watch` fits 80 columns and shows improvements and regressions."""

from __future__ import annotations

import dataclasses
import io
import re

import numpy as np
import pytest
from project import check_stored, digest
from rich.console import Console
from rich.text import Text

from sandbox.core import registry
from sandbox.core.source_line import SourceLine
from sandbox.core.tile import Tile
from sandbox.toolchain.arch import Occupancy
from sandbox.toolchain.nvrtc import Resources
from sandbox.verify.check import Result
from sandbox.verify.error_map import ErrorMap
from sandbox.verify.findings import Finding
from sandbox.watch import screen as watch_report
from sandbox.watch.figures import Cost, VersionResult, figures
from sandbox.watch.history import Version
from sandbox.watch.session import Iteration

RESULT = Result("fwd_mma", "grouped", "B2 H4/2 S77x97 D64 float16 causal", "cuda", True, error=4.3e-4, bound=2.8e-3,
                seconds=28.6e-6, tflops=119.27)  # fmt: skip
COST = Cost("sm_90a", Tile(BLOCK_M=64), Resources(168, 0, 64, 0, 0), 81920, Occupancy(2, 0.125, "registers"),
            {"HMMA": 288, "LDG.128": 4, "FADD": 100})  # fmt: skip
GOOD = VersionResult("ok", results=(RESULT,), cost=COST, setting="NVIDIA H100 80GB HBM3: B1 H12 S1024 D64 float16",
                   compiling=0.9)  # fmt: skip
OLD = {"seconds": 30e-6, "tflops": 110.0, "registers": 160.0, "spills": 0.0, "HMMA": 288.0, "LDG": 16.0, "error": 0.01}


def version(number: int, **figures: float) -> Version:
    return Version(number, "2026-01-02 03:04:05", True, "ok", "", GOOD.setting, {**OLD, **figures}, {})


def screen(found: VersionResult, width: int = 80, previous: Version | None = None, best: Version | None = None) -> str:
    console = Console(width=width, highlight=False, force_terminal=True, color_system="standard")
    now = Iteration(14, "fwd_mma", found, figures(found), 1.21, previous, best)
    with console.capture() as capture:
        console.print(watch_report.screen(now))
    return capture.get()


def plain(text: str) -> list[str]:
    return Text.from_ansi(text).plain.splitlines()


def line(shown: str, begins: str) -> str:
    (found,) = [each for each in plain(shown) if each.startswith(begins)]
    return " ".join(found.split())


def test_the_first_version() -> None:
    shown = plain(screen(GOOD))
    assert shown[0].startswith("fwd_mma #14  ok  1.21 s, 900 ms of it compiling")
    assert "last good" not in "".join(shown)
    assert any(each.split() == ["occupancy,", "by", "registers", "12.5%"] for each in shown)


def test_changes_against_two_versions() -> None:
    shown = screen(GOOD, previous=version(13), best=version(9, seconds=25e-6, tflops=130.0))
    assert line(shown, "  ") == "now last good #13 best #9"
    assert line(shown, "time") == "time 28.6 µs 30 µs -4.7% 25 µs +14.4%"
    assert line(shown, "TFLOP/s") == "TFLOP/s 119.27 110.00 +8.4% 130.00 -8.3%"
    assert line(shown, "registers") == "registers 168 160 +5.0% 160 +5.0%"
    assert line(shown, "spilled bytes") == "spilled bytes 0 0 0"
    assert line(shown, "HMMA") == "HMMA 288 288 288"
    assert line(shown, "LDG.128") == "LDG.128 4 - -"
    assert line(shown, "LDG ") == "LDG - 16 16"
    assert line(shown, "error / bound") == "error / bound 0.15 0.01 ×15 0.01 ×15"
    for colour, change in ((32, "-4.7%"), (31, "+14.4%"), (32, "+8.4%"), (31, "-8.3%")):
        assert re.search(rf"\x1b\[{colour}m *{re.escape(change)}", shown)


def test_one_version_that_is_both() -> None:
    assert line(screen(GOOD, previous=version(9), best=version(9)), "  ") == "now last good, and best #9"


def test_stored_screens() -> None:
    """The whole screen of each outcome, with styles, beside earlier versions and without; and the history."""
    old = [version(13), version(9, seconds=0.0, tflops=1.0, stack=16.0, smem=1000.0, occupancy=0.5)]
    lines = []
    for name, found in {"GOOD": GOOD, **FAULTS}.items():
        for previous, best in ((None, None), (old[0], old[1]), (old[1], old[1])):
            its = [
                line.replace(str(registry.FOLDER.parent), "…")
                for line in screen(found, 80, previous, best).splitlines()
            ]
            lines += [f"---- {name}", *(its if name == "GOOD" or not best else [digest(its)])]
    now = Iteration(0, "k", dataclasses.replace(GOOD, pending="sanitizers run"), {}, 0.5, None, None, elapsed=0.75)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(watch_report.screen(now), *watch_report.history_lines([*old, failed(5)]), sep="\n")
    text = "\n".join([*lines, *console.export_text().splitlines()])
    check_stored("watch.txt", (line.rstrip() for line in text.replace(str(registry.FOLDER.parent), "…").splitlines()))


def failed(number: int) -> Version:
    return dataclasses.replace(version(number), ok=False, stage="compile", message=REFUSED)


TEXT = "O is wrong in 3 of 9 elements " * 5
WHERE = ErrorMap("O", 3, 9, (0, 0, 1, 2), (0, 0, 1, 2), ("the tail",), TEXT, 64, np.ones((2, 3)))
WRONG = dataclasses.replace(RESULT, ok=False, error=1.0, where=WHERE)
REFUSED = f"NVRTC 12.9 refused {registry.FOLDER}/mine.cu\n\n{registry.FOLDER}/mine.cu(3): error: no\n  x = ;\n      ^"
RACE = Finding("data race: " + "x" * 60, (SourceLine(__file__, 2),) * 9, on="B1 H2/1 S131x69 D16, tile BLOCK_M=64")
FAULTS = {
    "WRONG": VersionResult("wrong", TEXT, (WRONG,), cost=COST, setting=GOOD.setting),
    "DOES NOT COMPILE": VersionResult("compile", REFUSED),
    "NOT SAFE": VersionResult("sanitize", findings=(RACE,), cost=COST, setting=GOOD.setting),
    "HANGS": VersionResult(
        "hang", "did not finish within 10 s while running B1 H12 S1024 D64 float16; --timeout is more"
    ),
    "CRASHES": VersionResult("crash", "it accessed memory that is not there (SIGSEGV) while running B1"),
    "SPEC": VersionResult("spec", f"{registry.FOLDER}/mine.py, line 5: TypeError: no"),
    "FAILS": VersionResult("run", "cuCtxSynchronize(after mine): CUDA_ERROR_ILLEGAL_ADDRESS"),
    "NOT SUPPORTED": VersionResult(
        "refused", "mine: D=3 is not supported", notes=("NVRTC is missing",), output="row 1\n"
    ),
}


@pytest.mark.parametrize("word", FAULTS)
@pytest.mark.parametrize("width", [80, 120])
def test_each_fault_fits(word: str, width: int) -> None:
    shown = plain(screen(FAULTS[word], width, previous=version(13), best=version(9)))
    assert shown[0].startswith(f"fwd_mma #14  {word}  1.21 s")
    assert all(len(each.rstrip()) <= width for each in shown), shown
    said = FAULTS[word].message or FAULTS[word].findings[0].what
    expected = said.replace(f"{registry.FOLDER.parent}/", "")
    assert "".join(expected.split()) in "".join("".join(shown).split())


def test_what_a_sanitizer_finds_is_on_a_problem_of_its_own() -> None:
    """The screen names the problem of the figures."""
    shown = plain(screen(FAULTS["NOT SAFE"]))
    at, figures = (next(i for i, each in enumerate(shown) if each.split()[:1] == [word]) for word in ("data", "now"))
    assert [i for i, each in enumerate(shown) if GOOD.setting in each] == [figures - 1]
    assert shown.index("  on B1 H2/1 S131x69 D16, tile BLOCK_M=64") > at


def test_notes_and_prints_are_shown() -> None:
    shown = plain(screen(FAULTS["NOT SUPPORTED"]))
    assert "note: NVRTC is missing" in shown
    assert shown[shown.index("the kernel printed") + 1] == "row 1"


def test_the_history_names_the_first_error() -> None:
    failed = dataclasses.replace(version(2), ok=False, stage="compile", message=FAULTS["DOES NOT COMPILE"].message)
    lines = [each.plain for each in watch_report.history_lines([version(1), failed])]
    assert lines[0] == "#1    2026-01-02 03:04:05  ok  time 30 µs, TFLOP/s 110.00, registers 160, spilled bytes 0"
    assert lines[1].strip() == GOOD.setting
    assert lines[2].startswith("#2    2026-01-02 03:04:05  DOES NOT COMPILE")
    assert lines[3].strip() == "kernels_cu/mine.cu(3): error: no"


def test_a_result_that_follows_its_verdict() -> None:
    for elapsed, said in ((0.9, "ok  900 ms, 500 ms of it compiling"), (2.5, "ok  900 ms, complete after 2.5 s")):
        found = dataclasses.replace(GOOD, compiling=0.5)
        now = Iteration(3, "fwd_mma", found, figures(found), 0.9, elapsed=elapsed)
        console = Console(width=80)
        with console.capture() as capture:
            console.print(watch_report.screen(now))
        assert capture.get().splitlines()[0].strip() == f"fwd_mma #3  {said}"


def test_a_verdict_without_its_number() -> None:
    """While instructions are counted, everything else is shown."""
    console = Console(width=80, force_terminal=True)
    found = dataclasses.replace(GOOD, cost=dataclasses.replace(COST, opcodes={}), pending="counting its instructions")
    with console.capture() as capture:
        console.print(watch_report.screen(Iteration(0, "fwd_mma", found, figures(found), 0.9)))
    shown = plain(capture.get())
    assert shown[0].startswith("fwd_mma  ok  900 ms")
    assert "counting its instructions" in [each.strip() for each in shown]
    assert not any("HMMA" in each for each in shown)
