"""`python -m sandbox …`: the group that every command joins, and what an exception becomes."""

from __future__ import annotations

import errno
import faulthandler
from typing import Any

import click

from ..core import interrupts
from ..core.errors import HistoryError, SandboxError, SpecError, UnknownKernel, UnsupportedProblem
from .options import OptionalValue
from .output import open_standard_streams, say

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
        if not ctx.resilient_parsing:
            self._refuse_blanks(ctx, attached + left)
        return super().parse_args(ctx, attached + left)

    def _refuse_blanks(self, ctx: click.Context, args: list[str]) -> None:
        """An option whose value is blank, as of a shell variable that is not set, must not count as left out."""
        given, _, _ = self.make_parser(ctx).parse_args(args=[*args])
        for param in self.params:
            values = given.get(param.name or "")
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, str) and not value.strip():
                    raise click.BadParameter(f"{value!r} is blank: give it a value, or leave it out", ctx, param)


class _Commands(click.Group):
    """Turns this project's exceptions into one message and an exit status."""

    command_class = _Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SandboxError as error:
            say(f"sandbox: {error}", stderr=True)
            ctx.exit(2 if isinstance(error, _USAGE) else 1)
        except OSError as error:  # a file that cannot be written, a disk that is full
            if error.errno == errno.EPIPE:  # the reader went away: click ends in silence
                raise
            say(f"sandbox: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", stderr=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """A research sandbox for attention kernels in raw CUDA C++: edit a .cu, compile, launch, verify, measure.

    A command's own --help says more.
    """


def main() -> None:
    """Entry point of `sandbox` and `python -m sandbox`."""
    interrupts.restore()
    open_standard_streams()
    faulthandler.enable()  # a kernel that leaves its tensors on the CPU backend does not die in silence
    cli(prog_name="sandbox")
