"""The test suite itself: it runs with other installed pytest plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
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


class Item:
    """A test, with what `sampled` looks at."""

    def __init__(self, function: str, parameter: int, period: int):
        self.nodeid = f"{function}[{parameter}]"
        self.marker = SimpleNamespace(args=(period,))
        self.callspec = SimpleNamespace(params={})
        self.name, self.path = self.nodeid, Path("tests/core/test_x.py")

    def get_closest_marker(self, name: str) -> object:
        return self.marker if name == "sampled" else None


def test_a_sample_has_a_test_of_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in n, rounded up, and all of those with n = 1."""
    monkeypatch.setattr(conftest, "SAMPLE", "sampled")
    counts = {("a", 1): 8, ("b", 3): 10, ("c", 50): 4}
    items = [Item(function, n, period) for (function, period), count in counts.items() for n in range(count)]
    drawn = Counter(item.nodeid.partition("[")[0] for item in conftest.sampled(items))
    assert drawn == {"a": 8, "b": 4, "c": 1}
    mixed = [Item("d", n, 1 if n < 3 else 4) for n in range(7)]
    assert [*mixed[:3]] == [item for item in conftest.sampled(mixed) if item.marker.args == (1,)]
    assert len(conftest.sampled(mixed)) == 4


def test_file_names_are_unique() -> None:
    """pytest imports a test file by its base name, and collects only one of two equal names."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]
