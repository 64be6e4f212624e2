"""Tables as pages have them, and a page of sections that hold tables, texts and pictures."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.table
from rich.text import Text

from ..core.errors import ToolchainMissing, UnsupportedProblem
from .render import render

_LOOKS = {"red": "bad", "green": "good", "dim": "faint", "yellow": "faint", "bold": "strong"}  # the first that is named


@dataclass(frozen=True)
class Cell:
    """`look`: a class of the style sheet, or ""."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Column:
    """`right`: it holds numbers."""

    head: str
    right: bool


@dataclass(frozen=True)
class Table:
    """`heading` names it on the page; a click on a column's head sorts by it, where `sortable`."""

    heading: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = True


@dataclass(frozen=True)
class Section:
    """A part of a page: `picture` is an image's address, which holds the image."""

    heading: str
    table: Table | None = None
    texts: Sequence[str] = ()
    picture: str = ""
    described: str = ""  # the picture, for who does not see it


def of_terminal(table: rich.table.Table, heading: str) -> Table:
    """What a verb prints, made for a wide screen."""
    columns = [Column(_unbroken(_plain(c.header).text), c.justify == "right") for c in table.columns]
    rows = [list(row) for row in zip(*([_plain(cell) for cell in c.cells] for c in table.columns), strict=True)]
    heads = any(column.head for column in columns)
    return Table(heading, columns, rows, heading, sortable=heads)


def _unbroken(head: str) -> str:
    """A head that was broken to be narrow, in one line."""
    return re.sub(r"(?<=[-_])\n", "", head).replace("\n", " ")


def _plain(cell: object) -> Cell:
    if not isinstance(cell, Text):
        return Cell(str(cell))
    styles = " ".join([str(cell.style), *(str(span.style) for span in cell.spans if span.start == 0)])
    return Cell(cell.plain, next((look for word, look in _LOOKS.items() if word in styles), ""))


def drawn(draw: Callable[[Path], Iterable[Path]]) -> str:
    """The picture that `draw` writes as PREFIX.svg, as an image's address; "" where there is none to draw."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = [*draw(Path(folder) / "picture")]
        except (ToolchainMissing, UnsupportedProblem):
            return ""
        content = next(path.read_bytes() for path in paths if path.suffix == ".svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"


def page(title: str, about: Sequence[str], sections: Sequence[Section]) -> str:
    """HTML of sections, one after the other. Raises ToolchainMissing without jinja2."""
    return render("tables.html", title=title, about=about, sections=sections)
