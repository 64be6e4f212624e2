"""`list`: the kernels there are."""

from __future__ import annotations

from .. import registry, report
from .group import cli
from .options import json_option
from .output import print_json, screen


@cli.command("list")
@json_option
def list_(as_json: bool) -> None:
    """The ladder: kernel, rung, dtypes, head widths, architecture, idea."""
    kernels = registry.kernels().values()
    if as_json:
        fields = ("name", "computes", "rung", "dtypes", "max_D", "min_arch", "summary", "source")
        print_json([{f: getattr(k, f) for f in fields} | {"tiles": [dict(t) for t in k.tiles]} for k in kernels])
    else:
        screen().print(report.ladder_table(kernels))
