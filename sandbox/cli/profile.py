"""`profile`: one launch under Nsight Compute or Nsight Systems."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..core import registry
from ..core.problem import Problem
from ..engine import pipeline
from ..engine.choose import choose_tile
from ..launch import driver
from ..pages import reports
from ..profile import plot as profile_plot
from ..profile import profiler
from ..profile import report as profile_report
from ..profile.profiler import Profile, Subject
from ..toolchain import arch as architectures
from .group import cli
from .options import (
    OutputPath,
    Scored,
    alone,
    causal_option,
    dtype_option,
    entry_argument,
    excluding,
    html_option,
    json_option,
    parsed_tile,
    problem_or_default,
    score_options,
    shape_option,
    tile_option,
)
from .output import print_json, save_page, say, screen


@cli.command("profile")
@entry_argument
@click.option("--tool", type=click.Choice(profiler.TOOLS), default="ncu", show_default=True,
              help="ncu: Nsight Compute, metrics of one launch. nsys: Nsight Systems, a timeline.")  # fmt: skip
@shape_option(gpu_only=True, default="1,12,4096,64", show_default=True)
@dtype_option
@causal_option
@score_options
@tile_option("Default: the tuned tile for this GPU, else chosen from the kernel's spec.")
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    help="Compare two versions: each a tile, a git revision, history:N (a version that watch stored) or a .cu file.",
)
@click.option(
    "--out",
    type=OutputPath(),
    metavar="PREFIX",
    help="Prefix of the output files. Default: a name in .sandbox/profiles.",
)
@click.option("--show", "shown", type=click.Path(path_type=Path), metavar="PREFIX", multiple=True,
              help="Show ncu's stored profile with this prefix; measure nothing. Given twice: compare.")  # fmt: skip
@click.option(
    "--plot", "prefix", type=OutputPath(), metavar="PREFIX", help="Plot the roofline to PREFIX.png and PREFIX.svg."
)
@click.option("--dry-run", is_flag=True, help="Print the profiler's command line; run nothing.")
@html_option
@json_option
def profile_(
    kernel: str, tool: str, shape: str, dtype: str, causal: str | None, scored: Scored, tile: str | None,
    compare: tuple[str, str] | None, out: Path | None, shown: tuple[Path, ...], prefix: Path | None, dry_run: bool,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Profile one launch with Nsight.

    Prints time, tensor-core use, memory traffic compared with the IO model, and stalls by source line. Stores the
    Nsight report. For ncu it also stores the report's pages `raw` and `source` as text; --show reads them without
    Nsight and without a GPU.
    """
    spec = registry.entry_owner(kernel)  # raises UnknownKernel
    if shown:
        alone("--show", "kernel", "shown", "prefix", "html", "as_json")
    if compare:
        excluding("--compare, whose A and B are tiles or versions", "tile")
    if dry_run or tool == "nsys":
        excluding("--dry-run" if dry_run else "--tool nsys", "prefix", "html")
    prefixes, commands = list(shown), []
    if not shown:
        problem = problem_or_default(spec, shape, dtype, causal, scored, ("cuda", 0))
        for reference in compare or (tile,):
            version = reference if reference and "=" not in reference else ""
            subject = _subject(kernel, problem, None if version else reference, version, dry_run)
            place = _prefix(out, subject, len(prefixes) if compare else None)
            if dry_run:
                commands.append(profiler.command(tool, subject, place))
            else:
                profiler.collect(tool, subject, place)
            prefixes.append(place)
    if dry_run:
        if as_json:
            print_json({"commands": commands})
        for command in () if as_json else commands:
            click.echo(shlex.join(command))
        return
    if tool == "nsys" and not shown:
        for place in prefixes:
            _show_nsys(place, as_json)
        return
    profiles = [profiler.read(place) for place in prefixes]
    _show(profiles, prefix, as_json)
    if html:
        save_page(html, reports.profile(profiles, profiler.executed(prefixes[0]) if len(prefixes) == 1 else None))
    if not shown:
        say(f"wrote {', '.join(f'{place}.ncu-rep' for place in prefixes)}", stderr=True)


def _subject(entry: str, problem: Problem, tile: str | None, version: str, dry_run: bool) -> Subject:
    wanted = parsed_tile(tile)
    if dry_run and not driver.available():
        arch = architectures.parse(pipeline.DEFAULT_ARCH)
        chosen = choose_tile(registry.entry_owner(entry), problem, arch, wanted)
        return Subject(entry, problem, chosen, pipeline.DEFAULT_ARCH, version)
    return profiler.subject(entry, problem, wanted, version)


def _prefix(out: Path | None, subject: Subject, number: int | None) -> Path:
    name = f"{subject.entry}-{subject.problem}".replace(" ", "_").replace("/", "_")
    base = out or registry.FOLDER.parent / ".sandbox" / "profiles" / name
    return base if number is None else base.with_name(f"{base.name}-{'ab'[number]}")


def _show_nsys(place: Path, as_json: bool) -> None:
    (text,) = (x.decode() for x in profiler.stored(place, "kernels.csv"))
    if as_json:
        print_json({"report": f"{place}.nsys-rep", "kernels": text.splitlines()})
    else:
        click.echo(text)


def _show(profiles: list[Profile], prefix: Path | None, as_json: bool) -> None:
    if as_json:
        print_json([profile_report.as_json(p) for p in profiles])
    else:
        console = screen()
        if len(profiles) == 2:
            console.print(profile_report.comparison(*profiles))
        else:
            for p in profiles:
                for part in profile_report.page(p, console.width):
                    console.print(part)
    if prefix:
        for path in profile_plot.draw(profiles, prefix):
            say(f"wrote {path}", stderr=True)
