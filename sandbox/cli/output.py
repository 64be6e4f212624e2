"""Output of the commands, and their exit status."""

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
from rich.table import Table
from rich.text import Text

from ..core.operation import OperationProblem
from ..core.problem import Problem
from ..pages import render
from ..verify.report import in_parts

T = TypeVar("T")


def open_standard_streams() -> None:
    """Open a closed standard stream (`>&-`) as the null device. Otherwise the next opened file, such as a compiler's
    output, would get its file descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if number else "r")  # noqa: SIM115  open until the process ends
            os.set_inheritable(stream.fileno(), True)  # the lowest free descriptor, which is the closed one
            setattr(sys, name, stream)


def _console(**more: Any) -> Console:
    # Output may contain user text, such as score expressions: "[h & 1]" is not markup, ":x:" is not an emoji.
    return Console(highlight=False, markup=False, emoji=False, **more)


def screen() -> Console:
    # In a file or a pipe a table is as wide as needed unless COLUMNS is set; on a screen it folds.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return _console(width=None if known else 200)


def show_table(table: Table) -> None:
    """Print a table; one that is too wide in parts."""
    console = screen()
    parts = in_parts(table, console.width)
    for part in parts:
        console.print(part)
        if len(parts) > 1:
            console.print()
    if len(parts) > 1 and table.caption:
        say(str(table.caption))


def say(text: str | Text, **where: Any) -> None:
    """Print text without line breaks, so that paths can be copied; the terminal wraps it."""
    with suppress(OSError) if where.get("stderr") else nullcontext():  # a full stderr must not fail the command
        _console(soft_wrap=True, **where).print(text)


def save_page(path: Path, page: str) -> None:
    """Write the page of --html and report its path."""
    try:
        render.write(path, page)
    except OSError as error:
        raise click.FileError(str(path), error.strerror or "cannot be written") from error
    say(f"wrote {path}", stderr=True)


def print_json(value: object) -> None:
    click.echo(json.dumps(plain(value), indent=2))


def print_json_rows(rows: Iterable[T]) -> Iterator[T]:
    """The same rows; each is printed when it is available, as an element of one JSON list."""
    before = "[\n"
    for row in rows:
        click.echo(before + textwrap.indent(json.dumps(plain(row), indent=2), "  "), nl=False)
        before = ",\n"
        yield row
    click.echo("[]" if before == "[\n" else "\n]")


def plain(value: object) -> object:
    """The value as JSON types. NaN and infinity become null; fields with repr=False are omitted."""
    if isinstance(value, (Problem, OperationProblem)):  # omits absent options
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
    """The same results, with a progress line on the terminal that describes the latest one."""
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
    """1 when any verdict is False; 2 when none is True or False; else 0."""
    seen = set(verdicts)
    return 1 if False in seen else 0 if True in seen else 2
