"""What a mutation is, the operators' result and the written mutations."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = ROOT / "tests" / "engine" / "mutations.toml"


@dataclass(frozen=True)
class Change:
    """One edit of a text: `before`, at the offset `begin`, becomes `after`."""

    operator: str
    begin: int
    before: str
    after: str

    def applied(self, text: str) -> str:
        """The text with the edit. Raises ValueError if it does not have `before` there."""
        end = self.begin + len(self.before)
        if text[self.begin : end] != self.before:
            raise ValueError(f"the text at {self.begin} is {text[self.begin : end]!r}, not {self.before!r}")
        return text[: self.begin] + self.after + text[end:]


@dataclass(frozen=True)
class Mutation:
    """A change of one file. `lines`: those of the file that it changes, from 1. `tests`: pytest selections that should
    fail, such as "tests/x/test_y.py -k z"; without any, they are found automatically."""

    file: str
    change: Change
    lines: tuple[int, ...]
    context: str
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        before, after = (_short(text) for text in (self.change.before, self.change.after))
        return f"{self.file}:{self.lines[0]} {self.change.operator}: {before!r} -> {after!r} in {self.context!r}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."


def of(file: str, text: str, change: Change, tests: tuple[str, ...] = ()) -> Mutation:
    """The mutation of a file with this text."""
    first = text.count("\n", 0, change.begin) + 1
    last = first + change.before.count("\n")
    return Mutation(file, change, tuple(range(first, last + 1)), _short(text.splitlines()[first - 1]), tests)


def written(path: Path = WRITTEN) -> list[Mutation]:
    """The written mutations. Raises ValueError for a text that does not occur exactly once in its file."""
    files: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text())
    return [_written(file, **row) for file, rows in files.items() for row in rows]


def _written(file: str, text: str, becomes: str, tests: list[str]) -> Mutation:
    content = (ROOT / file).read_text()
    if content.count(text) != 1:
        raise ValueError(f"{file} has the text {content.count(text)} times: {text!r}")
    return of(file, content, Change("written", content.index(text), text, becomes), tuple(tests))
