"""Rows as a table, errors as a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from sandbox.core import picture

NAMES = ("dQ", "dK", "dV")


def cell(row: dict[str, Any]) -> Text:
    """`error <= bound` of the gradient that comes closest to its bound."""
    if row["ok"] is None:
        return Text("not supported", style="dim")
    worst = row[row["worst"]]
    sign, style = ("<=", "") if row["ok"] else (">", "bold red")
    return Text(f"{worst['error']:.1e} {sign} {worst['bound']:.1e} {row['worst']}", style=style)


def table(rows: list[dict[str, Any]]) -> Table:
    """A line per case and dtype, a column per contender."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    shown = Table("case", "problem", *contenders, title="|error| <= bound of the gradient nearest to its bound")
    lines: dict[tuple[str, str], list[Text]] = {}
    for row in rows:
        lines.setdefault((row["case"], row["problem"]), []).append(cell(row))
    for (name, problem), cells in lines.items():
        shown.add_row(name, problem, *cells)
    return shown


def slices(errors: list[np.ndarray], yardstick: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The head with the largest error of each gradient, (rows, D), and autograd's errors of the same head."""
    found = {}
    for name, mine, theirs in zip(NAMES, errors, yardstick, strict=True):
        b, h = np.unravel_index(np.argmax(mine.max(axis=(2, 3))), mine.shape[:2])
        found |= {name: mine[b, h].astype(np.float16), f"{name}_autograd": theirs[b, h].astype(np.float16)}
    return found


def draw(folder: Path, backend: str) -> Path:
    """worst_BACKEND.npz -> a heat map of |error| over (row, column): ours above, autograd's below."""
    from matplotlib.colors import LogNorm

    stored = np.load(folder / f"worst_{backend}.npz")
    with picture.figure(10, 6.2) as figure:
        axes = figure.subplots(2, 3)
        for i, (suffix, source) in enumerate((("", "ours"), ("_autograd", "autograd, same dtype"))):
            for axis, name in zip(axes[i], NAMES, strict=True):
                errors = np.maximum(stored[name + suffix].astype(float), 1e-3)
                image = axis.imshow(errors, norm=LogNorm(1e-3, 1), cmap="magma", aspect="auto", interpolation="nearest")
                axis.set_title(f"{name}, {source}: at most {errors.max():.2f}", fontsize=9)
                axis.set(xlabel="column" if i else "", ylabel="row" if name == "dQ" else "")
        figure.colorbar(image, ax=axes, label="|error| / bound", extend="both")
        figure.suptitle(str(stored["title"]), fontsize=10)
        return picture.compact(picture.save(figure, folder / f"worst_{backend}"))
