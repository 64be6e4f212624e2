"""Errors in a user's Python file: the line, of this file."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from sandbox.core.errors import SpecError
from sandbox.core.files import mistakes_of, names_of

WRONG = {  # the file -> what follows its name
    "x = 1\nx = (\n": ", line 2: SyntaxError: .*never closed",
    "\nimport helper_with_an_error": r", line 2: SyntaxError: .*\(helper_with_an_error.py, line 4\)",
    "\n\neval('1 +')": r", line 3: SyntaxError: .*\(<string>, line 1\)",
    "import json\njson.loads('{')": ", line 2: JSONDecodeError: ",
    "# coding: nonsense": ": SyntaxError: .*unknown encoding",  # no line is known
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=["own", "helper", "eval", "library", "no line"])
def test_the_line_is_of_this_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_with_an_error.py").write_text("\n\n\ndef f(:\n")
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(SpecError, match=rf"^{re.escape(str(tmp_path))}/wrong\.py{message}"):
        names_of(tmp_path / "wrong.py")


def test_a_file_that_is_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text, error in (("\n1 / 0", "ZeroDivisionError"), ("\n(", "SyntaxError")):
        (tmp_path / "real/wrong.py").write_text(text)
        with (
            pytest.raises(SpecError, match=f"^named, line 2: {error}: "),
            mistakes_of(tmp_path / "real/wrong.py", "named"),
        ):
            runpy.run_path(str(tmp_path / "link/wrong.py"))
