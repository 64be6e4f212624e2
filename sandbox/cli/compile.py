"""`compile`: registers, shared memory and occupancy of tiles, without a GPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator

import click

from ..core.errors import CompileError, SpecError, UnsupportedProblem, without_options
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..disassembly import sweep as sweeping
from ..disassembly.costs import Cost, compiled_table
from ..engine import choose, pipeline, spills
from ..launch.dlpack import HOST
from ..toolchain import arch as architectures
from .group import cli
from .options import (
    Scored,
    alone,
    causal_option,
    chosen_kernels,
    dtype_option,
    given_without,
    json_option,
    kernels_argument,
    numbers,
    of_attention,
    parsed_tile,
    problem_or_default,
    score_options,
    shape_option,
    tile_option,
)
from .output import exit_status, followed, print_json, say, screen


@cli.command("compile")
@kernels_argument
@click.option("--arch", "archs", multiple=True,
              help=f"Architectures, such as sm_80,sm_90a. Repeatable. Default: {pipeline.DEFAULT_ARCH}.")  # fmt: skip
@shape_option(
    "Repeatable. Default: D = 64 and D = 128; for a custom operation the first of `cases` in its spec.",
    multiple=True,
)
@click.option("-D", "--head-dim", "widths", default="64,128", hidden=True)  # older spelling of --shape
@dtype_option
@causal_option
@score_options
@tile_option("Default: every tile of the spec.")
@click.option("--sweep", is_flag=True,
              help="Compile the tiles of KERNEL without and with score options. Write to "
                   "KERNEL.spills.json, beside the .cu, which of them spill registers. Automatic selection avoids "
                   "these tiles. Takes minutes on 16 cores. "
                   f"Without --arch: {','.join(sweeping.ARCHS)}.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), metavar="N", help="Processes of --sweep. Default: one per core.")
@json_option
def compile_(
    kernels: tuple[str, ...], archs: tuple[str, ...], shapes: tuple[str, ...], widths: str, dtype: str,
    causal: str | None, scored: Scored, tile: str | None, sweep: bool, jobs: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile kernels and report registers, spills and shared memory of each tile.

    Also occupancy and compile time. Needs no GPU.
    """
    head_dims = numbers(widths, "--head-dim", "64,128")
    targets = _targets(kernels, archs)
    if sweep:
        _sweep(kernels, targets, jobs, as_json)
        return
    given_without("--sweep", "jobs")
    targets = targets or [pipeline.DEFAULT_ARCH]
    chosen, wanted = chosen_kernels(kernels), parsed_tile(tile)
    if shapes and not kernels:
        chosen = of_attention(chosen)
    default = tuple(f"1,1,1,{D}" for D in head_dims)
    tried = [
        (kernel, target, problem, t)
        for kernel, target in itertools.product(chosen, targets)
        for problem in [problem_or_default(kernel, s, dtype, causal, scored, HOST)
                        for s in shapes or (default[:1] if kernel.custom else default)]
        for t in ((wanted,) if wanted else kernel.tiles)
    ]  # fmt: skip
    found = itertools.chain.from_iterable(itertools.starmap(_costs, tried))
    costs = list(followed(found, lambda c: f"{c.kernel} {c.problem.variant}"))
    if as_json:
        print_json(costs)
    else:
        if any(c.ok for c in costs):
            console = screen()
            console.print(compiled_table(costs, console.width))
        for message in _distinct(c.message for c in costs if c.ok is not True):
            say(f"not compiled: {message}", stderr=True)
    sys.exit(exit_status(c.ok for c in costs))


def _targets(kernels: tuple[str, ...], archs: tuple[str, ...]) -> list[str]:
    """The values of --arch. Raises UsageError for an architecture among the kernels."""
    targets = [*dict.fromkeys(name.strip() for names in archs for name in names.split(","))]
    if stray := [name for name in kernels if architectures.PATTERN.fullmatch(name)]:
        options = " ".join(f"--arch {name}" for name in (*targets, *stray))
        raise click.UsageError(f"{stray[0]} is an architecture, not a kernel: write {options}")
    return targets


def _sweep(kernels: tuple[str, ...], targets: list[str], processes: int | None, as_json: bool) -> None:
    """Write the tables of spilled registers, and report the number of their rows."""
    alone("--sweep", "kernels", "archs", "sweep", "jobs", "as_json")
    chosen = of_attention(chosen_kernels(kernels))
    archs = [*dict.fromkeys(architectures.name_of(architectures.parse(target)) for target in targets)]
    total = sum(1 for kernel in chosen for _ in sweeping.jobs(kernel, archs or sweeping.ARCHS))
    results = sweeping.sweep(chosen, archs or sweeping.ARCHS, processes)
    found = [*followed(results, lambda r: f"{r.job.kernel} {r.job.arch} D={r.job.D}", total)]
    rows = []
    for kernel in chosen:
        own = [result for result in found if result.job.kernel == kernel.name]
        table = spills.read(spills.path(kernel))
        rows.append({"kernel": kernel.name, "compiled": sum(r.compiled for r in own), "rows": len(table["rows"])})
    errors = [error for result in found for error in result.errors]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            say(f"{row['kernel']}: {row['compiled']} variants compiled, {row['rows']} rows of tiles that spill")
    for message in _distinct(errors):
        say(f"not compiled: {message}", stderr=True)
    sys.exit(exit_status([not errors]))


def _costs(kernel: Kernel, target: str, problem: Problem, tile: Tile) -> Iterator[Cost]:
    """One Cost per entry point of the kernel; a single one with a message if it does not compile."""
    arch = architectures.parse(target)
    where = (problem, tile, target)
    try:
        if reason := choose.why_unsupported(kernel, problem, arch) or choose.why_tile_unsupported(
            kernel, problem, tile, arch
        ):
            raise UnsupportedProblem(reason)
        where = (problem, tile, target := pipeline.target_of(kernel, target))
        compiled = pipeline.compile_problem(kernel, problem, tile, target)
    except UnsupportedProblem as refusal:
        yield Cost(kernel.name, *where, ok=None, message=str(refusal))
        return
    except (CompileError, SpecError) as error:
        yield Cost(kernel.name, *where, ok=False, message=str(error))
        return
    for entry, made in zip(kernel.entries, compiled, strict=True):
        occupancy = pipeline.occupancy(entry, problem, tile, made.resources, arch)
        smem = entry.smem_bytes(problem, tile)
        yield Cost(entry.name, *where, True, made.resources, smem, occupancy, made.seconds, made.cached)


def _distinct(messages: Iterable[str]) -> Iterable[str]:
    """The first of the compiler messages that differ only in the options."""
    return {without_options(message): message for message in reversed([*messages])}.values()
