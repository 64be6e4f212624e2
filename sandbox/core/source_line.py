"""A line of a source file, as compilers, disassemblers and sanitizers name it, and its text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class SourceLine:
    """A line of a file, which is named by its absolute path."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def text(self) -> str:
        """The text of the line, as recorded or else as it is now; "" if it cannot be read."""
        lines = lines_of(self.file)
        return lines[self.line - 1].strip() if self.line <= len(lines) else ""


_recorded: dict[str, list[str]] = {}  # {file: its lines}


def record(texts: Mapping[str, str]) -> None:
    """From now on, these texts {file: text} replace the files: those to which a stored profile refers."""
    _recorded.update((file, text.splitlines()) for file, text in texts.items())


def lines_of(file: str) -> list[str]:
    """The lines of a file, as recorded or else as it is now; [] if it does not exist."""
    if file in _recorded:
        return _recorded[file]
    try:
        return _read(file, os.stat(file).st_mtime_ns)
    except OSError:
        return []


@lru_cache(maxsize=64)
def _read(file: str, version: int) -> list[str]:
    return Path(file).read_text(errors="replace").splitlines()
