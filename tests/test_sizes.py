"""Limits of CUDA sources and the vocabulary: what outgrows one needs another place, not another limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import ROOT

KERNELS = sorted((ROOT / "kernels_cu").rglob("*.cu"))
SUFFIXES = (".cu", ".cuh", ".h", ".cpp")
FOLDERS = (ROOT / "kernels_cu", ROOT / "sandbox" / "cpu")
SOURCES = sorted(file for folder in FOLDERS for file in folder.rglob("*.*") if file.suffix in SUFFIXES)
COLUMNS = 120  # also inside diagrams, which clang-format leaves alone
HEAD_LINES = 30
FUNCTION_LINES = 100


def id_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def functions(lines: list[str]) -> Iterator[int]:
    """The number of lines of each device function's body: clang-format puts the last brace below the first word."""
    for n, line in enumerate(lines):
        if re.search(r"\b__(?:global|device)__\b.*[({,]$", line):
            indent = line[: len(line) - len(line.lstrip())]
            begin = next(at for at in range(n, len(lines)) if lines[at].endswith("{"))
            yield next(at for at in range(begin, len(lines)) if lines[at] == f"{indent}}}") - begin + 1


@pytest.mark.parametrize("file", SOURCES, ids=id_of)
def test_columns(file: Path) -> None:
    assert [line for line in file.read_text().splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize("file", KERNELS, ids=id_of)
def test_lines_of_a_kernel(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 350
    head = next(n for n, line in enumerate(lines) if not line.startswith("//"))
    assert head <= HEAD_LINES


@pytest.mark.parametrize("file", SOURCES, ids=id_of)
def test_lines_of_functions(file: Path) -> None:
    longest = max(functions(file.read_text().splitlines()), default=0)
    assert longest <= FUNCTION_LINES


def test_functions_are_found() -> None:
    text = "__device__ int f(int x) {\n    return x;\n}\nstruct S {\n    __device__ void g() {\n    }\n};\n"
    assert list(functions(text.splitlines())) == [3, 2]


def test_entries_of_the_vocabulary() -> None:
    rows = re.findall(r"^\| ", (ROOT / "VOCABULARY.md").read_text(), re.MULTILINE)
    assert len(rows) - 2 <= 45  # without the two lines of the head
