"""Mutation tests: insert small faults into the project, one at a time, and report those that no test detects.

`tests/engine/mutations.toml` contains the faults: a text that occurs exactly once in its file, its replacement and
the tests that should fail, smallest first. Each mutation is applied to a scratch copy of the project, its tests run
until one fails, and it is reverted. A mutation that survives needs a test, or a reason in the data why it is
equivalent.

    python scripts/mutants.py                      all mutations
    python scripts/mutants.py --sample 5 --seed 3  five random mutations
    python scripts/mutants.py --match fwd_mma      mutations whose file, text or replacement contains fwd_mma

Results are stored as JSON lines and reused until a file of the project changes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "engine" / "mutations.toml"
sys.path.insert(0, str(ROOT))

from sandbox.core import jsonl  # noqa: E402
from sandbox.toolchain import cache  # noqa: E402

_COUNTS = ("kernels_cu", "sandbox", "tests", "pyproject.toml")  # files that results depend on
# Mutations of these files affect cache keys, so their tests run with an empty cache.
_KEYS = ("sandbox/cpu/build.py", "sandbox/cpu/compiler.py", "sandbox/toolchain/")


@dataclass(frozen=True)
class Mutation:
    """One fault. `tests`: pytest selections, such as "tests/x/test_y.py -k z", smallest first. `equivalent`: why no
    test can detect it, if so."""

    file: str
    text: str
    becomes: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {_short(self.text)} -> {_short(self.becomes)}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def load(path: Path = DATA) -> list[Mutation]:
    """All mutations, in the order of the file."""
    files: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text())
    rows = ((file, row) for file, its_rows in files.items() for row in its_rows)
    return [Mutation(file, **{**row, "tests": tuple(row.get("tests", ()))}) for file, row in rows]


def project_files() -> list[str]:
    """The files of the project: tracked, or untracked and not ignored."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = sorted(filter(None, listed.stdout.decode().split("\0")))
    return [name for name in names if (ROOT / name).is_file()]


def digest(names: Sequence[str]) -> str:
    """A digest of all files that results depend on, except the mutations."""
    found = hashlib.sha256()
    for name in names:
        if name.startswith(_COUNTS):
            found.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()[:16]


class Copy:
    """A scratch copy of the project with its own cache of compiled objects."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self.root, self._cache, self._limit = folder / "project", folder / "cache", 600.0
        for name in names:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """Context with the mutation applied. Raises ValueError unless its text occurs exactly once."""
        file = self.root / mutation.file
        content = file.read_text()
        if content.count(mutation.text) != 1:
            raise ValueError(f"{mutation.file} has the text {content.count(mutation.text)} times: {mutation.text!r}")
        file.write_text(content.replace(mutation.text, mutation.becomes))
        try:
            yield
        finally:
            file.write_text(content)

    def passes(self, selection: str, fresh_cache: bool = False, limit: float = 600.0) -> bool:
        """Whether these tests pass. False if they hang, crash, or cannot be collected."""
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",  # two edits of equal length within a second would share bytecode
            "SANDBOX_TEST_CACHE_DIR": tempfile.mkdtemp(dir=self.root.parent) if fresh_cache else str(self._cache),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(selection)]
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Results:
    """Stored results of this tree: rows {"tree", "what", "outcome", "seconds"}."""

    def __init__(self, path: Path, tree: str):
        self._path, self._tree, self._lock = path, tree, Lock()
        self.known = {row["what"]: row for row in jsonl.read(path) if row.get("tree") == tree}

    def add(self, what: str, outcome: str, seconds: float) -> dict[str, Any]:
        """Store a row and return it."""
        row = {"tree": self._tree, "what": what, "outcome": outcome, "seconds": round(seconds, 1)}
        with self._lock:
            jsonl.append(self._path, row)
            self.known[what] = row
        return row


def examine(mutation: Mutation, copy: Copy, results: Results) -> dict[str, Any]:
    """The result of a mutation: "killed", "survived", or "void" if its tests fail without the mutation."""
    what = f"{mutation} {hashlib.sha256(repr(mutation).encode()).hexdigest()[:8]}"
    if what in results.known:
        return results.known[what]
    start = time.perf_counter()
    fresh = mutation.file.startswith(_KEYS)
    for selection in mutation.tests:
        sound = results.known.get(selection)
        if sound is None:
            begun = time.perf_counter()
            if not copy.passes(selection):
                return {
                    "outcome": "void",
                    "seconds": time.perf_counter() - start,
                }  # not stored, so that it is tried again
            sound = results.add(selection, "passes", time.perf_counter() - begun)
        with copy.broken(mutation):
            if not copy.passes(selection, fresh, limit=60 + 10 * sound["seconds"]):
                return results.add(what, "killed", time.perf_counter() - start)
    return results.add(what, "survived", time.perf_counter() - start)


def run(
    mutations: Sequence[Mutation], results: Results, jobs: int, names: Sequence[str]
) -> Iterator[tuple[Mutation, str]]:
    """Each mutation with its outcome, when available, with `jobs` scratch copies in parallel."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for n in range(jobs):
            free.put(Copy(Path(folder) / str(n), names))

        def one(mutation: Mutation) -> dict[str, Any]:
            copy = free.get()
            try:
                return examine(mutation, copy, results)
            finally:
                free.put(copy)

        waiting = {pool.submit(one, mutation): mutation for mutation in mutations}
        try:
            for done in as_completed(waiting):
                row = done.result()
                print(f"{row['outcome']:9}{row['seconds']:6.1f} s  {waiting[done]}", flush=True)
                yield waiting[done], row["outcome"]
        finally:
            pool.shutdown(cancel_futures=True)


def chosen(options: argparse.Namespace) -> list[Mutation]:
    """The selected mutations, without equivalent ones."""
    mutations = [m for m in load() if not m.equivalent]
    if options.match:
        mutations = [m for m in mutations if any(options.match in text for text in (m.file, m.text, m.becomes))]
    if options.sample is not None:
        seed = random.randrange(10**6) if options.seed is None else options.seed
        sampled = f"--sample {options.sample} --seed {seed}"
        print(f"{options.sample} of {len(mutations)} mutations: {sampled}", flush=True)
        mutations = random.Random(seed).sample(mutations, min(options.sample, len(mutations)))
    return mutations


def main() -> int:
    """Exit status: 0 if every mutation was detected."""
    parser = argparse.ArgumentParser(description="Mutation tests: report small faults that no test detects.")
    parser.add_argument("--sample", type=int, metavar="N", help="number of random mutations")
    parser.add_argument("--seed", type=int, metavar="S", help="seed of --sample; default: random")
    parser.add_argument("--match", metavar="TEXT", help="only mutations whose file, text or replacement contains TEXT")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel jobs; default: all cores"
    )
    parser.add_argument(
        "--results", type=Path, default=None, help="file of stored results; default: mutants.jsonl in the cache folder"
    )
    options = parser.parse_args()
    mutations, names = chosen(options), project_files()
    results = Results(options.results or cache.directory() / "mutants.jsonl", digest(names))
    outcomes = dict(run(mutations, results, max(1, options.jobs), names))
    killed = sum(outcome == "killed" for outcome in outcomes.values())
    print(f"{killed} of {len(outcomes)} detected" + (f", {100 * killed / len(outcomes):.1f}%" if outcomes else ""))
    for outcome, meaning in (("survived", "not detected"), ("void", "its tests fail without the mutation")):
        for mutation in mutations:
            if outcomes[mutation] == outcome:
                print(f"{meaning}: {mutation}")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
