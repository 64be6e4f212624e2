"""Whole files are replaced, or stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.core import atomic


def test_the_permissions_stay(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("before")
    old.chmod(0o600)
    for file in (new, old):
        atomic.replace(file, b"after")
        assert file.read_text() == "after"
    assert [oct(file.stat().st_mode & 0o777) for file in (new, old)] == ["0o644", "0o600"]


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    file.write_text("before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.replace(file, b"after")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]
