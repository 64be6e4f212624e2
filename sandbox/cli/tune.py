"""`tune`: which tile is fastest?"""

from __future__ import annotations

from pathlib import Path

import click

from ..bench import benchmark
from ..core import registry
from ..core.tile import Tile
from ..pages import reports
from ..tune import executors
from ..tune import report as tune_report
from ..tune.search import Search
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
    problem_of,
    score_options,
    shape_option,
)
from .output import followed, print_json, save_page, say, screen


@cli.command("tune")
@kernel_argument
@click.option("--grid", type=click.Choice(list(benchmark.GRIDS)), help="Named problems, each with a search of its own.")
@shape_option("Repeatable.", multiple=True)
@dtype_option
@causal_option
@score_options
@click.option("--fix", help="Hold these numbers of the tile, as BLOCK_M=64,WARPS=4.")
@click.option("--gpus", help="GPUs to spread the work over, as 0,1; by default all.")
@click.option("--dask", "cluster", metavar="ADDRESS", help="Spread it over the workers of this Dask cluster instead.")
@click.option("--fresh", is_flag=True, help="Measure again what an earlier search has measured.")
@click.option("--plot", "prefix", type=OutputPath(), help="Draw the space to PREFIX.png and PREFIX.svg.")
@backend_option
@html_option
@json_option
def tune_(
    kernel: str, grid: str | None, shapes: tuple[str, ...], dtype: str, causal: str | None, scored: Scored,
    fix: str | None, gpus: str | None, cluster: str | None, fresh: bool, prefix: Path | None, backend: str | None,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the fastest tile, which attention then takes.

    Of the spec's space: compile in parallel, drop what spills, check, time by successive halving. The best is kept, and
    `attention` takes it for problems of the class on that GPU, until the source changes. An interrupted search goes
    on where it stopped. --backend cpu is for trying this command: its times say nothing.

    --dask tcp://HOST:8786 names the scheduler of a Dask cluster whose workers have one GPU each (dask cuda worker) and
    the same state of this project. They compile and time; results are kept on this machine.
    """
    if not shapes and not grid:
        raise click.UsageError("name a problem: --shape B,H,S,D, or --grid")
    ordinals = numbers(gpus, "--gpus", "0,1") if gpus else ()
    if gpus and cluster:
        raise click.UsageError("--gpus counts this machine's, and --dask asks others: name one of the two")
    problems = [problem_of(s, dtype, causal, scored) for s in shapes]
    problems += benchmark.GRIDS[grid](dtype) if grid else []
    spec, fixed = registry.get(kernel), dict(Tile.parse(fix)) if fix else {}
    searches = []
    with executors.lab(spec, backend, ordinals, cluster) as lab:
        for number, problem in enumerate(problems):
            search = Search(spec, problem, lab, fixed, fresh)
            for _ in followed(search, lambda c: f"{c.state} {c.tile}"):
                pass
            searches.append(search)
            if not as_json:
                console = screen()
                console.print(tune_report.tune_table(search, console.width))
                for text in tune_report.verdict(search):
                    say(text)
            if prefix:
                for path in tune_report.draw(search, f"{prefix}-{number}" if len(problems) > 1 else prefix):
                    say(f"wrote {path}", stderr=True)
    if html:
        save_page(html, reports.tune(searches))
    if as_json:
        print_json([tune_report.as_json(search) for search in searches])
