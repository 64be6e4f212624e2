"""`bits`: which changes leave rows of the results bitwise equal."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click

from ..core.kernel import INVARIANCES
from ..verify import bits
from ..verify import check as checking
from .group import cli
from .options import (
    backend_option,
    chosen_kernels,
    json_option,
    kernels_argument,
    parsed_tile,
    tile_option,
)
from .output import exit_status, followed, print_json, say, show_table


@cli.command("bits")
@kernels_argument
@tile_option()
@backend_option()
@click.option(
    "--change",
    multiple=True,
    type=click.Choice([*INVARIANCES]),
    help=f"Only this change. Repeatable. {'; '.join(f'{name}: {what}' for name, what in INVARIANCES.items())}.",
)
@click.option(
    "--invariant/--default",
    default=None,
    help="--invariant: test only with invariant=True. --default: test only without it. With neither option: both.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the inputs. Default: random, printed.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, writable=True),
    help="Replace the table in this Markdown file between the comments <!-- bits … --> and <!-- end of bits -->.",
)
@json_option
def bits_(
    kernels: tuple[str, ...], tile: str | None, backend: str | None, change: tuple[str, ...], invariant: bool | None,
    seed: int | None, page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Test which changes leave rows of the results bitwise equal.

    Runs each kernel of attention on random inputs, then again with one thing changed, and compares, bit by bit, the
    rows that both runs have in common. Shows the first difference. Fails if rows differ that the
    kernel's spec guarantees to be equal (`list --guarantees`).
    """
    device, seed = checking.pick_device(backend), secrets.randbits(31) if seed is None else seed
    if page:
        bits.page_parts(page)  # a file without the marks is an error before the first run
    chosen = [k for k in chosen_kernels(kernels) if kernels or k.computes in ("forward", "backward")]
    tried = bits.examine(chosen, device, seed, parsed_tile(tile), change, invariant)
    found = list(followed(tried, lambda f: f"{f.kernel} {f.change}"))
    if as_json:
        print_json({"seed": seed, "backend": device[0], "findings": found})
    else:
        show_table(bits.table_of(found))
        for finding in found:
            if finding.equal is False:
                say(bits.sentence(finding))
        say(f"seed {seed}, on {device[0]}; {bits.LEGEND}{'; blank: not tried' if change else ''}")
    if page:
        bits.write_page(page, found, seed, device)
        say(f"wrote {page}", stderr=True)
    sys.exit(exit_status(not f.violated for f in found if f.equal is not None))
