"""Experiments that are scripts to run and read still run: a few cases, a few steps, on the CPU backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path: Path, script: str, *options: str) -> list[dict[str, Any]]:
    """The rows that an experiment writes."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "experiments" / script), "--backend", "cpu", "--out", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]


def test_gradients_are_autograds(tmp_path: Path) -> None:
    only = ("--kernels", "bwd_minimal", "--dtypes", "float32", "--cases", "rows that see no key", "one row, one key")
    rows = run(tmp_path, "010_autograd_parity/run.py", *only)
    ours = [row for row in rows if row["contender"] == "bwd_minimal"]
    assert len(ours) == 2
    assert all(row["ok"] for row in ours)
    assert (tmp_path / "worst_cpu.png").is_file()


def test_a_model_learns_the_same(tmp_path: Path) -> None:
    rows = run(tmp_path, "011_train_gpt/run.py", "--steps", "3")
    verdict = rows.pop()
    assert verdict["ok"]
    assert {"ours", "sdpa-flash"} <= {row["contender"] for row in rows}
    assert (tmp_path / "curves_cpu.svg").is_file()
