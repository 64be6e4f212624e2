"""One version of a kernel, examined: does it compile, is it safe, is it right, how fast is it, what does it cost.

Called in a worker, since the kernel may hang or crash; what it returns can be pickled.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ..core import registry
from ..core.errors import (
    CompileError,
    SandboxError,
    SpecError,
    ToolchainMissing,
    UnsupportedProblem,
    without_options,
)
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..cpu.instrumented import UNFINISHED
from ..engine import pipeline
from ..engine.choose import why_tile_unsupported
from ..jobs.worker import ReportStage
from ..launch import driver
from ..launch.dlpack import HOST, Device
from ..toolchain import arch as architectures
from ..toolchain import disassembly, nvrtc
from ..toolchain.nvrtc import Compiled, Resources
from ..verify import check, sanitize
from ..verify.cases import Case
from ..verify.check import Result
from ..verify.findings import Finding
from ..verify.isolated import device_usable
from ..verify.references import reference_of
from ..verify.sanitize import Inspection
from .figures import Cost, VersionResult
from .job import Job, quick_cases, tile_case

T = TypeVar("T")
Opcodes = dict[str, int]
COMPILE_SECONDS = 300.0  # what compiling may take; a run has the job's own limit
REPEATS = 20  # launches that are timed on a GPU
_PATIENCE = 60.0  # with a large tile under a sanitizer; what hangs has been found by then
_QUICK_TOOLS = ("address", "thread")
_SLOW = ("stack", "spill_stores", "spill_loads")  # of Resources: what is in local memory
_SMALL_TOOLS = (*_QUICK_TOOLS, "uninitialised")  # unoptimised code, too slow for large tiles


def prepare(job: Job) -> None:
    """What a worker does before it is asked, so that the answer is quick: imports, NVRTC, a CUDA context, the truth."""
    with suppress(Exception):  # whatever is wrong, the job will say so
        nvrtc.version()
    with suppress(Exception):
        if job.device != HOST:
            driver.device(job.device[1]).synchronize()
        kernel = registry.get(job.kernel)
        for case in _cases(kernel, job):
            reference_of(kernel.computes, case)


def _cases(kernel: Kernel, job: Job) -> list[Case]:
    return [Case("--shape", job.problem)] if job.problem else quick_cases(kernel, job.device)


# nvdisasm takes half a second, whatever it reads: longer than everything after the compiler, and no verdict needs it.
_disassembler = ThreadPoolExecutor(1)
_counts: Future[Opcodes] | None = None  # of the version examined last


def examine(job: Job | None, at: ReportStage) -> tuple[VersionResult | Opcodes, bool]:
    """(the examination, whether this process is fit for another job: after some errors a CUDA context is not). Of None,
    the instructions of the version before, once they are counted."""
    if job is None:
        at("counting instructions", COMPILE_SECONDS)
        return _counted(), True
    started = time.perf_counter()
    try:
        found = _examine(job, at)
    except CompileError as error:
        found = VersionResult("compile", without_options(str(error)))
    except SpecError as error:
        found = VersionResult("spec", str(error))
    except (UnsupportedProblem, ToolchainMissing) as error:
        found = VersionResult("refused", str(error))
    except SandboxError as error:
        found = VersionResult("run", str(error))
    except Exception as error:  # a spec may do anything
        found = VersionResult("spec", f"{type(error).__name__}: {error}")
    return replace(found, seconds=time.perf_counter() - started), device_usable(job.device)


def _examine(job: Job, at: ReportStage) -> VersionResult:
    at("reading the spec", job.seconds)
    registry.forget()
    pipeline.forget()
    kernel = registry.get(job.kernel)
    cases = _cases(kernel, job)
    setting = f"{_device_name(job.device)}: {cases[0].problem}"
    new, untaken = _new_tiles(kernel, job)
    trials = [(case, job.tile) for case in cases] + [(tile_case(kernel, tile), tile) for tile in new]
    at("compiling", COMPILE_SECONDS)
    with ThreadPoolExecutor() as pool:  # compilers run side by side
        started = time.perf_counter()
        cost, notes = _compile(kernel, trials, job, pool)
        notes += untaken
        compiling = time.perf_counter() - started
        findings: tuple[Finding, ...] = ()
        shipped: _Looking = []
        if job.device == HOST:
            tile = job.tile or sanitize.small_tile(kernel)
            small = [(t, problem) for t in (tile, *new) for problem in sanitize.small_problems(kernel, t)[:1]]
            at("running it under sanitizers", COMPILE_SECONDS)
            findings, more = _found(_sanitizing(kernel, small, job, pool, _SMALL_TOOLS))
            notes += more
            if not findings and not job.tile:  # what is shipped, while results are compared
                patient = replace(job, seconds=max(job.seconds, _PATIENCE))
                shipped = _sanitizing(kernel, sanitize.shipped_tiles(kernel, None), patient, pool)
        results = () if findings else _verify(kernel, trials, job, at)
        at("running the shipped tiles under sanitizers", COMPILE_SECONDS)
        findings += _found(shipped)[0]
        stage, message = _verdict(findings, results)
        counting = _counts is not None and not _counts.done()
        if cost and not counting:
            cost = replace(cost, opcodes=_counted())
        return VersionResult(
            stage, message, results, findings, cost, setting, tuple(notes), compiling=compiling, counting=counting
        )


def _new_tiles(kernel: Kernel, job: Job) -> tuple[list[Tile], list[str]]:
    """The tiles that the spec has now and did not have when watching began; and why some of them are not tried."""
    arch, taken, reasons = pipeline.arch_of(job.device), [], []
    for tile in kernel.tiles if job.known is not None and not job.tile else ():
        if tile not in (job.known or ()):
            problem = tile_case(kernel, tile).problem
            if reason := kernel.why_unsupported(problem, arch) or why_tile_unsupported(kernel, problem, tile, arch):
                reasons.append(f"new tile {tile} is not tried: {reason}")
            else:
                taken.append(tile)
    return taken, reasons


def _verdict(findings: tuple[Finding, ...], results: tuple[Result, ...]) -> tuple[str, str]:
    if findings:
        first = findings[0]
        return ("hang" if UNFINISHED in first.what else "sanitize"), f"{first.what}\non {first.on}"
    if broken := next((r for r in results if r.ok is False and r.error is None), None):
        return "run", broken.message
    if any(r.ok is False for r in results):
        return "wrong", next(r.where.text if r.where else r.message for r in results if r.ok is False)
    return ("ok", "") if any(r.ok for r in results) else ("refused", results[0].message)


def _compile(
    kernel: Kernel, trials: Sequence[tuple[Case, Tile | None]], job: Job, pool: ThreadPoolExecutor
) -> tuple[Cost | None, list[str]]:
    """Every binary that will be needed. NVRTC's word comes first, also on the CPU backend, as it is the GPU's, and on
    all of them: one may spill where another does not. The first one's instructions are counted meanwhile.

    Raises CompileError.
    """
    global _counts  # noqa: PLW0603
    _counts = None
    arch, notes = pipeline.arch_of(job.device), []
    variants: dict[tuple, tuple[Problem, Tile]] = {}
    for p, wanted in ((case.problem, tile) for case, tile in trials):
        if not kernel.why_unsupported(p, arch):
            tile = pipeline.tile_on(job.device, kernel, p, wanted)
            variants.setdefault(tuple(kernel.defines(p, tile).items()), (p, tile))
    target = pipeline.DEFAULT_ARCH if arch is None else pipeline.arch_name(kernel, arch)
    try:
        nvrtc.version()
        for_gpu = [*variants.values()]
    except ToolchainMissing as missing:
        for_gpu, notes = [], [str(missing).splitlines()[0]]
    cubins = [pool.submit(pipeline.compile_problem, kernel, p, t, target) for p, t in for_gpu]
    on_host = [] if arch else [pool.submit(pipeline.load, kernel, t, p, HOST) for p, t in variants.values()]
    if for_gpu:
        _counts = _disassembler.submit(_opcodes, cubins[0])
    compiled = _all(cubins)
    _all(on_host)
    notes += _slow_memory(kernel, for_gpu, compiled)
    return (_cost(kernel, *for_gpu[0], compiled) if compiled else None), notes


def _opcodes(compiled: Future[tuple[Compiled, ...]]) -> Opcodes:
    """Of all entries: they are one module. {} when nothing can disassemble, as one that is older than the cubin."""
    with suppress(ToolchainMissing, CompileError):
        return disassembly.opcode_counts(compiled.result()[0].cubin)
    return {}


def _counted() -> Opcodes:
    return _counts.result() if _counts else {}


def _cost(kernel: Kernel, problem: Problem, tile: Tile, variants: Sequence[tuple[Compiled, ...]]) -> Cost:
    """Of the first of the variants, all but stack and spills."""
    compiled = variants[0]
    entries = [(entry, made.resources) for entry, made in zip(kernel.entries, compiled, strict=True)]
    arch = architectures.parse(compiled[0].arch)
    most = Resources.worst(made.resources for variant in variants for made in variant)
    own = replace(Resources.worst(r for _, r in entries), **{name: getattr(most, name) for name in _SLOW})
    least = min((pipeline.occupancy(entry, problem, tile, r, arch) for entry, r in entries), key=lambda o: o.fraction)
    smem = max(entry.smem_bytes(problem, tile) + r.smem_static for entry, r in entries)
    return Cost(compiled[0].arch, tile, own, smem, least, {})


def _slow_memory(
    kernel: Kernel, variants: Sequence[tuple[Problem, Tile]], compiled: Sequence[tuple[Compiled, ...]]
) -> list[str]:
    """Which variants' threads keep something in local memory, how much, and the likely cause: a sentence each."""
    said = []
    for (problem, tile), entries in zip(variants, compiled, strict=True):
        for made in entries:
            r, name = made.resources, f"{made.entry} on {problem}, tile {tile}, for {made.arch}"
            if r.spill_stores or r.spill_loads:
                how = f"{r.spill_stores} bytes of stores and {r.spill_loads} of loads are spilled"
                said.append(f"{name}: {how} with {r.registers} registers: a thread has too much to keep in them")
            elif r.stack:
                lines = (i.line for i in disassembly.ptx(made.ptx) if i.opcode.startswith(("ld.local", "st.local")))
                at = ", ".join(map(str, [*dict.fromkeys(line for line in lines if line)][:3]))
                cause = f"an array that is indexed by a variable{f', at {at}' if at else ''}, cannot stay in registers"
                said.append(f"{name}: {r.stack} bytes of stack, in slow local memory: the likely cause is {cause}")
    return said


_Looking = list[list[Future[Inspection]]]  # by the tools, at each problem


def _sanitizing(
    kernel: Kernel, pairs: Iterable[tuple[Tile, Problem]], job: Job, pool: ThreadPoolExecutor,
    tools: Sequence[str] = _QUICK_TOOLS,
) -> _Looking:  # fmt: skip
    """Ragged problems in processes of their own: what would end this one is found there, and by its line."""
    return [
        [pool.submit(sanitize.on_host, tool, kernel, problem, tile, job.seconds) for tool in tools]
        for tile, problem in pairs
    ]


def _found(looking: _Looking) -> tuple[tuple[Finding, ...], list[str]]:
    """What there is to mend, and why some tool could not be used."""
    looked: list[Inspection] = []
    for futures in looking:
        of_problem = _all(futures)
        looked += [i for i in of_problem if not sanitize.explained_by_stray_store(i.tool, of_problem)]
    found: dict[object, Finding] = {}  # by their lines: the same fault is met on several problems
    for i in looked:
        for finding in i.findings:
            found.setdefault(finding.places or finding.what, replace(finding, on=f"{i.problem}, tile {i.tile}"))
    return tuple(found.values()), [i.message for i in looked if i.clean is None][:1]


def _verify(
    kernel: Kernel, trials: Sequence[tuple[Case, Tile | None]], job: Job, at: ReportStage
) -> tuple[Result, ...]:
    """Every case; after one that failed to run there is nothing to learn from the next."""
    results = []
    for i, (case, tile) in enumerate(trials):
        at(f"preparing {case.problem}", COMPILE_SECONDS)
        reference_of(kernel.computes, case)
        at(f"running {case.problem}", job.seconds)
        repeats = REPEATS if i == 0 and job.device != HOST else 1
        results.append(check.verify(kernel, case, job.device, tile, repeats=repeats))
        if results[-1].ok is False and results[-1].error is None:
            break
    return tuple(results)


def _all(futures: Iterable[Future[T]]) -> list[T]:
    """Results in order; the first error in that order, after all have ended."""
    started = list(futures)
    for future in started:
        future.exception()
    return [future.result() for future in started]


def _device_name(device: Device) -> str:
    return "cpu" if device == HOST else driver.device(device[1]).name
