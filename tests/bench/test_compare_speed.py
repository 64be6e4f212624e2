"""scripts/compare_speed.py, with processes of this checkout on the CPU backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import compare_speed

SMALL = ["--rounds", "1", "--seconds", "0.001", "--dtype", "float32"]


def test_two_checkouts(capfd: pytest.CaptureFixture[str]) -> None:
    """Here twice the same one: every process answers for every problem."""
    trees = [f"old={ROOT}", f"new={ROOT}"]
    compare_speed.main([*trees, "--shape", "1,1,16,8", "--shape", "B1 H2/1 S8x16 D8", "--causal", "--json", *SMALL])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["shape"] for row in rows] == ["1,1,16,8", "B1 H2/1 S8x16 D8"]
    for row in rows:
        assert [*row["us"]] == ["old", "new"]
        assert all(len(times) == 1 and times[0] > 0 for times in row["us"].values())


@pytest.mark.parametrize("more", [["--backward"], ["--page-size", "16", "--options", '{"window": [4, 0]}']])
def test_other_calls(more: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    compare_speed.main([f"here={ROOT}", "--shape", "1,2,16,8", *more, *SMALL])
    assert capfd.readouterr().out.startswith("1,2,16,8                     here ")


def test_a_process_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="the process of here ended with status 1"):
        compare_speed.main([f"here={ROOT}", "--shape", "1,2,16", *SMALL])
    said = capfd.readouterr().err
    assert f"{ROOT}: shape '1,2,16' must be" in said
    assert "Traceback" not in said


def test_a_folder_without_a_checkout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_speed.main([f"old={tmp_path}", f"new={ROOT}", "--shape", "1,2,16,8"])
    assert f"no checkout with a package sandbox: {tmp_path}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([str(ROOT)], "each checkout must be NAME=FOLDER"),
        (["a="], "each checkout must be NAME=FOLDER"),
        ([f"a={ROOT}", f"a={ROOT}"], "each name occur once"),
        ([f"a={ROOT}", "--backward", "--page-size", "16"], "--backward does not support --page-size"),
        ([f"a={ROOT}", "--rounds", "0"], "--rounds and --processes must be at least 1"),
    ],
)
def test_arguments_that_make_no_sense(trees: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_speed.main([*trees, "--shape", "1,2,16,8"])
    assert message in capfd.readouterr().err


def test_a_process_that_has_already_ended() -> None:
    worker = compare_speed.Worker("gone", subprocess.Popen(["false"], stdin=-1, stdout=-1, text=True))
    worker.process.wait()
    with pytest.raises(SystemExit, match="the process of gone ended with status 1"):
        worker.time(0)
    worker.process.communicate()


def test_other_results(capfd: pytest.CaptureFixture[str]) -> None:
    class Answers(compare_speed.Worker):
        def time(self, i: int) -> tuple[float, float]:
            return 10.0, {"a": 1.0, "b": 1.02}[self.name]

    assert compare_speed.compare([Answers("a", None), Answers("b", None)], 0, 1) == {"a": [10.0], "b": [10.0]}
    assert "the results differ: sums of the absolute values are a 1, b 1.02" in capfd.readouterr().err


def test_lines() -> None:
    """Medians over processes; the speed of each process relative to that of the first checkout."""
    found = {"old": [100.0, 102.0, 104.0], "new": [50.0, 102.0, 208.0]}
    assert compare_speed.line_of("1,2,16,8", found) == (
        "1,2,16,8                     old 102.0 us; new 102.0 us, speed 1.000 (0.500 ... 2.000)"
    )
    assert compare_speed.line_of("1,2,16,8", {"old": [30.0], "new": [20.0]}).endswith("new 20.0 us, speed 1.500")
