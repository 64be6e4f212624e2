"""A spec's `args` held against the parameters that the compiler found: a launch takes them on trust."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import SpecError
from ..core.kernel import Dim3, Entry
from ..toolchain.nvrtc import Parameter
from ..toolchain.sources import split_arguments
from .arguments import ARGUMENTS, Row

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def check_arguments(entry: Entry, found: Sequence[Parameter], source: Path, score_bytes: int = 16) -> None:
    """Raises SpecError naming the first of `args` that is not what the parameter in its place is: another kind, another
    size, or, where the `.cu` calls its parameter by another argument's name, that one. A score's size is
    the problem's."""
    names = _names(entry.name, source, len(found))
    for i, (arg, parameter, called) in enumerate(itertools.zip_longest(entry.args, found, names), 1):
        if arg is None or parameter is None:
            raise SpecError(
                f"{entry.name}: its spec's args name {len(entry.args)}, {source.name} has {len(found)} parameters: "
                + (f"{arg}, number {i}, is none of them" if arg else f"{_shown(parameter)}, number {i}, has no name")
            )
        if arg not in ARGUMENTS and arg not in entry.numbers:
            return  # whoever packs them says so
        row = _NUMBER if arg in entry.numbers else ARGUMENTS[arg]
        expected = Parameter(("struct",), score_bytes) if arg == "score" else _parameter(row)
        if parameter.size != expected.size or not {*expected.kinds} & {*parameter.kinds}:
            raise SpecError(
                f"{entry.name}: number {i} of its spec's args is {arg}, {_shown(expected)}, "
                f"but parameter {i} in {source.name}{f', {called},' if called else ''} is {_shown(parameter)}"
            )
        if called != arg and (called in ARGUMENTS or called in entry.numbers):
            raise SpecError(
                f"{entry.name}: number {i} of its spec's args is {arg}, but parameter {i} in {source.name} is called "
                f"{called}: put them in one order"
            )


def check_block_size(entry: str, block: Dim3, most: int) -> None:
    """Raises SpecError for a block of more threads than the entry's __launch_bounds__ allow; `most` 0: it has none."""
    threads = math.prod(block)
    if most and threads > most:
        raise SpecError(
            f"{entry}: a block of {threads} threads, {block}, exceeds its __launch_bounds__({most}), and a GPU rejects "
            f"such a launch: give it at most {most} threads in the spec's block, or raise the bound in the .cu"
        )


_NUMBER = Row(ctypes.c_int32)


def _parameter(row: Row) -> Parameter:
    kind = "pointer" if row.ctype is ctypes.c_void_p else "struct"
    if issubclass(row.ctype, ctypes._SimpleCData) and kind != "pointer":
        kind = "float" if row.ctype in (ctypes.c_float, ctypes.c_double) else "integer"
    return Parameter((kind,), ctypes.sizeof(row.ctype))


def _shown(parameter: Parameter) -> str:
    return f"{' or '.join(parameter.kinds)} of {parameter.size} bytes"


def _names(entry: str, source: Path, count: int) -> list[str]:
    """What the `.cu` calls them, as far as the text tells: not where a macro makes the list."""
    text = _COMMENT.sub(" ", source.read_text(errors="replace"))
    begin = re.search(rf"\b__global__\b[^;{{}}]*?\b{entry}\s*\(", text)
    pieces = split_arguments(text, begin.end(), "(<[", ")>]")[0] if begin else []
    names = [(re.findall(r"[A-Za-z_]\w*", piece) or [""])[-1] for piece in pieces]
    return names if len(names) == count else [""] * count
