"""Options and arguments shared by several commands, and their conversion to problems, kernels and tiles."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from ..core import registry
from ..core.dtypes import FLOAT8, ITEMSIZE, own_name
from ..core.kernel import Kernel
from ..core.options import SHOWN
from ..core.problem import Problem
from ..core.score import Score
from ..core.tile import Tile
from ..launch.dlpack import Device
from ..verify.suite import suite_of

_F = TypeVar("_F", bound=Callable[..., Any])
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


class OutputPath(click.Path):
    """An output file, or a prefix of output files. Checked before any work starts: its folder can be created."""

    def __init__(self, **more: Any):
        super().__init__(path_type=Path, **more)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = cast(Path, super().convert(value, param, ctx))
        folder = next((parent for parent in path.absolute().parents if parent.exists()), None)
        if folder and not folder.is_dir():
            self.fail(f"{path} cannot be written: {folder} is a file, not a folder", param, ctx)
        return path


class Seconds(click.FloatRange):
    """A time limit in seconds. NaN is rejected separately, because it passes the comparisons of FloatRange."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0, max=1e6, min_open=True)  # poll() takes milliseconds of 32 bits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value} is not a number of seconds, 0 < seconds <= {self.max:g}", param, ctx)
        return seconds


html_option = click.option(
    "--html", type=OutputPath(dir_okay=False), metavar="FILE", help="Write the result as a self-contained HTML file."
)


def kernel_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Kernel names for shell completion."""
    return [name for name in registry.kernels() if name.startswith(incomplete)]


def entry_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Kernel names and the names of their later entry points, for shell completion."""
    entries = (entry.name for kernel in registry.kernels().values() for entry in kernel.entries)
    return [name for name in entries if name.startswith(incomplete)]


def _named(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Kernel names; the path of a `.cu` outside of the project is replaced by the kernel's name."""
    if isinstance(value, tuple):
        return tuple(_named(ctx, param, one) for one in value)
    if value is None or not value.endswith(".cu"):
        return value
    path = Path(value).resolve()
    if not path.is_file() or not path.with_suffix(".py").is_file():
        missing = path if not path.is_file() else path.with_suffix(".py")
        raise click.BadParameter(f"{missing} does not exist: a kernel is a .cu with its spec, a .py, beside it")
    registry.add(path.parent)
    own = [name for name, kernel in registry.kernels().items() if kernel.source == path]
    return path.stem if path.stem in own or not own else own[0]


kernels_argument = click.argument(
    "kernels", nargs=-1, metavar="[KERNEL]...", shell_complete=kernel_names, callback=_named
)
kernel_argument = click.argument("kernel", shell_complete=kernel_names, callback=_named)
optional_kernel_argument = click.argument("kernel", required=False, shell_complete=kernel_names, callback=_named)
entry_argument = click.argument("kernel", shell_complete=entry_names, callback=_named)


def tile_option(said: str = "Default: chosen from the kernel's spec.") -> Callable[[_F], _F]:
    """The option --tile, with `said` added to its help."""
    numbers = "all its numbers, such as BLOCK_M=64,BLOCK_N=32 for fwd_minimal (`compile` prints those of each kernel)"
    return click.option("--tile", help=f"Tile configuration: {numbers}. {said}")


def timeout_option(seconds: float, said: str) -> Callable[[_F], _F]:
    """The option --timeout with the default `seconds`, and the help `said`."""
    return click.option("--timeout", type=Seconds(), default=seconds, show_default=True, help=said)


def backend_option(
    said: str = "GPU, or emulation on the host. Default: cuda if a GPU is present, else cpu.",
) -> Callable[[_F], _F]:
    """The option --backend, with the help `said`."""
    return click.option("--backend", type=click.Choice(["cuda", "cpu"]), help=said)


class Dtype(click.Choice[str]):
    """A dtype of q, k and v. PyTorch's name float8_e4m3fn is accepted."""

    def __init__(self) -> None:
        super().__init__(list(ITEMSIZE))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(own_name(value), param, ctx)


class OptionalValue(click.Option):
    """A choice whose value may be omitted. `--causal fwd_mma` means `--causal=flag_value` and the kernel fwd_mma."""

    type: click.Choice[str]


causal_option = click.option(
    "--causal",
    cls=OptionalValue,
    is_flag=False,
    flag_value="bottom-right",
    type=click.Choice(["bottom-right", "top-left"]),
    help="Causal mask, aligned to this corner of the score matrix. Without a value: bottom-right.",
)
dtype_option = click.option(
    "--dtype",
    type=Dtype(),
    default="float16",
    show_default=True,
    help="dtype of q, k and v; float8_e4m3 is PyTorch's float8_e4m3fn.",
)


def shape_option(said: str = "", *, operations: bool = True, gpu_only: bool = False, **more: Any) -> Callable[[_F], _F]:
    """The option --shape, with `said` added to its help. With `multiple=True` the argument is called `shapes`.
    operations: whether the command accepts a custom operation (VOCABULARY.md); gpu_only: whether it has no CPU
    backend."""
    name = "shapes" if more.get("multiple") else "shape"
    form = (
        "Problem: B,H,S,D or B,H,Sq,Sk,D. Grouped-query attention: B,H/Hk,…; V's head dimension: …,D/Dv. Also the "
        "sizes of a printed problem: 'B1 H8/2 S1x2048 D64'."
    )
    if operations:
        form += " For a kernel of a custom operation (not attention): the sizes of its dimensions, such as M,N."
    if "default" in more:
        first = "the first of `shapes` in its spec" + ("" if gpu_only else ", on the CPU backend the first of `cases`")
        said += f" Default for a custom operation: {first}."
    return click.option("--shape", name, help=f"{form} {said.strip()}".strip(), **more)


_FLAGS = {(option.flag_name or option.name).replace("_", "-"): option.flag for option in SHOWN if option.flag}
Scored = Mapping[str, Any]  # {name of a flag: value} of the options of a problem (core/options.py)
SCORE_NAMES = tuple(_FLAGS)


def score_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a flag for each option of a problem (core/options.py). The command receives their values as one argument
    `scored`, for `problem_of`."""

    @functools.wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        scored = {name: given.pop(name.replace("-", "_")) for name in SCORE_NAMES}
        return command(*args, scored=scored, **given)

    for name, flag in reversed(_FLAGS.items()):
        gathered = click.option(f"--{name}", **flag)(gathered)
    return gathered


def problem_for(kernels: Sequence[Kernel], shape: str, dtype: str, causal: str | None, scored: Scored) -> Problem:
    """The problem of these kernels that --shape, --dtype, --causal and the options in `scored` describe. If all take
    latent attention only, it is latent."""
    custom = [kernel for kernel in kernels if kernel.custom]
    if not custom:
        problem = problem_of(shape, dtype, causal, scored)
        return kernels[0].adapted(problem) if kernels and all(kernel.latent for kernel in kernels) else problem
    names = {kernel.operation.name if kernel.custom else "attention" for kernel in kernels}
    if len(names) > 1:
        raise click.UsageError(
            f"--shape has different meanings for {' and '.join(sorted(names))}: name kernels of one operation"
        )
    _refuse_options_of_attention(custom[0], causal, scored)
    return suite_of(custom[0]).problem(custom[0], shape, dtype if on_command_line("dtype") else "")


def problem_or_default(
    kernel: Kernel, shape: str, dtype: str, causal: str | None, scored: Scored, device: Device
) -> Problem:
    """`problem_for`. Without --shape on the command line, an operation's kernel has the first problem of `watch`."""
    if not kernel.custom or on_command_line("shape") or on_command_line("shapes"):
        return problem_for([kernel], shape, dtype, causal, scored)
    _refuse_options_of_attention(kernel, causal, scored)
    first = suite_of(kernel).quick_cases(kernel, device)[0].problem
    return dataclasses.replace(first, dtype=dtype) if on_command_line("dtype") else first


def _refuse_options_of_attention(kernel: Kernel, causal: str | None, scored: Scored) -> None:
    if options := [f"--{name}" for name, value in (("causal", causal), *scored.items()) if value]:
        raise click.UsageError(
            f"{options[0]} is an option of attention, and {kernel.name} computes a custom operation: omit it"
        )


def on_command_line(name: str) -> bool:
    """Whether a parameter has its value from the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def of_attention(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels that compute attention: what commands run on a --shape if no kernel is named."""
    return [kernel for kernel in kernels if not kernel.custom]


def problem_of(shape: str, dtype: str, causal: str | None, scored: Scored) -> Problem:
    """The problem of attention that --shape, --dtype, --causal and the options in `scored` describe."""
    options = {name.replace("-", "_"): value for name, value in scored.items() if value}
    if "window" in options:
        window = options["window"]
        options["window"] = tuple(_bound(window, text) for text in window.split(","))
        if len(options["window"]) != 2:
            raise click.BadParameter(f"{window!r} {_WINDOW}", param_hint="--window")
    if (keys := options.get("kv_dtype")) and own_name(keys) not in FLOAT8:
        raise click.BadParameter(
            f"{keys} is not supported: choose {' or '.join(FLOAT8)}, or omit it: k and v then have the dtype of q",
            param_hint="--kv-dtype",
        )
    file = options.pop("score", None)
    problem = Problem.from_shape(shape, dtype=dtype, causal=causal or False, **options)
    return dataclasses.replace(problem, score=Score.from_file(file, problem)) if file else problem


_WINDOW = "must be L,R: numbers of keys, or none for no bound, such as 1024,0 or none,0"


def _bound(window: str, text: str) -> int | None:
    if text.strip() in ("", "none"):
        return None
    if not text.strip().isdecimal():
        raise click.BadParameter(f"{window!r} {_WINDOW}", param_hint="--window")
    return int(text)


def chosen_kernels(names: tuple[str, ...]) -> list[Kernel]:
    return [registry.get(name) for name in names] or list(registry.kernels().values())


def parsed_tile(text: str | None) -> Tile | None:
    return Tile.parse(text) if text else None


def numbers(text: str, option: str, example: str) -> list[int]:
    """The comma-separated integers in the value of `option`. Raises BadParameter."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise click.BadParameter(f"{text!r} must be numbers with commas between, such as {example}", param_hint=option)
    return [int(part) for part in text.split(",")]


def given_without(needed: str, *names: str) -> None:
    """Raises UsageError if one of the options `names` is on the command line without the option `needed`."""
    for name in names:
        if on_command_line(name.replace("-", "_")):
            raise click.UsageError(f"--{name} needs {needed}")


def alone(option: str, *names: str) -> None:
    """Raises UsageError if a parameter other than `names` is on the command line with `option`."""
    excluding(option, *(param.name or "" for param in click.get_current_context().command.params
                        if param.name not in names))  # fmt: skip


def excluding(option: str, *names: str) -> None:
    """Raises UsageError if one of the parameters `names` is on the command line with `option`."""
    for param in click.get_current_context().command.params:
        if param.name in names and on_command_line(param.name):
            said = max(param.opts, key=len) if isinstance(param, click.Option) else "KERNEL"
            raise click.UsageError(f"{said} is not supported with {option}")
