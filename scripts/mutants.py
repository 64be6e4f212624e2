"""Break the project on purpose, one small fault at a time, and see which of them no test notices.

`mutations.toml` beside this file holds the faults: a text that its file has exactly once, what it becomes, and the
tests that ought to notice, smallest first. Each is put into a scratch copy of the project, its tests are run until one
fails, and it is taken out again. A survivor is a missing test, or says in the data why it is equivalent.

    python scripts/mutants.py                  all of them
    python scripts/mutants.py --sample 5 --seed 3 five, sampled
    python scripts/mutants.py --match fwd_mma  those whose file, text or replacement contains it

What has been found out about this very tree is kept in a file of JSON lines, and not found out again.
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
DATA = Path(__file__).with_name("mutations.toml")
sys.path.insert(0, str(ROOT))

from sandbox.core import jsonl  # noqa: E402
from sandbox.toolchain import cache  # noqa: E402

_COUNTS = ("kernels_cu", "sandbox", "tests", "pyproject.toml")  # what a result depends on
# Mutated, these decide what is found in a cache of compiled objects: they get an empty one.
_KEYS = ("sandbox/cpu/build.py", "sandbox/cpu/compiler.py", "sandbox/toolchain/")


@dataclass(frozen=True)
class Mutation:
    """One fault. `tests`: selections of pytest, such as "tests/x/test_y.py -k z", the smallest first. `equivalent`: why
    nothing can notice it, if so."""

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
    """Every mutation of the file, in its order."""
    files: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text())
    rows = ((file, row) for file, its_rows in files.items() for row in its_rows)
    return [Mutation(file, **{**row, "tests": tuple(row.get("tests", ()))}) for file, row in rows]


def project_files() -> list[str]:
    """What belongs to the project: tracked, or new and not ignored."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = sorted(filter(None, listed.stdout.decode().split("\0")))
    return [name for name in names if (ROOT / name).is_file()]


def digest(names: Sequence[str]) -> str:
    """Of everything that decides what becomes of a mutation, the data apart."""
    found = hashlib.sha256()
    for name in names:
        if name.startswith(_COUNTS):
            found.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()[:16]


class Copy:
    """A scratch copy of the project with a cache of compiled objects of its own."""

    def __init__(self, folder: Path, names: Sequence[str]):
        self.root, self._cache, self._limit = folder / "project", folder / "cache", 600.0
        for name in names:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        """With the mutation in it. Raises ValueError unless its text is there once."""
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
        """Whether these tests pass; not if they hang, crash, or cannot be collected."""
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",  # two edits within a second, of one length, would share their bytecode
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
    """What is known of this tree: rows {"tree", "what", "outcome", "seconds"}, kept as they come."""

    def __init__(self, path: Path, tree: str):
        self._path, self._tree, self._lock = path, tree, Lock()
        self.known = {row["what"]: row for row in jsonl.read(path) if row.get("tree") == tree}

    def add(self, what: str, outcome: str, seconds: float) -> dict[str, Any]:
        """Keep a row, and return it."""
        row = {"tree": self._tree, "what": what, "outcome": outcome, "seconds": round(seconds, 1)}
        with self._lock:
            jsonl.append(self._path, row)
            self.known[what] = row
        return row


def examine(mutation: Mutation, copy: Copy, results: Results) -> dict[str, Any]:
    """A row on the mutation: "killed", "survived", or "void" where its tests fail without it."""
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
                return {"outcome": "void", "seconds": time.perf_counter() - start}  # not kept: to be tried again
            sound = results.add(selection, "passes", time.perf_counter() - begun)
        with copy.broken(mutation):
            if not copy.passes(selection, fresh, limit=60 + 10 * sound["seconds"]):
                return results.add(what, "killed", time.perf_counter() - start)
    return results.add(what, "survived", time.perf_counter() - start)


def run(
    mutations: Sequence[Mutation], results: Results, jobs: int, names: Sequence[str]
) -> Iterator[tuple[Mutation, str]]:
    """Each mutation with its outcome, as they come, from `jobs` scratch copies at a time."""
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
    """What the options ask for, without those that are said to be equivalent."""
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
    """0 when every mutation was noticed."""
    parser = argparse.ArgumentParser(description="Which small faults does no test notice?")
    parser.add_argument("--sample", type=int, metavar="N", help="draw N mutations at random")
    parser.add_argument("--seed", type=int, metavar="S", help="of the lot; by default another each time")
    parser.add_argument("--match", metavar="TEXT", help="those whose file, text or replacement contains it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument(
        "--results", type=Path, default=None, help="what is known; by default mutants.jsonl in the cache"
    )
    options = parser.parse_args()
    mutations, names = chosen(options), project_files()
    results = Results(options.results or cache.directory() / "mutants.jsonl", digest(names))
    outcomes = dict(run(mutations, results, max(1, options.jobs), names))
    killed = sum(outcome == "killed" for outcome in outcomes.values())
    print(f"{killed} of {len(outcomes)} noticed" + (f", {100 * killed / len(outcomes):.1f}%" if outcomes else ""))
    for outcome, meaning in (("survived", "no test notices"), ("void", "its tests fail without it")):
        for mutation in mutations:
            if outcomes[mutation] == outcome:
                print(f"{meaning}: {mutation}")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
