"""Stored results of tuning: JSON lines for each kernel, in the folder `tuned` of the cache.

A row is valid for the source that was measured, and for GPUs of the same name. `cache clear` keeps the folder, because
measuring takes minutes.
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
    """The file with a kernel's "measurements" or "winners" (the fastest tile of each problem class)."""
    return cache.directory() / "tuned" / kernel.name / f"{what}.jsonl"


def problem_class(problem: Problem) -> str:
    """The class of problems that share a tuned tile."""
    return problem.tuning_class


def digest(kernel: Kernel) -> str:
    """A hash of the `.cu` and of the project's headers that it includes, independent of their folders."""
    files, _ = sources.included_files(kernel.source, (INCLUDE_DIR,))
    parts = sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def winner(kernel: Kernel, problem: Problem, gpu: str) -> Tile | None:
    """The best tile that tuning found for this class of problems on a GPU of that name, with the current source."""
    rows = jsonl.read(path(kernel, "winners"))
    if not rows:
        return None
    key = {"digest": digest(kernel), "gpu": gpu, "class": problem_class(problem)}
    latest = next((row for row in reversed(rows) if all(row.get(name) == value for name, value in key.items())), None)
    try:
        return Tile.parse(latest["tile"]) if latest else None
    except (SpecError, KeyError, AttributeError):  # edited, or written by another version
        return None
