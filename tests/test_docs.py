"""The examples of the documentation run in order, in one namespace."""

from __future__ import annotations

import re
from typing import Any

import pytest
from project import ROOT

PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name == "score-options.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 8
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, f"{page.name}: {block.splitlines()[0]}", "exec"), names)
