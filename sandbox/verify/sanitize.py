"""Sanitizers on the CPU backend and on a GPU. They find faults that may leave the result correct.

On the CPU backend every tool runs the kernel in a separate process, in buffers of exact size: AddressSanitizer (bounds,
alignment, and shared memory that is the target of a pending cp.async), UndefinedBehaviorSanitizer, ThreadSanitizer with
one thread per CUDA thread, detection of uninitialised shared memory and local variables, and a comparison of launches
with different thread orders. On a GPU the tools are those of compute-sanitizer; its initcheck covers only global
memory.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..core import registry
from ..core.errors import ToolchainMissing, UnsupportedProblem
from ..core.kernel import Arch, Entry, Kernel
from ..core.operation import problem_from_json
from ..core.options import score_structure, score_tensors
from ..core.problem import Problem
from ..core.tile import Tile
from ..cpu import instrumented as host
from ..cpu.build import Sanitizer
from ..cpu.instrumented import Fill, Pointer, Report
from ..engine import pipeline
from ..engine.choose import choose_tile
from ..launch import dlpack
from ..launch.arguments import OPTIONAL_OUTPUTS, ArgumentBlock, argument_kinds
from ..launch.dlpack import HOST, Device
from ..toolchain import snippets, tools
from . import compute_sanitizer, trial
from .cases import Array, Case
from .findings import Finding, name_buffers, parse_host_sanitizer, resolve_expressions
from .suite import suite_of

HOST_TOOLS = {
    "address": "accesses out of bounds or misaligned; shared memory used before cp_async_wait",
    "undefined": "undefined behaviour of C++",
    "thread": "races on shared and global memory",
    "uninitialised": "reads of uninitialised shared memory; results that depend on uninitialised local variables",
    "orders": "results that depend on the order of threads",
}
_SEEDS = (1, 2)  # of shuffled thread orders
_AFFECTED_BY_STRAY_STORES = ("thread", "orders")
_STRAY = "skipped: a store out of bounds, which must be fixed first, looks like a race"
_ENDED = "an access out of bounds, which must be fixed first, ended the process"
_CRASH = re.compile(r"was terminated by SIG|^(free|malloc|realloc|munmap_chunk)\(\): |^(corrupted|double free)")


@dataclass(frozen=True)
class Inspection:
    """The result of one tool for a kernel on one problem. `clean` is None if the tool could not run: `message` gives
    the reason. `text`: the complete report."""

    kernel: str
    problem: Problem
    tile: Tile
    tool: str
    clean: bool | None
    findings: tuple[Finding, ...] = ()
    message: str = ""
    text: str = ""


def small_tile(kernel: Kernel) -> Tile:
    """The spec's smallest tile: with few threads, several blocks run fast."""
    return min(kernel.tiles, key=lambda tile: np.prod(list(tile.values())))


def small_problems(kernel: Kernel, tile: Tile) -> list[Problem]:
    """The problems that are used by default, with several blocks and partial tiles."""
    return suite_of(kernel).small_problems(kernel, tile)


def shipped_tiles(kernel: Kernel, arch: Arch | None) -> list[tuple[Tile, Problem]]:
    """The tiles that are selected for large problems, each with a small problem."""
    return suite_of(kernel).shipped_tiles(kernel, arch)


def inspect(
    kernel: Kernel, device: Device, tile: Tile | None = None, timeout: float = 120.0, problem: Problem | None = None
) -> Iterator[Inspection]:
    """`sanitize`: every tool of the backend on `problem`, or on small problems and with the shipped tiles.

    Raises ToolchainMissing without compute-sanitizer on a GPU, CompileError, SpecError, UnsupportedProblem.
    """
    if device != HOST:
        tools.need("compute-sanitizer")
    if problem:
        tile = pipeline.tile_on(device, kernel, problem, tile)
    small = tile or small_tile(kernel)
    pairs = [(small, problem)] if problem else [(small, p) for p in small_problems(kernel, small)]
    if not problem and not tile:
        pairs += shipped_tiles(kernel, pipeline.arch_of(device))
    if not pairs:
        raise UnsupportedProblem(
            f"{kernel.name}: tile {small} supports none of the small problems: choose another tile, or a problem with "
            "--shape"
        )
    if problem and not any(all(entry.grid(problem, small)) for entry in kernel.entries):
        raise UnsupportedProblem(
            f"{kernel.name}: {problem} is not supported: it has no blocks to launch (choose sizes that are not 0)"
        )
    for chosen, p in pairs:
        pipeline.load(kernel, chosen, p, device)  # raises SpecError for arguments that do not match the parameters
        done: list[Inspection] = []
        for tool in HOST_TOOLS if device == HOST else compute_sanitizer.TOOLS:
            if explained_by_stray_store(tool, done):
                done.append(Inspection(kernel.name, p, chosen, tool, None, message=_STRAY))
            else:
                done.append((on_host if device == HOST else on_gpu)(tool, kernel, p, chosen, timeout))
                if ended_by_stray_access(done[-1], done):
                    done[-1] = replace(done[-1], clean=None, findings=(), message=_ENDED)
            yield done[-1]


def explained_by_stray_store(tool: str, done: Iterable[Inspection]) -> bool:
    """Whether findings of `tool` may be caused by a store out of bounds, which "address" found on this problem."""
    return tool in _AFFECTED_BY_STRAY_STORES and _address_found(", write of ", done)


def ended_by_stray_access(found: Inspection, done: Iterable[Inspection]) -> bool:
    """Whether the process only ended, probably because of an access out of bounds that "address" found on this
    problem: without that tool, memory of the process is damaged."""
    if found.tool == "address" or not found.findings or not all(_CRASH.search(f.what) for f in found.findings):
        return False
    return _address_found("out of bounds", done)


def is_consequence(found: Inspection, done: Iterable[Inspection]) -> bool:
    """Whether the findings are probably consequences of what "address" found on this problem."""
    return explained_by_stray_store(found.tool, done) or ended_by_stray_access(found, done)


def _address_found(text: str, done: Iterable[Inspection]) -> bool:
    return any(text in f.what for i in done if i.tool == "address" for f in i.findings)


def on_host(tool: str, kernel: Kernel, problem: Problem, tile: Tile, timeout: float) -> Inspection:
    """One of HOST_TOOLS. Raises CompileError."""
    head = (kernel.name, problem, tile, tool)
    try:
        if tool == "orders":
            if not kernel.deterministic:
                return Inspection(*head, None, message="skipped: the kernel sums with atomics, in any order")
            findings = _compare_orders(kernel, problem, tile, timeout)
            return Inspection(*head, not findings, findings)
        report, left = launch_on_host(tool, kernel, problem, tile, timeout=timeout)  # type: ignore[arg-type]
        if tool == "uninitialised" and report.clean:
            findings = _unwritten_locals(kernel, problem, tile, timeout, left)
            return Inspection(*head, not findings, findings)
    except ToolchainMissing as missing:
        return Inspection(*head, None, message=str(missing))
    return Inspection(*head, report.clean, _findings(report, problem), text=report.text)


def launch_on_host(
    sanitizer: Sanitizer,
    kernel: Kernel,
    problem: Problem,
    tile: Tile,
    *,
    order: int = 0,
    stack: Fill = Fill.NANS,
    timeout: float = 120.0,
) -> tuple[Report, dict[str, Array]]:
    """Launches every entry once, in order, in buffers of exact size -> (report of the first entry that is not clean,
    else of the last; every tensor, by name, after the launch)."""
    chosen = choose_tile(kernel, problem, None, tile)
    inputs = suite_of(kernel).inputs(Case("sanitize", problem))
    arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
    made = trial.outputs_and_scratch(kernel, problem, chosen).items()
    arrays |= {name: np.zeros(shape, dlpack.numpy_dtype(dtype)) for name, (shape, dtype) in made}
    for entry in kernel.entries:
        absent = any(name in entry.args and name not in arrays for name in OPTIONAL_OUTPUTS)
        sizes = kernel.launch_sizes(entry, problem, chosen)
        if absent or not all(sizes.grid):
            continue
        views = {name: dlpack.view(array) for name, array in arrays.items()}
        arguments = ArgumentBlock(entry, problem, chosen, views, kinds=argument_kinds(kernel))
        follows = dict(_pointers(kernel, entry, problem, arrays))
        buffers = {pointer: arrays[name] for pointer, name in follows.items()}
        report = host.run(
            sanitizer, kernel.source, entry.name, kernel.defines(problem, chosen), sizes.grid, sizes.block,
            sizes.smem_bytes, arguments.values, buffers, cluster=sizes.cluster, order=order, stack=stack,
            timeout=timeout, folders=snippets.folders(problem),
        )  # fmt: skip
        if not report.clean:
            named = [f"{name} {arrays[name].shape} of {arrays[name].itemsize} bytes each" for name in follows.values()]
            report = replace(report, text=name_buffers(report.text, named))
            break
        # If two arguments point to the same tensor, each has its own copy: the kernel uses the first.
        left = dict(reversed([*zip(follows.values(), report.contents, strict=True)]))
        arrays |= left
    return report, arrays


def _pointers(kernel: Kernel, entry: Entry, problem: Problem, arrays: Container[str]) -> Iterator[tuple[Pointer, str]]:
    """(argument index, byte offset) of every address in an entry's arguments, and the array's name."""
    kinds = argument_kinds(kernel)
    for i, name in enumerate(entry.args):
        if name in entry.numbers:
            continue
        if kinds[name].tensor in arrays:
            yield (i, 0), kinds[name].tensor
        if kinds[name].ctype is ctypes.Structure:  # the score
            fields = score_structure(problem)
            yield from (((i, getattr(fields, t.pointer).offset), t.name) for t in score_tensors(problem))


def _findings(report: Report, problem: Problem) -> tuple[Finding, ...]:
    if report.clean:
        return ()
    text, expression = resolve_expressions(report.text, problem.score)
    return tuple(replace(finding, what=finding.what + expression) for finding in parse_host_sanitizer(text))


def _compare_orders(kernel: Kernel, problem: Problem, tile: Tile, timeout: float) -> tuple[Finding, ...]:
    """Results must be bit-equal for every order in which threads run between barriers."""
    launches = [launch_on_host("none", kernel, problem, tile, order=n, timeout=timeout) for n in (0, *_SEEDS)]
    if failed := next((report for report, _ in launches if not report.clean), None):
        return _findings(failed, problem)
    (_, ascending), *others = launches
    for seed, (_, shuffled) in zip(_SEEDS, others, strict=True):
        between = f"ascending order and shuffle {seed}"
        if differ := _difference("the order of threads", between, ascending, shuffled):
            return (Finding(differ),)
    return ()


def _unwritten_locals(
    kernel: Kernel, problem: Problem, tile: Tile, timeout: float, left: Mapping[str, Array]
) -> tuple[Finding, ...]:
    """Results must be bit-equal whether uninitialised local variables hold NaN or zeros. `left`: the tensors after a
    launch with NaN."""
    rerun = partial(launch_on_host, "uninitialised", kernel, problem, tile, timeout=timeout)
    _, others = rerun(stack=Fill.ZEROS)
    differ = _difference("uninitialised local variables", "NaN and 0 in them", left, others)
    if not differ:
        return ()
    read, _ = rerun(stack=Fill.REPORTED_NANS)  # reports the line of the read, if it is detected
    where = [place for finding in _findings(read, problem) for place in finding.places]
    return (Finding(differ, tuple(where)),)


def _difference(cause: str, between: str, some: Mapping[str, Array], others: Mapping[str, Array]) -> str:
    """A sentence about the first tensor whose bits differ between two launches; "" if none differs."""
    for name, array in some.items():
        bits = f"u{array.itemsize}"
        if (differ := array.view(bits) != others[name].view(bits)).any():
            first = tuple(map(int, np.argwhere(differ)[0]))
            what = f"{name} depends on {cause}: {differ.sum()} of {differ.size} elements differ"
            return f"{what} between {between}, first at {first}"
    return ""


# ---- on a GPU: the launch in a separate process, under compute-sanitizer

_CHILD = (  # its kernels are compiled with checks of the lengths in their inputs
    "import os, sys; os.environ['SANDBOX_CHECKED'] = '1'; "
    "from sandbox.verify.sanitize import launch; launch(sys.argv[1])"
)


def on_gpu(tool: str, kernel: Kernel, problem: Problem, tile: Tile, timeout: float) -> Inspection:
    """One of compute-sanitizer's tools."""
    head = (kernel.name, problem, tile, tool)
    what = json.dumps({"kernel": kernel.name, "tile": dict(tile), "problem": problem.as_json()})
    try:
        command = (sys.executable, "-c", _CHILD, what)
        folders = (*registry.folders(), registry.FOLDER / "include")
        findings, text = compute_sanitizer.run(tool, command, timeout, registry.FOLDER.parent, folders, problem.score)
    except ToolchainMissing as missing:
        return Inspection(*head, None, message=str(missing))
    return Inspection(*head, not findings, tuple(findings), text=text)


def launch(what: str) -> None:
    """In the child process: launches on copies of NumPy arrays in allocations of exact size, without an allocator's
    padding."""
    job = json.loads(what)
    kernel, problem, tile = registry.get(job["kernel"]), problem_from_json(job["problem"]), Tile(**job["tile"])
    inputs = suite_of(kernel).inputs(Case("sanitize", problem))
    trial.launch(kernel, tile, problem, inputs, ("cuda", 0))
