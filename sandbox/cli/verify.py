"""`run` and `check`: compare results with the reference."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from ..launch.dlpack import HOST
from ..pages import reports
from ..verify import check as checking
from ..verify import error_map, report
from ..verify.cases import GIVEN, Case
from ..verify.isolated import NOT_TRIED, IsolatedRunner
from .group import cli
from .options import (
    SCORE_NAMES,
    OutputPath,
    Scored,
    backend_option,
    causal_option,
    chosen_kernels,
    dtype_option,
    given_without,
    html_option,
    json_option,
    kernels_argument,
    of_attention,
    parsed_tile,
    problem_for,
    score_options,
    shape_option,
    tile_option,
    timeout_option,
)
from .output import exit_status, followed, print_json_rows, save_page, say, screen

map_option = click.option(
    "--map",
    "prefix",
    type=OutputPath(),
    metavar="PREFIX",
    help="Plot the errors of a wrong result to PREFIX.png and PREFIX.svg.",
)

limit_option = timeout_option(600, "Time limit for compiling and running a case, in seconds.")


@cli.command("run")
@kernels_argument
@shape_option(
    "Default: for attention the cases gpt2 (GPT-2 small, no mask), causal (the same with a causal mask), cross "
    "(cross-attention) and groups (grouped-query attention); for latent attention the cases latent (contiguous keys) "
    "and pages (keys in pages); for a custom operation the cases of its spec."
)
@dtype_option
@causal_option
@score_options
@tile_option()
@backend_option()
@limit_option
@map_option
@json_option
def run_(
    kernels: tuple[str, ...], shape: str | None, dtype: str, causal: str | None, scored: Scored, tile: str | None,
    backend: str | None, timeout: float, prefix: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile, launch and verify; one line per kernel and problem.

    The options from --dtype to --invariant need --shape: the default problems have their own.
    """
    if not shape:
        given_without("--shape", "dtype", "causal", *SCORE_NAMES)
    device = checking.pick_device(backend)
    chosen, wanted = chosen_kernels(kernels), parsed_tile(tile)
    if shape:
        chosen = chosen if kernels else of_attention(chosen)
        case = Case(GIVEN, problem_for(chosen, shape, dtype, causal, scored))
        runs = [(kernel, case) for kernel in chosen]
    else:
        runs = checking.named_runs(chosen, small=device == HOST)
    with IsolatedRunner(_forward_output, timeout) as runner:
        found = followed(checking.run_cases(runs, device, wanted, runner.verify), lambda r: r.case)
        if as_json:
            results = list(print_json_rows(found))
        else:
            names = [checking.Result(k.name, c.name, c.problem, "", None) for k, c in runs]
            results = list(_shown(found, names, everything=bool(kernels or shape)))
    _draw_map(results, prefix)
    sys.exit(exit_status(r.ok for r in results))


def _shown(
    found: Iterable[checking.Result], expected: Sequence[checking.Result], everything: bool
) -> Iterator[checking.Result]:
    """Prints each result when it is available; then notes, failures and hints."""
    console, shown, results = screen(), 0, []
    for r in found:
        results.append(r)
        # A kernel that was not named and does not support the problem gets a note instead of a line.
        if r.ok is not None or everything:
            console.print(report.results_table([r], console.width, expected=expected, head=not shown))
            shown += 1
        yield r
    for text in (*report.notes(results), *report.failures(results), *report.hints(results)):
        say(text)


@cli.command("check")
@kernels_argument
@tile_option()
@backend_option()
@limit_option
@map_option
@html_option
@json_option
def check_(
    kernels: tuple[str, ...], tile: str | None, backend: str | None, timeout: float, prefix: Path | None,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare kernels with the reference on many small problems, up to several hundred per attention kernel.

    Odd lengths, masks, dtypes, layouts, score options, and special inputs (all equal, one large value, …).
    """
    device, wanted = checking.pick_device(backend), parsed_tile(tile)
    chosen = chosen_kernels(kernels)
    with IsolatedRunner(_forward_output, timeout) as runner:
        swept = checking.sweep(chosen, device, wanted, runner.verify)
        found = followed(swept, lambda r: f"{r.kernel} {r.case}")
        results = list(print_json_rows(found) if as_json else _reported(found))
    if not as_json and len(chosen) > 1:
        say(f"{report.counts(results)}, on {device[0]}")
    _draw_map(results, prefix)
    if html:
        save_page(html, reports.check(results))
    sys.exit(exit_status(r.ok for r in results))


def _reported(found: Iterable[checking.Result]) -> Iterator[checking.Result]:
    """Prints failures when they occur, each reason once, and one line per finished kernel."""
    for kernel, of_kernel in itertools.groupby(found, lambda r: r.kernel):
        results: list[checking.Result] = []
        shown: set[str] = set()
        for r in of_kernel:
            results.append(r)
            if (r.ok is False or r.message == NOT_TRIED) and (reason := report.reason(r)) not in shown:
                shown.add(reason)
                for text in report.failures([r]):
                    say(text)
            yield r
        if all(r.ok is None for r in results):  # such as with an invalid tile
            for text in itertools.islice(report.failures(results), 1):
                say(text)
        for text in report.hints(results):
            say(text)
        say(f"{kernel}: {report.counts(results)}, on {results[0].backend}")


def _forward_output(printed: str) -> None:
    """Forward a kernel's own output to stderr; it is not part of the results."""
    click.echo(printed, err=True, nl=False)


def _draw_map(results: Iterable[checking.Result], prefix: Path | None) -> None:
    """Plot the error map of the wrong result with the most elements."""
    wrong = [(r, r.where) for r in results if r.where]
    if prefix and wrong:
        r, where = max(wrong, key=lambda pair: pair[1].heat.size)
        for path in error_map.draw(where, f"{r.kernel} on {r.problem}", prefix):
            say(f"wrote {path}", stderr=True)
