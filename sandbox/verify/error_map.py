"""Error maps: where a result is wrong, and which part of the kernel's structure the wrong elements match.

Faults of a kernel have typical patterns: a missing tail guard corrupts the rows of the last tile, a wrong fragment the
columns of an MMA step, a wrong mask the rows along the diagonal. Each rule below detects one pattern.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core import picture
from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..reference import errors
from . import mask_fault

Array = NDArray[Any]
_OF_QUERIES = ("O", "LSE", "dQ", "delta")  # their rows are query rows
_STEPS = (2, 4, 8, 16, 32)  # column periods of the distribution over threads and MMA fragments


@dataclass(frozen=True)
class ErrorMap:
    """Where one output is wrong. `first` and `worst` are indices (b, h, row, column), or a prefix of them.

    `patterns`: phrases such as "the tail" that describe the wrong elements. `text`: a summary in one paragraph.
    `heat`: |error| / bound of the worst head, (rows, columns).
    """

    name: str
    wrong: int
    of: int
    first: tuple[int, ...]
    worst: tuple[int, ...]
    patterns: tuple[str, ...]
    text: str
    tile_rows: int
    heat: Array = field(repr=False)


def locate(
    name: str, got: ArrayLike, ref: ArrayLike, bound: Array | float, kernel: Kernel, problem: Problem, tile: Tile,
    inputs: Mapping[str, Array] | None = None,
) -> ErrorMap | None:  # fmt: skip
    """The elements of the output `name` whose error |got − ref| exceeds `bound`; None if there are none.

    got, ref: (B, H, S, D), (B, H, S) or (H,). bound: a number, or of the same shape. `inputs`: those of the kernel, to
    distinguish a wrong mask from other faults."""
    got, ref = np.asarray(got).astype(np.float64), np.asarray(ref).astype(np.float64)
    error = errors(got, ref)
    bad = ~(error <= bound)
    if not bad.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(error / bound, nan=0.0, posinf=np.inf)  # 0 / 0: a correct row without keys
    first = _at(np.argwhere(bad)[0])
    worst = _at(np.unravel_index(int(np.where(bad, ratio, 0).argmax()), bad.shape))
    cube, expected, off = (_cube(x) for x in (bad, ref, error))
    M, named = _tile_rows(name, tile)
    by_mask = mask_fault.explain(name, got, bad, worst[:2], bound, problem, inputs) if inputs else ""
    shapes = (
        (f"the diagonal: {by_mask}",) if by_mask else (),
        _extent(cube),
        _factor(np.asarray(got)[bad], ref[bad]),
        _row_shapes(np.nonzero(cube.any((0, 1, 3)))[0], cube.shape[2], M, named, math.prod(kernel.block(tile))),
        _diagonal(cube, off, expected, problem)
        if name in _OF_QUERIES and problem.causal and not problem.ragged
        else (),
        _column_shapes(np.nonzero(cube.any((0, 1, 2)))[0], cube.shape[3]),
    )
    patterns = tuple(itertools.chain.from_iterable(shapes))
    text = _describe(name, got, ref, bad, first, worst, patterns)
    heat = _cube(ratio)[((0, *worst) if ratio.ndim == 1 else (*worst, 0, 0))[:2]]
    return ErrorMap(name, int(bad.sum()), bad.size, first, worst, patterns, text, M, heat)


def _at(index: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, index))


def _cube(x: Array) -> Array:
    """As (B, H, rows, columns), with size 1 in missing dimensions; an array of one dimension, (H,), has heads only."""
    batch = (1,) if x.ndim == 1 else ()
    return x.reshape(*batch, *x.shape, *[1] * (4 - x.ndim - len(batch)))


def _describe(
    name: str, got: Array, ref: Array, bad: Array, first: tuple[int, ...], worst: tuple[int, ...],
    patterns: tuple[str, ...],
) -> str:  # fmt: skip
    unwritten = int(np.isnan(got[bad]).sum())
    nan = f", {unwritten} of them NaN (or never written)" if unwritten and not np.isnan(ref[bad]).all() else ""
    rows = np.unique(np.nonzero(bad)[2]) if bad.ndim > 2 else np.empty(0, int)
    said = [f"Row{'s' if rows.size > 1 else ''} {_ranges(rows)}"] if rows.size else []
    said += ["; ".join(patterns)] if patterns else []
    return (
        f"{name} is wrong in {bad.sum()} of {bad.size} elements{nan}, first at {index_text(first)}: "
        f"{got[first]:.4g} instead of {ref[first]:.4g}; worst at {index_text(worst)}: "
        f"{got[worst]:.4g} instead of {ref[worst]:.4g}.{' ' if said else ''}{': '.join(said)}{'.' if said else ''}"
    )


def index_text(at: tuple[int, ...]) -> str:
    """An index (b, h, row, column), or a prefix of it, as text."""
    axes = ("h",) if len(at) == 1 else ("b", "h", "row", "column")
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))


def _ranges(numbers: Array, most: int = 4) -> str:
    """0-31, 64, 70-77 and so on."""
    runs = np.split(numbers, np.nonzero(np.diff(numbers) > 1)[0] + 1)
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:most]]
    return ", ".join(shown) + (f" and {len(runs) - most} more runs" if len(runs) > most else "")


def _tile_rows(name: str, tile: Tile) -> tuple[int, str]:
    """The rows of this output per tile, as a number and as text. Tiles of dK and dV have BLOCK_N rows."""
    macro = "BLOCK_N" if name in ("dK", "dV") else "BLOCK_M"
    rows = tile.get(macro, 64)
    return rows, f"{macro}={rows}"


def _extent(bad: Array) -> Iterator[str]:
    heads = np.asarray(bad.any((2, 3)))
    if bad.mean() > 0.9:
        yield "nearly everywhere"
    elif heads.size > 1 and not heads.all():
        which = [f"(b {b}, h {h})" for b, h in np.argwhere(heads)]
        yield f"in {len(which)} of {heads.size} heads: {', '.join(which[:3])}{' …' if len(which) > 3 else ''}"


def _factor(got: Array, expected: Array) -> Iterator[str]:
    """A constant factor: a wrong scale of P, or a wrong row sum."""
    some = np.isfinite(got) & (abs(expected) > 0.1 * abs(np.nan_to_num(expected)).max())
    if some.sum() < 16:
        return
    low, middle, high = np.quantile(got[some] / expected[some], (0.05, 0.5, 0.95))
    if high - low < 0.1 * abs(middle):
        yield f"{middle:.3g} times the expected values"


def _row_shapes(rows: Array, S: int, M: int, named: str, threads: int) -> Iterator[str]:
    tail = S // M * M
    if 0 < tail <= rows.min() and rows.size < S:
        yield f"the tail: only rows of the last, partial tile ({named})"
    elif np.isin(rows % M, (0, M - 1)).all() and S > M and rows.size < S:
        edge = "first" if (rows % M == 0).all() else "last" if (rows % M == M - 1).all() else "first or last"
        yield f"a tile boundary: only the {edge} row of a tile ({named})"
    elif (tiles := np.unique(rows // M)).size < -(-S // M):
        yield f"only tiles {_ranges(tiles)} of {-(-S // M)} ({named})"
    warps = threads // 32
    if warps > 1 and M % warps == 0:
        own = M // warps
        owners, all_owners = (np.unique(some % M // own) for some in (rows, np.arange(S)))
        whole = np.unique(rows % M).size == owners.size * own  # else the rows of a warp are probably others
        if owners.size <= all_owners.size // 2 and rows.size > 1 and whole:
            yield f"a warp's rows: those of warp {_ranges(owners)} of {warps}, if each has {own} rows of a tile"


def _diagonal(bad: Array, error: Array, expected: Array, problem: Problem) -> Iterator[str]:
    """Errors of a mask, of the first tile or of the row sum are largest in rows with few visible keys. Those of a scale
    are the same in all rows."""
    rows = np.asarray(bad.any((0, 1, 3)))
    seen = np.clip(np.arange(len(rows)) + problem.diagonal + 1, 0, problem.Sk)
    if not rows[seen > 0].any():
        yield "only rows that see no key"
        return
    part = max(1, int((seen > 0).sum()) // 8)
    by_keys = np.argsort(seen, kind="stable")[(seen == 0).sum() :]
    relative = error.max((0, 1, 3)) / np.maximum(abs(np.nan_to_num(expected)).max((0, 1, 3)), 1e-30)
    few, many = np.median(relative[by_keys[:part]]), np.median(relative[by_keys[-part:]])
    if rows.sum() > len(by_keys) // 2 >= 8 and few > 2 * many:
        yield "worst where a row sees few keys"


def _column_shapes(columns: Array, D: int) -> Iterator[str]:
    if columns.size == D:
        return
    if columns.size == columns[-1] - columns[0] + 1:
        yield f"only columns {_ranges(columns)} of {D}"
        return
    for step in _STEPS:
        residues = np.unique(columns % step)
        if step < D and residues.size <= step // 2 and columns.size == np.isin(np.arange(D) % step, residues).sum():
            yield f"only columns c with c % {step} in {_ranges(residues)}"
            return
    yield f"only columns {_ranges(columns)}"


def draw(found: ErrorMap, title: str, prefix: Path | str) -> list[Path]:
    """Writes PREFIX.png and PREFIX.svg, |error| / bound of the worst head over (row, column), with tile boundaries.
    Returns their paths. Raises ToolchainMissing without matplotlib."""
    rows, columns = found.heat.shape
    top = float(np.clip(found.heat.max(), 10.0, 1e4))  # larger ratios have the same colour
    with picture.figure(6.4, 4.8, dpi=120) as figure:
        from matplotlib.colors import LogNorm
        from matplotlib.ticker import MaxNLocator

        axis = figure.subplots()
        shown = axis.imshow(
            np.clip(found.heat, 1 / top, top), norm=LogNorm(1 / top, top), cmap="RdBu_r", interpolation="nearest",
            aspect="auto", extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        )  # fmt: skip
        for edge in range(found.tile_rows, rows, found.tile_rows):
            axis.axhline(edge - 0.5, color="#bbbbbb", linewidth=0.7, linestyle=":")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("column")
        axis.set_ylabel("row (dotted: tile boundaries)")
        axis.set_title(f"{title}: {found.name} at {index_text(found.worst[:2])}", loc="left")
        figure.colorbar(shown, ax=axis, label="|error| / bound; red exceeds the bound")
        return picture.save(figure, prefix)
