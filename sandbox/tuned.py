"""What tuning has measured and found, kept for each kernel: JSON lines in the folder `tuned` of the cache.

Several tuners may write at once: a row is one line, added whole while the file is locked. A line that a killed writer
left unfinished is skipped. A row counts for the very source it was measured with, and for a GPU of the same name;
`cache clear` leaves the folder alone, since what is in it takes minutes to measure again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import cache, sources
from .errors import SpecError
from .nvrtc import INCLUDE_DIR
from .spec import Kernel, Problem, Tile


def path(kernel: Kernel, what: str) -> Path:
    """The file of a kernel's "measurements" or "winners"."""
    return cache.directory() / "tuned" / kernel.name / f"{what}.jsonl"


def problem_class(problem: Problem) -> str:
    """What problems share when one tile suits them: head width, dtype, mask, and the powers of two that Sq, Sk and the
    number of heads B * H fit in."""
    Sq, Sk, heads = (1 << max(n - 1, 0).bit_length() for n in (problem.Sq, problem.Sk, problem.B * problem.H))
    mask = f" {problem.causal}" if problem.causal else ""
    return f"D{problem.D} {problem.dtype}{mask} Sq<={Sq} Sk<={Sk} heads<={heads}"


def digest(kernel: Kernel) -> str:
    """Of the `.cu` and the project's headers that it includes, wherever they lie."""
    files, _ = sources.included_files(kernel.source, (INCLUDE_DIR,))
    parts = sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a file that others may be adding to."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    with file.open("a+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            line = line if stream.read(1) == b"\n" else b"\n" + line  # whoever wrote last was killed
        stream.write(line)


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file, without lines that are not whole; [] when there is none."""
    rows = []
    for line in file.read_bytes().split(b"\n") if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def winner(kernel: Kernel, problem: Problem, gpu: str) -> Tile | None:
    """The tile that tuning found best for problems of this class on a GPU of that name, with the present source."""
    rows = read(path(kernel, "winners"))
    if not rows:
        return None
    key = {"digest": digest(kernel), "gpu": gpu, "class": problem_class(problem)}
    latest = next((row for row in reversed(rows) if all(row.get(name) == value for name, value in key.items())), None)
    try:
        return Tile.parse(latest["tile"]) if latest else None
    except (SpecError, KeyError, AttributeError):  # written by hand, or by another version
        return None
