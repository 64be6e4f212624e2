"""A worker pool on the machines of a Dask cluster: the counterpart of `WorkerPool`. Dask is imported on demand.

Dask assigns a job to one of its workers. There a separate process runs it, so that a kernel that crashes or hangs ends
only this process and not the Dask worker. Each Dask worker runs one job at a time, whatever its number of threads: a
job has the GPU for itself.
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
_POLL_SECONDS = 5.0  # between two checks whether any workers are left
_IDLE_SECONDS = 60.0  # an idle process ends after this time, in case its owner was killed


class DistributedUnavailable(SandboxError, RuntimeError):
    """There is no scheduler, it has no workers, or they lack this package; the message says which."""


class DistributedPool:
    """The workers of the Dask scheduler at `address`, such as "tcp://host:8786". Time limit of a job: `seconds`. A
    context manager. Raises ToolchainMissing without Dask, DistributedUnavailable."""

    def __init__(self, address: str, seconds: float):
        if importlib.util.find_spec("distributed") is None:
            raise ToolchainMissing('a cluster needs Dask: pip install "attention-sandbox[cluster]"')
        self.address, self._seconds, self._name = address, seconds, uuid.uuid4().hex

    def __enter__(self) -> DistributedPool:
        from distributed import Client
        from distributed.comm import resolve_address

        try:
            resolve_address(self.address)  # Client would hang with an invalid address
            self._client = Client(self.address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise DistributedUnavailable(
                f"no Dask scheduler answers at {self.address!r} ({error}): start one with `dask scheduler`, which "
                f"prints its address, and on each machine `dask cuda worker ADDRESS` of the package dask-cuda"
            ) from error
        if not self.workers():
            self._client.close()
            raise DistributedUnavailable(
                f"the Dask scheduler at {self.address} has no workers: start `dask cuda worker {self.address}` on each "
                "machine, or `dask worker` where there is no GPU"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(Exception):  # workers that cannot be reached end their processes after _IDLE_SECONDS
            self._client.run(_end, self._name)
        self._client.close()

    def workers(self) -> list[str]:
        """The addresses of the current workers."""
        return sorted(self._client.scheduler_info(n_workers=-1)["workers"])

    def map(self, function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
        """As `WorkerPool.map`. If a Dask worker disappears, another one runs its job; if several disappear with the
        same job, its result is WorkerDied. Raises DistributedUnavailable if no workers are left."""
        futures = {
            self._client.submit(_run_job, self._name, self._pickled(function, job), pure=False): job for job in jobs
        }
        try:
            for future in self._as_they_finish(list(futures)):
                yield futures[future], self._result(future)
        finally:
            self._client.cancel(list(futures))

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """function(*arguments) on every worker: {worker address: the result, or WorkerDied}."""
        found = self._client.run(_run_job_in_thread, self._name, self._pickled(function, arguments), on_error="return")
        for result in found.values():
            if isinstance(result, Exception) and not isinstance(result, WorkerDied):
                raise self._unfit(result)
        return found

    def _pickled(self, function: Callable[..., Any], job: Any) -> bytes:
        """The job as bytes, so that Dask does not search the arguments for tasks."""
        return pickle.dumps((function, job, self._seconds))

    def _as_they_finish(self, futures: list[Any]) -> Iterator[Any]:
        from distributed import wait

        no_workers = False
        while futures:
            try:
                with suppress(TimeoutError), self._client.as_current():
                    wait(futures, timeout=_POLL_SECONDS, return_when="FIRST_COMPLETED")
            except CancelledError:
                raise DistributedUnavailable(
                    f"the Dask scheduler at {self.address} has stopped: start it again"
                ) from None
            done = [future for future in futures if future.done()]
            futures = [future for future in futures if not future.done()]
            yield from done
            # Raises at the second check without workers: a restarted worker is back by then.
            if (none_now := not done and not self.workers()) and no_workers:
                raise DistributedUnavailable(
                    f"the Dask scheduler at {self.address} has lost all workers: start new ones"
                )
            no_workers = none_now

    def _result(self, future: Any) -> Any:
        from distributed import KilledWorker

        if future.status == "finished":
            return future.result()
        if future.status == "error":
            if isinstance(error := future.exception(), KilledWorker):  # several workers ran it
                return WorkerDied("the Dask workers that ran it disappeared", stage="working", hung=False)
            raise self._unfit(error)
        raise DistributedUnavailable(f"the Dask scheduler at {self.address} has lost a job ({future.status})")

    def _unfit(self, error: BaseException) -> DistributedUnavailable:
        return DistributedUnavailable(
            f"a worker of {self.address} cannot run jobs of this package ({type(error).__name__}: {error}): install it "
            "on every machine of the cluster, including the scheduler's, with the same Python and packages"
        )


# ---- in the Dask workers

_gpu_lock = threading.Lock()
_processes: dict[str, tuple[Worker, threading.Timer]] = {}  # {name of the pool: process that runs its jobs}


def _run_job(name: str, pickled: bytes) -> Any:
    """The result of a job; WorkerDied, as a value, if the job ended its process."""
    with _gpu_lock:
        if name in _processes:
            worker, idle = _processes.pop(name)
            idle.cancel()
        else:
            multiprocessing.current_process().daemon = False  # daemons may not start processes; ours ends with it
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


async def _run_job_in_thread(name: str, pickled: bytes) -> Any:
    """`_run_job` in a thread, so that the Dask worker's event loop is not blocked."""
    return await asyncio.to_thread(_run_job, name, pickled)


def _end(name: str) -> None:
    """Ends the process of that pool, unless it is running a job: then its idle timer ends it later."""
    if _gpu_lock.acquire(blocking=False):
        try:
            if name in _processes:
                worker, idle = _processes.pop(name)
                idle.cancel()
                worker.close()
        finally:
            _gpu_lock.release()
