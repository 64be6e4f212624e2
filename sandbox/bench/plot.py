"""Plots of benchmark rows: TFLOP/s against sequence length, one panel per mask and head dimension; or GB/s of keys."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core import picture
from ..core.errors import UnsupportedProblem
from .report import GBPS, GBPS_OF_ALL, unit_of
from .rows import by_problem, problem_of

Row = Mapping[str, Any]
_MASKS = {False: "no mask", "bottom-right": "causal", "top-left": "causal, top-left"}
_KERNEL_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#e6a100", "#9467bd", "#17becf", "#8c564b", "#e377c2")
_PEER_COLOURS = ("#4d4d4d", "#8c6d31", "#7b8fb2", "#b58db6", "#8fae8b", "#a6a6a6")
_MARKERS = "osD^vPX<"
_STYLE = {
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
}


def draw(rows: Iterable[Row], prefix: Path | str) -> list[Path]:
    """Writes PREFIX.png, 1000 pixels wide, and PREFIX.svg; returns their paths. The same rows give the same files.

    Uses the latest row of each contender and problem. Bands show the quartiles, the dashed line the matrix product
    measured in the same run. Memory-bound problems have one point each, and the line of a kernel that only reads as
    many bytes; there the dashed line is reading 1 GiB. Raises UnsupportedProblem if no row has a time, ToolchainMissing
    without matplotlib.
    """
    latest = {(row["contender"], problem_of(row)): row for row in rows}
    timed = [row for row in latest.values() if row.get("ms")]
    if not timed:
        raise UnsupportedProblem("there is nothing to plot: no row has a time")
    if "operation" in timed[0]:
        return _draw_operation(timed, prefix)
    if unit_of(timed) == GBPS:
        return _draw_reading(timed, prefix)
    widths = sorted({row["D"] for row in timed})
    masks = [mask for mask in _MASKS if any(row["causal"] == mask for row in timed)]
    styles, ceilings = _styles(timed), _ceilings(timed)
    with picture.figure(10, 1.1 + 2.7 * len(masks), style=_STYLE) as figure:
        axes = figure.subplots(len(masks), len(widths), sharex="col", sharey=True, squeeze=False)
        for (i, mask), (j, D) in itertools.product(enumerate(masks), enumerate(widths)):
            _panel(axes[i][j], [row for row in timed if (row["causal"], row["D"]) == (mask, D)], styles, ceilings)
            axes[i][j].set_title(f"D = {D}, {_MASKS[mask]}", loc="left")
            axes[i][j].set_xlabel("sequence length" if i == len(masks) - 1 else "")
            axes[i][j].set_ylabel("TFLOP/s" if j == 0 else "")
        handles = {handle.get_label(): handle for axis in axes.flat for handle in axis.get_legend_handles_labels()[0]}
        order = sorted(handles, key=lambda label: [*styles, label].index(label))
        columns = min(len(order), 5)
        figure.legend([handles[k] for k in order], order, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(_title(timed), x=0.01, ha="left", fontsize=9, color="#444444")
        return picture.save(figure, prefix)


def _draw_reading(rows: Sequence[Row], prefix: Path | str) -> list[Path]:
    """GB/s of keys and values for each problem, in order of bytes."""
    styles, there = _styles(rows), by_problem(rows)
    problems = sorted(there, key=lambda p: min(row["gbps"] * row["ms"] for row in there[p].values()))
    tops = [row["ceiling_read_gbps"] for row in rows if row.get("ceiling_read_gbps")]
    with picture.figure(10, 4.4, style=_STYLE) as figure:
        axis = figure.subplots()
        for label, line in _by_label(rows, len({row["dtype"] for row in rows})).items():
            points = sorted((problems.index(problem_of(row)), row) for row in line)
            axis.plot([n for n, _ in points], [row["gbps"] for _, row in points], label=label, **styles[label])
        if tops:
            top = statistics.median(tops)
            axis.axhline(top, color="#999999", linestyle=(0, (5, 3)), linewidth=1, label=f"reading 1 GiB, {top:.0f}")
        alone = {problem_of(row): row["ceiling_keys_gbps"] for row in rows if row.get("ceiling_keys_gbps")}
        if at := [n for n, problem in enumerate(problems) if problem in alone]:
            reading = [alone[problems[n]] for n in at]
            axis.plot(at, reading, color="#999999", linewidth=1, marker="_", label="reading as many bytes")
        shown = [str(p).replace(f" D{p.D} {p.dtype}", "").replace(" ", "\n") for p in problems]
        axis.set_xticks(range(len(problems)), shown, fontsize=7)
        axis.set_ylabel("GB/s of keys and values")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(_title(rows), x=0.01, ha="left", fontsize=9, color="#444444")
        return picture.save(figure, prefix)


def _draw_operation(rows: Sequence[Row], prefix: Path | str) -> list[Path]:
    """The speed on each problem of an operation: GB/s if all rows are memory-bound, else TFLOP/s."""
    styles, problems = _styles(rows), [*by_problem(rows)]
    unit = unit_of(rows)
    field, ceiling = ("gbps", "ceiling_gbps") if unit == GBPS_OF_ALL else ("tflops", "ceiling_tflops")
    with picture.figure(10, 4.4, style=_STYLE) as figure:
        axis = figure.subplots()
        for label, line in _by_label(rows, len({row["dtype"] for row in rows})).items():
            points = sorted((problems.index(problem_of(row)), row[field] or 0.0) for row in line)
            axis.plot([n for n, _ in points], [speed for _, speed in points], label=label, **styles[label])
        if tops := [row[ceiling] for row in rows if row.get(ceiling)]:
            name = "copy" if field == "gbps" else "matrix product"
            top = statistics.median(tops)
            axis.axhline(top, color="#999999", linestyle=(0, (5, 3)), linewidth=1, label=f"{name}, {top:.0f}")
        axis.set_xticks(range(len(problems)), [str(p).replace(" ", "\n") for p in problems], fontsize=7)
        axis.set_ylabel(unit)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
        figure.suptitle(f"{rows[0]['operation']}  ·  {rows[0].get('device') or ''}", x=0.01, ha="left", fontsize=9)
        return picture.save(figure, prefix)


def _label(row: Row, dtypes: int) -> str:
    return row["contender"] if dtypes == 1 else f"{row['contender']} {row['dtype']}"


def _by_label(rows: Sequence[Row], dtypes: int) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["kind"] != "kernel"):  # the order of the rows, kernels first
        found.setdefault(_label(row, dtypes), []).append(row)
    return found


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """{label: line style}: kernels have strong colours and filled markers, peers muted colours and hollow markers."""
    lines = _by_label(rows, len({row["dtype"] for row in rows}))
    kernels, peers = ([name for name in lines if lines[name][0]["kind"] == kind] for kind in ("kernel", "peer"))
    styles: dict[str, dict[str, Any]] = {}
    for n, label in enumerate(kernels):
        colour = _KERNEL_COLOURS[n % len(_KERNEL_COLOURS)]
        styles[label] = {"color": colour, "linewidth": 2.2, "marker": _MARKERS[n % 8], "markersize": 5, "zorder": 4}
    for n, label in enumerate(peers):
        colour = _PEER_COLOURS[n % len(_PEER_COLOURS)]
        hollow = {"markerfacecolor": "white", "markeredgecolor": colour, "markersize": 4.5}
        styles[label] = {"color": colour, "linewidth": 1.3, "marker": _MARKERS[n % 8], "zorder": 3, **hollow}
    return styles


def _ceilings(rows: Sequence[Row]) -> dict[str, float]:
    """{label: TFLOP/s of the matrix product} for each dtype: the median over runs."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("ceiling_tflops"):
            found.setdefault(row["dtype"], []).append(row["ceiling_tflops"])
    tops = {dtype: statistics.median(values) for dtype, values in found.items()}
    return {f"matrix product{f' {dtype}' if len(tops) > 1 else ''}, {top:.0f}": top for dtype, top in tops.items()}


def _panel(
    axis: Any, rows: Sequence[Row], styles: Mapping[str, Mapping[str, Any]], ceilings: Mapping[str, float]
) -> None:
    lines = _by_label(rows, 1 if all(row["contender"] in styles for row in rows) else 2)
    for label, line in lines.items():
        line.sort(key=lambda row: row["Sq"])
        lengths = [row["Sq"] for row in line]
        slow, fast = ([row["tflops"] * row["ms"] / row[q] for row in line] for q in ("q3_ms", "q1_ms"))
        axis.plot(lengths, [row["tflops"] for row in line], label=label, **styles[label])
        axis.fill_between(lengths, slow, fast, color=styles[label]["color"], alpha=0.18, linewidth=0)
    for label, top in ceilings.items():
        axis.axhline(top, color="#999999", linestyle=(0, (5, 3)), linewidth=1, label=label)
    ticks = sorted({row["Sq"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)


def _title(rows: Sequence[Row]) -> str:
    """The common properties of all panels: problem, device, mode."""
    said = {
        name: ", ".join(sorted({str(row[name]) for row in rows if row.get(name)}))
        for name in ("computes", "dtype", "device", "mode")
    }
    tokens = {row["B"] * row["Sq"] for row in rows}
    hidden = {row["H"] * row["D"] for row in rows}
    shape = f"{tokens.pop() // 1024}k tokens" if len(tokens) == 1 and min(tokens) % 1024 == 0 else ""
    shape += f", hidden size {hidden.pop()}" if shape and len(hidden) == 1 else ""
    timed = {"events": "single launches, L2 flushed", "graph": "CUDA graphs, L2 warm"}.get(said["mode"], said["mode"])
    return "  ·  ".join(filter(None, (f"Attention {said['computes']}, {said['dtype']}", shape, said["device"], timed)))
