"""Renders templates to HTML pages that contain their style, scripts and data, with a light and a dark scheme."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import ToolchainMissing

_TEMPLATES = Path(__file__).resolve().parent / "templates"


@lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ToolchainMissing(f'pages need jinja2 ({error}): pip install "attention-sandbox[html]"') from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["data"] = _data
    return environment


def render(template: str, **values: Any) -> str:
    """Render a template of `templates/` with escaped values. Raises ToolchainMissing without jinja2."""
    return _environment().get_template(template).render(**values)


def write(path: Path, page: str) -> None:
    """Write a page to a file. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _data(value: object) -> Any:
    """JSON for a script element, escaped so that it cannot end the element."""
    import markupsafe

    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return markupsafe.Markup(text)
