"""The course: its faults fit the kernels, and `watch` finds a sample of them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from project import ROOT, SAMPLE, SEED

from sandbox.cli import cli
from sandbox.core import registry
from sandbox.core.errors import SpecError
from sandbox.course import faults

sys.path.insert(0, str(ROOT / "scripts"))
import course

FOUND = random.Random(SEED).sample(sorted(faults.every()), 5 if SAMPLE == "all" else 1)


@pytest.mark.parametrize("number", faults.every())
def test_a_fault_fits_its_kernel(number: int) -> None:
    fault = faults.get(number)
    assert fault.faulty() != fault.correct(".cu")
    assert fault.name in fault.faulty()
    assert "default=True" not in fault.correct(".py")
    assert faults.solution(number).startswith(fault.why)


def test_numbers_are_consecutive() -> None:
    assert [*faults.every()] == list(range(1, len(faults.every()) + 1))
    with pytest.raises(SpecError, match="the course has no fault 99: choose one of 1 to"):
        faults.get(99)


def test_the_tools_find_enough() -> None:
    """Of the stored rows; the table in docs/course.md is compared with them elsewhere."""
    rows = course.stored()
    assert [row["number"] for row in rows] == [*faults.every()]
    in_time = [row for row in rows if row["found"] and row["seconds"] <= course.LIMIT_SECONDS]
    assert len(in_time) >= 27
    assert sum(row["right"] for row in in_time) >= 20


def test_the_commands(tmp_path: Path) -> None:
    """Fault 3 is not correct; its corrected copy is."""
    run = CliRunner().invoke
    listed = run(cli, ["course", "list"]).output.splitlines()
    assert len(listed) == len(faults.every())
    started = run(cli, ["course", "start", "3", str(tmp_path)])
    assert started.exit_code == 0
    file = tmp_path / "course_03.cu"
    assert str(file) in started.output
    assert "exist already" in run(cli, ["course", "start", "3", str(tmp_path)]).output
    assert "choose another" in run(cli, ["course", "start", "3", str(tmp_path)]).output
    assert "only whole key tiles" in run(cli, ["course", "solution", "3"]).output


@pytest.fixture
def hopper_plain(monkeypatch) -> Iterator[None]:
    """Registers this kernel."""
    monkeypatch.setenv("SANDBOX_KERNELS", str(faults.get(20).source(".cu").parent))
    registry.forget()
    yield
    monkeypatch.undo()
    registry.forget()


@pytest.mark.parametrize("options", ["--shape 1,4/2,130,200,64", "--shape 2,1,65,128 --causal"])
@pytest.mark.usefixtures("hopper_plain")
def test_the_plain_hopper_kernel_is_correct(options: str) -> None:
    done = CliRunner().invoke(cli, ["run", "hopper_plain", "--backend", "cpu", *options.split()])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("corrected", "status"), [(False, 1), (True, 0)])
@pytest.mark.sampled(2)
def test_a_correction_is_checked(corrected: bool, status: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SANDBOX_KERNELS", "")
    faults.start(3, tmp_path)
    file = tmp_path / "course_03.cu"
    if corrected:
        file.write_text(faults.get(3).correct(".cu"))
    done = CliRunner().invoke(cli, ["course", "check", "3", str(file)])
    assert done.exit_code == status, done.output
    assert ("last, partial one" in done.output) != corrected


@pytest.mark.complete
def test_watch_finds_a_sample(monkeypatch) -> None:
    """Found, and with the cause if the stored row has it. The sample depends on SANDBOX_SEED."""
    print("faults", FOUND)
    monkeypatch.setenv("SANDBOX_KERNELS", "")
    stored = {row["number"]: row for row in course.stored()}
    cache = os.environ["SANDBOX_CACHE_DIR"]
    for row in course.measure(FOUND):
        assert row["found"] == stored[row["number"]]["found"], row
        assert row["ever_right"] or not stored[row["number"]]["ever_right"], row
    assert os.environ["SANDBOX_CACHE_DIR"] == cache
