"""`run` and `check`: is it right?"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from ..verify import check as checking
from ..verify import error_map, report
from ..verify.cases import Case
from .group import cli
from .options import (
    SCORE_NAMES,
    Scored,
    backend_option,
    causal_option,
    chosen_kernels,
    dtype_option,
    given_without,
    json_option,
    kernels_argument,
    parsed_tile,
    problem_of,
    score_options,
    shape_option,
    tile_option,
)
from .output import exit_status, followed, print_json, say, screen

map_option = click.option(
    "--map", "prefix", type=click.Path(path_type=Path), help="Draw where a result is wrong to PREFIX.png and .svg."
)


@cli.command("run")
@kernels_argument
@shape_option("By default the named problems.")
@dtype_option
@causal_option
@score_options
@tile_option
@backend_option
@map_option
@json_option
def run_(
    kernels: tuple[str, ...], shape: str | None, dtype: str, causal: str | None, scored: Scored, tile: str | None,
    backend: str | None, prefix: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile, launch, verify: a line for each kernel and problem.

    --dtype and --causal go with --shape; the named problems have their own.
    """
    if not shape:
        given_without("--shape", "dtype", "causal", *SCORE_NAMES)
    device = checking.pick_device(backend)
    cases = None
    if shape:
        problem = problem_of(shape, dtype, causal, scored)
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
    _draw_map(results, prefix)
    sys.exit(exit_status(r.ok for r in results))


@cli.command("check")
@kernels_argument
@tile_option
@backend_option
@map_option
@json_option
def check_(kernels: tuple[str, ...], tile: str | None, backend: str | None, prefix: Path | None, as_json: bool) -> None:
    """The correctness sweep.

    Ragged lengths, masks, dtypes, layouts, and inputs that point at a fault.
    """
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
    _draw_map(results, prefix)
    sys.exit(exit_status(r.ok for r in results))


def _draw_map(results: Iterable[checking.Result], prefix: Path | None) -> None:
    """Of the wrong result with the most elements, which shows most."""
    wrong = [(r, r.where) for r in results if r.where]
    if prefix and wrong:
        r, where = max(wrong, key=lambda pair: pair[1].heat.size)
        for path in error_map.draw(where, f"{r.kernel} on {r.problem}", prefix):
            say(f"wrote {path}", stderr=True)
