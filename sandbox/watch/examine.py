"""Examines one version of a kernel: compilation, sanitizers, correctness, time and resource usage.

Runs in a worker process, because the kernel may hang or crash. Its results can be pickled.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ..core import registry
from ..core.errors import (
    CompileError,
    NoFastCompilation,
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
from ..verify.cases import GIVEN, Case
from ..verify.check import Result
from ..verify.findings import Finding
from ..verify.isolated import device_usable
from ..verify.sanitize import Inspection
from ..verify.suite import suite_of
from .figures import Cost, VersionResult
from .job import Job, quick_cases, tile_case

T = TypeVar("T")
Opcodes = dict[str, int]
COMPILE_SECONDS = 300.0  # time limit of compiling; a run has the job's limit
COUNTING = "counting its instructions"
REPEATS = 20  # timed launches on a GPU
_LARGE_TILE_SECONDS = 60.0  # time limit of a large tile under a sanitizer; hangs have been found earlier
_QUICK_TOOLS = ("address", "thread")
_SLOW = ("stack", "spill_stores", "spill_loads")  # fields of Resources for local memory
_SMALL_TOOLS = (*_QUICK_TOOLS, "uninitialised")  # unoptimised code, too slow for large tiles


def prepare(job: Job) -> None:
    """Prepares a worker before its first job, to reduce the latency: imports, NVRTC, a CUDA context, the references."""
    with suppress(Exception):  # the job reports any error
        nvrtc.version()
    with suppress(Exception):
        if job.device != HOST:
            driver.device(job.device[1]).synchronize()
        kernel = registry.get(job.kernel)
        for case in _cases(kernel, job):
            suite_of(kernel).reference(case)


def _cases(kernel: Kernel, job: Job) -> list[Case]:
    return [Case(GIVEN, job.problem)] if job.problem else quick_cases(kernel, job.device)


# nvdisasm takes half a second for any input, longer than everything after the compile. The verdict does not need it.
_disassembler = ThreadPoolExecutor(1)
_counts: Future[Opcodes] | None = None  # of the latest version


def examine(job: Job | None, report_stage: ReportStage) -> tuple[VersionResult | Opcodes, bool]:
    """(the result, whether this process can run another job: after some errors the CUDA context is unusable). For the
    job None, waits for the instruction counts of the latest version and returns them."""
    if job is None:
        report_stage("counting instructions", COMPILE_SECONDS)
        return _counted(), True
    return _reported(_examine, job, report_stage), device_usable(job.device)


def first_verdict(job: Job, report_stage: ReportStage) -> tuple[VersionResult | None, bool]:
    """As `examine`, but only whether the results are correct: with the fast compilation on a GPU, without sanitizers on
    the CPU backend, without figures. None if there is no fast compilation for this kernel."""
    try:
        found = _reported(_verify_first, job, report_stage)
    except NoFastCompilation:
        found = None
    return found, device_usable(job.device)


def merged(parts: Sequence[VersionResult]) -> VersionResult:
    """The first verdict of workers that each had a share of the cases, which may be empty: that of the first worker
    that failed, else of one with a correct result, else of one whose cases are not supported."""
    failed = [part for part in parts if part.stage not in ("ok", "refused")]
    correct = [part for part in parts if part.ok and part.results]
    refused = [part for part in parts if part.stage == "refused"]
    return replace(
        (failed + correct + refused + [*parts])[0],
        results=tuple(result for part in parts for result in part.results),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        output="".join(part.output for part in parts),
        seconds=max(part.seconds for part in parts),
        compiling=max(part.compiling for part in parts),
    )


def _reported(
    work: Callable[[Job, ReportStage], VersionResult], job: Job, report_stage: ReportStage
) -> VersionResult:  # fmt: skip
    """The result of `work`, also if it raises an exception other than NoFastCompilation."""
    started = time.perf_counter()
    try:
        found = work(job, report_stage)
    except NoFastCompilation:
        raise
    except CompileError as error:
        found = VersionResult("compile", without_options(str(error)))
    except SpecError as error:
        found = VersionResult("spec", str(error))
    except (UnsupportedProblem, ToolchainMissing) as error:
        found = VersionResult("refused", str(error))
    except SandboxError as error:
        found = VersionResult("run", str(error))
    except Exception as error:  # a spec may raise anything
        found = VersionResult("spec", f"{type(error).__name__}: {error}")
    return replace(found, seconds=time.perf_counter() - started)


_Trials = Sequence[tuple[Case, Tile | None]]
_Macros = tuple[tuple[str, object], ...]


class _Plan(NamedTuple):
    """What to run of a version: cases with their tiles, the `new` ones among them; notes on tiles that cannot run."""

    kernel: Kernel
    trials: _Trials
    new: list[Tile]
    setting: str
    notes: list[str]


def _plan(job: Job, report_stage: ReportStage) -> _Plan:
    """Reads the version's spec."""
    report_stage("reading the spec", job.seconds)
    registry.forget()
    pipeline.forget()
    kernel = registry.get(job.kernel)
    cases = _cases(kernel, job)
    setting = f"{_device_name(job.device)}: {cases[0].problem}"
    new, unsupported = _new_tiles(kernel, job)
    trials = [(case, job.tile) for case in cases] + [(tile_case(kernel, tile), tile) for tile in new]
    return _Plan(kernel, trials, new, setting, unsupported)


def _verify_first(job: Job, report_stage: ReportStage) -> VersionResult:
    kernel, all_trials, _, setting, notes = _plan(job, report_stage)
    trials = _shared(kernel, all_trials, job)
    if not trials:
        return VersionResult("ok", setting=setting, notes=tuple(notes))
    report_stage("compiling", COMPILE_SECONDS)
    started = time.perf_counter()
    with ThreadPoolExecutor() as pool:  # compile in parallel
        variants = _variants(kernel, trials, job)
        _all([pool.submit(pipeline.load, kernel, tile, p, job.device, True) for p, tile in variants])
    compiling = time.perf_counter() - started
    results = _verify(kernel, trials, job, report_stage, fast=True)
    return VersionResult(*_verdict((), results), results, setting=setting, notes=tuple(notes), compiling=compiling)


def _examine(job: Job, report_stage: ReportStage) -> VersionResult:
    kernel, trials, new, setting, unsupported = _plan(job, report_stage)
    report_stage("compiling", COMPILE_SECONDS)
    with ThreadPoolExecutor() as pool:  # compile in parallel
        started = time.perf_counter()
        cost, notes = _compile(kernel, trials, job, pool)
        notes += unsupported
        compiling = time.perf_counter() - started
        findings: tuple[Finding, ...] = ()
        shipped: _PendingInspections = []
        if job.device == HOST:
            tile = job.tile or sanitize.small_tile(kernel)
            small = [(t, problem) for t in (tile, *new) for problem in sanitize.small_problems(kernel, t)[:1]]
            report_stage("running it under sanitizers", COMPILE_SECONDS)
            findings, more = _collect(_sanitizing(kernel, small, job, pool, _SMALL_TOOLS))
            notes += more
            if not findings and not job.tile:  # the shipped tiles run while results are compared
                slow = replace(job, seconds=max(job.seconds, _LARGE_TILE_SECONDS))
                shipped = _sanitizing(kernel, sanitize.shipped_tiles(kernel, None), slow, pool)
        results = () if findings else _verify(kernel, trials, job, report_stage)
        report_stage("running the shipped tiles under sanitizers", COMPILE_SECONDS)
        findings += _collect(shipped)[0]
        stage, message = _verdict(findings, results)
        pending = COUNTING if _counts is not None and not _counts.done() else ""
        if cost and not pending:
            cost = replace(cost, opcodes=_counted())
        return VersionResult(
            stage, message, results, findings, cost, setting, tuple(notes), compiling=compiling, pending=pending
        )


def _new_tiles(kernel: Kernel, job: Job) -> tuple[list[Tile], list[str]]:
    """(tiles that were added to the spec since `watch` started, the reasons why others are not supported)."""
    arch, taken, reasons = pipeline.arch_of(job.device), [], []
    for tile in kernel.tiles if job.known is not None and not job.tile else ():
        if tile not in (job.known or ()):
            problem = tile_case(kernel, tile).problem
            if reason := kernel.why_unsupported(problem, arch) or why_tile_unsupported(kernel, problem, tile, arch):
                reasons.append(f"new tile {tile} is not run: {reason}")
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
        wrong = next(r for r in results if r.ok is False)
        return "wrong", "\n".join(filter(None, (wrong.cause, wrong.where.text))) if wrong.where else wrong.message
    return ("ok", "") if any(r.ok for r in results) else ("refused", results[0].message)


def _variants(kernel: Kernel, trials: _Trials, job: Job) -> list[tuple[Problem, Tile]]:
    """One problem and tile for each binary that the trials need."""
    found: dict[_Macros, tuple[Problem, Tile]] = {}
    for case, wanted in trials:
        if binary := _binary(kernel, case, wanted, job):
            found.setdefault(*binary)
    return [*found.values()]


def _binary(kernel: Kernel, case: Case, wanted: Tile | None, job: Job) -> tuple[_Macros, tuple[Problem, Tile]] | None:
    """The macros, the problem and the tile of the binary that a trial needs; None if it is not supported."""
    if kernel.why_unsupported(case.problem, pipeline.arch_of(job.device)):
        return None
    tile = pipeline.tile_on(job.device, kernel, case.problem, wanted)
    return tuple(kernel.defines(case.problem, tile).items()), (case.problem, tile)


def _shared(kernel: Kernel, trials: _Trials, job: Job) -> _Trials:
    """The trials of the job's share of the binaries."""
    index, workers = job.share
    numbers: dict[_Macros | None, int] = {}
    binaries = [_binary(kernel, case, tile, job) for case, tile in trials]
    own = [numbers.setdefault(binary and binary[0], len(numbers)) % workers == index for binary in binaries]
    return [trial for trial, is_own in zip(trials, own, strict=True) if is_own]


def _compile(kernel: Kernel, trials: _Trials, job: Job, pool: ThreadPoolExecutor) -> tuple[Cost | None, list[str]]:
    """Compiles every binary that the trials need. NVRTC compiles all variants first, also on the CPU backend, because
    it decides for the GPU, and one variant may spill where another does not. The instructions of the first variant are
    counted in the background.

    Raises CompileError.
    """
    global _counts  # noqa: PLW0603
    _counts = None
    arch, notes = pipeline.arch_of(job.device), []
    variants = _variants(kernel, trials, job)
    target = pipeline.DEFAULT_ARCH if arch is None else pipeline.arch_name(kernel, arch)
    try:
        nvrtc.version()
        for_gpu = variants
    except ToolchainMissing as missing:
        for_gpu, notes = [], [str(missing).splitlines()[0]]
    cubins = [pool.submit(pipeline.compile_problem, kernel, p, t, target) for p, t in for_gpu]
    on_host = [] if arch else [pool.submit(pipeline.load, kernel, t, p, HOST) for p, t in variants]
    if for_gpu:
        _counts = _disassembler.submit(_opcodes, cubins[0])
    compiled = _all(cubins)
    _all(on_host)
    notes += _slow_memory(kernel, for_gpu, compiled)
    return (_cost(kernel, *for_gpu[0], compiled) if compiled else None), notes


def _opcodes(compiled: Future[tuple[Compiled, ...]]) -> Opcodes:
    """The instruction counts of all entries, which are one module. {} if there is no disassembler, or it is older than
    the cubin."""
    with suppress(ToolchainMissing, CompileError):
        return disassembly.opcode_counts(compiled.result()[0].cubin)
    return {}


def _counted() -> Opcodes:
    return _counts.result() if _counts else {}


def _cost(kernel: Kernel, problem: Problem, tile: Tile, variants: Sequence[tuple[Compiled, ...]]) -> Cost:
    """The cost of the first variant, with the maximum stack and spills of all variants."""
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
    """A sentence for each variant that uses local memory: how much, and the likely cause."""
    found = []
    for (problem, tile), entries in zip(variants, compiled, strict=True):
        for made in entries:
            r, name = made.resources, f"{made.entry} on {problem}, tile {tile}, for {made.arch}"
            if r.spill_stores or r.spill_loads:
                how = f"{r.spill_stores} bytes of stores and {r.spill_loads} of loads are spilled"
                found.append(f"{name}: {how} with {r.registers} registers: a thread needs more")
            elif r.stack:
                lines = (i.line for i in disassembly.ptx(made.ptx) if i.opcode.startswith(("ld.local", "st.local")))
                at = ", ".join(map(str, [*dict.fromkeys(line for line in lines if line)][:3]))
                cause = f"an array that is indexed by a variable{f', at {at}' if at else ''}"
                found.append(f"{name}: {r.stack} bytes of stack, in slow local memory: the likely cause is {cause}")
    return found


_PendingInspections = list[list[Future[Inspection]]]  # for each problem, one per tool


def _sanitizing(
    kernel: Kernel, pairs: Iterable[tuple[Tile, Problem]], job: Job, pool: ThreadPoolExecutor,
    tools: Sequence[str] = _QUICK_TOOLS,
) -> _PendingInspections:  # fmt: skip
    """Starts sanitizers, in separate processes: a fault that would end this process is found there, with its line."""
    return [
        [pool.submit(sanitize.on_host, tool, kernel, problem, tile, job.seconds) for tool in tools]
        for tile, problem in pairs
    ]


def _collect(pending: _PendingInspections) -> tuple[tuple[Finding, ...], list[str]]:
    """(findings, the reason why a tool could not run)."""
    done: list[Inspection] = []
    for futures in pending:
        of_problem = _all(futures)
        done += [i for i in of_problem if not sanitize.is_consequence(i, of_problem)]
    found: dict[object, Finding] = {}  # by source lines: several problems have the same fault
    for i in done:
        for finding in i.findings:
            found.setdefault(finding.places or finding.what, replace(finding, on=f"{i.problem}, tile {i.tile}"))
    return tuple(found.values()), [i.message for i in done if i.clean is None][:1]


def _verify(
    kernel: Kernel, trials: _Trials, job: Job, report_stage: ReportStage, *, fast: bool = False
) -> tuple[Result, ...]:
    """Verifies every case, up to the first that fails to run. `fast`: as for `check.verify`."""
    results: list[Result] = []
    report_stage("waiting for the GPU", COMPILE_SECONDS)
    with _gpu_locked(job):
        for i, (case, tile) in enumerate(trials):
            report_stage(f"preparing {case.problem}", COMPILE_SECONDS)
            suite_of(kernel).reference(case)
            report_stage(f"running {case.problem}", job.seconds)
            repeats = REPEATS if i == 0 and job.device != HOST and not fast else 1
            explain = not any(r.where for r in results)
            results.append(check.verify(kernel, case, job.device, tile, repeats=repeats, explain=explain, fast=fast))
            if results[-1].ok is False and results[-1].error is None:
                break
    return tuple(results)


@contextmanager
def _gpu_locked(job: Job) -> Iterator[None]:
    """Waits until no other worker uses the GPU. The lock of a process that has ended is free."""
    if not job.gpu_lock:
        yield
        return
    with job.gpu_lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _all(futures: Iterable[Future[T]]) -> list[T]:
    """The results in order. If any failed, raises the first error in that order, after all have ended."""
    started = list(futures)
    for future in started:
        future.exception()
    return [future.result() for future in started]


def _device_name(device: Device) -> str:
    return "cpu" if device == HOST else driver.device(device[1]).name
