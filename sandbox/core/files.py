"""Runs a user's Python file (a spec, a Score, peers), and turns its exceptions into SpecError."""

from __future__ import annotations

import builtins
import contextlib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import SandboxError, SpecError


def names_of(path: str | Path) -> dict[str, Any]:
    """The globals of a Python file after it has run. Raises SpecError as `mistakes_of`."""
    with mistakes_of(path, str(path)):
        return runpy.run_path(str(path))


@contextlib.contextmanager
def mistakes_of(path: str | Path, named: str) -> Iterator[None]:
    """Raises SpecError for every exception of a user's file that is executed, and for a call of `exit`: with the line,
    unless it is an exception of this package. `named`: the file's name in the message."""
    try:
        with _stdin_stays_open():
            yield
    except SandboxError as error:
        raise SpecError(f"{named}: {error}") from error
    except (Exception, SystemExit) as error:
        raise SpecError(f"{named}{mistake(error, path)}") from error


def refused_path(path: str | Path) -> str | None:
    """Why compilers cannot name a file at `path`, as a sentence; None if they can. Line information (-lineinfo) quotes
    paths in PTX without escaping them, and NVRTC takes paths as UTF-8."""
    for character, name in (('"', "a double quote"), ("\\", "a backslash")):
        if character in str(path):
            return f"its path has {name}, which PTX cannot quote"
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "its path is not UTF-8"
    return None


def mistake(error: BaseException, path: str | Path) -> str:
    """The last line of the file that led to the error, if one did, and the error, as the text after the file's name."""
    file = os.path.realpath(path)
    trace = traceback.extract_tb(error.__traceback__)
    lines: list[int | None] = [frame.lineno for frame in trace if os.path.realpath(frame.filename) == file]
    what: object = error
    if isinstance(error, SyntaxError) and os.path.realpath(error.filename or "") == file:  # not of a file it imports
        lines, what = [error.lineno], error.msg
    if isinstance(error, SystemExit):
        what = f"{error}: exit would end the program that reads this file: raise an exception instead"
    line = f", line {lines[-1]}" if lines and lines[-1] else ""
    return f"{line}: {type(error).__name__}: {what}"


_swapping, _users = threading.Lock(), 0
_quitters: dict[str, Any] = {}  # `exit` and `quit` of `site`, while files are executed


@contextlib.contextmanager
def _stdin_stays_open() -> Iterator[None]:
    """`exit` and `quit` of the module `site` close standard input before they raise SystemExit."""
    global _users  # noqa: PLW0603
    with _swapping:
        if not _users:
            _quitters.update((name, getattr(builtins, name)) for name in ("exit", "quit") if hasattr(builtins, name))
            for name in _quitters:
                setattr(builtins, name, sys.exit)
        _users += 1
    try:
        yield
    finally:
        with _swapping:
            _users -= 1
            if not _users:
                for name, original in _quitters.items():
                    setattr(builtins, name, original)
