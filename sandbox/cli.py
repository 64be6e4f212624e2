"""`python -m sandbox …`: parses and prints, nothing else.

Exit status: 0 when all is well, 1 when a result is wrong or something fails, 2 for a usage error or an unsupported
problem.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from . import arch as architectures
from . import bench, bench_report, choose, doctor, peers, plot, registry, report, run
from . import cache as disk_cache
from . import check as checking
from .cases import Case
from .errors import CompileError, SandboxError, SpecError, UnknownKernel, UnsupportedProblem
from .rows import read_rows, recorded
from .spec import ITEMSIZE, Kernel, Problem, Tile
from .timing import Limits

T = TypeVar("T")
_USAGE = (UnsupportedProblem, SpecError, UnknownKernel)


class _Commands(click.Group):
    """Turns this project's exceptions into one message and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SandboxError as error:
            _say(f"sandbox: {error}", stderr=True)
            ctx.exit(2 if isinstance(error, _USAGE) else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """A research sandbox for attention kernels in raw CUDA C++: edit a .cu, compile, launch, verify, measure."""


def main() -> None:
    """Entry point of `sandbox` and `python -m sandbox`."""
    faulthandler.enable()  # a kernel that leaves its tensors on the CPU backend does not die in silence
    cli(prog_name="sandbox")


# ---- options that several commands share

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_kernels = click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
_tile = click.option("--tile", help="Use this tile, as BLOCK_M=64,BLOCK_N=32.")
_backend = click.option("--backend", type=click.Choice(["cuda", "cpu"]), help="By default cuda if there is a GPU.")
_causal = click.option(
    "--causal",
    is_flag=False,
    flag_value="bottom-right",
    type=click.Choice(["bottom-right", "top-left"]),
    help="Mask the future; alone it means bottom-right.",
)
_dtype = click.option("--dtype", type=click.Choice(list(ITEMSIZE)), default="float16", show_default=True)


def _chosen(names: tuple[str, ...]) -> list[Kernel]:
    return [registry.get(name) for name in names] or list(registry.kernels().values())


def _forward(names: tuple[str, ...]) -> list[Kernel]:
    return [kernel for kernel in _chosen(names) if kernel.computes == "forward"]


def _parsed_tile(text: str | None) -> Tile | None:
    return Tile.parse(text) if text else None


# ---- printing


def _console() -> Console:
    # A table in a file or a pipe is as wide as it needs to be, unless somebody says how wide; on a screen it folds.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Console(highlight=False, width=None if known else 200)


def _say(text: str | Text, **where: Any) -> None:
    """Prose, unbroken: the terminal breaks it where it must, and a path can be copied."""
    Console(highlight=False, soft_wrap=True, **where).print(text, markup=False)


def _print_json(value: object) -> None:
    click.echo(json.dumps(_plain(value), indent=2))


def _plain(value: object) -> object:
    """As JSON has it: a NaN or an infinity, which it cannot write, becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _followed(results: Iterable[T], describe: Callable[[T], str], total: int | None = None) -> Iterator[T]:
    """The same results, with the latest one shown on the terminal while work goes on."""
    done = (BarColumn(), MofNCompleteColumn()) if total else (SpinnerColumn(), TextColumn("{task.completed} done"))
    console = Console(stderr=True)
    with Progress(
        *done, TimeElapsedColumn(), TextColumn("{task.description}"), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=total)
        for result in results:
            progress.update(task, advance=1, description=describe(result))
            yield result


def _exit_status(verdicts: Iterable[bool | None]) -> int:
    """1 when anything is wrong; 2 when nothing could be tried at all."""
    seen = set(verdicts)
    return 1 if False in seen else 0 if True in seen else 2


# ---- commands


@cli.command("list")
@_json
def list_(as_json: bool) -> None:
    """The ladder: kernel, rung, dtypes, head widths, architecture, idea."""
    kernels = registry.kernels().values()
    if as_json:
        fields = ("name", "computes", "rung", "dtypes", "max_D", "min_arch", "summary", "source")
        _print_json([{f: getattr(k, f) for f in fields} | {"tiles": [dict(t) for t in k.tiles]} for k in kernels])
    else:
        _console().print(report.ladder_table(kernels))


@cli.command("doctor")
@_json
def doctor_(as_json: bool) -> None:
    """What this machine has, what is missing, and how to get it."""
    findings = doctor.examine()
    if as_json:
        _print_json(findings)
    else:
        _console().print(report.doctor_table(findings))
    sys.exit(int(any(f.required and not f.ok for f in findings)))


@cli.command("compile")
@_kernels
@click.option("--arch", "archs", default=run.DEFAULT_ARCH, show_default=True, help="One or several, comma-separated.")
@click.option("-D", "--head-dim", "widths", default="64,128", show_default=True, help="Head widths, comma-separated.")
@_dtype
@_causal
@_tile
@_json
def compile_(
    kernels: tuple[str, ...], archs: str, widths: str, dtype: str, causal: str | None, tile: str | None, as_json: bool
) -> None:
    """Registers, spills, shared memory, occupancy, compile time of every tile. Needs no GPU."""
    if not all(width.strip().isdecimal() for width in widths.split(",")):
        raise click.BadParameter(f"{widths!r} is not a list of numbers, such as 64,128", param_hint="--head-dim")
    targets = [name.strip() for name in archs.split(",")]
    problems = [Problem(1, 1, 1, 1, int(D), dtype=dtype, causal=causal or False) for D in widths.split(",")]  # type: ignore[arg-type]
    wanted = _parsed_tile(tile)
    tried = [
        (kernel, target, problem, t)
        for kernel, target, problem in itertools.product(_chosen(kernels), targets, problems)
        for t in ((wanted,) if wanted else kernel.tiles)
    ]
    costs = list(_followed(itertools.starmap(_cost, tried), lambda c: f"{c.kernel} {c.problem}"))
    if as_json:
        _print_json(costs)
    else:
        if any(c.ok for c in costs):
            console = _console()
            console.print(report.compiled_table(costs, console.width))
        for message in _distinct(c.message for c in costs if c.ok is not True):
            _say(f"not compiled: {message}", stderr=True)
    sys.exit(_exit_status(c.ok for c in costs))


def _cost(kernel: Kernel, target: str, problem: Problem, tile: Tile) -> report.Cost:
    arch = architectures.parse(target)
    head = (kernel.name, str(problem).partition(" S1 ")[2], str(tile), target)
    try:
        if reason := kernel.refuses(problem, arch) or choose.refuses_tile(kernel, problem, tile, arch):
            raise UnsupportedProblem(reason)
        compiled = run.compile(kernel, problem.D, problem.dtype, problem.causal, target, tile)
    except UnsupportedProblem as refusal:
        return report.Cost(*head, ok=None, message=str(refusal))
    except CompileError as error:
        return report.Cost(*head, ok=False, message=str(error))
    x, y, z = kernel.block(tile)
    smem, resources = kernel.smem_bytes(problem, tile), compiled.resources
    occupancy = architectures.occupancy(arch, x * y * z, resources.registers, smem + resources.smem_static)
    return report.Cost(*head, True, resources, smem, occupancy, compiled.seconds, compiled.cached)


def _distinct(messages: Iterable[str]) -> Iterable[str]:
    """Of compilers' messages that differ in nothing but the options, the first."""
    return {message.partition("\n\noptions: ")[0]: message for message in reversed([*messages])}.values()


@cli.command("run")
@_kernels
@click.option("--shape", help="B,H,S,D or B,H,Sq,Sk,D instead of the named problems; grouped heads as B,H/Hk,S,D.")
@_dtype
@_causal
@_tile
@_backend
@_json
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
    chosen = _forward(kernels)
    results = list(_followed(checking.run_cases(chosen, device, _parsed_tile(tile), cases), lambda r: r.case))
    if as_json:
        _print_json(results)
    else:
        console = _console()
        # A kernel that nobody asked for by name, and that does not take a named problem, gets a note and no line.
        shown = [r for r in results if r.ok is not None or kernels or shape]
        console.print(report.results_table(shown, console.width))
        for text in report.failures(results):
            _say(text)
    sys.exit(_exit_status(r.ok for r in results))


@cli.command("check")
@_kernels
@_tile
@_backend
@_json
def check_(kernels: tuple[str, ...], tile: str | None, backend: str | None, as_json: bool) -> None:
    """The correctness sweep: ragged lengths, masks, dtypes, layouts, and inputs that point at a fault."""
    device = checking.pick_device(backend)
    chosen = _forward(kernels)
    results = list(_followed(checking.sweep(chosen, device, _parsed_tile(tile)), lambda r: f"{r.kernel} {r.case}"))
    if as_json:
        _print_json(results)
    else:
        for text in report.failures(r for r in results if r.ok is False):
            _say(text)
        counts = {state: sum(r.ok is state for r in results) for state in (True, False, None)}
        _say(f"{counts[True]} ok, {counts[False]} wrong, {counts[None]} not taken, on {device[0]}")
    sys.exit(_exit_status(r.ok for r in results))


@cli.command("bench")
@_kernels
@click.option("--grid", type=click.Choice(list(bench.GRIDS)), help="Named problems; gpt2 where no --shape is given.")
@click.option(
    "--shape", "shapes", multiple=True, help="B,H,S,D or B,H,Sq,Sk,D; grouped heads as B,H/Hk,S,D. Repeatable."
)
@_dtype
@_causal
@click.option("--tile", "tiles", multiple=True, help="Use this tile, as BLOCK_M=64,BLOCK_N=32. Repeatable.")
@click.option(
    "--peers", "names", default=",".join(peers.DEFAULT), show_default=True, help="Also flex, a file, or none."
)
@click.option("--against", help="The peer that kernels are compared with; by default the first that has a time.")
@click.option("--mode", type=click.Choice(list(bench.MODES)), default="events", show_default=True,
              help="Single launches after an L2 flush, or CUDA graphs, without host time or flush.")  # fmt: skip
@click.option("--seconds", default=0.5, show_default=True, help="GPU time for each contender and problem, at most.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Append rows to this file, JSON lines.")
@click.option("--resume", is_flag=True, help="Skip what --out has already, of the same commit, device and mode.")
@click.option(
    "--show", type=click.Path(path_type=Path, exists=True), help="Measure nothing: show the rows of this file."
)
@click.option("--plot", "prefix", type=click.Path(path_type=Path), help="Draw TFLOP/s to PREFIX.png and PREFIX.svg.")
@_json
def bench_(
    kernels: tuple[str, ...], grid: str | None, shapes: tuple[str, ...], dtype: str, causal: str | None,
    tiles: tuple[str, ...], names: str, against: str | None, mode: str, seconds: float, out: Path | None, resume: bool,
    show: Path | None, prefix: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Time kernels beside peers, correct ones only: TFLOP/s, % of the measured peak, ratios. Needs a GPU and PyTorch.

    --causal goes with --shape; a grid has its own masks.
    """
    if resume and not out:
        raise click.UsageError("--resume needs --out, the file to go on with")
    rows, stopped = read_rows(show) if show else [], None
    if not show:
        problems = [Problem.from_shape(s, dtype=dtype, causal=causal or False) for s in shapes]
        problems += bench.GRIDS[grid or "gpt2"](dtype) if grid or not shapes else []
        chosen = [k for k in _chosen(kernels) if kernels or k.computes == "forward"]
        parsed = [Tile.parse(tile) for tile in tiles]
        others = [peer for name in names.split(",") if name != "none" for peer in peers.get(name.strip())]
        if against and against not in (peer.name for peer in others):
            raise click.BadParameter(f"{against} is not among the peers", param_hint="--against")
        if resume and out:
            rows = bench.stored(read_rows(out), problems, mode)
            problems = bench.unmeasured(rows, problems, [*bench.ours(chosen, parsed), *others])
        found = bench.run(chosen, problems, others, tiles=parsed, mode=mode, limits=Limits(seconds=seconds))
        total = len(problems) * (len(chosen) * max(1, len(parsed)) + len(others))
        try:
            rows.extend(_followed(recorded(found, out), lambda r: f"S{r['Sq']} D{r['D']} {r['contender']}", total))
        except (KeyboardInterrupt, SandboxError) as error:
            stopped = error
    _show_rows(rows, against, prefix, as_json)
    if stopped:
        _say(f"interrupted: {len(rows)} rows are kept{f' in {out}' if out else ', here alone'}", stderr=True)
        if isinstance(stopped, SandboxError):
            raise stopped
    ours = [r["ok"] for r in rows if r["kind"] == "kernel"] or [r["ok"] for r in rows]
    wrong = stopped or any(r["ok"] is False for r in rows)
    sys.exit(0 if show else 1 if wrong else _exit_status(ours))


def _show_rows(rows: list[dict[str, Any]], against: str | None, prefix: Path | None, as_json: bool) -> None:
    if as_json:
        _print_json(rows)
    elif rows:
        console, peer = _console(), bench_report.pick_peer(rows, against)
        console.print(bench_report.bench_table(rows, peer, console.width))
        for text in bench_report.notes(rows, peer):
            _say(text)
    if prefix and rows:
        for path in plot.draw(rows, prefix):
            _say(f"wrote {path}", stderr=True)


@cli.group("cache")
def cache_() -> None:
    """The compiled objects kept on disk."""


@cache_.command("ls")
@_json
def cache_ls(as_json: bool) -> None:
    """Every entry: what, size, age."""
    rows = [
        {"key": entry.key, "name": entry.meta.get("name", ""), "bytes": entry.nbytes, "made": entry.made}
        for entry in disk_cache.entries()
    ]
    if as_json:
        _print_json({"directory": disk_cache.directory(), "entries": rows})
        return
    for row in sorted(rows, key=lambda row: row["made"]):
        click.echo(f"{row['key'][:12]}  {row['bytes'] / 1024:8.1f} KiB  {_age(row['made']):>8}  {row['name']}")
    click.echo(f"{len(rows)} entries, {sum(row['bytes'] for row in rows) / 2**20:.1f} MiB in {disk_cache.directory()}")


def _age(made: float) -> str:
    seconds = max(0.0, time.time() - made)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@cache_.command("clear")
@_json
def cache_clear(as_json: bool) -> None:
    """Remove every entry."""
    removed = disk_cache.clear()
    if as_json:
        _print_json({"directory": disk_cache.directory(), "removed": removed})
    else:
        click.echo(f"removed {removed} entries from {disk_cache.directory()}")
