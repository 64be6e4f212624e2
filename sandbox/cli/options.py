"""Options and arguments that several commands share, and what they stand for."""

from __future__ import annotations

import click

from .. import registry
from ..spec import ITEMSIZE, Kernel, Tile

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
kernels_argument = click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
tile_option = click.option("--tile", help="Use this tile, as BLOCK_M=64,BLOCK_N=32.")
backend_option = click.option(
    "--backend", type=click.Choice(["cuda", "cpu"]), help="By default cuda if there is a GPU."
)
causal_option = click.option(
    "--causal",
    is_flag=False,
    flag_value="bottom-right",
    type=click.Choice(["bottom-right", "top-left"]),
    help="Mask the future; alone it means bottom-right.",
)
dtype_option = click.option("--dtype", type=click.Choice(list(ITEMSIZE)), default="float16", show_default=True)


def chosen_kernels(names: tuple[str, ...]) -> list[Kernel]:
    return [registry.get(name) for name in names] or list(registry.kernels().values())


def parsed_tile(text: str | None) -> Tile | None:
    return Tile.parse(text) if text else None
