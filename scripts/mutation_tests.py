"""Which tests a mutation runs, cheap ones first: those that executed its lines, those of its kernels, or its folder's.

`make coverage` records which tests execute which line and launch which kernel, and how long each takes, in `build/`.
Without this record the tests of the file's folder are taken, and of the folders that import it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from mutation import ROOT, Mutation

from sandbox.core import registry
from sandbox.cpu import build
from sandbox.toolchain import sources

DATA = ROOT / "build" / "coverage"
TIMES = ROOT / "build" / "tests.xml"
UNKNOWN = 0.5  # seconds of a test whose time is not recorded
LEAST_TIMEOUT = 120.0  # seconds; a mutation's tests compile kernels that were in the cache when the times were recorded


@dataclass
class Selection:
    """The selected tests of the suite, and what is recorded about them. Environment: as for `make test`."""

    tests: tuple[str, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    launched: dict[str, set[str]] = field(default_factory=dict)  # {entry point: tests that launch it}
    executed: dict[str, dict[int, set[str]]] = field(default_factory=dict)  # {file: {line: tests}}

    def of(self, mutation: Mutation, budget: float) -> tuple[list[str], int]:
        """(tests to run, in order, for at most `budget` recorded seconds; the number of all relevant tests)."""
        by_kernel = mutation.file.startswith("kernels_cu/") and mutation.file not in self.executed
        found = self._of_kernels(mutation) if by_kernel else self._of_lines(mutation)
        chosen: list[str] = []
        total = 0.0
        for test in found:
            total += self.seconds.get(test, UNKNOWN)
            if chosen and total > budget:
                break
            chosen.append(test)
        return chosen, len(found)

    def timeout(self, tests: Sequence[str]) -> float | None:
        """Seconds after which one of these tests hangs: 20 times the recorded time of the slowest. None if a time is
        not recorded."""
        if not all(test in self.seconds for test in tests):
            return None
        return max(LEAST_TIMEOUT, 20 * max(self.seconds[test] for test in tests))

    def _sorted(self, tests: Iterable[str]) -> list[str]:
        """The cheapest test of each function, then the second of each, and so on: functions look for different faults,
        but many parameters of one function for the same."""
        cost = {test: (self.seconds.get(test, UNKNOWN), test) for test in tests}
        by_function: dict[str, list[str]] = {}
        for test in sorted(cost, key=cost.__getitem__):
            by_function.setdefault(test.partition("[")[0], []).append(test)
        rounds = zip_longest(*by_function.values())
        return [test for each in rounds for test in sorted(filter(None, each), key=cost.__getitem__)]

    def _of_lines(self, mutation: Mutation) -> list[str]:
        """Tests of the folder first: they are the ones that look at the result. Without records, first those in files
        with the module's name."""
        lines = self.executed.get(mutation.file, {})
        running: set[str] = set().union(*(lines.get(line, ()) for line in mutation.lines))
        if not running:  # executed by the import: a table or a definition
            running = set().union(*lines.values())
        own = self._in_folders([Path(mutation.file).parts[1]])
        if not lines:
            if Path(mutation.file).parent == Path("sandbox"):  # what every folder imports
                return self._sorted(self.tests)
            word = Path(mutation.file).stem.partition("_")[0]
            named = {test for test in own if Path(test.partition("::")[0]).stem.startswith(f"test_{word}")}
            others = self._in_folders(importers_of(mutation.file)) - own
            return [*self._sorted(named), *self._sorted(own - named), *self._sorted(others)]
        running = running.intersection(self.tests)  # torch.compile traces without a record: the folder's others last
        return [*self._sorted(running & own), *self._sorted(running - own), *self._sorted(own - running)]

    def _in_folders(self, folders: Iterable[str]) -> set[str]:
        return {test for folder in folders for test in self.tests if test.startswith(f"tests/{folder}/")}

    def _of_kernels(self, mutation: Mutation) -> list[str]:
        """Tests that launch the kernel or have its name, alternating between the kernels that include the file; then
        other tests of the engine. Tests of the folder with the file's name for a kernel that is not registered."""
        if not kernels_of(mutation.file):
            return self._sorted(self._in_folders([Path(mutation.file).parts[1]]))
        columns = (self._sorted(self._with_kernel(name)) for name in kernels_of(mutation.file))
        named = [test for test in chain.from_iterable(zip_longest(*columns)) if test]
        every = {name: re.compile(rf"[\[-]{name}[\]-]") for name in registry.kernels()}
        others = (
            t for t in self.tests if t.startswith("tests/engine/") and not any(p.search(t) for p in every.values())
        )
        return [*dict.fromkeys(named), *self._sorted(others)]

    def _with_kernel(self, name: str) -> set[str]:
        named = re.compile(rf"[\[-]{name}[\]-]")
        entries = {entry.name for entry in registry.kernels()[name].entries}
        launching = set[str]().union(*(self.launched.get(entry, set()) for entry in entries))
        return launching.intersection(self.tests).union(test for test in self.tests if named.search(test))


def importers_of(file: str) -> list[str]:
    """The other folders of `sandbox/` with a file that imports this module of a folder."""
    _, folder, *_, name = Path(file).with_suffix("").parts
    imports = re.compile(rf"^\s*from \.\.+{folder}(?:\.{name} import|\b.*\b{name}\b)", re.MULTILINE)
    files = sorted((ROOT / "sandbox").glob("*/**/*.py"))
    found = dict.fromkeys(path.relative_to(ROOT).parts[1] for path in files if imports.search(path.read_text()))
    return [each for each in found if each != folder]


def kernels_of(file: str) -> list[str]:
    """The kernels whose source is, or includes, this file, or whose spec it is."""
    path = (ROOT / file).with_suffix(".cu") if file.endswith(".py") else ROOT / file
    return [name for name in registry.kernels() if path in _files_of(name)]


@cache
def _files_of(name: str) -> frozenset[Path]:
    """The source of a kernel and what it includes."""
    source = registry.kernels()[name].source
    return frozenset(sources.included_files(source, build.searched(source))[0])


def selection(root: Path, environment: dict[str, str]) -> Selection:
    """The tests that pytest collects in `root`, with the records of `make coverage`, if there are any."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-o", "addopts="], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    tests = tuple(line for line in done.stdout.splitlines() if "::" in line)
    if done.returncode or not tests:
        raise RuntimeError(f"pytest could not collect the tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Selection(tests, *recorded_tests(TIMES, tests), recorded_lines(DATA))


def recorded_tests(path: Path, tests: Sequence[str]) -> tuple[dict[str, float], dict[str, set[str]]]:
    """({test: seconds}, {entry point: tests that launch it}) of pytest's JUnit file."""
    cases = ET.parse(path).getroot().iter("testcase") if path.is_file() else ()
    by_name = {(case.get("classname"), case.get("name")): case for case in cases}
    seconds: dict[str, float] = {}
    launched: dict[str, set[str]] = {}
    for test in tests:
        if (case := by_name.get(_junit_name(test))) is None:
            continue
        seconds[test] = float(case.get("time", UNKNOWN))
        for launches in case.iterfind("properties/property[@name='launches']"):
            for entry in launches.get("value", "").split():
                launched.setdefault(entry, set()).add(test)
    return seconds, launched


def _junit_name(test: str) -> tuple[str, str]:
    """The class name and name that pytest's JUnit file has for a test."""
    function, bracket, parameters = test.partition("[")
    path, *names = function.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *names[:-1]]), names[-1] + bracket + parameters


def recorded_lines(path: Path) -> dict[str, dict[int, set[str]]]:
    """{file: {line: tests that execute it}} of the data file of `make coverage`."""
    if not path.is_file():
        return {}
    from coverage import CoverageData

    data = CoverageData(str(path))
    data.read()
    found: dict[str, dict[int, set[str]]] = {}
    for file in data.measured_files():
        by_line = data.contexts_by_lineno(file)
        found[file] = {line: {c.rpartition("|")[0] for c in contexts if c} for line, contexts in by_line.items()}
    return found
