"""Is it right? Kernels against the float64 reference, by the error bound that the problem itself sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from . import driver, nvrtc, run, trial
from .cases import Array, Case, Inputs, inputs_of, make_inputs, named_cases, sweep_cases
from .choose import choose_tile
from .dlpack import HOST, Device, view
from .errors import SandboxError, ToolchainMissing, UnsupportedProblem
from .nvrtc import Resources
from .reference import (
    GRADIENT_FACTOR,
    attention,
    attention_backward,
    backward_magnitudes,
    errors,
    gradient_bound,
    lse_bound,
    max_error,
    naive,
    naive_backward,
    output_bound,
)
from .spec import Kernel, Problem, Tile


@dataclass(frozen=True)
class Result:
    """One kernel on one case. Errors are absolute; `error <= bound` and `lse_excess <= 0` make it ok.

    Of dQ, dK and dV, `error` and `bound` are those of the one that fares worst, named in `tensor`. `lse_excess` is the
    worst |LSE - ref| minus its bound; without LSE, None. `message` says why there is no number: the kernel does not
    take the problem (`ok` is None), or it failed (`ok` is False). `seconds` is GPU time, or emulation on the CPU.
    `resources`, `smem_dynamic` and `compile_seconds` are NVRTC's, for the GPU or, without one, for `arch`; of several
    entries, the largest figures.
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
    tensor: str = ""


def pick_device(backend: str | None) -> Device:
    """The device that `backend` names; by default a GPU if there is one. Raises GpuUnavailable for "cuda" without."""
    if backend == "cuda" or (backend is None and driver.available()):
        return "cuda", driver.device().ordinal
    return HOST


def run_cases(
    kernels: Iterable[Kernel], device: Device, tile: Tile | None = None, cases: Iterable[Case] | None = None
) -> Iterator[Result]:
    """`run`: every kernel on the named problems (or `cases`), timed, with what NVRTC reports."""
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
           report: bool = False) -> Result:  # fmt: skip
    """One kernel on one case, compared with the reference. `report` adds NVRTC's figures, also without a GPU."""
    given = inputs_of(kernel, case, inputs)
    alignment = min(view(array).alignment for array in given.values() if array.ndim == 4)
    problem = dataclasses.replace(case.problem, alignment=alignment)
    head = (kernel.name, case.name, str(problem), device[0])
    arch = driver.device(device[1]).arch if device != HOST else None
    try:
        chosen = choose_tile(kernel, problem, arch, tile)
        done = trial.launch(kernel, chosen, problem, given, device, repeats=repeats)
    except UnsupportedProblem as reason:
        return Result(*head, ok=None, message=str(reason))
    except SandboxError as failure:
        return Result(*head, ok=False, message=str(failure))
    compiled, note = done.prepared.compiled, ""
    if report and not compiled:
        try:
            compiled, note = _static_report(kernel, chosen, case)
        except SandboxError as failure:  # the host's compiler takes it, NVRTC does not
            return Result(*head, ok=False, message=str(failure))
    with np.errstate(all="ignore"):  # NaN and inf are among the inputs
        verdict = _VERDICTS[kernel.computes](problem, given, done.outputs)
    trespass = f"rows beside {', '.join(done.trespassed)} were written" if done.trespassed else ""
    flops = problem.flops_of(kernel.computes)
    return Result(
        *head,
        ok=verdict.error <= verdict.bound and (verdict.lse_excess or 0) <= 0 and not done.trespassed,
        tile=str(chosen),
        arch=compiled[0].arch if compiled else "",
        compile_seconds=compiled[0].seconds if compiled else done.prepared.seconds,
        cached=compiled[0].cached if compiled else done.prepared.cached,
        resources=Resources.worst(c.resources for c in compiled) if compiled else None,
        smem_dynamic=max(entry.smem_bytes(problem, chosen) for entry in kernel.entries),
        **vars(verdict),
        seconds=done.seconds,
        tflops=flops / done.seconds * 1e-12 if device != HOST and flops and done.seconds else None,
        message="; ".join(filter(None, (trespass, note))),
    )


@dataclass(frozen=True)
class _Verdict:
    """The fields of Result that say how far a kernel's outputs are from the truth."""

    error: float
    bound: float
    lse_error: float | None = None
    lse_excess: float | None = None
    tensor: str = ""


def _forward(problem: Problem, given: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Verdict:
    q, k, v = (given[name] for name in ("Q", "K", "V"))
    ref, ref_lse = attention(q, k, v, causal=problem.causal, scale=problem.scale)
    plain = naive(q, k, v, causal=problem.causal, scale=problem.scale, dtype=problem.dtype)
    excess = float((errors(outputs["LSE"], ref_lse) - lse_bound(ref_lse, problem.dtype)).max(initial=-1.0))
    bound = output_bound(ref, plain, problem.dtype)
    return _Verdict(max_error(outputs["O"], ref), bound, max_error(outputs["LSE"], ref_lse), excess)


def _delta(problem: Problem, given: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Verdict:
    ref, plain = (np.einsum("bhsd,bhsd->bhs", *(given[n].astype(t) for n in ("dO", "O"))) for t in ("f8", "f4"))
    return _Verdict(max_error(outputs["delta"], ref), output_bound(ref, plain, "float32", GRADIENT_FACTOR))


def _backward(problem: Problem, given: Mapping[str, Array], outputs: Mapping[str, Array]) -> _Verdict:
    """The true gradients are those of the inputs alone: that O and LSE come rounded is part of the error."""
    dO, q, k, v, out, lse = (given[name] for name in ("dO", "Q", "K", "V", "O", "LSE"))
    refs = attention_backward(dO, q, k, v, causal=problem.causal, scale=problem.scale)
    plains = naive_backward(dO, q, k, v, causal=problem.causal, scale=problem.scale, dtype=problem.dtype)
    sizes = backward_magnitudes(dO, q, k, v, out, lse, causal=problem.causal, scale=problem.scale)
    verdicts = [
        _Verdict(max_error(outputs[name], ref), gradient_bound(ref, plain, size, problem.dtype), tensor=name)
        for name, ref, plain, size in zip(("dQ", "dK", "dV"), refs, plains, sizes, strict=True)
    ]
    return max(verdicts, key=lambda v: (not v.error <= v.bound, v.error / v.bound))  # a wrong one before all


_VERDICTS = {"forward": _forward, "delta": _delta, "backward": _backward}


def _static_report(kernel: Kernel, tile: Tile, case: Case) -> tuple[tuple[nvrtc.Compiled, ...], str]:
    """What NVRTC makes of the kernel where no GPU runs it; without NVRTC, a note instead."""
    try:
        p = case.problem
        return run.compile_entries(kernel, p.D, p.dtype, p.causal, run.DEFAULT_ARCH, tile), ""
    except (ToolchainMissing, UnsupportedProblem) as error:
        return (), str(error).splitlines()[0]
