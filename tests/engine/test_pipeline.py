"""A source with a compile error is compiled again after an edit, in the same process, without a reload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.core import registry
from sandbox.core.errors import CompileError
from sandbox.core.kernel import Kernel
from sandbox.cpu import compiler
from sandbox.engine import pipeline
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem

PROBLEM = Problem(1, 1, 8, 8, 8)


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Kernel]:
    """A function that returns a kernel, after appending text to its source or to one of its headers."""
    original = registry.get("fwd_minimal")
    (tmp_path / "include").mkdir()
    (tmp_path / "elsewhere").mkdir()
    places = {
        "source": tmp_path / "k.cu",
        "header": tmp_path / "include/own.cuh",
        "environment": tmp_path / "elsewhere/other.cuh",
    }
    monkeypatch.setenv("CPATH", str(tmp_path / "elsewhere"))

    def edit(place: str, text: str) -> Kernel:
        for path in places.values():
            path.write_text("")
        included = '#include "own.cuh"\n#include "other.cuh"\n' + original.source.read_text()
        places["source"].write_text(included)
        with places[place].open("a") as file:
            file.write(text)
        return dataclasses.replace(original, source=places["source"])

    return edit


def load(kernel: Kernel) -> pipeline.Loaded:
    return pipeline.load(kernel, kernel.tiles[0], PROBLEM, HOST)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made, really = [], compiler.run

    def run(*arguments):
        made.append(arguments[-1])
        return really(*arguments)

    monkeypatch.setattr(compiler, "run", run)
    return made


@pytest.mark.parametrize("place", ["source", "header", "environment"])
def test_a_source_that_was_broken_and_then_fixed_is_loaded(
    place: str, edited: Callable[[str, str], Kernel], compilations: list[Path]
) -> None:
    broken = edited(place, "#error broken\n")
    for _ in range(3):
        with pytest.raises(CompileError, match="#error broken"):
            load(broken)
    assert len([path for path in compilations if path == broken.source]) == 1  # the others were remembered
    edited(place, "#error still broken\n")
    with pytest.raises(CompileError, match="#error still broken"):
        load(broken)
    assert load(edited(place, "// fixed\n")).functions


def test_a_source_whose_headers_are_not_known_is_compiled_again(edited: Callable[[str, str], Kernel]) -> None:
    """An #include whose name is a macro: an edit of the header cannot be detected."""
    computed = '#define HEADER "own.cuh"\n#include HEADER\n'
    broken = edited("source", computed + "#error broken\n")
    with pytest.raises(CompileError, match="#error broken"):
        load(broken)
    assert load(edited("source", computed)).functions


def test_a_source_that_is_fixed_while_it_compiles_is_loaded(
    edited: Callable[[str, str], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, really = edited("source", "#error broken\n"), compiler.run

    def slow(*arguments):
        try:
            really(*arguments)
        finally:
            if arguments[-1] == broken.source:  # not the runtime, which is compiled first
                edited("source", "// fixed\n")

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "run", slow)
        with pytest.raises(CompileError, match="#error broken"):
            load(broken)
    assert load(broken).functions


def test_a_source_that_is_missing_is_named(tmp_path: Path) -> None:
    gone = dataclasses.replace(registry.get("fwd_minimal"), source=tmp_path / "gone.cu")
    for _ in range(2):
        with pytest.raises((CompileError, FileNotFoundError), match=r"gone\.cu"):
            load(gone)
