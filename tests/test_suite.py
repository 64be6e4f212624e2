"""The test suite itself: it runs with other installed pytest plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from project import ROOT

BENCHMARK = """
import warnings
class PytestBenchmarkWarning(UserWarning):
    pass
def pytest_configure(config):
    warnings.warn(PytestBenchmarkWarning("Benchmarks are automatically disabled because xdist plugin is active."))
"""


def test_beside_pytest_benchmark(tmp_path: Path) -> None:
    """Under `pytest -n` the plugin warns when it is configured, and warnings are errors here."""
    (tmp_path / "benchmark_like.py").write_text(BENCHMARK)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "benchmark_like", "--collect-only", "-q", "tests/core/test_spec.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_file_names_are_unique() -> None:
    """pytest imports a test file by its base name, and collects only one of two equal names."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]
