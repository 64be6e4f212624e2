"""`python -m sandbox …`: the group that every command joins, and what an exception becomes."""

from __future__ import annotations

import faulthandler
from typing import Any

import click

from ..core.errors import HistoryError, SandboxError, SpecError, UnknownKernel, UnsupportedProblem
from .options import OptionalValue
from .output import say

_USAGE = (UnsupportedProblem, SpecError, UnknownKernel, HistoryError)


class _Command(click.Command):
    """Attaches its value, said or left out, to every option whose value may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        optional = {name: p for p in self.params if isinstance(p, OptionalValue) for name in p.opts}
        attached, left = [], [*args]
        while left and left[0] != "--":
            word = left.pop(0)
            if option := optional.get(word):
                value = left.pop(0) if left and left[0] in option.type.choices else option.flag_value
                word = f"{word}={value}"
            attached.append(word)
        return super().parse_args(ctx, attached + left)


class _Commands(click.Group):
    """Turns this project's exceptions into one message and an exit status."""

    command_class = _Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SandboxError as error:
            say(f"sandbox: {error}", stderr=True)
            ctx.exit(2 if isinstance(error, _USAGE) else 1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """A research sandbox for attention kernels in raw CUDA C++: edit a .cu, compile, launch, verify, measure.

    A command's own --help says more.
    """


def main() -> None:
    """Entry point of `sandbox` and `python -m sandbox`."""
    faulthandler.enable()  # a kernel that leaves its tensors on the CPU backend does not die in silence
    cli(prog_name="sandbox")
