"""A kernel that somebody edits: every save is tried in a process of its own, and what came of it is news."""

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

SECONDS = 60.0  # that compiling and one run may take


@dataclass(frozen=True)
class News:
    """Of one save: whether the kernel is right, otherwise why not; `took`: seconds from the save to here."""

    ok: bool
    message: str
    took: float


class Edited:
    """News of every save of `kernel`'s `.cu`, its spec or a header, for as long as this process lives."""

    def __init__(self, kernel: str, problem: Problem, device: Device):
        self.kernel, self._job = registry.get(kernel), (kernel, problem, device)
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._looks = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()
        self._looks.wait()  # no later save is missed

    def heard(self) -> list[News]:
        """What there is, without waiting."""
        return [self._news.get() for _ in range(self._news.qsize())]

    def wait(self) -> News:
        """The next."""
        return self._news.get()

    def _follow(self) -> None:
        with closing(Worker(attempt)) as worker:
            saved, seen = saves(registry.FOLDER), read_texts(self.kernel)
            self._looks.set()
            for _ in saved:
                began, texts = time.perf_counter(), read_texts(self.kernel)
                if texts is None or texts == seen:
                    continue
                seen = texts
                ok, message = self._tried(worker)
                if read_texts(self.kernel) == texts:  # else the next save is waiting
                    self._news.put(News(ok, message, time.perf_counter() - began))

    def _tried(self, worker: Worker) -> tuple[bool, str]:
        try:
            return worker.do(self._job)[0]
        except WorkerDied as death:
            return False, f"{death} while {death.stage}"


def attempt(job: tuple[str, Problem, Device], at: At) -> tuple[tuple[bool, str], bool]:
    """In the worker: (right, why not) of the kernel as it is now, and whether the process is fit for another."""
    name, problem, device = job
    at("it compiled and ran", SECONDS)
    registry.forget()
    pipeline.forget()
    try:
        result = verify(registry.get(name), Case("the model's", problem), device)
        message = f"error {result.error:.2g}, bound {result.bound:.2g}" if result.ok else result.message
        found = bool(result.ok), without_options(message)
    except SandboxError as error:  # of its spec
        found = False, str(error)
    return found, fit(device)
