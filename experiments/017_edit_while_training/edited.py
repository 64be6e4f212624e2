"""A kernel that is being edited: every save is tested in another process."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import closing
from dataclasses import dataclass

from sandbox.core import registry
from sandbox.core.errors import SandboxError, without_options
from sandbox.core.problem import Problem
from sandbox.engine import pipeline
from sandbox.jobs.worker import At, Worker, WorkerDied
from sandbox.launch.dlpack import Device
from sandbox.verify.cases import Case
from sandbox.verify.check import verify
from sandbox.verify.isolated import fit
from sandbox.watch.history import read_texts
from sandbox.watch.session import saves

SECONDS = 60.0  # time limit of compiling and one run


@dataclass(frozen=True)
class Outcome:
    """The outcome of one save: whether the kernel is correct, a message, and the seconds since the save."""

    ok: bool
    message: str
    took: float


class Edited:
    """The outcomes of all saves of `kernel`'s `.cu`, its spec or a header."""

    def __init__(self, kernel: str, problem: Problem, device: Device):
        self.kernel, self._job = registry.get(kernel), (kernel, problem, device)
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._ready = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()
        self._ready.wait()  # later saves are not missed

    def poll(self) -> list[Outcome]:
        """The outcomes so far, without waiting."""
        return [self._outcomes.get() for _ in range(self._outcomes.qsize())]

    def wait(self) -> Outcome:
        """Waits for the next outcome."""
        return self._outcomes.get()

    def _follow(self) -> None:
        with closing(Worker(attempt)) as worker:
            saved, last = saves(registry.FOLDER), read_texts(self.kernel)
            self._ready.set()
            for _ in saved:
                began, texts = time.perf_counter(), read_texts(self.kernel)
                if texts is None or texts == last:
                    continue
                last = texts
                ok, message = self._test(worker)
                if read_texts(self.kernel) == texts:  # otherwise the next save follows
                    self._outcomes.put(Outcome(ok, message, time.perf_counter() - began))

    def _test(self, worker: Worker) -> tuple[bool, str]:
        try:
            return worker.do(self._job)[0]
        except WorkerDied as death:
            return False, f"{death} while {death.stage}"


def attempt(job: tuple[str, Problem, Device], at: At) -> tuple[tuple[bool, str], bool]:
    """In the worker: (correct, message) for the present kernel, and whether the process can be used again."""
    name, problem, device = job
    at("it compiled and ran", SECONDS)
    registry.forget()
    pipeline.forget()
    try:
        result = verify(registry.get(name), Case("model", problem), device)
        message = f"error {result.error:.2g}, bound {result.bound:.2g}" if result.ok else result.message
        found = bool(result.ok), without_options(message)
    except SandboxError as error:  # of its spec
        found = False, str(error)
    return found, fit(device)
