"""Checks a spec's `args` against the kernel parameters that the compiler found. A launch relies on this check."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import SpecError
from ..core.kernel import Dim3, Entry, Kernel
from ..core.operation import Tensor
from ..toolchain.nvrtc import Parameter
from ..toolchain.sources import code_of, split_arguments
from .arguments import ARGUMENTS, Row


def check_arguments(
    entry: Entry, found: Sequence[Parameter], source: Path, score_bytes: int = 16, kinds: Mapping[str, Row] = ARGUMENTS
) -> None:
    """Raises SpecError for the first of `args` that does not match its parameter: in kind, in size, or because the
    `.cu` gives the parameter another argument's name. `score_bytes`: size of the `score` argument. `kinds`:
    `argument_kinds` of the kernel."""
    names = _names(entry.name, source, len(found))
    for i, (arg, parameter, called) in enumerate(itertools.zip_longest(entry.args, found, names), 1):
        if arg is None or parameter is None:
            raise SpecError(
                f"{entry.name}: args in its spec has {len(entry.args)} names, {source.name} has {len(found)} "
                "parameters: "
                + (
                    f"argument {i}, {arg}, has no parameter"
                    if arg
                    else f"parameter {i}, {_shown(parameter)}, has no name in args"
                )
            )
        if arg not in kinds and arg not in entry.numbers:
            return  # ArgumentBlock reports unknown names
        row = _NUMBER if arg in entry.numbers else kinds[arg]
        expected = Parameter(("struct",), score_bytes) if row.ctype is ctypes.Structure else _parameter(row)
        if parameter.size != expected.size or not {*expected.kinds} & {*parameter.kinds}:
            raise SpecError(
                f"{entry.name}: argument {i} in its spec is {arg}, {_shown(expected)}, "
                f"but parameter {i} in {source.name}{f', {called},' if called else ''} is {_shown(parameter)}"
            )
        if called != arg and (called in kinds or called in entry.numbers):
            raise SpecError(
                f"{entry.name}: argument {i} in its spec is {arg}, but parameter {i} in {source.name} is called "
                f"{called}: use the same order"
            )


_ELEMENTS = {
    "float": "float32", "__half": "float16", "half": "float16", "__nv_bfloat16": "bfloat16", "int": "int32",
    "int32_t": "int32", "long long": "int64", "int64_t": "int64", "bool": "bool", "double": "float64",
    "__nv_fp8_e4m3": "float8_e4m3", "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip
_POINTER = re.compile(r"\s*((?:\w+\s+)*?\w+)\s*(?:\bconst\b\s*)?\*(?!.*\*)")  # with one `*`


def check_element_types(kernel: Kernel) -> None:
    """Raises SpecError for the first tensor of a custom operation whose dtype in the spec is not that of its pointer in
    the `.cu`. Types other than those in _ELEMENTS and `dtype` (element.cuh) are not compared."""
    tensors: Mapping[str, Tensor] = getattr(kernel.operation, "tensors", {})
    for entry in kernel.entries if tensors else ():
        for i, (arg, declaration) in enumerate(
            zip(entry.args, _declarations(entry.name, kernel.source), strict=False), 1
        ):
            pointer = _POINTER.match(declaration)
            called = re.sub(r"\s*\b(const|volatile)\b\s*", "", pointer[1]) if pointer else ""
            if arg not in tensors or called not in (*_ELEMENTS, "dtype"):
                continue
            given, own = tensors[arg].dtype, {*kernel.dtypes}
            if ({given} if given else own) != (own if called == "dtype" else {_ELEMENTS[called]}):
                has = f"dtype={given!r}" if given else "the problem's dtype"
                fix = f"dtype={_ELEMENTS[called]!r}" if called != "dtype" else "omit dtype"
                fix = fix if given else f"write dtype*, or give its Tensor {fix}"
                raise SpecError(
                    f"{entry.name}: argument {i}, {arg}, has {has} in its spec, but is {called}* in "
                    f"{kernel.source.name} ({fix})"
                )


def check_block_size(entry: str, block: Dim3, most: int) -> None:
    """Raises SpecError for a block with more threads than the entry's __launch_bounds__ allow; `most` 0: no bounds."""
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
    """The parameter names in the `.cu`; empty strings if they cannot be parsed, as when a macro makes the list."""
    names = [(re.findall(r"[A-Za-z_]\w*", declared) or [""])[-1] for declared in _declarations(entry, source)]
    return names if len(names) == count else [""] * count


def _declarations(entry: str, source: Path) -> list[str]:
    """The declarations of the entry's parameters in the `.cu`, as text."""
    text = code_of(source)
    begin = re.search(rf"\b__global__\b[^;{{}}]*?\b{entry}\s*\(", text)
    return list(split_arguments(text, begin.end(), "(<[", ">)]")[0]) if begin else []
