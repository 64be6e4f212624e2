"""Is it right? Kernels against the float64 reference, by the error bound that the problem itself sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from . import driver, nvrtc, run, trial
from .cases import Case, Inputs, make_inputs, named_cases, sweep_cases
from .choose import choose_tile
from .dlpack import HOST, Device, view
from .error_map import ErrorMap, locate
from .errors import SandboxError, ToolchainMissing, UnsupportedProblem
from .nvrtc import Resources
from .reference import attention, errors, lse_bound, max_error, naive, output_bound
from .spec import Kernel, Problem, Tile
from .trial import Array


@dataclass(frozen=True)
class Result:
    """One kernel on one case. Errors are absolute; `error <= bound` and `lse_excess <= 0` make it ok.

    `lse_excess` is the worst |LSE - ref| minus its bound. `message` says why there is no number: the kernel does not
    take the problem (`ok` is None), or it failed (`ok` is False). `seconds` is GPU time, or emulation on the CPU.
    `resources`, `smem_dynamic` and `compile_seconds` are NVRTC's, for the GPU or, without one, for `arch`.
    """

    kernel: str
    case: str
    problem: str
    backend: str
    ok: bool | None
    tile: str = ""
    arch: str = ""
    compile_seconds: float | None = None
    cached: bool | None = None
    resources: Resources | None = None
    smem_dynamic: int | None = None
    error: float | None = None
    bound: float | None = None
    lse_error: float | None = None
    lse_excess: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    message: str = ""
    where: ErrorMap | None = None  # of the output that is wrong


@dataclass(frozen=True)
class Truth:
    """What O and LSE are, in float64, and how far each may be off."""

    out: Array
    lse: Array
    bound: float
    lse_bound: Array


def truth_of(problem: Problem, inputs: Inputs) -> Truth:
    """The reference on these inputs, and the bounds that it sets."""
    with np.errstate(all="ignore"):  # NaN and inf are among the inputs
        out, lse = attention(*inputs, causal=problem.causal, scale=problem.scale)
        plain = naive(*inputs, causal=problem.causal, scale=problem.scale, dtype=problem.dtype)
        return Truth(out, lse, output_bound(out, plain, problem.dtype), lse_bound(lse, problem.dtype))


def pick_device(backend: str | None) -> Device:
    """The device that `backend` names; by default a GPU if there is one. Raises GpuUnavailable for "cuda" without."""
    if backend == "cuda" or (backend is None and driver.available()):
        return "cuda", driver.device().ordinal
    return HOST


def run_cases(
    kernels: Iterable[Kernel], device: Device, tile: Tile | None = None, cases: Iterable[Case] | None = None
) -> Iterator[Result]:
    """`run`: every forward kernel on the named problems (or `cases`), timed, with what NVRTC reports."""
    for case in named_cases(small=device == HOST) if cases is None else cases:
        inputs = make_inputs(case)
        for kernel in kernels:
            yield verify(kernel, case, inputs, device, tile, repeats=1 if device == HOST else 20, report=True)


def sweep(kernels: Iterable[Kernel], device: Device, tile: Tile | None = None) -> Iterator[Result]:
    """`check`: every kernel over its sweep."""
    for kernel in kernels:
        for case in sweep_cases(kernel):
            yield verify(kernel, case, make_inputs(case), device, tile)


def verify(kernel: Kernel, case: Case, inputs: Inputs, device: Device, tile: Tile | None = None, *, repeats: int = 1,
           report: bool = False, truth: Truth | None = None) -> Result:  # fmt: skip
    """One kernel on one case, compared with the reference (`truth`, where somebody has it already). `report` adds
    NVRTC's figures, also without a GPU."""
    alignment = min(view(array).alignment for array in inputs)
    problem = dataclasses.replace(case.problem, alignment=alignment)
    head = (kernel.name, case.name, str(problem), device[0])
    arch = driver.device(device[1]).arch if device != HOST else None
    try:
        chosen = choose_tile(kernel, problem, arch, tile)
        done = trial.forward(kernel, chosen, problem, *inputs, device, repeats=repeats)
    except UnsupportedProblem as reason:
        return Result(*head, ok=None, message=str(reason))
    except SandboxError as failure:
        return Result(*head, ok=False, message=str(failure))
    compiled, note = done.prepared.compiled, ""
    if report and compiled is None:
        try:
            compiled, note = _static_report(kernel, chosen, case)
        except SandboxError as failure:  # the host's compiler takes it, NVRTC does not
            return Result(*head, ok=False, message=str(failure))
    truth = truth or truth_of(problem, inputs)
    with np.errstate(invalid="ignore"):
        error = max_error(done.out, truth.out)
        excess = float((errors(done.lse, truth.lse) - truth.lse_bound).max(initial=-1.0))
    right = bool(error <= truth.bound and excess <= 0)
    where = None if right else _where(kernel, problem, chosen, done, truth)
    trespass = "rows beside O were written" if done.trespassed else ""
    return Result(
        *head,
        ok=right and not done.trespassed,
        tile=str(chosen),
        arch=compiled.arch if compiled else "",
        compile_seconds=compiled.seconds if compiled else done.prepared.seconds,
        cached=compiled.cached if compiled else done.prepared.cached,
        resources=compiled.resources if compiled else None,
        smem_dynamic=kernel.smem_bytes(problem, chosen),
        error=error,
        bound=truth.bound,
        lse_error=max_error(done.lse, truth.lse),
        lse_excess=excess,
        seconds=done.seconds,
        tflops=problem.flops / done.seconds * 1e-12 if device != HOST and done.seconds else None,
        message="; ".join(filter(None, (trespass, note))),
        where=where,
    )


def _where(kernel: Kernel, problem: Problem, tile: Tile, done: trial.Trial, truth: Truth) -> ErrorMap | None:
    """Of O; of LSE where O is right."""
    in_out = locate("O", done.out, truth.out, truth.bound, kernel, problem, tile)
    return in_out or locate("LSE", done.lse, truth.lse, truth.lse_bound, kernel, problem, tile)


def _static_report(kernel: Kernel, tile: Tile, case: Case) -> tuple[nvrtc.Compiled | None, str]:
    """What NVRTC makes of the kernel where no GPU runs it; without NVRTC, a note instead."""
    try:
        p = case.problem
        return run.compile(kernel, D=p.D, dtype=p.dtype, causal=p.causal, arch=run.DEFAULT_ARCH, tile=tile), ""
    except (ToolchainMissing, UnsupportedProblem) as error:
        return None, str(error).splitlines()[0]
