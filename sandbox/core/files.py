"""Python files that people write for us, and what is wrong with one, in a sentence."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path
from typing import Any

from .errors import SandboxError, SpecError


def names_of(path: str | Path) -> dict[str, Any]:
    """What a Python file defines. Raises SpecError with the line of its mistake."""
    try:
        return runpy.run_path(str(path))
    except SandboxError as error:
        raise SpecError(f"{path}: {error}") from error
    except Exception as error:  # whatever a file's own mistakes raise
        raise SpecError(f"{path}, {mistake(error, path)}") from error


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


def mistake(error: Exception, path: str | Path) -> str:
    """The last line of the file that led to the error, and the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    what = error.msg if isinstance(error, SyntaxError) else error
    return f"line {line}: {type(error).__name__}: {what}"
