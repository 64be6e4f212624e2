"""Templates to pages. A page holds all that it needs: style, script, texts; it opens anywhere, light or dark."""

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
    """A page of `templates/`, each value escaped where it stands. Raises ToolchainMissing without jinja2."""
    return _environment().get_template(template).render(**values)


def write(path: Path, page: str) -> None:
    """Raises OSError where it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _data(value: object) -> Any:
    """JSON for a script: nothing in it can end the element."""
    import markupsafe

    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return markupsafe.Markup(text)
