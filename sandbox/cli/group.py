"""`python -m sandbox …`: the command group, and the conversion of exceptions to messages and exit statuses."""

from __future__ import annotations

import errno
import faulthandler
from typing import Any

import click

from ..core import interrupts, registry
from ..core.errors import HistoryError, SandboxError, SpecError, UnknownKernel, UnsupportedProblem
from .options import OptionalValue
from .output import open_standard_streams, say

_USAGE = (UnsupportedProblem, SpecError, UnknownKernel, HistoryError)


class _Command(click.Command):
    """Attaches the value, given or default, to every OptionalValue option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        optional = {name: p for p in self.params if isinstance(p, OptionalValue) for name in p.opts}
        attached, left = [], [*args]
        while left and left[0] != "--":
            word = left.pop(0)
            if option := optional.get(word):
                given = bool(left) and left[0] in option.type.choices
                if left and not given and not ctx.resilient_parsing:
                    self._check_kernel(word, option, left[0])
                word = f"{word}={left.pop(0) if given else option.flag_value}"
            attached.append(word)
        if not ctx.resilient_parsing:
            self._refuse_blanks_and_repeats(ctx, attached + left)
        return super().parse_args(ctx, attached + left)

    def _check_kernel(self, name: str, option: OptionalValue, word: str) -> None:
        """Raises UsageError if `word`, after the option `name` without a value, is neither an option nor a kernel."""
        if word.startswith("-") or word.endswith(".cu"):
            return
        said = f"{name} {word} is not supported: choose {' or '.join(option.type.choices)}"
        if not {"kernel", "kernels"} & {param.name for param in self.params}:
            raise click.UsageError(said)
        try:
            registry.entry_owner(word)
        except UnknownKernel as error:
            raise click.UsageError(f"{said}, or name a kernel: {error}") from None

    def _refuse_blanks_and_repeats(self, ctx: click.Context, args: list[str]) -> None:
        """A blank value, such as that of an unset shell variable, is an error and not an absent option. So is a second
        value of an option that has one."""
        given, _, order = self.make_parser(ctx).parse_args(args=[*args])
        for param in self.params:
            if isinstance(param, click.Option) and not param.multiple and order.count(param) > 1:
                names = "/".join((max(param.opts, key=len), *param.secondary_opts))
                if not param.is_flag or param.secondary_opts:
                    raise click.UsageError(f"{names} was given more than once: {self.name} takes one", ctx)
            values = given.get(param.name or "")
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, str) and not value.strip():
                    raise click.BadParameter(f"{value!r} is blank: pass a value, or omit the option", ctx, param)


class _Commands(click.Group):
    """Converts this project's exceptions to one message and an exit status."""

    command_class = _Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SandboxError as error:
            say(f"sandbox: {error}", stderr=True)
            ctx.exit(2 if isinstance(error, _USAGE) else 1)
        except OSError as error:  # a file that cannot be written, a disk that is full
            if error.errno == errno.EPIPE:  # the reader of the pipe has exited; click handles it silently
                raise
            say(f"sandbox: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", stderr=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def cli() -> None:
    """A research sandbox for attention kernels in raw CUDA C++: edit a .cu, compile, launch, verify, measure.

    Each command has its own --help.
    """


def main() -> None:
    """Entry point of `sandbox` and `python -m sandbox`."""
    interrupts.restore()
    open_standard_streams()
    faulthandler.enable()  # report the stack if a kernel on the CPU backend crashes the process
    cli(prog_name="sandbox")
