"""What commands print, and the exit status that verdicts amount to."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..core.problem import Problem
from ..pages import render

T = TypeVar("T")


def open_standard_streams() -> None:
    """A standard stream that is closed (`>&-`) becomes the null device: Python has None for it, and the next file that
    is opened would get its number, such as one that a compiler is to write."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115  for as long as the process runs
            os.set_inheritable(stream.fileno(), True)  # which is the closed one's: the lowest that is free
            setattr(sys, name, stream)


def _console(**more: Any) -> Console:
    # What is printed may hold a user's own text, such as the expressions of a score: "[h & 1]" is no markup, ":x:" no
    # emoji.
    return Console(highlight=False, markup=False, emoji=False, **more)


def screen() -> Console:
    # A table in a file or a pipe is as wide as it needs to be, unless somebody says how wide; on a screen it folds.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return _console(width=None if known else 200)


def say(text: str | Text, **where: Any) -> None:
    """Prose, unbroken: the terminal breaks it where it must, and a path can be copied."""
    with suppress(OSError) if where.get("stderr") else nullcontext():  # that stderr is full is not the command's fault
        _console(soft_wrap=True, **where).print(text)


def save_page(path: Path, page: str) -> None:
    """Write what --html asks for, and say where."""
    try:
        render.write(path, page)
    except OSError as error:
        raise click.FileError(str(path), error.strerror or "cannot be written") from error
    say(f"wrote {path}", stderr=True)


def print_json(value: object) -> None:
    click.echo(json.dumps(plain(value), indent=2))


def print_json_rows(rows: Iterable[T]) -> Iterator[T]:
    """The same rows, each printed when it is there, as an element of one JSON list."""
    before = "[\n"
    for row in rows:
        click.echo(before + textwrap.indent(json.dumps(plain(row), indent=2), "  "), nl=False)
        before = ",\n"
        yield row
    click.echo("[]" if before == "[\n" else "\n]")


def plain(value: object) -> object:
    """As JSON has it: a NaN or an infinity, which it cannot write, becomes null; what a dataclass keeps out of its repr
    is for this process alone."""
    if isinstance(value, Problem):  # which options are absent it knows itself
        return plain(value.as_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def followed(results: Iterable[T], describe: Callable[[T], str], total: int | None = None) -> Iterator[T]:
    """The same results, with the latest one shown on the terminal while work goes on: below what is printed there."""
    done = (BarColumn(), MofNCompleteColumn()) if total else (SpinnerColumn(), TextColumn("{task.completed} done"))
    on_screen = sys.stdout.isatty()
    console = _console(stderr=not on_screen)
    latest = TextColumn("{task.description}", markup=False)
    with Progress(
        *done, TimeElapsedColumn(), latest, console=console, transient=True,
        disable=not console.is_terminal, redirect_stdout=on_screen,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=total)
        for result in results:
            progress.update(task, advance=1, description=describe(result))
            yield result


def exit_status(verdicts: Iterable[bool | None]) -> int:
    """1 when anything is wrong; 2 when nothing could be tried at all."""
    seen = set(verdicts)
    return 1 if False in seen else 0 if True in seen else 2
