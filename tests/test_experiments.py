"""The scripts of the experiments start, and their committed files stay small. What they measure is not tested."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from project import ROOT

from sandbox.core import registry

FOLDER = ROOT / "experiments"
SCRIPTS = sorted(path for path in FOLDER.glob("*/*.py") if "__main__" in path.read_text())
# Their run.py checks without a GPU what depends on the kernels.
CHECKED = ("004_mma_ladder", "007_bank_conflicts", "023_hopper_ladder", "027_backward_ladder")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_script_starts(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported PyTorch already."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", [str(script), "check" if script.parent.name in CHECKED else "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), str(ROOT), *sys.path])
    status = None
    try:
        with mock.patch.dict(os.environ):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        registry.forget()  # kernels that it added
        for name in [name for name, module in sys.modules.items() if is_of_an_experiment(module)]:
            del sys.modules[name]  # other folders have modules of the same name
    assert not status
    assert capsys.readouterr().out


def is_of_an_experiment(module: object) -> bool:
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(FOLDER)


def test_the_folder_stays_small() -> None:
    """At most 4 MB, no file above 300 kB, figures as PNG of at most 60 kB."""
    if not shutil.which("git"):
        pytest.skip("no git")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "experiments"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    sizes = {name: (ROOT / name).stat().st_size for name in files if (ROOT / name).is_file()}
    if not sizes:
        pytest.skip("not a git checkout")
    assert sum(sizes.values()) <= 4_000_000
    assert {name: size for name, size in sizes.items() if size > (60_000 if name.endswith("png") else 300_000)} == {}
    assert [name for name in sizes if name.endswith((".svg", ".jpg", ".pdf"))] == []
