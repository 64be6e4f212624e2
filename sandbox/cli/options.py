"""Options and arguments that several commands share, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..core import registry
from ..core.kernel import Kernel
from ..core.problem import ITEMSIZE
from ..core.tile import Tile

_F = TypeVar("_F", bound=Callable[..., Any])
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


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


def chosen_kernels(names: tuple[str, ...]) -> list[Kernel]:
    return [registry.get(name) for name in names] or list(registry.kernels().values())


def parsed_tile(text: str | None) -> Tile | None:
    return Tile.parse(text) if text else None


def given_without(needed: str, *names: str) -> None:
    """Raises UsageError when one of these options stands on the command line without the one that it goes with."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} goes with {needed}")
