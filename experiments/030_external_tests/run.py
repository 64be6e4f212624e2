"""The test suites of FlashAttention and of PyTorch's attention on our kernels. README.md says where to get the files.

python experiments/030_external_tests/run.py flash --tests PATH/test_flash_attn.py --sample 3048 --rows FILE
python experiments/030_external_tests/run.py torch --tests PATH/test_transformers.py --rows FILE
python experiments/030_external_tests/run.py table --rows FILE        counts by test function, as JSON lines
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from suites import SUITES

from sandbox.core import jsonl

CONTEXT = multiprocessing.get_context("spawn")  # a process that has used CUDA cannot fork
START = 300.0  # seconds until a worker has imported the tests
FAILED = ("failed", "crashed", "timeout", "out of memory")


# ---- a worker: one process, which runs one test after another


def work(connection: Any, suite: str, options: dict[str, Any], environment: dict[str, str], log: str) -> None:
    """Sends "ready"; then answers (sample, seed) with the chunks of tests, and a test with its result."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tests = SUITES[suite](**options)
    connection.send("ready")
    while (what := connection.recv()) is not None:
        os.ftruncate(output, 0)
        if "sample" in what:
            connection.send(tests.chunks(**what))
            continue
        start = time.perf_counter()
        outcome, text, more = tests.run(**what)
        broken = tests.broken()
        connection.send((outcome, round(time.perf_counter() - start, 2), text, more, broken))
        if broken:
            return


@dataclass
class Worker:
    """`chunk`: tests that it runs next; `test`: the one that it runs."""

    arguments: tuple[str, dict[str, Any]]
    folder: str
    own_environment: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    process: Any = None
    ready: bool = False
    connection: Any = None
    chunk: deque[dict[str, Any]] = field(default_factory=deque)
    test: dict[str, Any] | None = None
    since: float = 0.0

    def start(self, environment: dict[str, str]) -> None:
        self.end()
        self.ready, self.environment, self.log = False, environment, Path(tempfile.mkstemp(dir=self.folder)[1])
        self.connection, theirs = CONTEXT.Pipe()
        arguments = theirs, *self.arguments, self.own_environment | environment, str(self.log)
        self.process = CONTEXT.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.log.unlink()
            self.process = None

    def give(self, test: dict[str, Any]) -> None:
        environment = test.get("environment", {})
        if self.process is None or environment != self.environment:
            self.start(environment)
        self.test, self.since = test, time.monotonic()
        self.connection.send({key: value for key, value in test.items() if key != "environment"})

    def answer(self, seconds: float) -> tuple[Any, ...] | None:
        """The answer to the test that runs, or one about its end without answer; None: it still runs."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                found = self.connection.recv()
                if found == "ready":
                    self.ready, self.since = True, time.monotonic()
                    return None
                if found[-1]:  # CUDA reports an error at every call from now on
                    self.end()
                return found[:-1]
        passed = round(time.monotonic() - self.since, 2)
        alive = self.process.is_alive()
        seconds = seconds if self.ready else START
        if alive and passed < seconds:
            return None
        outcome = "timeout" if alive else "crashed"
        reason = f"after {seconds} s" if alive else f"exit status {self.process.exitcode}"
        text = f"{outcome}: {reason}\n{self.log.read_text(errors='replace')[-1500:]}"
        self.end()
        return outcome, passed, text, {}


# ---- all workers


def identity(test: dict[str, Any]) -> str:
    return f"{test['test']} {json.dumps(test['parameters'], sort_keys=True)}"


def chunks_of(args: argparse.Namespace, worker: Worker, done: set[str]) -> deque[list[dict[str, Any]]]:
    """The chunks of the sample, in random order, without the tests that are `done`."""
    worker.start({})
    worker.connection.send({"sample": args.sample, "seed": args.seed})
    try:
        worker.connection.recv()
        worker.ready, chunks = True, worker.connection.recv()
    except (EOFError, ConnectionResetError):
        raise SystemExit(f"the tests cannot be imported:\n{worker.log.read_text()[-3000:]}") from None
    left = ([test for test in chunk if identity(test) not in done] for chunk in chunks)
    return deque(chunk for chunk in left if chunk)


def results(
    workers: list[Worker], queue: deque[list[dict[str, Any]]], deadline: float, most: float
) -> Iterator[tuple[dict[str, Any], Any]]:
    """(test, answer) of each test. A chunk is run by one worker. Tests that ran out of GPU memory run again at the end,
    one at a time."""
    again: deque[dict[str, Any]] = deque()
    alone = False
    while time.monotonic() < deadline:
        for worker in workers[:1] if alone else workers:
            if worker.test is None and not worker.chunk and queue:
                worker.chunk.extend(queue.popleft())
            if worker.test is None and (worker.chunk or (alone and again)):
                worker.give(worker.chunk.popleft() if worker.chunk else again.popleft())
        busy = [worker for worker in workers if worker.test is not None]
        if not busy and not again:
            return
        if not busy:
            alone = True
            for worker in workers[1:]:
                worker.end()
            continue
        wait([worker.connection for worker in busy], timeout=0.2)
        for worker in busy:
            if (answer := worker.answer(most)) is None:
                continue
            test, worker.test = worker.test, None
            if answer[0] == "out of memory" and not alone:
                again.append(test)  # type: ignore[arg-type]
            else:
                yield test, answer  # type: ignore[misc]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Appends a row for each test, and returns those that have failed."""
    deadline = time.monotonic() + args.seconds
    rows = jsonl.read(args.rows)
    done = {identity(row) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        options = {"path": str(args.tests.resolve()), "device": args.device}
        gpus = [{"CUDA_VISIBLE_DEVICES": str(i)} for i in range(args.gpus)] if args.gpus > 1 else [{}]
        workers = [Worker((args.suite, options), folder, gpus[i % len(gpus)]) for i in range(args.workers)]
        queue = chunks_of(args, workers[0], done)
        left = sum(map(len, queue))
        print(f"{left} tests in {len(queue)} chunks, {len(done)} done before", flush=True)
        try:
            for test, (outcome, seconds, text, more) in results(workers, queue, deadline, args.limit):
                row = {"suite": args.suite, "test": test["test"], "parameters": test["parameters"]}
                row |= {"outcome": outcome, "seconds": seconds, "text": text, **more}
                jsonl.append(args.rows, row)
                rows.append(row)
                left -= 1
                if outcome in FAILED:
                    print(f"{outcome}: {identity(test)}: {reason(row)}", flush=True)
        finally:
            for worker in workers:
                worker.end()
    failures = [row for row in rows if row["outcome"] in FAILED]
    for row in failures[: args.failures]:
        print(f"\n---- {row['outcome']}: {identity(row)}\n{row['text']}")
    print(f"\n{summary(rows)}; {left} not run")
    return failures


# ---- rows


def reason(row: dict[str, Any]) -> str:
    """The last line that names an exception, without numbers."""
    lines = [line for line in row["text"].splitlines() if re.match(r"[\w.]+(Error|Exception|Problem|\w+)?:", line)]
    return re.sub(r"\d[\d.e+-]*", "#", (lines or row["text"].splitlines() or [""])[-1])[:160]


def summary(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows)
    text = f"{len(rows)} tests: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())
    for (outcome, why), n in Counter((r["outcome"], reason(r)) for r in rows if r["text"]).most_common(40):
        text += f"\n{n:6} {outcome}: {why}"
    return f"{text}\n{sum(row['seconds'] for row in rows):.0f} s in tests"


def table(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One small row for each test function: its counts by outcome."""
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["suite"], row["parameters"].get("function", row["test"])][row["outcome"]] += 1
    for (suite, test), outcomes in sorted(counts.items()):
        yield {"suite": suite, "test": test, **dict(outcomes.most_common())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="suite", required=True)
    for name in (*SUITES, "table"):
        command = commands.add_parser(name)
        command.add_argument("--rows", type=Path, default=Path(f"{name}.jsonl"), help="results; a second run goes on")
        if name == "table":
            continue
        command.add_argument("--tests", type=Path, required=True, help="the file of the tests")
        command.add_argument("--workers", type=int, default=os.cpu_count() or 1)
        command.add_argument("--gpus", type=int, default=1, help="that the workers share")
        command.add_argument("--seconds", type=float, default=570.0, help="of the run")
        command.add_argument("--limit", type=float, default=150.0, help="seconds of one test")
        command.add_argument("--sample", type=int, help="the number of tests, by default all")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        command.add_argument("--failures", type=int, default=40, help="the number of failures to print")
    args = parser.parse_args()
    if args.suite == "table":
        for row in table(jsonl.read(args.rows)):
            print(json.dumps(row))
        return 0
    return 1 if run(args) else 0


if __name__ == "__main__":
    sys.exit(main())
