"""`run` and `check`: is it right?"""

from __future__ import annotations

import sys

import click

from .. import check as checking
from .. import report
from ..cases import Case
from ..spec import Problem
from .group import cli
from .options import (
    backend_option,
    causal_option,
    chosen_kernels,
    dtype_option,
    json_option,
    kernels_argument,
    parsed_tile,
    tile_option,
)
from .output import exit_status, followed, print_json, say, screen


@cli.command("run")
@kernels_argument
@click.option("--shape", help="B,H,S,D or B,H,Sq,Sk,D instead of the named problems; grouped heads as B,H/Hk,S,D.")
@dtype_option
@causal_option
@tile_option
@backend_option
@json_option
def run_(
    kernels: tuple[str, ...], shape: str | None, dtype: str, causal: str | None, tile: str | None, backend: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Compile, launch, verify, report: one line for each kernel and problem.

    --dtype and --causal go with --shape; the named problems have their own.
    """
    given = click.get_current_context().get_parameter_source
    if not shape and any(given(name) is click.core.ParameterSource.COMMANDLINE for name in ("dtype", "causal")):
        raise click.UsageError("--dtype and --causal go with --shape: the named problems have their own")
    device = checking.pick_device(backend)
    cases = None
    if shape:
        problem = Problem.from_shape(shape, dtype=dtype, causal=causal or False)
        cases = [Case("--shape", problem)]
    chosen = chosen_kernels(kernels)
    results = list(followed(checking.run_cases(chosen, device, parsed_tile(tile), cases), lambda r: r.case))
    if as_json:
        print_json(results)
    else:
        console = screen()
        # A kernel that nobody asked for by name, and that does not take a named problem, gets a note and no line.
        shown = [r for r in results if r.ok is not None or kernels or shape]
        console.print(report.results_table(shown, console.width))
        for text in report.failures(results):
            say(text)
    sys.exit(exit_status(r.ok for r in results))


@cli.command("check")
@kernels_argument
@tile_option
@backend_option
@json_option
def check_(kernels: tuple[str, ...], tile: str | None, backend: str | None, as_json: bool) -> None:
    """The correctness sweep: ragged lengths, masks, dtypes, layouts, and inputs that point at a fault."""
    device = checking.pick_device(backend)
    chosen = chosen_kernels(kernels)
    results = list(followed(checking.sweep(chosen, device, parsed_tile(tile)), lambda r: f"{r.kernel} {r.case}"))
    if as_json:
        print_json(results)
    else:
        for text in report.failures(r for r in results if r.ok is False):
            say(text)
        counts = {state: sum(r.ok is state for r in results) for state in (True, False, None)}
        say(f"{counts[True]} ok, {counts[False]} wrong, {counts[None]} not taken, on {device[0]}")
    sys.exit(exit_status(r.ok for r in results))
