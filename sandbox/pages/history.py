"""The history page: every version of a kernel recorded by `watch`, its figures as curves, and its changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..watch import screen
from ..watch.history import Texts, Version
from .render import render

_WIDTH, _HEIGHT, _EDGE = 240, 48, 5


@dataclass(frozen=True)
class _Point:
    x: float
    y: float
    number: int
    text: str
    ok: bool


def page(kernel: str, versions: Sequence[Version]) -> str:
    """HTML of all versions, the latest first, with a curve for each figure of the latest version's setting.

    Raises ToolchainMissing without jinja2.
    """
    setting = next((v.setting for v in reversed(versions) if v.figures), "")
    counted = f"{len(versions)} versions" if len(versions) != 1 else "1 version"
    about = [counted + (f"; curves: {setting}" if setting else "")]
    shown = [_shown(v, before) for before, v in zip([None, *versions], versions, strict=False)]
    return render(
        "history.html", title=f"{kernel}: history", about=about, curves=list(_curves(versions, setting)),
        versions=shown[::-1], width=_WIDTH, height=_HEIGHT,
    )  # fmt: skip


def _curves(versions: Sequence[Version], setting: str) -> Iterator[dict[str, Any]]:
    there = [v for v in versions if v.setting == setting and v.figures]
    for name in dict.fromkeys(name for v in reversed(there) for name in v.figures):
        having = [v for v in there if name in v.figures]
        values = [v.figures[name] for v in having]
        if len({*values}) < 2 and name.isupper():  # an instruction count that never changed
            continue
        title, shown = screen.figure(name)
        low, high = min(values), max(values)
        step = (_WIDTH - 2 * _EDGE) / max(1, len(values) - 1)
        scale = (_HEIGHT - 2 * _EDGE) / ((high - low) or 1)
        heights = [round(_HEIGHT - _EDGE - (value - low) * scale, 1) for value in values]
        points = [
            _Point(round(_EDGE + n * step, 1), heights[n], v.number, shown(values[n]), v.ok)
            for n, v in enumerate(having)
        ]
        yield {"title": title, "last": shown(values[-1]), "low": shown(low), "high": shown(high), "points": points,
               "line": " ".join(f"{p.x},{p.y}" for p in points)}  # fmt: skip


def _shown(version: Version, before: Version | None) -> dict[str, Any]:
    figures = [(title, text(value)) for (title, text), value in
               ((screen.figure(name), value) for name, value in version.figures.items())]  # fmt: skip
    changes = [*_changes(before.texts if before else None, version.texts)]
    return {"number": version.number, "time": version.time, "ok": version.ok, "word": screen.word(version.stage),
            "message": version.message, "setting": version.setting, "figures": figures, "changes": changes,
            "before": before.number if before else None}  # fmt: skip


def _changes(before: Texts | None, after: Texts) -> Iterator[tuple[str, str]]:
    """(kind, line) of a unified diff; kind is "add", "remove", "head" or "". Empty for the first version."""
    if before is None:
        return
    for path in sorted({*before, *after}):
        old, new = (texts.get(path, "").splitlines() for texts in (before, after))
        for line in difflib.unified_diff(old, new, path, path, lineterm=""):
            if line.startswith(("--- ", "@@")):
                yield "head", line.removeprefix("--- ")
            elif not line.startswith("+++ "):
                yield {"+": "add", "-": "remove"}.get(line[:1], ""), line
