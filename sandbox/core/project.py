"""Where the project is that the kernels belong to."""

from __future__ import annotations

from pathlib import Path

import kernels_cu

FOLDER = Path(kernels_cu.__path__[0]).resolve()  # of the kernels; what tools write goes beside it


def within_project(path: str) -> str:
    """A file of the project by its place in it: stored rows mean the same in every checkout. Others as they are."""
    root = FOLDER.parent
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def from_project(path: str) -> str:
    """What `within_project` was given."""
    return str(FOLDER.parent / path) if path else path
