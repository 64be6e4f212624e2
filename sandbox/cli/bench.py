"""`bench`: time kernels and peers."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..bench import benchmark, operations, peers, plot, sampled_shapes
from ..bench import report as bench_report
from ..bench.peers import Contender
from ..bench.rows import problem_of as problem_of_row
from ..bench.rows import read_rows, recorded, stored_rows
from ..bench.timing import Limits
from ..core.errors import SandboxError, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine import choose, pipeline
from ..pages import reports
from ..verify.check import pick_device
from ..verify.suite import suite_of
from .group import cli
from .options import (
    SCORE_NAMES,
    OutputPath,
    Scored,
    Seconds,
    alone,
    causal_option,
    chosen_kernels,
    dtype_option,
    excluding,
    given_without,
    html_option,
    json_option,
    kernels_argument,
    on_command_line,
    problem_for,
    score_options,
    shape_option,
)
from .output import exit_status, followed, print_json, save_page, say, screen, show_table


@cli.command("bench")
@kernels_argument
@click.option(
    "--grid",
    type=click.Choice(list(benchmark.GRIDS)),
    help="Set of problems. paper: FlashAttention's benchmark (16k tokens, hidden size 2048, S 512 … 16k); gpt2: GPT-2 "
    "small in training; tutorial: Triton's; scores: one score option at a time; dropout: 0.1 and none; ragged: "
    "sequences of different lengths; decode: one query or a few; real: layers of published models; latent: latent "
    "attention; serving: batches of an inference server. Default without --shape: gpt2.",
)
@click.option(
    "--sample",
    type=click.IntRange(0),
    metavar="N",
    help=f"Number of sampled problems of the grids {', '.join(sampled_shapes.SAMPLED)}. 0: the fixed problems of "
    f"these grids. Default: {sampled_shapes.DEFAULT_COUNT}.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Seed of sampled problems and of the inputs. Default: 0; for sampled problems a random seed, which is printed "
    "and stored with the results.",
)
@shape_option("Repeatable.", multiple=True)
@dtype_option
@causal_option
@score_options
@click.option(
    "--tile",
    "tiles",
    multiple=True,
    help="Tile configuration: all its numbers, such as BLOCK_M=64,BLOCK_N=32 for fwd_minimal. Repeatable.",
)
@click.option(
    "--peers",
    "names",
    default=",".join(peers.DEFAULT),
    show_default=True,
    help="Other implementations to time (peers). eager: unfused PyTorch operations. Also: flex, varlen, flash-mla, "
    "none, or a Python file that defines peers, such as sandbox/bench/flash_attention_peers.py "
    "(FlashAttention-2, -3 and -4). A custom operation has only the peers of its spec; by default all of them.",
)
@click.option("--backward", is_flag=True, help="Time the backward; that of the peers is timed through autograd.")
@click.option("--against", help="Peer for the ratio column. Default: the first one with a time.")
@click.option("--mode", type=click.Choice(list(benchmark.MODES)), default="events", show_default=True,
              help="events: single launches after an L2 flush. graph: CUDA graphs, no flush.")  # fmt: skip
@click.option(
    "--seconds",
    type=Seconds(),
    default=0.5,
    show_default=True,
    help="Stop sampling after this GPU time per implementation and problem, but not before 3 samples. A launch of "
    "0.5 s or longer is sampled once.",
)
@click.option("--out", type=OutputPath(dir_okay=False), metavar="FILE", help="Append the rows to this JSON-lines file.")
@click.option(
    "--resume",
    is_flag=True,
    help="Skip problems for which the file of --out has rows of all contenders with the same commit, device, mode and "
    "seed.",
)
@click.option(
    "--show",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Show the rows of this file; measure nothing.",
)
@click.option(
    "--plot", "prefix", type=OutputPath(), metavar="PREFIX", help="Plot the speed to PREFIX.png and PREFIX.svg."
)
@html_option
@json_option
def bench_(
    kernels: tuple[str, ...], grid: str | None, sample: int | None, seed: int | None, shapes: tuple[str, ...],
    dtype: str, causal: str | None, scored: Scored, tiles: tuple[str, ...], names: str, backward: bool,
    against: str | None, mode: str, seconds: float, out: Path | None, resume: bool, show: Path | None,
    prefix: Path | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time kernels and other implementations (peers).

    Prints TFLOP/s, also in percent of the speed of a matrix product in the same run, and the ratio to a peer. For
    decoding and other memory-bound problems: GB/s, also in percent of the speed of reading as many bytes (custom
    operations: of a copy). A kernel with a wrong result is not timed. Needs a GPU and PyTorch. The options from
    --causal to --invariant need --shape: the problems of a grid have their own.
    """
    if resume and not out:
        raise click.UsageError("--resume needs --out, the file with the earlier rows")
    if not shapes:
        given_without("--shape", "causal", *SCORE_NAMES)
    computes = "backward" if backward else "forward"
    if show:
        alone("--show", "show", "backward", "against", "prefix", "html", "as_json")
    rows, stopped, custom = stored_rows(show, computes) if show else [], None, False
    if not show:
        chosen = [k for k in chosen_kernels(kernels) if kernels or k.computes == computes]
        parsed = [Tile.parse(tile) for tile in tiles]
        others: list[Contender] = []
        labels: dict[str, Any] = {}
        if custom := bool(chosen and chosen[0].custom):
            excluding(f"{chosen[0].name}, which computes no attention", "grid", "sample", "backward")
            problems = _operation_problems(chosen, shapes, dtype, causal, scored)
            contenders = operations.contenders_of(chosen, parsed, _operation_peers(names))
            computes = chosen[0].operation.name
        else:
            problems = [problem_for(chosen, s, dtype, causal, scored) for s in shapes]
            if name := grid or (None if shapes else "gpt2"):
                chosen_grid = _grid(name, sample, seed, resume)
                problems += chosen_grid.problems(dtype)
                seed, labels = chosen_grid.seed, chosen_grid.labels
            elif sample is not None:
                raise click.UsageError(f"--sample {sample} needs --grid {' or '.join(sampled_shapes.SAMPLED)}")
            others = [peer for name in names.split(",") if name != "none" for peer in peers.get(name.strip())]
            contenders = [*benchmark.kernel_contenders(chosen, parsed), *others]
        known = [c.name for c in contenders if not c.kernel]
        if against and against not in known:
            names = ", ".join(known) or "none"
            raise click.BadParameter(f"{against} is not among the peers of this run: {names}", param_hint="--against")
        if resume and out:
            rows = benchmark.matching_rows(read_rows(out), problems, mode, seed or 0, computes)
            problems = benchmark.unmeasured(rows, problems, contenders)
        how: dict[str, Any] = {"mode": mode, "limits": Limits(seconds=seconds), "seed": seed or 0}
        if custom:
            found = operations.run(chosen, problems, contenders, **how)
        else:
            found = benchmark.run(chosen, problems, others, tiles=parsed, computes=computes, labels=labels, **how)
        total = len(problems) * len(contenders)
        try:
            rows.extend(followed(recorded(found, out), lambda r: f"{problem_of_row(r)} {r['contender']}", total))
        except (KeyboardInterrupt, SandboxError) as error:
            stopped = error
    _show_rows(rows, against, prefix, as_json, None if show or custom else partial(_chosen, computes))
    if html and rows:
        save_page(html, reports.bench(rows, against))
    if stopped:
        say(f"interrupted after {len(rows)} rows{f', saved in {out}' if out else ', not saved'}", stderr=True)
        if isinstance(stopped, SandboxError):
            raise stopped
    ours = [r["ok"] for r in rows if r["kind"] == "kernel"] or [r["ok"] for r in rows]
    wrong = stopped or any(r["ok"] is False for r in rows)
    sys.exit(0 if show else 1 if wrong else exit_status(ours))


@dataclass(frozen=True)
class _Grid:
    """A grid of `bench`: its fixed problems, or `count` sampled ones."""

    name: str
    count: int
    seed: int

    def problems(self, dtype: str) -> list[Problem]:
        if not self.count:
            return benchmark.GRIDS[self.name](dtype)
        return sampled_shapes.sampled(self.name, self.count, self.seed, dtype)

    @property
    def labels(self) -> dict[str, Any]:
        """The fields of its rows from which, with the seed, the problems can be drawn again."""
        return {"grid": self.name, "sampled": self.count}


def _grid(name: str, sample: int | None, seed: int | None, resume: bool) -> _Grid:
    """The grid of --grid, --sample and --seed. Without --seed, sampled problems are others in each run."""
    if name not in sampled_shapes.SAMPLED:
        if sample:
            known = ", ".join(sampled_shapes.SAMPLED)
            raise click.UsageError(f"--sample {sample} is for the grids {known}: the problems of {name} are fixed")
        return _Grid(name, 0, seed or 0)
    count = sampled_shapes.DEFAULT_COUNT if sample is None else sample
    if count and seed is None and resume:
        raise click.UsageError(f"--resume needs the --seed of the earlier run: --grid {name} samples its problems")
    grid = _Grid(name, count, secrets.randbelow(2**31) if count and seed is None else seed or 0)
    if count:
        say(f"grid {name}: {count} sampled problems, --seed {grid.seed}", stderr=True)
    return grid


def _operation_problems(
    kernels: Sequence[Kernel], shapes: Sequence[str], dtype: str, causal: str | None, scored: Scored
) -> list[Any]:
    """The problems of an operation: those of --shape, or of its spec."""
    if shapes:
        return [problem_for(kernels, shape, dtype, causal, scored) for shape in shapes]
    given_without("--shape", "dtype")
    return [case.problem for case in suite_of(kernels[0]).named_cases(kernels[0], small=False)]


def _operation_peers(names: str) -> list[str] | None:
    """The peers that --peers names; None if it is not on the command line."""
    return [name.strip() for name in names.split(",") if name != "none"] if on_command_line("names") else None


def _chosen(computes: str, problem: Problem) -> str:
    """Name of the kernel that `attention` chooses on this GPU; empty if there is none."""
    try:
        return choose.choose_kernel(problem, computes, pipeline.arch_of(pick_device(None))).name
    except UnsupportedProblem:
        return ""


def _show_rows(
    rows: list[dict[str, Any]], against: str | None, prefix: Path | None, as_json: bool,
    chosen: Callable[[Problem], str] | None,
) -> None:  # fmt: skip
    """chosen: for rows of this run (bench_report.choices)."""
    if as_json:
        print_json(rows)
    elif rows:
        peer = bench_report.pick_peer(rows, against)
        show_table(bench_report.bench_table(rows, peer, screen().width))
        for text in (*(bench_report.choices(rows, chosen) if chosen else ()), *bench_report.notes(rows, peer)):
            say(text)
    if prefix and rows:
        for path in plot.draw(rows, prefix):
            say(f"wrote {path}", stderr=True)
