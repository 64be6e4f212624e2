"""The course: its faults fit the kernels, and `watch` finds a sample of them."""

from __future__ import annotations

import dataclasses
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
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A registry without kernels of $SANDBOX_KERNELS, which the test may set; later tests have their own again."""
    monkeypatch.setenv("SANDBOX_KERNELS", "")
    registry.forget()
    yield monkeypatch
    monkeypatch.undo()
    registry.forget()


@pytest.fixture
def hopper_plain(own_registry: pytest.MonkeyPatch) -> None:
    """Registers this kernel."""
    own_registry.setenv("SANDBOX_KERNELS", str(faults.get(20).source(".cu").parent))
    registry.forget()


@pytest.mark.parametrize("options", ["--shape 1,4/2,130,200,64", "--shape 2,1,65,128 --causal"])
@pytest.mark.usefixtures("hopper_plain")
def test_the_plain_hopper_kernel_is_correct(options: str) -> None:
    done = CliRunner().invoke(cli, ["run", "hopper_plain", "--backend", "cpu", *options.split()])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("corrected", "status"), [(False, 1), (True, 0)])
@pytest.mark.sampled(2)
@pytest.mark.usefixtures("own_registry")
def test_a_correction_is_checked(corrected: bool, status: int, tmp_path: Path) -> None:
    faults.start(3, tmp_path)
    file = tmp_path / "course_03.cu"
    if corrected:
        file.write_text(faults.get(3).correct(".cu"))
    done = CliRunner().invoke(cli, ["course", "check", "3", str(file)])
    assert done.exit_code == status, done.output
    assert ("last, partial one" in done.output) != corrected


@pytest.mark.complete
@pytest.mark.usefixtures("own_registry")
def test_watch_finds_a_sample() -> None:
    """Found, and with the cause if the stored row has it. The sample depends on SANDBOX_SEED."""
    print("faults", FOUND)
    stored = {row["number"]: row for row in course.stored()}
    cache = os.environ["SANDBOX_CACHE_DIR"]
    for row in course.measure(FOUND):
        assert row["found"] == stored[row["number"]]["found"], row
        assert row["ever_right"] or not stored[row["number"]]["ever_right"], row
    assert os.environ["SANDBOX_CACHE_DIR"] == cache


@pytest.mark.parametrize("number", faults.every())
def test_the_lines_of_a_fault(number: int) -> None:
    """All lines that differ from the correct kernel."""
    fault = faults.get(number)
    correct, faulty = fault.correct(".cu").splitlines(), fault.faulty().splitlines()
    begin = next(n for n, (a, b) in enumerate(zip(correct, faulty, strict=False), 1) if a != b)
    end = next(n for n, (a, b) in enumerate(zip(correct[::-1], faulty[::-1], strict=False)) if a != b)
    assert fault.lines.start <= begin <= len(faulty) - end <= fault.lines[-1] or begin > len(faulty) - end
    text = "\n".join(faulty[fault.lines.start - 1 : fault.lines[-1]])
    assert all(line.strip() in text for line in fault.new.splitlines())


def test_a_fault_that_no_longer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, times in (("nowhere in it", 0), ("#include", 4)):
        fault = dataclasses.replace(faults.get(3), old=text)
        found = fault.correct(".cu").count(text)
        assert bool(found) is bool(times)
        with pytest.raises(SpecError, match=rf"fault 3 does not fit fwd_\w+\.cu: '{text}' occurs {found} times"):
            fault.faulty()


def test_files_of_a_fault(tmp_path: Path) -> None:
    """In a new folder; neither is written if one exists."""
    folder = tmp_path / "new" / "course"
    assert faults.start(3, folder) == [folder / "course_03.cu", folder / "course_03.py"]
    assert (folder / "course_03.cu").read_text() == faults.get(3).faulty()
    assert (folder / "course_03.py").read_text() == faults.get(3).correct(".py")
    (folder / "course_03.cu").unlink()
    with pytest.raises(SpecError, match=r"^\S+course_03\.py exist already: choose another folder, or delete them$"):
        faults.start(3, folder)
    assert not (folder / "course_03.cu").exists()
    faults.start(4, folder)


def test_the_name_of_a_copy() -> None:
    assert faults.get(7).name == "course_07"
    assert "void mine(" in faults.get(3).faulty("mine")
    assert "course_03" not in faults.get(3).faulty("mine")


def test_a_solution_is_a_diff() -> None:
    lines = faults.solution(3).splitlines()
    begin = lines.index("--- course_03.cu")
    assert lines[begin - 1 : begin + 2] == ["", "--- course_03.cu", "+++ course_03.cu (corrected)"]
    removed = [line[1:].strip() for line in lines[begin + 2 :] if line.startswith("-")]
    assert removed == [line.strip() for line in faults.get(3).faulty().splitlines() if line.strip() in removed]
    assert 1 <= len(removed) <= len(faults.get(3).lines)
    context = [line for line in lines[begin + 3 :] if line.startswith(" ")]
    assert len(context) == 2
