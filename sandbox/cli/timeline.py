"""`timeline`: what does each warp do when?"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..core import registry
from ..engine import pipeline
from ..pages import timeline
from ..timeline import plot, record, report, trace
from ..verify.check import pick_device
from .group import cli
from .options import (
    OutputPath,
    Scored,
    backend_option,
    causal_option,
    dtype_option,
    html_option,
    json_option,
    kernel_argument,
    numbers,
    parsed_tile,
    problem_of,
    score_options,
    shape_option,
    tile_option,
)
from .output import exit_status, print_json, save_page, say, screen


@cli.command("timeline")
@kernel_argument
@shape_option(default="1,2,512,64", show_default=True)
@dtype_option
@causal_option
@score_options
@tile_option
@backend_option
@click.option("--blocks", metavar="N,N…", help="Show these blocks of the grid; by default four.")
@click.option("--between", metavar="A,B", help="Draw from tick A to tick B; by default what can be told apart.")
@click.option("--plot", "prefix", type=OutputPath(), help="Draw it to PREFIX.png and PREFIX.svg.")
@click.option("--trace", "trace_file", type=OutputPath(dir_okay=False),
              help="Write FILE.json, for ui.perfetto.dev and chrome://tracing.")  # fmt: skip
@html_option
@json_option
def timeline_(
    kernel: str, shape: str, dtype: str, causal: str | None, scored: Scored, tile: str | None, backend: str | None,
    blocks: str | None, between: str | None, prefix: Path | None, trace_file: Path | None, html: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """When each warp begins which step, by the marks TIMELINE(name) in the kernel.

    Marks are compiled in here alone. A GPU's ticks are cycles; the CPU backend shows the order of the fibers.
    """
    spec, problem, device = registry.get(kernel), problem_of(shape, dtype, causal, scored), pick_device(backend)
    chosen = pipeline.tile_on(device, spec, problem, parsed_tile(tile))
    wanted = numbers(blocks, "--blocks", "0,1") if blocks else None
    window = numbers(between, "--between", "0,20000") if between else None
    if window and (len(window) != 2 or window[0] >= window[1]):
        raise click.BadParameter(f"{between} must be two rising numbers, such as 0,20000", param_hint="--between")
    found = record.record(spec, problem, chosen, device, wanted)
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
    if html:
        save_page(html, timeline.page(found))
    sys.exit(exit_status([found.same is not False]))
