"""`new`: create a kernel or an experiment."""

from __future__ import annotations

from pathlib import Path

import click

from ..scaffold import new
from .group import cli
from .options import json_option, kernel_names
from .output import print_json


@cli.group("new")
def new_() -> None:
    """Create a kernel or an experiment from a template."""


@new_.command("experiment")
@click.argument("name")
@json_option
def new_experiment(name: str, as_json: bool) -> None:
    """Create experiments/NNN_NAME.

    The folder has a README.md, and a run.py with an example measurement that runs unchanged.
    """
    _say(new.experiment(name), as_json)


@new_.command("kernel")
@click.argument("name")
@click.option("--like", "--from", "source", default="fwd_minimal", show_default=True, shell_complete=kernel_names,
              help=f"Kernel to copy, or a template: {', '.join(new.TEMPLATE_NAMES)}.")  # fmt: skip
@json_option
def new_kernel(name: str, source: str, as_json: bool) -> None:
    """Create NAME.cu and NAME.py.

    Copies another kernel or a template to the first folder of SANDBOX_KERNELS, or to kernels_cu if it is not set. The
    copy runs unchanged, and all commands find it.
    """
    _say(new.kernel(name, source), as_json)


def _say(files: list[Path], as_json: bool) -> None:
    if as_json:
        print_json({"files": files})
    else:
        for file in files:
            click.echo(file)
