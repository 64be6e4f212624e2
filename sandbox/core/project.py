"""The folder of the kernels, and paths relative to the project."""

from __future__ import annotations

from pathlib import Path

import kernels_cu

FOLDER = Path(kernels_cu.__path__[0]).resolve()  # of the kernels; folders that commands write are beside it


def within_project(path: str) -> str:
    """A path relative to the project, so that stored rows are equal in all checkouts. Other paths are unchanged."""
    root = FOLDER.parent
    return str(Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def from_project(path: str) -> str:
    """The inverse of `within_project`."""
    return str(FOLDER.parent / path) if path else path
