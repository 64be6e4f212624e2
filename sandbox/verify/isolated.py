"""Verdicts from a process of its own: a kernel that crashes or spoils its GPU's context costs its own result alone."""

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
from .references import reference_of

_ENOUGH = 3  # crashes, each of which costs the start of a process
NOT_TRIED = f"not tried: its process has ended {_ENOUGH} times already"


class _Question(NamedTuple):
    kernel: str
    case: Case
    device: Device
    tile: Tile | None
    repeats: int
    report: bool


class IsolatedRunner:
    """Use it in a `with` statement; its `verify` takes a registry's kernel and answers as `check.verify` does, but that
    a kernel which ends the process has a result that says so, and is not tried for ever.

    `on_output` is told what kernels print.
    """

    def __init__(self, on_output: Callable[[str], object]):
        self._on_output = on_output
        self._crashes: Counter[str] = Counter()

    def __enter__(self) -> IsolatedRunner:
        self._worker = Worker(_answer)
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.close()

    def verify(
        self, kernel: Kernel, case: Case, device: Device, tile: Tile | None = None, *, repeats: int = 1,
        report: bool = False,
    ) -> Result:  # fmt: skip
        """One kernel on one case, for as long as it takes."""
        where = kernel.name, case.name, case.problem, device[0]
        if self._crashes[kernel.name] >= _ENOUGH:
            return Result(*where, ok=None, message=NOT_TRIED)
        try:
            result, printed = self._worker.do(_Question(kernel.name, case, device, tile, repeats, report))
        except WorkerDied as death:
            printed = death.printed
            message = f"its process ended: {death}, while {death.stage}"
            self._crashes[kernel.name] += 1
            result = Result(*where, ok=False, message=message, sanitize=True)
        if printed:
            self._on_output(printed)
        return result


def _answer(asked: _Question, at: ReportStage) -> tuple[Result, bool]:
    """In the worker."""
    kernel = registry.get(asked.kernel)
    at("computing the reference", None)
    with suppress(SandboxError):  # which `verify` will say
        reference_of(kernel.computes, asked.case)
    at("running it", None)
    result = verify(kernel, asked.case, asked.device, asked.tile, repeats=asked.repeats, report=asked.report)
    return result, device_usable(asked.device)


def device_usable(device: Device) -> bool:
    """Whether this process can run another kernel: an illegal address or a trap stays with a CUDA context for ever."""
    try:
        if device != HOST:
            driver.device(device[1]).synchronize()
    except DriverError:
        return False
    except SandboxError:  # no GPU at all
        return True
    return True
