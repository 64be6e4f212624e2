"""Where to look for a fault: changed lines, and lines that match a pattern."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sandbox.verify import places, weights
from sandbox.verify.places import where_to_look

TEXT = [f"line {n};" for n in range(1, 41)]
TEXT[9] = TEXT[19] = TEXT[29] = "O *= alpha;"  # lines 10, 20 and 30


def repository(folder: Path) -> Path:
    """A folder with a kernel and a header, both committed."""
    (folder / "include").mkdir()
    for name in ("mine.cu", "include/mine.cuh"):
        (folder / name).write_text("\n".join(TEXT) + "\n")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *command), cwd=folder, check=True)
    return folder / "mine.cu"


def edit(source: Path, *numbers: int, text: str = "edited;") -> None:
    lines = source.read_text().splitlines()
    for number in numbers:
        lines[number - 1] = f"{text}  // {number}"
    source.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ((), ("mine.cu:10", "mine.cu:20")),
        ((30,), ("mine.cu:30", "mine.cu:10")),
        ((3,), ("mine.cu:3", "mine.cu:10")),
        ((3, 5), ("mine.cu:3", "mine.cu:5")),
        (tuple(range(12, 38)), ("mine.cu:10",)),  # a new version: no line of it is more probable than others
    ],
)
def test_changed_lines_are_named_first(changed: tuple[int, ...], found: tuple[str, ...], tmp_path: Path) -> None:
    source = repository(tmp_path)
    edit(source, *changed)
    assert where_to_look(source, weights.RESCALE) == found


def test_changed_lines_that_match_are_named_before_others(tmp_path: Path) -> None:
    source = repository(tmp_path)
    edit(source, 3)
    edit(source, 25, text="alpha;")
    assert where_to_look(source, weights.RESCALE) == ("mine.cu:25", "mine.cu:3")


def test_headers_and_removed_lines(tmp_path: Path) -> None:
    source = repository(tmp_path)
    edit(tmp_path / "include" / "mine.cuh", 7)
    assert where_to_look(source, weights.RESCALE) == ("mine.cuh:7", "mine.cu:10")
    source.write_text("\n".join(TEXT[:4] + TEXT[5:]) + "\n")  # without line 5
    assert where_to_look(source, "nothing") == ("mine.cuh:7", "mine.cu:5")


def test_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.cu").write_text("\n".join(TEXT))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert where_to_look(tmp_path / "mine.cu", weights.RESCALE) == ("mine.cu:10", "mine.cu:20")
    monkeypatch.setattr(places.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError("no git")))
    assert where_to_look(tmp_path / "mine.cu", weights.RESCALE) == ("mine.cu:10", "mine.cu:20")


def test_lines_ignore_comments() -> None:
    assert places.lines("// alpha\nx = 1;\nO *= alpha;  // rescale\n", weights.RESCALE) == [3]
