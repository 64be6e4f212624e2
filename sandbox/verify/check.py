"""Compares kernels with the float64 reference, by an error bound that depends on the problem."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..core.errors import DriverError, NoFastCompilation, SandboxError, ToolchainMissing, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import pipeline
from ..engine.choose import choose_tile
from ..launch import driver
from ..launch.dlpack import HOST, Device
from ..reference import errors, max_error
from ..toolchain import arch as architectures
from ..toolchain import nvrtc
from ..toolchain.nvrtc import Resources
from . import diagnosis, trial
from .cases import Case
from .error_map import ErrorMap, index_text
from .references import Reference, ReferenceOutput
from .suite import Suite, suite_of
from .trial import Array


@dataclass(frozen=True)
class Result:
    """One kernel on one case. Errors are absolute; the result is ok if `error <= bound` and `lse_excess <= 0`.

    `error` and `bound` are those of `tensor`, the output with the largest ratio. LSE is separate: `lse_excess` is the
    maximum of |LSE - ref| minus its bound, None if the kernel writes no LSE. If `error` is None, `message` gives the
    reason: the kernel does not support the problem (`ok` is None), or it failed (`ok` is False). `seconds` is GPU time,
    or the time of the emulation on the CPU backend. `resources`, `smem` (bytes per block, dynamic and static) and
    `compile_seconds` are those of NVRTC's code for `arch`: the GPU's, or DEFAULT_ARCH on the CPU backend; for several
    entries they are the maxima.
    """

    kernel: str
    case: str
    problem: Problem
    backend: str
    ok: bool | None
    tile: Tile | None = None
    arch: str = ""
    compile_seconds: float | None = None
    cached: bool | None = None
    resources: Resources | None = None
    smem: int | None = None
    error: float | None = None
    bound: float | None = None
    lse_error: float | None = None
    lse_excess: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    message: str = ""
    tensor: str = ""
    where: ErrorMap | None = None  # of a wrong output
    cause: str = ""  # a sentence; "" if none is known, or none was asked for
    sanitize: bool = False  # whether `sanitize` may find the cause


def pick_device(backend: str | None) -> Device:
    """The device of `backend`; by default a GPU if there is one. Raises GpuUnavailable for "cuda" without a GPU."""
    if backend == "cuda" or (backend is None and driver.available()):
        return "cuda", driver.device().ordinal
    return HOST


class Verifier(Protocol):
    """The signature of `verify`, which may also run in another process (`IsolatedRunner.verify`)."""

    def __call__(
        self, kernel: Kernel, case: Case, device: Device, tile: Tile | None = None, *, repeats: int = 1,
        report: bool = False, explain: bool = False,
    ) -> Result: ...  # fmt: skip


def run_cases(
    runs: Iterable[tuple[Kernel, Case]], device: Device, tile: Tile | None, verifier: Verifier
) -> Iterator[Result]:
    """`run`: each kernel on its case, timed, with NVRTC's resource report. The first wrong result of a kernel has a
    cause."""
    wrong: set[str] = set()
    for kernel, case in runs:
        repeats, explain = 1 if device == HOST else 20, kernel.name not in wrong
        result = verifier(kernel, case, device, tile, repeats=repeats, report=True, explain=explain)
        wrong |= {kernel.name} if result.where else set()
        yield result


def named_runs(kernels: Sequence[Kernel], small: bool) -> list[tuple[Kernel, Case]]:
    """The runs of `run` without a problem, case by case: kernels with the same cases are adjacent."""
    cases = {kernel: suite_of(kernel).named_cases(kernel, small) for kernel in kernels}
    every = dict.fromkeys(itertools.chain.from_iterable(cases.values()))
    return [(kernel, case) for case in every for kernel in kernels if case in cases[kernel]]


def sweep(
    kernels: Iterable[Kernel], device: Device, tile: Tile | None = None, verifier: Verifier | None = None
) -> Iterator[Result]:
    """`check`: every kernel on all its sweep cases. The first wrong result of a kernel has a cause."""
    for kernel in kernels:
        explain = True
        for case in suite_of(kernel).sweep_cases(kernel):
            result = (verifier or verify)(kernel, case, device, tile, explain=explain)
            explain = explain and not result.where
            yield result


def verify(
    kernel: Kernel, case: Case, device: Device, tile: Tile | None = None, *, repeats: int = 1, report: bool = False,
    explain: bool = False, fast: bool = False,
) -> Result:  # fmt: skip
    """One kernel on one case, compared with the reference. `report` adds NVRTC's resources, also without a GPU.
    `explain`: runs further problems to find the cause of a wrong result. `fast`: with the fast compilation on a GPU,
    and on either backend without times and resources; raises NoFastCompilation."""
    suite = suite_of(kernel)
    try:
        expected = suite.reference(case)
    except SandboxError as failure:  # invalid expressions of a Score
        return Result(kernel.name, case.name, case.problem, device[0], ok=False, message=str(failure))
    problem = suite.laid_out(case.problem, expected.inputs)
    head = (kernel.name, case.name, problem, device[0])
    try:
        chosen = pipeline.tile_on(device, kernel, problem, tile)
        with ThreadPoolExecutor(1) as pool:  # NVRTC compiles while the CPU backend does
            static = pool.submit(_static_report, kernel, chosen, case) if report and device == HOST else None
            done = trial.launch(kernel, chosen, problem, expected.inputs, device, repeats=repeats, fast=fast)
    except UnsupportedProblem as reason:
        return Result(*head, ok=None, message=str(reason))
    except NoFastCompilation:
        raise
    except SandboxError as failure:
        return Result(*head, ok=False, message=str(failure), sanitize=isinstance(failure, DriverError))
    compiled, note = done.prepared.compiled, ""
    if static:
        try:
            compiled, note = static.result()
        except SandboxError as failure:  # the host compiler accepts the source, NVRTC does not
            return Result(*head, ok=False, message=str(failure))
    verdict = _verdict(expected.outputs, done.outputs)
    right = verdict.error <= verdict.bound and (verdict.lse_excess or 0) <= 0
    stray = f"memory beside {', '.join(done.stray_writes)} was written" if done.stray_writes else ""
    flops = suite.flops(problem, expected.inputs) if device != HOST else 0
    where = None if right else _where(suite, verdict.tensor, expected, done)
    result = Result(
        *head,
        ok=right and not done.stray_writes,
        tile=chosen,
        **vars(verdict),
        message="; ".join(filter(None, (stray, note))),
        where=where,
        cause=_cause(kernel, case, device, chosen, where, fast) if where and explain else "",
        sanitize=not right or bool(done.stray_writes),
    )
    return result if fast else dataclasses.replace(result, **_measured(done, compiled, flops))


def _measured(done: trial.Trial, compiled: Sequence[nvrtc.Compiled], flops: float) -> dict[str, Any]:
    """The fields of Result with times and resources."""
    run = done.prepared
    dynamic = [entry.smem_bytes(run.problem, run.tile) for entry in run.kernel.entries]
    tflops = flops / done.seconds * 1e-12 if flops and done.seconds else None
    compilation = compiled[0] if compiled else done.prepared
    return {
        "arch": compiled[0].arch if compiled else "",
        "compile_seconds": compilation.seconds,
        "cached": compilation.cached,
        "resources": Resources.worst(c.resources for c in compiled) if compiled else None,
        "smem": max(map(int.__add__, dynamic, (c.resources.smem_static for c in compiled)), default=None),
        "seconds": done.seconds,
        "tflops": tflops,
    }


@dataclass(frozen=True)
class _Verdict:
    """The fields of Result with the errors of a kernel's outputs."""

    tensor: str
    error: float
    bound: float
    lse_error: float | None = None
    lse_excess: float | None = None


def _verdict(answers: Mapping[str, ReferenceOutput], outputs: Mapping[str, Array]) -> _Verdict:
    with np.errstate(invalid="ignore"):
        found = [
            _Verdict(name, max_error(outputs[name], answer.values), answer.bound)
            for name, answer in answers.items()
            if isinstance(answer.bound, float) and name in outputs  # not LSE, which has one bound per element
        ]
        # Wrong outputs first. The bound of integers is 0.
        worst = max(found, key=lambda v: (not v.error <= v.bound, v.error / v.bound if v.bound else v.error))
        if "LSE" not in answers:
            return worst
        lse, ref = outputs["LSE"], answers["LSE"]
        excess = float((errors(lse, ref.values) - ref.bound).max(initial=-1.0))
        return dataclasses.replace(worst, lse_error=max_error(lse, ref.values), lse_excess=excess)


def _where(suite: Suite, worst: str, expected: Reference, done: trial.Trial) -> ErrorMap | None:
    """The error map of the output `worst`; if that output is correct, of the first wrong one."""
    about, answers = (
        (done.prepared.kernel, done.prepared.problem, done.prepared.tile, expected.inputs),
        expected.outputs,
    )
    names = (name for name in dict.fromkeys((worst, *answers)) if name in done.outputs)
    maps = (suite.locate(name, done.outputs[name], answers[name], *about) for name in names)
    return next(filter(None, maps), None)


def _cause(kernel: Kernel, case: Case, device: Device, tile: Tile, where: ErrorMap, fast: bool) -> str:
    """The cause of a wrong result as a sentence; "" if none is known."""
    said = str(diagnosis.diagnose(kernel, case, device, tile, fast=fast))
    return f"{where.name} on {case.described}, first wrong at {index_text(where.first)}: {said}." if said else ""


def _static_report(kernel: Kernel, tile: Tile, case: Case) -> tuple[tuple[nvrtc.Compiled, ...], str]:
    """NVRTC's result for DEFAULT_ARCH, for runs without a GPU; a note instead without NVRTC, or for a problem that
    DEFAULT_ARCH does not support."""
    target = pipeline.DEFAULT_ARCH
    try:
        chosen = choose_tile(kernel, case.problem, architectures.parse(target), tile)
        return pipeline.compile_problem(kernel, case.problem, chosen, target), ""
    except UnsupportedProblem as error:
        reason = str(error).splitlines()[0].removeprefix(f"{kernel.name}: ")
        return (), f"regs and smem are not shown: for {target}, {reason}"
    except ToolchainMissing as error:
        return (), str(error).splitlines()[0]
