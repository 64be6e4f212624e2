"""The include folder with the generated header of a user's score expressions."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from ..core import atomic, score_errors
from ..core.errors import CompileError
from ..core.problem import Problem
from ..core.score import Score
from ..core.snippet import HEADER, digest, header
from . import cache

P = ParamSpec("P")
T = TypeVar("T")


def folders(problem: Problem) -> tuple[Path, ...]:
    """The folder with the header of the problem's `score`, created if missing; empty without a score."""
    if problem.score is None:
        return ()
    folder = cache.snippets() / f"{digest(problem.score):012x}"
    file, content = folder / HEADER, header(problem.score).encode()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)  # in use: cache.clear keeps it
    if not file.exists() or file.read_bytes() != content:
        atomic.replace(file, content)  # another process may compile it
    return (folder,)


def explaining(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator for a function with a Problem or Score argument. A CompileError that is caused by the score expressions
    is replaced by one that quotes them instead of generated files."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CompileError as error:
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, (Problem, Score))), None)
            score = given.score if isinstance(given, Problem) else given
            if not score or not (message := score_errors.explain(error, score)):
                raise
            raise CompileError(message, source=error.source, options=error.options, log=error.log) from None

    return wrapped
