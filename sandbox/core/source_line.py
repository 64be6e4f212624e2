"""A line of a source file, as compilers, disassemblers and sanitizers name it, and its text."""

from __future__ import annotations

import os
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
        """The current text of the line; "" if it cannot be read."""
        lines = lines_of(self.file)
        return lines[self.line - 1].strip() if self.line <= len(lines) else ""


def lines_of(file: str) -> list[str]:
    """The lines of a file; [] if it does not exist."""
    try:
        return _read(file, os.stat(file).st_mtime_ns)
    except OSError:
        return []


@lru_cache(maxsize=64)
def _read(file: str, version: int) -> list[str]:
    return Path(file).read_text(errors="replace").splitlines()
