"""The text of a line of a source file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from sandbox.core import source_line
from sandbox.core.source_line import SourceLine


def test_the_text_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As recorded, or else as the file is now; none beyond its end, or without the file."""
    file = tmp_path / "k.cu"
    file.write_text("first\n  second  \n")
    lines = [SourceLine(str(file), n) for n in (1, 2, 3)]
    assert [str(line) for line in lines] == ["k.cu:1", "k.cu:2", "k.cu:3"]
    assert [line.text() for line in lines] == ["first", "second", ""]
    assert SourceLine(str(tmp_path / "gone.cu"), 1).text() == ""
    file.write_text("edited\n")
    os.utime(file, ns=(1, 1))
    assert [line.text() for line in lines] == ["edited", "", ""]
    monkeypatch.setattr(source_line, "_recorded", {})
    source_line.record({str(file): "one\ntwo"})
    assert [line.text() for line in lines] == ["one", "two", ""]
    assert len({*lines, SourceLine(str(file), 1)}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        lines[0].line = 2  # type: ignore[misc]
