"""Test cases, inputs, expected outputs and error bounds of an Operation, from its spec."""

from __future__ import annotations

import itertools
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.dtypes import ITEMSIZE
from ..core.errors import SpecError
from ..core.kernel import Arch, Kernel
from ..core.operation import Operation, OperationProblem
from ..core.tile import Tile
from ..engine.choose import why_tile_unsupported
from ..launch.dlpack import HOST, Device, numpy_dtype
from ..reference import errors, ulp
from .cases import Array, Case
from .error_map import ErrorMap
from .references import Reference, ReferenceOutput

_FACTOR = 2.0  # multiple of the float32 result's error
_ROUNDING = 8.0  # ulp of float32: functions such as __expf, and divisions
_SHAPES = {1: ("16777216",), 2: ("4096,4096",), 3: ("2048,2048,2048",)}  # by the number of dimensions, on a GPU
_SIZES = (67, 136, 72, 1, 200, 17, 97, 128, 2, 33, 64, 203)  # of cases, in turns
_CASES = 10


# ---- problems


def dtype_of(kernel: Kernel, dtype: str = "") -> str:
    """`dtype` if it is given, else float16 if the kernel supports that, else its first dtype."""
    if dtype:
        return dtype
    return "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]


def small_problems(operation: Operation, kernel: Kernel, tile: Tile, dtype: str) -> list[OperationProblem]:
    """The spec's `cases`, or those of `_default_cases`; only those that the kernel and the tile support.
    Raises SpecError if there are none."""
    shapes = operation.cases or _default_cases(len(operation.dims), tile)
    problems = [operation.problem(shape, dtype) for shape in shapes]
    taken = [p for p in problems if not _refused(kernel, p, tile)]
    if not taken:
        raise SpecError(
            f"{kernel.name}: no small problem is supported, for example {_refused(kernel, problems[0], tile)}: give "
            "`cases` in its Operation"
        )
    return taken


def _refused(kernel: Kernel, problem: Any, tile: Tile) -> str | None:
    return kernel.why_unsupported(problem, None) or why_tile_unsupported(kernel, problem, tile, None)


def _default_cases(dims: int, tile: Tile) -> Iterator[str]:
    largest = max((n for n in tile.values() if n <= 1024), default=64)
    sizes = _SIZES if dims > 1 else (4099, 1, 1000, 17, largest - 1, largest, largest + 1, 2 * largest + 3)
    for i in range(_CASES):
        yield ",".join(str(max(sizes[(5 * i + k) % len(sizes)], 1)) for k in range(dims))
    if dims > 1:
        yield from (",".join([str(n)] * dims) for n in (64, 128, 256))


def large_problems(operation: Operation, kernel: Kernel, dtype: str) -> list[OperationProblem]:
    """The spec's `shapes`, or a default."""
    shapes = operation.shapes or _SHAPES.get(len(operation.dims)) or (",".join(["64"] * len(operation.dims)),)
    return [operation.problem(shape, dtype_of(kernel, dtype)) for shape in shapes]


def named_cases(operation: Operation, kernel: Kernel, small: bool) -> list[Case]:
    """The cases of `run`: `shapes`, or on the CPU backend (`small`) the first of `cases`; each dtype."""
    found = []
    for dtype in kernel.dtypes:
        problems = (
            small_problems(operation, kernel, kernel.tiles[0], dtype)[:1]
            if small
            else large_problems(operation, kernel, dtype)
        )
        found += [_case(problem) for problem in problems]
    return found


def _case(problem: Any, inputs: str = "normal") -> Case:
    words = problem.widths.replace(", ", " "), problem.dtype, "" if inputs == "normal" else inputs
    return Case(" ".join(filter(None, words)), problem, inputs, "contiguous")


def sweep_cases(operation: Operation, kernel: Kernel) -> Iterator[Case]:
    """The cases of `check`: each dtype, small problem and kind of inputs."""
    for dtype in kernel.dtypes:
        problems = small_problems(operation, kernel, kernel.tiles[0], dtype)
        yield from (_case(problem) for problem in problems)
        yield from (_case(problems[0], inputs) for inputs in operation.isolate)


def quick_cases(operation: Operation, kernel: Kernel, device: Device) -> list[Case]:
    """The cases of `watch`: on a GPU one to time, and small ones."""
    dtype = dtype_of(kernel)
    small = small_problems(operation, kernel, kernel.tiles[0], dtype)[:3]
    timed = [] if device == HOST else large_problems(operation, kernel, dtype)[:1]
    return [_case(problem) for problem in (*timed, *small)]


def tile_case(operation: Operation, kernel: Kernel, tile: Tile) -> Case:
    """A small case for `tile`."""
    return Case("new tile", small_problems(operation, kernel, tile, dtype_of(kernel))[0], "normal", "contiguous")  # type: ignore[arg-type]


def sanitized_problems(operation: Operation, kernel: Kernel, tile: Tile) -> list[OperationProblem]:
    """The two smallest problems with several blocks, for the sanitizers: they run one OS thread for each of a block's
    threads."""
    problems = small_problems(operation, kernel, tile, dtype_of(kernel))
    threads = math.prod(kernel.block(tile))

    def cost(p: Any) -> tuple[bool, int, int]:
        blocks = math.prod(kernel.grid(p, tile))
        return blocks < 2, blocks * threads, -math.prod(size for _, size in p.sizes)

    return sorted(problems, key=cost)[:2]


def shipped_tiles(operation: Operation, kernel: Kernel, arch: Arch | None) -> list[tuple[Tile, OperationProblem]]:
    """The spec's best tile, with a small problem; none if it is the smallest, which is examined anyway."""
    if kernel.tiles[0] == min(kernel.tiles, key=lambda tile: math.prod(tile.values())):
        return []
    return [(kernel.tiles[0], sanitized_problems(operation, kernel, kernel.tiles[0])[0])]


# ---- inputs and expected outputs


def inputs_of(operation: Operation, case: Case) -> dict[str, Array]:
    """The inputs of a case by name, contiguous, from a seeded generator. Raises SpecError for an error in the spec."""
    rng = np.random.default_rng(0)
    found: dict[str, Array] = {}
    for name, tensor in operation.inputs.items():
        shape, dtype = tensor.shape(case.problem), tensor.dtype_in(case.problem)  # type: ignore[arg-type]
        make = tensor.values or (_normal if dtype in ITEMSIZE else _bits)
        with np.errstate(all="ignore"):
            values = np.asarray(_called(operation, f"values of {name}", make, rng, shape))
        if values.shape != shape:
            raise SpecError(f"{operation.name}: values of {name} have shape {values.shape}: it must be {shape}")
        found[name] = np.ascontiguousarray(values.astype(numpy_dtype(dtype))).reshape(shape)
    if case.inputs != "normal":
        if case.inputs not in operation.isolate:
            names = ", ".join(("normal", *operation.isolate))
            raise SpecError(f"inputs={case.inputs!r} are not supported: choose from {names}")
        _called(operation, f"isolate {case.inputs}", operation.isolate[case.inputs], found)
    return found


def _normal(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape, np.float32)


def _bits(rng: Any, shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 2, shape)


@lru_cache(maxsize=4)  # problems on a GPU are large
def reference_of(operation: Operation, case: Case) -> Reference:
    """Inputs and expected outputs of a case, with error bounds. The arrays are cached: do not write to them.

    The default bound is 2 max|float32 - float64| + 1 ulp of the dtype + 8 ulp of float32, both at max|float64|. The
    float32 result is computed for the inputs, and for inputs that differ by up to 4 units of their last float32 place:
    the error of the second result is like that of sums in another order. Integers and bool must be equal.
    """
    inputs = inputs_of(operation, case)
    exact = expected(operation, case.problem, inputs, "float64")
    rng = np.random.default_rng(3)
    nudged = {name: _nudged(x, rng) for name, x in inputs.items()}
    near = [expected(operation, case.problem, given, "float32") for given in (inputs, nudged)]
    outputs = {}
    for name, values in exact.items():
        dtype = operation.outputs[name].dtype_in(case.problem)  # type: ignore[arg-type]
        if operation.bound:
            bound = float(_called(operation, "bound", operation.bound, case.problem, values))
        else:
            bound = _bound(values, [each[name] for each in near], dtype)
        outputs[name] = ReferenceOutput(values, bound)
    return Reference(inputs, outputs)


def expected(operation: Operation, problem: Any, inputs: Mapping[str, Array], precision: str) -> dict[str, Array]:
    """The outputs of the reference, in float64, for these inputs converted to `precision`, "float64" or "float32".

    Raises SpecError if the reference raises, or if its result does not fit the spec.
    """
    given = (
        x.astype(precision) if operation.inputs[name].dtype_in(problem) in ITEMSIZE else x for name, x in inputs.items()
    )
    with np.errstate(all="ignore"):
        result = _called(operation, "reference", operation.reference, *given)
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(operation.outputs):
        raise SpecError(
            f"{operation.name}: the reference gives {len(results)} arrays, and there are {len(operation.outputs)} "
            f"outputs: {', '.join(operation.outputs)}"
        )
    found = {}
    for (name, tensor), values in zip(operation.outputs.items(), results, strict=True):
        shape, array = tensor.shape(problem), np.asarray(values)
        if array.shape != shape:
            dims = ", ".join(map(str, tensor.dims))
            raise SpecError(
                f"{operation.name}: the reference of {name} has shape {array.shape}, and the spec gives it ({dims}) = "
                f"{shape} on {problem}"
            )
        found[name] = array.astype(np.float64)
    return found


def _nudged(x: Array, rng: Any) -> Array:
    """x with relative changes of up to 4 * 2^-24."""
    if x.dtype.kind in "iub":
        return x
    return x.astype(np.float32) * (1 + 2.0**-22 * rng.uniform(-1, 1, x.shape).astype(np.float32))


def _bound(exact: Array, near: list[Array], dtype: str) -> float:
    if dtype not in ITEMSIZE:
        return 0.0
    finite = np.isfinite(exact) & np.logical_and.reduce([np.isfinite(x) for x in near])
    most = float(abs(exact[finite]).max(initial=0))
    error = max(float(abs(x[finite] - exact[finite]).max(initial=0)) for x in near)
    return _FACTOR * error + float(ulp(most, dtype)) + _ROUNDING * float(ulp(most, "float32"))


def _called(operation: Operation, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of the spec. What it raises becomes SpecError, with its line."""
    try:
        return function(*arguments)
    except Exception as error:
        code = getattr(function, "__code__", None)
        file = code.co_filename if code else ""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
        raise SpecError(f"{operation.name}: the {what} raised {type(error).__name__}: {error}{where}") from error


# ---- where a result is wrong


def locate(operation: Operation, name: str, got: Array, answer: ReferenceOutput, tile: Tile) -> ErrorMap | None:
    """The elements of an output whose error exceeds the bound; None if there are none."""
    got, ref = np.asarray(got).astype(np.float64), answer.values
    error = errors(got, ref)
    bad = ~(error <= answer.bound)
    if not bad.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(error / answer.bound, nan=0.0, posinf=np.inf)
    first = tuple(map(int, np.argwhere(bad)[0]))
    worst = tuple(map(int, np.unravel_index(int(np.where(bad, ratio, -1).argmax()), bad.shape)))
    dims = [d if isinstance(d, str) else f"axis {i}" for i, d in enumerate(operation.outputs[name].dims)]
    patterns = tuple(_patterns(bad, dims, tile))
    unwritten = int(np.isnan(got[bad]).sum()) if not np.isnan(ref[bad]).all() else 0
    nan = f", {unwritten} of them NaN (or never written)" if unwritten else ""

    def at(index: tuple[int, ...]) -> str:
        place = ", ".join(f"{dim} {i}" for dim, i in zip(dims, index, strict=True))
        return f"{place}{': ' if place else ''}{got[index]:.6g} instead of {ref[index]:.6g}"

    text = f"{name} is wrong in {bad.sum()} of {bad.size} elements{nan}, first at {at(first)}; worst at {at(worst)}."
    text += f" Only {'; '.join(patterns)}." if patterns else ""
    heat = ratio.reshape(-1, ratio.shape[-1]) if ratio.ndim > 1 else ratio.reshape(1, -1)
    rows = max(tile.values(), default=64)
    return ErrorMap(name, int(bad.sum()), bad.size, first, worst, patterns, text, rows, heat)


def _patterns(bad: Array, dims: list[str], tile: Tile) -> Iterator[str]:
    """Restrictions of the wrong elements: a range of a dimension, the last partial tile."""
    for axis, dim in enumerate(dims):
        others = tuple(i for i in range(bad.ndim) if i != axis)
        where, size = np.nonzero(bad.any(axis=others))[0], bad.shape[axis]
        if where.size == size:
            continue
        span = f"{where[0]}" if where.size == 1 else f"{where[0]}-{where[-1]}"
        gaps = "" if where.size == where[-1] - where[0] + 1 else f" ({where.size} of them)"
        tails = (f"{n}={m}" for n, m in tile.items() if m > 1 and 0 < size // m * m <= where[0])
        tail = next(itertools.islice(tails, 1), "")
        yield f"{dim} {span}{gaps} of {size}{f': the last, partial tile ({tail})' if tail else ''}"
