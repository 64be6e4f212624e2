"""Runs `verify` in a separate process, so that a kernel that crashes or corrupts its CUDA context affects only its own
result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..core import registry
from ..core.errors import DriverError, SandboxError
from ..core.kernel import Kernel
from ..core.tile import Tile
from ..jobs.worker import ReportStage, Worker, WorkerDied
from ..launch import driver
from ..launch.dlpack import HOST, Device
from .cases import Case
from .check import Result, verify
from .suite import suite_of

_MAX_CRASHES = 3  # per kernel; each costs the start of a process
NOT_TRIED = f"not tried: its process has ended {_MAX_CRASHES} times already"


class _Job(NamedTuple):
    kernel: str
    case: Case
    device: Device
    tile: Tile | None
    repeats: int
    report: bool
    explain: bool
    seconds: float | None


class IsolatedRunner:
    """A context manager. Its `verify` takes a kernel of the registry and returns the same result as `check.verify`. If
    the kernel ends the process, the result says so; after several such crashes the kernel is not run again.

    `on_output` is called with the output that kernels print. seconds: time limit of compiling and running a case.
    """

    def __init__(self, on_output: Callable[[str], object], seconds: float | None = None):
        self._on_output, self._seconds = on_output, seconds
        self._crashes: Counter[str] = Counter()

    def __enter__(self) -> IsolatedRunner:
        self._worker = Worker(_run_job)
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.close()

    def verify(
        self, kernel: Kernel, case: Case, device: Device, tile: Tile | None = None, *, repeats: int = 1,
        report: bool = False, explain: bool = False,
    ) -> Result:  # fmt: skip
        """One kernel on one case."""
        where = kernel.name, case.name, case.problem, device[0]
        if self._crashes[kernel.name] >= _MAX_CRASHES:
            return Result(*where, ok=None, message=NOT_TRIED)
        try:
            result, printed = self._worker.do(
                _Job(kernel.name, case, device, tile, repeats, report, explain, self._seconds)
            )
        except WorkerDied as death:
            printed = death.printed
            message = f"its process ended: {death}, while {death.stage}"
            self._crashes[kernel.name] += 1
            result = Result(*where, ok=False, message=message, sanitize=True)
        if printed:
            self._on_output(printed)
        return result


def _run_job(job: _Job, report_stage: ReportStage) -> tuple[Result, bool]:
    """Runs in the worker process."""
    kernel = registry.get(job.kernel)
    report_stage("computing the reference", None)
    with suppress(SandboxError):  # `verify` reports it
        suite_of(kernel).reference(job.case)
    report_stage("running it", job.seconds)
    how = {"repeats": job.repeats, "report": job.report, "explain": job.explain}
    result = verify(kernel, job.case, job.device, job.tile, **how)  # type: ignore[arg-type]
    return result, device_usable(job.device)


def device_usable(device: Device) -> bool:
    """Whether this process can run another kernel: after an illegal address or a trap a CUDA context is unusable."""
    try:
        if device != HOST:
            driver.device(device[1]).synchronize()
    except DriverError:
        return False
    except SandboxError:  # no GPU at all
        return True
    return True
