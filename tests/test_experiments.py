"""The scripts of the experiments start, and their committed files stay small. What they measure is not tested."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from project import ROOT, run_script

from sandbox import reference

FOLDER = ROOT / "experiments"
SCRIPTS = sorted(path for path in FOLDER.glob("*/*.py") if "__main__" in path.read_text())
# Their run.py checks without a GPU what depends on the kernels.
CHECKED = ("004_mma_ladder", "007_bank_conflicts", "023_hopper_ladder", "027_backward_ladder")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.sampled(3)
def test_a_script_starts(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    command = "check" if script.parent.name in CHECKED else "--help"
    assert not run_script(script, command)
    assert capsys.readouterr().out


def test_the_dropout_mask_of_external_tests() -> None:
    """The mask that the shim of experiment 030 computes in PyTorch is that of the reference, and so of the kernels."""
    pytest.importorskip("torch")
    dropout = runpy.run_path(str(FOLDER / "030_external_tests/flash_attn_shim/flash_attn/dropout.py"))
    shape = (-12345678901234, 2, 3, 70, 45, 0.17)
    assert (dropout["dropout_keep"](*shape, "cpu").numpy() == reference.dropout_keep(*shape)).all()


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
