"""Mutation tests: insert small faults into the project, one at a time, and report those that no test detects.

    python scripts/mutants.py                         20 random mutations, 3 of Python files for 2 of kernels
    python scripts/mutants.py --sample 5 --seed 3     five of them, the same in each run on the same files
    python scripts/mutants.py --group kernels         only mutations of CUDA files
    python scripts/mutants.py --written               the written mutations of tests/engine/mutations.toml
    python scripts/mutants.py --tier all              with the tests of `make test-all`
    python scripts/mutants.py --table                 write docs/mutation-score.md from the stored rows

Each mutation is applied to a scratch copy of the project. Its tests (mutation_tests.py) run until one fails. `--rows
FILE` appends the results as JSON lines. If a mutation of the stored rows cannot change any result, add "equivalent"
with the reason to its row: it does not count.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cuda_mutations
import mutation as mutations
from mutation import ROOT, Mutation

sys.path.insert(0, str(ROOT))

import mutation_score
import mutation_tests

from sandbox.core import jsonl

GROUPS = ("host", "kernels")
TIERS = {"test": {}, "all": {"SANDBOX_SAMPLE": "all", "SANDBOX_MAGNITUDES": "all"}}
WRITTEN_TIMEOUT = 60.0  # seconds of a test that a written mutation names; a mutated kernel may never end
# Mutations of these files affect cache keys, so their tests run with an empty cache.
_KEYS = ("sandbox/cpu/build.py", "sandbox/cpu/compiler.py", "sandbox/toolchain/")
_GONE = re.compile(r"^ERROR: not found: .*?/(tests/.*)$", re.MULTILINE)
_UNLOADED = re.compile(r"^ERROR: found no collectors for .*?/(tests/.*?\.py)", re.MULTILINE)
_TIMEOUT = re.compile(r"^\++ Timeout \++$", re.MULTILINE)
_HANGS = "a test did not end"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - |$)", re.MULTILINE)


def project_files() -> list[str]:
    """The files of the project: tracked, or untracked and not ignored."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = sorted(filter(None, listed.stdout.decode().split("\0")))
    return [name for name in names if (ROOT / name).is_file()]


def group_of(name: str) -> str | None:
    """The group of GROUPS whose mutations include those of this file. Headers that the CPU backend replaces are in
    none: without a GPU no test executes them."""
    if name.startswith(("sandbox/", "kernels_cu/")) and name.endswith(".py"):
        return "host"
    replaced = (ROOT / "sandbox/cpu/include" / Path(name).name).is_file()
    return "kernels" if name.startswith("kernels_cu/") and name.endswith((".cu", ".cuh")) and not replaced else None


def draw(group: str, names: Sequence[str], sample: random.Random) -> Mutation:
    """A random mutation; files are drawn by their size."""
    files = {name: (ROOT / name).read_text() for name in names if group_of(name) == group}
    while True:
        name = sample.choices(list(files), [len(text) for text in files.values()])[0]
        if group == "host":
            import host_mutations

            change = host_mutations.draw(files[name], sample)
        else:
            change = cuda_mutations.draw(files[name], sample)
        if change:
            return mutations.of(name, files[name], change)


class Copy:
    """A scratch copy of the project with its own cache of compiled objects."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self.root, self._cache = folder / "project", folder / "cache"
        self._running: subprocess.Popen[str] | None = None
        for name in names:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """Context with the mutation applied."""
        file = self.root / mutation.file
        content = file.read_text()
        file.write_text(mutation.change.applied(content))
        try:
            yield
        finally:
            file.write_text(content)

    def environment(self, tier: str, fresh_cache: bool = False) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("SANDBOX_")},
            **TIERS[tier],
            "PYTHONDONTWRITEBYTECODE": "1",  # two edits of equal length within a second would share bytecode
            "SANDBOX_TEST_CACHE_DIR": tempfile.mkdtemp(dir=self.root.parent) if fresh_cache else str(self._cache),
        }

    def stop(self) -> None:
        """End the running tests, with the processes that they started. Pytest may have ended before those."""
        running, self._running = self._running, None
        if running is not None:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()

    def failure(
        self, tests: Sequence[str], environment: dict[str, str], limit: float, timeout: float | None = None
    ) -> tuple[str, str] | None:
        """(the first test that fails, pytest's output), or None if all pass. A run that hangs or crashes fails.
        `limit`: seconds of the run; `timeout`: of each test, by default the one in pyproject.toml."""
        chosen = self.root.parent / "tests.txt"
        chosen.write_text("\n".join(tests))
        arguments = shlex.split(tests[0]) if " -k " in tests[0] else [f"@{chosen}"]
        if timeout is not None:
            arguments.append(f"--timeout={timeout:.0f}")
        status, output = self._pytest(arguments, environment, limit)
        if status == 0:
            return None
        if status == 4 and (module := _UNLOADED.search(output)):
            return f"{module[1]} cannot be imported", output
        if status == 4 and (gone := set(_GONE.findall(output))):  # tests with parameters that the mutation removes
            functions = {test.partition("[")[0] for test in gone}
            left = [test for test in tests if test.partition("[")[0] not in functions]
            return self.failure(left, environment, limit, timeout) if left and len(left) < len(tests) else None
        if status > 2 and "while loading conftest" not in output:  # an argument that is wrong, or no test
            raise RuntimeError(f"pytest failed:\n{output[-2000:]}")
        if output == _HANGS or _TIMEOUT.search(output):
            return _HANGS, output
        found = _FAILED.search(output)
        return (found[1] if found else f"exit status {status}"), output

    def _pytest(self, arguments: Sequence[str], environment: dict[str, str], limit: float) -> tuple[int, str]:
        """(exit status, output)"""
        self._running = running = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments],
            cwd=self.root, env=environment, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return 1, _HANGS
        finally:
            self.stop()
        return running.returncode, output


def does_not_compile(output: str) -> bool:
    """Whether a test failed because the mutated CUDA text is invalid: an assertion about the tile is a detection."""
    return "CompileError" in output and "error:" in output and "static assertion failed" not in output


class Examiner:
    """Runs mutations in `jobs` scratch copies. `budget`: recorded seconds of tests for one mutation."""

    def __init__(self, folder: Path, names: Sequence[str], options: argparse.Namespace):
        self._tier, self._budget = options.tier, options.seconds
        self._unsound: set[str] = set()
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._copies = [Copy(folder / str(n), names) for n in range(options.jobs)]
        first = self._copies[0]
        self._selection = mutation_tests.Selection(())  # written mutations name their tests
        if not options.written:
            self._selection = mutation_tests.selection(first.root, first.environment(self._tier))
        for copy in self._copies:
            self._free.put(copy)

    def stop(self) -> None:
        for copy in self._copies:
            copy.stop()

    def row(self, mutation: Mutation) -> dict[str, Any]:
        """Its result: "noticed" with the test, "survived", or "invalid" if it does not compile. Tests that also fail
        without the mutation are left out."""
        copy, start = self._free.get(), time.perf_counter()
        try:
            outcome, test, ran = self._outcome(mutation, copy)
        finally:
            self._free.put(copy)
        return {
            "file": mutation.file, "line": mutation.lines[0], "begin": mutation.change.begin,
            "operator": mutation.change.operator,
            "before": mutation.change.before, "after": mutation.change.after, "context": mutation.context,
            "tier": self._tier, "outcome": outcome, "test": test, "tests": ran,
            "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip

    def _outcome(self, mutation: Mutation, copy: Copy) -> tuple[str, str, str]:
        environment = copy.environment(self._tier, fresh_cache=mutation.file.startswith(_KEYS))
        chosen, relevant = ([], 0) if mutation.tests else self._selection.of(mutation, self._budget)
        runs = [[selection] for selection in mutation.tests] or [chosen]
        for tests in runs:
            while left := [test for test in tests if test not in self._unsound]:
                with copy.broken(mutation):
                    timeout = WRITTEN_TIMEOUT if mutation.tests else self._selection.timeout(left)
                    found = copy.failure(left, environment, 120 + 4 * self._budget, timeout)
                if found is None:
                    break
                test, output = found
                if mutation.file.endswith((".cu", ".cuh")) and does_not_compile(output):
                    return "invalid", test, f"{len(left)} of {relevant}"
                if "::" not in test or not copy.failure([test], copy.environment(self._tier), 600):
                    return "noticed", test, f"{len(left)} of {relevant}"
                self._unsound.add(test)  # it also fails without the mutation
        return "survived", "", f"{len(chosen)} of {relevant}"


def results(
    examiner: Examiner, group: str, wanted: Sequence[Mutation] | int, names: Sequence[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row of each mutation when it is available. For an invalid one, another one is drawn."""
    sample = random.Random(f"{options.seed} {group}")
    with ThreadPoolExecutor(options.jobs) as pool:
        given = [draw(group, names, sample) for _ in range(wanted)] if isinstance(wanted, int) else wanted
        waiting = {pool.submit(examiner.row, each): each for each in given}
        try:
            while waiting:
                done = next(as_completed(waiting))
                each, row = waiting.pop(done), {"group": group, "seed": options.seed, **done.result()}
                print(f"{row['outcome']:9}{row['seconds']:6.1f} s  {each}  {row['test']}", flush=True)
                if row["outcome"] == "invalid" and isinstance(wanted, int):
                    replacement = draw(group, names, sample)
                    waiting[pool.submit(examiner.row, replacement)] = replacement
                else:
                    yield row
        finally:
            examiner.stop()
            pool.shutdown(cancel_futures=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mutation tests: report small faults that no test detects.")
    parser.add_argument("--sample", type=int, metavar="N", default=20, help="number of random mutations; default: 20")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of the sample; default: random")
    parser.add_argument("--group", choices=GROUPS, help="only Python files, or only kernels; default: 3 to 2")
    parser.add_argument("--written", action="store_true", help="the written mutations instead; a sample with --seed")
    parser.add_argument("--match", metavar="TEXT", default="", help="only mutations of files whose path contains TEXT")
    parser.add_argument("--tier", choices=TIERS, default="test", help="tests of `make test`, or of `make test-all`")
    parser.add_argument("--seconds", type=float, default=120, help="limit of the tests' recorded seconds per mutation")
    parser.add_argument("--least", type=float, default=0, help="exit status 1 if fewer percent are noticed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel jobs; default: all cores")
    parser.add_argument("--rows", type=Path, help="append the results to this file")
    parser.add_argument("--table", action="store_true", help="write the table of the stored rows, and run nothing")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the scratch copies are removed
    options = parsed()
    if options.table:
        mutation_score.write()
        return 0
    names = project_files()
    matching = [name for name in names if options.match in name]
    written = [each for each in mutations.written() if options.match in each.file] if options.written else []
    if options.seed is None:
        options.seed = random.randrange(10**6)
    elif written:
        written = random.Random(options.seed).sample(written, min(options.sample, len(written)))
    share = {"host": round(0.6 * options.sample), "kernels": options.sample - round(0.6 * options.sample)}
    wanted = {
        group: options.sample if options.group else n for group, n in share.items() if options.group in (group, None)
    }
    print(f"--sample {options.sample} --seed {options.seed}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        examiner = Examiner(Path(folder), names, options)
        for group, number in {"written": written}.items() if written else wanted.items():
            for row in results(examiner, group, number, matching, options):
                rows.append(row)
                if options.rows:
                    jsonl.append(options.rows, row)
    noticed = sum(row["outcome"] == "noticed" for row in rows)
    print(f"{noticed} of {len(rows)} noticed")
    return int(100 * noticed < options.least * len(rows))


if __name__ == "__main__":
    sys.exit(main())
