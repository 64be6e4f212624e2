"""Pictures by matplotlib, as PREFIX.png and PREFIX.svg: the same content gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ToolchainMissing


@contextmanager
def figure(width: float, height: float, *, dpi: int = 100, style: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """A figure, so many inches wide and high, to draw on and to `save` within the `with` statement.

    `style`: settings by matplotlib's names. Raises ToolchainMissing without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolchainMissing(f'pictures need matplotlib ({error}): pip install "attention-sandbox[plot]"') from error
    settings = {"font.size": 9, "svg.hashsalt": "sandbox", **(style or {})}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **settings}):
        yield Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def save(figure: Any, prefix: Path | str) -> list[Path]:
    """Writes PREFIX.png and PREFIX.svg, without the time and the version that would make them differ; their paths."""
    paths = [Path(f"{prefix}.png"), Path(f"{prefix}.svg")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(paths[0], metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def compact(paths: Sequence[Path]) -> Path:
    """Reduces the PNG that `save` wrote to a palette of 128 colours and deletes the SVG: a figure of some 30 kB, to be
    committed. Returns the PNG's path."""
    from PIL import Image

    png, svg = paths
    with Image.open(png) as image:
        reduced = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    reduced.save(png, optimize=True)
    svg.unlink()
    return png
