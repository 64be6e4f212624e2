"""Where the header of a user's expressions lies, for a compiler to find it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..core.problem import Problem
from ..core.snippet import HEADER, digest, header
from . import cache


def folders(problem: Problem) -> tuple[Path, ...]:
    """The folder that holds the header of the problem's `score`, written when it is not there; none without a score."""
    if problem.score is None:
        return ()
    folder = cache.directory() / "snippets" / f"{digest(problem.score):012x}"
    file, text = folder / HEADER, header(problem.score)
    if not file.exists() or file.read_text() != text:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, staged = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(staged, file)  # whoever reads meanwhile finds it whole
    return (folder,)
