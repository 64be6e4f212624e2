"""A fleet on the machines of a Dask cluster: what `Fleet` is on one. Dask is imported on demand.

Dask says which of its workers takes a job; there a worker process of our own does it, as on one machine, so that a
kernel that crashes or hangs costs its job and not the Dask worker. A Dask worker has one such process at a time at
work, however many threads it has: a job has its GPU to itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import pickle
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

from ..core.errors import SandboxError, ToolchainMissing
from .pool import Job, perform
from .worker import Worker, WorkerDied

_CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 5.0  # between two looks whether anybody is still there
_IDLE_SECONDS = 60.0  # after which a process whose owner has not ended it, as one that was killed, is ended


class DistributedUnavailable(SandboxError, RuntimeError):
    """No scheduler answers, it has no workers, or they have not this package; the message says which."""


class DistributedPool:
    """The workers of the Dask scheduler at `address`, as "tcp://host:8786". A job may take `seconds`. Use it in a
    `with` statement. Raises ToolchainMissing without Dask, DistributedUnavailable."""

    def __init__(self, address: str, seconds: float):
        if importlib.util.find_spec("distributed") is None:
            raise ToolchainMissing('a cluster needs Dask: pip install "attention-sandbox[cluster]"')
        self.address, self._seconds, self._name = address, seconds, uuid.uuid4().hex

    def __enter__(self) -> DistributedPool:
        from distributed import Client
        from distributed.comm import resolve_address

        try:
            resolve_address(self.address)  # Client would hang over one that is none
            self._client = Client(self.address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise DistributedUnavailable(
                f"no Dask scheduler answers at {self.address!r} ({error}): start one with `dask scheduler`, which says "
                f"its address, and on each machine `dask cuda worker ADDRESS` of the package dask-cuda"
            ) from error
        if not self.workers():
            self._client.close()
            raise DistributedUnavailable(
                f"the Dask scheduler at {self.address} has no workers: start `dask cuda worker {self.address}` on each "
                "machine, or `dask worker` where there is no GPU"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(Exception):  # whoever cannot be told ends them by himself
            self._client.run(_end, self._name)
        self._client.close()

    def workers(self) -> list[str]:
        """The addresses of those that are there now."""
        return sorted(self._client.scheduler_info(n_workers=-1)["workers"])

    def map(self, function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
        """As `Fleet.map`. A job whose Dask worker goes away is done by another; a job that several went away with, as
        when a machine is out of memory, is WorkerDied. Raises DistributedUnavailable when nobody is left."""
        futures = {self._client.submit(_do, self._name, self._pickled(function, job), pure=False): job for job in jobs}
        try:
            for future in self._as_they_finish(list(futures)):
                yield futures[future], self._result(future)
        finally:
            self._client.cancel(list(futures))

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """function(*arguments) by every worker: {its address: the result, or WorkerDied}."""
        found = self._client.run(_do_aside, self._name, self._pickled(function, arguments), on_error="return")
        for result in found.values():
            if isinstance(result, Exception) and not isinstance(result, WorkerDied):
                raise self._unfit(result)
        return found

    def _pickled(self, function: Callable[..., Any], job: Any) -> bytes:
        """By us, so that Dask does not look into arguments for tasks of its own."""
        return pickle.dumps((function, job, self._seconds))

    def _as_they_finish(self, futures: list[Any]) -> Iterator[Any]:
        from distributed import wait

        deserted = False
        while futures:
            try:
                with suppress(TimeoutError), self._client.as_current():
                    wait(futures, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
            except CancelledError:
                raise DistributedUnavailable(f"the Dask scheduler at {self.address} has gone: start it again") from None
            done = [future for future in futures if future.done()]
            futures = [future for future in futures if not future.done()]
            yield from done
            if (alone := not done and not self.workers()) and deserted:  # twice: one that is restarted is soon back
                raise DistributedUnavailable(
                    f"the Dask scheduler at {self.address} has lost all workers: start some again"
                )
            deserted = alone

    def _result(self, future: Any) -> Any:
        from distributed import KilledWorker

        if future.status == "finished":
            return future.result()
        if future.status == "error":
            if isinstance(error := future.exception(), KilledWorker):  # it was tried by several
                return WorkerDied("the Dask workers that tried it went away", stage="working", hung=False)
            raise self._unfit(error)
        raise DistributedUnavailable(f"the Dask scheduler at {self.address} has lost a job ({future.status})")

    def _unfit(self, error: BaseException) -> DistributedUnavailable:
        return DistributedUnavailable(
            f"a worker of {self.address} cannot do jobs of this package ({type(error).__name__}: {error}): install it "
            "on every machine of the cluster, the scheduler's too, with the same Python and packages"
        )


# ---- in the Dask workers

_turn = threading.Lock()  # whose holder has the GPU
_processes: dict[str, tuple[Worker, threading.Timer]] = {}  # of each cluster's name: the process that does its jobs


def _do(name: str, pickled: bytes) -> Any:
    """The result of a job; WorkerDied, as a value, when it took its process along."""
    with _turn:
        if name in _processes:
            worker, idle = _processes.pop(name)
            idle.cancel()
        else:
            multiprocessing.current_process().daemon = False  # else it may have no children; ours end with it anyhow
            worker = Worker(perform)
        try:
            return worker.do(pickle.loads(pickled))[0]
        except WorkerDied as death:
            return death
        finally:
            idle = threading.Timer(_IDLE_SECONDS, _end, [name])
            idle.daemon = True
            idle.start()
            _processes[name] = worker, idle


async def _do_aside(name: str, pickled: bytes) -> Any:
    """The same in a thread: a Dask worker that is asked directly is not to stop answering meanwhile."""
    return await asyncio.to_thread(_do, name, pickled)


def _end(name: str) -> None:
    """Ends the process of that cluster, unless it is at work: then its next idle minute does."""
    if _turn.acquire(blocking=False):
        try:
            if name in _processes:
                worker, idle = _processes.pop(name)
                idle.cancel()
                worker.close()
        finally:
            _turn.release()
