"""Files of JSON lines that several processes add to, any of which may be killed.

A row is one line, added while the file is locked. An unfinished line is skipped, and removed when the next row is
added.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """The file, created if it does not exist, at its beginning and locked. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        file.seek(0)
        yield file


def add(file: BinaryIO, row: Mapping[str, Any]) -> None:
    """Add a row to a file that is `locked`, and flush it to disk (fsync). Raises ValueError for NaN."""
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if size and file.read(1) != b"\n":  # the last writer was killed, or the file was edited by hand
        file.seek(0)
        last = file.read().rpartition(b"\n")[2]
        if parse(last):
            file.write(b"\n")
        else:
            file.truncate(size - len(last))
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file to which other processes may add rows at the same time."""
    with locked(path) as file:
        add(file, row)


def parse(content: bytes) -> list[dict[str, Any]]:
    """The rows of a file's content, without unfinished lines."""
    rows = []
    for line in content.split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; [] when there is none."""
    return parse(path.read_bytes()) if path.exists() else []
