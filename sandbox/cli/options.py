"""Options and arguments that several commands share, and what they stand for."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ..core import registry
from ..core.dtypes import ITEMSIZE
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.score import Score
from ..core.tile import Tile

_F = TypeVar("_F", bound=Callable[..., Any])
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


class OutputPath(click.Path):
    """A file, or a prefix of files, that will be written. Checked before any work is done: its folder can be made."""

    def __init__(self, **more: Any):
        super().__init__(path_type=Path, **more)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = cast(Path, super().convert(value, param, ctx))
        folder = next((parent for parent in path.absolute().parents if parent.exists()), None)
        if folder and not folder.is_dir():
            self.fail(f"{path} cannot be written: {folder} is a file, not a folder", param, ctx)
        return path


class Seconds(click.FloatRange):
    """A time limit, which may not be NaN either: that is in no range, and passes the comparisons of one."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0, max=1e6, min_open=True)  # poll() takes milliseconds of 32 bits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds, 0 < seconds <= {self.max:g}", param, ctx)
        return seconds


html_option = click.option(
    "--html", type=OutputPath(dir_okay=False), metavar="FILE", help="Write a page to look at, one file."
)


def kernel_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in registry.kernels() if name.startswith(incomplete)]


def entry_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The same with the entries that kernels launch later."""
    entries = (entry.name for kernel in registry.kernels().values() for entry in kernel.entries)
    return [name for name in entries if name.startswith(incomplete)]


kernels_argument = click.argument("kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=kernel_names)
kernel_argument = click.argument("kernel", shell_complete=kernel_names)
entry_argument = click.argument("kernel", shell_complete=entry_names)
tile_option = click.option("--tile", help="Use this tile, as BLOCK_M=64,BLOCK_N=32.")
backend_option = click.option(
    "--backend", type=click.Choice(["cuda", "cpu"]), help="By default cuda if there is a GPU."
)


class OptionalValue(click.Option):
    """A choice that stands for `flag_value` where none of its values follows: `--causal fwd_mma` names a kernel."""

    type: click.Choice[str]


causal_option = click.option(
    "--causal",
    cls=OptionalValue,
    is_flag=False,
    flag_value="bottom-right",
    type=click.Choice(["bottom-right", "top-left"]),
    help="Mask the future; alone it means bottom-right.",
)
dtype_option = click.option("--dtype", type=click.Choice(list(ITEMSIZE)), default="float16", show_default=True)


def shape_option(said: str = "", **more: Any) -> Callable[[_F], _F]:
    """How every command is told a problem; `said` is what this one makes of it. `multiple=True` gives `shapes`."""
    name = "shapes" if more.get("multiple") else "shape"
    form = "B,H,S,D or B,H,Sq,Sk,D; grouped heads as B,H/Hk,S,D."
    return click.option("--shape", name, help=f"{form} {said}".strip(), **more)


_SCORE = (
    click.option("--window", metavar="L,R", help="Keys to the left, to the right of a query's place; none: no bound."),
    click.option("--softcap", type=float, default=0.0, help="x becomes SOFTCAP tanh(x / SOFTCAP)."),
    click.option("--alibi", is_flag=True, help="Slopes, one for each head."),
    click.option("--bias", metavar="SHAPE", help="Of this shape, as 1,H,Sq,Sk or 1,1,512,512."),
    click.option("--mask", metavar="SHAPE", help="Of this shape, likewise."),
    click.option("--sink", is_flag=True, help="A sink for each head."),
    click.option("--key-lengths", is_flag=True, help="So many keys of each batch entry count."),
    click.option("--lengths", help="A ragged batch: 64,128x256,… rows (queries x keys), instead of B and S."),
    click.option("--page-size", type=int, default=0, metavar="ROWS", help="Keys lie in pages of so many rows."),
    click.option("--score", metavar="FILE.py", help="A file that defines `score`, a sandbox.Score."),
    click.option("--dropout", type=float, default=0.0, metavar="P", help="The probability that an element is dropped."),
)
Scored = Mapping[str, Any]  # the options of a score, as they were given
SCORE_NAMES = (
    *("window", "softcap", "alibi", "bias", "mask", "sink", "key-lengths", "lengths", "page-size", "score", "dropout"),
)


def score_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a score is beyond --causal: one argument `scored` of the command, for `problem_of`."""

    @functools.wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        scored = {name: given.pop(name.replace("-", "_")) for name in SCORE_NAMES}
        return command(*args, scored=scored, **given)

    for option in reversed(_SCORE):
        gathered = option(gathered)
    return gathered


def problem_of(shape: str, dtype: str, causal: str | None, scored: Scored) -> Problem:
    """The problem that --shape, --dtype, --causal and the options of a score pose."""
    options = {name.replace("-", "_"): value for name, value in scored.items() if value}
    if "window" in options:
        options["window"] = tuple(_bound(options["window"], text) for text in options["window"].split(","))
    file = options.pop("score", None)
    problem = Problem.from_shape(shape, dtype=dtype, causal=causal or False, **options)
    return dataclasses.replace(problem, score=Score.from_file(file, problem)) if file else problem


def _bound(window: str, text: str) -> int | None:
    if text.strip() in ("", "none"):
        return None
    if not text.strip().isdecimal():
        raise click.BadParameter(
            f"{window} must be two numbers, such as 1024,0, or none for no bound", param_hint="--window"
        )
    return int(text)


def chosen_kernels(names: tuple[str, ...]) -> list[Kernel]:
    return [registry.get(name) for name in names] or list(registry.kernels().values())


def parsed_tile(text: str | None) -> Tile | None:
    return Tile.parse(text) if text else None


def numbers(text: str, option: str, example: str) -> list[int]:
    """Whole numbers with commas between, of `option`. Raises BadParameter."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as {example}", param_hint=option)
    return [int(part) for part in text.split(",")]


def given_without(needed: str, *names: str) -> None:
    """Raises UsageError when one of these options stands on the command line without the one that it goes with."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name.replace("-", "_")) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} goes with {needed}")
