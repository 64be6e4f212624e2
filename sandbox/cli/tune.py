"""`tune`: search for the fastest tile."""

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
    SCORE_NAMES,
    OutputPath,
    Scored,
    backend_option,
    causal_option,
    dtype_option,
    excluding,
    given_without,
    html_option,
    json_option,
    kernel_argument,
    numbers,
    problem_for,
    score_options,
    shape_option,
)
from .output import followed, print_json, save_page, say, screen


@cli.command("tune")
@kernel_argument
@click.option("--grid", type=click.Choice(list(benchmark.GRIDS)), help="Named set of problems; one search for each.")
@shape_option("Repeatable.", multiple=True)
@dtype_option
@causal_option
@score_options
@click.option("--fix", help="Numbers of the tile to keep fixed, such as BLOCK_M=64,WARPS=4.")
@click.option("--gpus", help="GPUs to use, such as 0,1. Default: all.")
@click.option("--dask", "cluster", metavar="ADDRESS", help="Scheduler of a Dask cluster whose workers run the search.")
@click.option("--fresh", is_flag=True, help="Ignore the measurements of earlier searches.")
@click.option(
    "--plot", "prefix", type=OutputPath(), metavar="PREFIX", help="Plot the search space to PREFIX.png and PREFIX.svg."
)
@backend_option("GPU, or emulation on the host, which only tests this command. Default: cuda.")
@html_option
@json_option
def tune_(
    kernel: str, grid: str | None, shapes: tuple[str, ...], dtype: str, causal: str | None, scored: Scored,
    fix: str | None, gpus: str | None, cluster: str | None, fresh: bool, prefix: Path | None, backend: str | None,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Find and store the fastest tile of a kernel.

    Candidates come from the spec's search space. They are compiled in parallel; those that spill are dropped; the rest
    are checked and timed by successive halving. `attention` uses the best tile for similar problems (same head
    dimension, dtype and causal, and the same sizes when rounded up to powers of two) on the same GPU model until the
    kernel's source changes. An interrupted search resumes. Use --backend cpu only to test this command: its times are
    meaningless.

    --dask tcp://HOST:8786 is the scheduler of a Dask cluster. Its workers (dask cuda worker) have one GPU each and the
    same version of this project. They compile and time; results are stored on this machine.
    """
    if not shapes and not grid:
        raise click.UsageError("tune needs a problem: pass --shape B,H,S,D (of a custom operation: its dims) or --grid")
    if not shapes:
        given_without("--shape", "causal", *SCORE_NAMES)
    if backend == "cpu":
        excluding("--backend cpu", "gpus")
    ordinals = numbers(gpus, "--gpus", "0,1") if gpus else ()
    if gpus and cluster:
        raise click.UsageError("--gpus and --dask cannot be combined: one selects local GPUs, the other remote ones")
    spec, fixed = registry.get(kernel), dict(Tile.parse(fix)) if fix else {}
    if grid and spec.custom:
        raise click.UsageError(f"--grid has problems of attention: {spec.name} computes another operation")
    problems = [problem_for([spec], s, dtype, causal, scored) for s in shapes]
    problems += benchmark.GRIDS[grid](dtype) if grid else []
    searches = []
    with executors.make_executor(spec, backend, ordinals, cluster) as executor:
        for number, problem in enumerate(problems):
            search = Search(spec, problem, executor, fixed, fresh)
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
