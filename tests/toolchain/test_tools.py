"""Where NVIDIA's tools are found, and folders with the expressions of a Score."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import cuda.pathfinder
import pytest

from sandbox.core.errors import CompileError, ToolchainMissing
from sandbox.core.score import Score
from sandbox.spec import Problem
from sandbox.toolchain import snippets, tools


def program(folder: Path) -> str:
    folder.mkdir(parents=True)
    path = folder / "ncu"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o700)
    return str(path)


def test_where_a_tool_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wheel, on the PATH, in $CUDA_HOME and $CUDA_PATH, in the usual folders, in this order."""
    places = ["wheel", "path", "home/bin", "cuda_path/bin", "usual"]
    of_wheel, *others = (program(tmp_path / place) for place in places)
    found: list[str | None] = [of_wheel]

    def in_wheel(name: str) -> str | None:
        if found[0] is None:
            raise ValueError("unknown")
        return found[0] or None

    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", in_wheel)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda_path"))
    monkeypatch.setattr(tools, "_FOLDERS", (str(tmp_path / "usual"),))
    assert tools.need("ncu") == of_wheel
    for nothing in ("", None):
        found[0] = nothing
        assert tools.find("ncu") == others[0]
    for path in others:
        assert tools.find("ncu") == path
        os.unlink(path)
    assert tools.find("ncu") is None
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("CUDA_PATH", "")
    with pytest.raises(ToolchainMissing, match=r"^ncu is neither on the PATH nor in \$CUDA_HOME/bin: install Nsight C"):
        tools.need("ncu")


PROBLEM = Problem(1, 1, 8, 8, 16, dtype="float16", score=Score("x + 0.5"))


def test_the_folder_of_a_score(own_cache: Path) -> None:
    """It is written once, and again if it was damaged."""
    assert snippets.folders(dataclasses.replace(PROBLEM, score=None)) == ()
    (folder,) = snippets.folders(PROBLEM)
    assert folder.parent == own_cache / "snippets"
    assert len(folder.name) == 12
    (file,) = folder.iterdir()
    assert "x + 0.5f" in file.read_text()
    os.utime(file, (1000, 1000))
    assert snippets.folders(PROBLEM) == (folder,)
    assert file.stat().st_mtime == 1000
    file.write_text("damaged")
    snippets.folders(PROBLEM)
    assert "x + 0.5f" in file.read_text()
    assert snippets.folders(dataclasses.replace(PROBLEM, score=Score("x"))) != (folder,)


@pytest.mark.parametrize("by", ["problem", "score", "keyword", "no score", "no argument", "elsewhere"])
def test_an_error_in_a_score_is_explained(by: str) -> None:
    """With the score, or the problem that has it, among the arguments; other errors stay as they are."""
    log = "k.cu:1:2: error: no" if by == "elsewhere" else "score:1:1: error: no"
    error = CompileError("g++ refused k.cu", source="k.cu", options=("-O2",), log=log)

    @snippets.explaining
    def compile(*given: object, **more: object) -> None:
        raise error

    given: tuple[object, ...] = (3, PROBLEM)
    if by in ("score", "no score", "no argument"):
        others = {"score": (PROBLEM.score,), "no score": (dataclasses.replace(PROBLEM, score=None),), "no argument": ()}
        given = others[by]
    with pytest.raises(CompileError) as caught:
        compile(3, what=PROBLEM) if by == "keyword" else compile(*given)
    if by in ("problem", "score", "keyword"):
        assert str(caught.value).startswith("Score: x + 0.5 does not compile: no\n  score: x + 0.5\n         ^")
        assert (caught.value.source, caught.value.options, caught.value.log) == ("k.cu", ("-O2",), log)
    else:
        assert caught.value is error
