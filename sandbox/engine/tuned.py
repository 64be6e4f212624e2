"""What tuning has measured and found, kept for each kernel: JSON lines in the folder `tuned` of the cache.

A row counts for the very source it was measured with, and for a GPU of the same name;
`cache clear` leaves the folder alone, since what is in it takes minutes to measure again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ..core import jsonl
from ..core.errors import SpecError
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..toolchain import cache, sources
from ..toolchain.nvrtc import INCLUDE_DIR


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


def winner(kernel: Kernel, problem: Problem, gpu: str) -> Tile | None:
    """The tile that tuning found best for problems of this class on a GPU of that name, with the present source."""
    rows = jsonl.read(path(kernel, "winners"))
    if not rows:
        return None
    key = {"digest": digest(kernel), "gpu": gpu, "class": problem_class(problem)}
    latest = next((row for row in reversed(rows) if all(row.get(name) == value for name, value in key.items())), None)
    try:
        return Tile.parse(latest["tile"]) if latest else None
    except (SpecError, KeyError, AttributeError):  # written by hand, or by another version
        return None
