"""`cache`: the compiled objects on disk."""

from __future__ import annotations

import time

import click

from ..toolchain import cache as disk_cache
from .group import cli
from .options import json_option
from .output import print_json


@cli.group("cache")
def cache_() -> None:
    """List or remove the compiled objects on disk."""


@cache_.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List every entry: name, size, age."""
    rows = [
        {"key": entry.key, "name": entry.meta.get("name", ""), "bytes": entry.nbytes, "made": entry.made}
        for entry in disk_cache.entries()
    ]
    if as_json:
        print_json({"directory": disk_cache.directory(), "entries": rows})
        return
    for row in sorted(rows, key=lambda row: row["made"]):
        click.echo(f"{row['key'][:12]}  {row['bytes'] / 1024:8.1f} KiB  {_age(row['made']):>8}  {row['name']}")
    size, limit = sum(row["bytes"] for row in rows) / 2**20, disk_cache.limit() / 2**20
    click.echo(f"{len(rows)} entries, {size:.1f} MiB of at most {limit:.0f} in {disk_cache.directory()}")


def _age(made: float) -> str:
    seconds = max(0.0, time.time() - made)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@cache_.command("clear")
@json_option
def cache_clear(as_json: bool) -> None:
    """Remove all compiled objects. Tuned tiles (folder `tuned` of the cache folder) are kept, and the headers of score
    expressions that were used in the last ten minutes.
    """
    removed = disk_cache.clear()
    if as_json:
        print_json({"directory": disk_cache.directory(), "removed": removed})
    else:
        click.echo(f"removed {removed} entries from {disk_cache.directory()}")
