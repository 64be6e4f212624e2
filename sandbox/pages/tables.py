"""Tables for pages, and a page of sections with tables, texts and pictures."""

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

_LOOKS = {"red": "bad", "green": "good", "dim": "faint", "yellow": "faint", "bold": "strong"}  # the first match counts


@dataclass(frozen=True)
class Cell:
    """A table cell. `look`: a class of the style sheet, or ""."""

    text: str
    look: str = ""


@dataclass(frozen=True)
class Column:
    """A column head. `right`: right-aligned, for numbers."""

    head: str
    right: bool


@dataclass(frozen=True)
class Table:
    """A table with its heading. If `sortable`, a click on a column head sorts by that column."""

    heading: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = True


@dataclass(frozen=True)
class Section:
    """A section of a page. `picture`: a data: URL of an image."""

    heading: str
    table: Table | None = None
    texts: Sequence[str] = ()
    picture: str = ""
    described: str = ""  # alternative text of the picture


def of_terminal(table: rich.table.Table, heading: str) -> Table:
    """Convert a table that a command prints; it should be rendered for a wide screen."""
    columns = [Column(_unbroken(_plain(c.header).text), c.justify == "right") for c in table.columns]
    rows = [list(row) for row in zip(*([_plain(cell) for cell in c.cells] for c in table.columns), strict=True)]
    heads = any(column.head for column in columns)
    return Table(heading, columns, rows, heading, sortable=heads)


def _unbroken(head: str) -> str:
    """A column head without its line breaks."""
    return re.sub(r"(?<=[-_])\n", "", head).replace("\n", " ")


def _plain(cell: object) -> Cell:
    if not isinstance(cell, Text):
        return Cell(str(cell))
    styles = " ".join([str(cell.style), *(str(span.style) for span in cell.spans if span.start == 0)])
    return Cell(cell.plain, next((look for word, look in _LOOKS.items() if word in styles), ""))


def drawn(draw: Callable[[Path], Iterable[Path]]) -> str:
    """The picture that `draw` writes to PREFIX.svg, as a data: URL; "" if it cannot be drawn."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = [*draw(Path(folder) / "picture")]
        except (ToolchainMissing, UnsupportedProblem):
            return ""
        content = next(path.read_bytes() for path in paths if path.suffix == ".svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"


def page(title: str, about: Sequence[str], sections: Sequence[Section]) -> str:
    """HTML of a list of sections. Raises ToolchainMissing without jinja2."""
    return render("tables.html", title=title, about=about, sections=sections)
