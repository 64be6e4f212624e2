"""Where the header of a user's expressions lies, for a compiler to find it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from ..core import score_errors
from ..core.errors import CompileError
from ..core.problem import Problem
from ..core.score import Score
from ..core.snippet import HEADER, digest, header
from . import cache

P = ParamSpec("P")
T = TypeVar("T")


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


def explaining(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, one of whose arguments is a Problem or a Score: a CompileError that is due to the expressions
    names these, not the files around them."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CompileError as error:
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, (Problem, Score))), None)
            score = given.score if isinstance(given, Problem) else given
            if not score or not (said := score_errors.explain(error, score)):
                raise
            raise CompileError(said, source=error.source, options=error.options, log=error.log) from None

    return wrapped
