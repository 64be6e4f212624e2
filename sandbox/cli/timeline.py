"""`timeline`: the steps of each warp over time."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..core import registry
from ..engine import pipeline
from ..pages import timeline
from ..timeline import plot, record, recording, report, trace
from ..verify.check import pick_device
from .group import cli
from .options import (
    OutputPath,
    Scored,
    alone,
    backend_option,
    causal_option,
    dtype_option,
    given_without,
    html_option,
    json_option,
    numbers,
    on_command_line,
    optional_kernel_argument,
    parsed_tile,
    problem_of,
    problem_or_default,
    score_options,
    shape_option,
    tile_option,
)
from .output import exit_status, print_json, save_page, say, screen

_DECODING = "1,2,1,512,64"


@cli.command("timeline")
@optional_kernel_argument
@shape_option(f"Kernels for decoding: {_DECODING}.", default="1,2,512,64", show_default=True)
@dtype_option
@causal_option
@score_options
@tile_option()
@backend_option()
@click.option("--blocks", metavar="N,N…", help="Numbers of the thread blocks to show, at most four. "
              "Default: four blocks, evenly spread over the grid.")  # fmt: skip
@click.option(
    "--between", metavar="A,B", help="First and last tick to plot. Default: from 0 until the first warp has 160 steps."
)
@click.option("--plot", "prefix", type=OutputPath(), metavar="PREFIX", help="Plot to PREFIX.png and PREFIX.svg.")
@click.option("--trace", "trace_file", type=OutputPath(dir_okay=False), metavar="FILE",
              help="Write a trace for ui.perfetto.dev and chrome://tracing.")  # fmt: skip
@click.option("--save", "saved", type=OutputPath(dir_okay=False), metavar="FILE",
              help="Store the recording in FILE (gzip-compressed JSON), for --show.")  # fmt: skip
@click.option("--show", "shown", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="Show a stored recording instead of making one. Omit KERNEL. Needs no GPU.")  # fmt: skip
@html_option
@json_option
def timeline_(
    kernel: str | None, shape: str, dtype: str, causal: str | None, scored: Scored, tile: str | None,
    backend: str | None, blocks: str | None, between: str | None, prefix: Path | None, trace_file: Path | None,
    saved: Path | None, shown: Path | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show the steps of each warp over time.

    A step begins at a mark TIMELINE(name) in the kernel. Only this command compiles the marks in. Times are
    in ticks: cycles on a GPU; on the CPU backend ticks show the order of the threads, not time.
    """
    if (kernel is None) == (shown is None):
        raise click.UsageError("give either a KERNEL to record, or --show FILE")
    if shown:
        alone("--show", "shown", "between", "prefix", "trace_file", "saved", "html", "as_json")
    if not prefix:
        given_without("--plot", "between")
    window = numbers(between, "--between", "0,20000") if between else None
    if window and (len(window) != 2 or window[0] >= window[1]):
        raise click.BadParameter(f"{between!r} must be two increasing numbers, such as 0,20000", param_hint="--between")
    if shown:
        found = recording.load(shown)
    else:
        spec, device = registry.get(str(kernel)), pick_device(backend)
        if not (spec.custom or on_command_line("shape")) and spec.first_for(problem_of(_DECODING, dtype, None, {})):
            shape = _DECODING
        problem = problem_or_default(spec, shape, dtype, causal, scored, device)
        chosen = pipeline.tile_on(device, spec, problem, parsed_tile(tile))
        found = record.record(spec, problem, chosen, device, numbers(blocks, "--blocks", "0,1") if blocks else None)
    if as_json:
        print_json(report.as_json(found))
    else:
        say(report.headline(found))
        screen().print(report.shares_table(found))
        for text in report.remarks(found):
            say(text)
    if prefix:
        for path in plot.draw(found, prefix, (window[0], window[1]) if window else None):
            say(f"wrote {path}", stderr=True)
    if trace_file:
        trace.write(found, trace_file)
        say(f"wrote {trace_file}", stderr=True)
    if saved:
        recording.save(found, saved)
        say(f"wrote {saved}", stderr=True)
    if html:
        save_page(html, timeline.page(found))
    sys.exit(exit_status([found.same is not False]))
