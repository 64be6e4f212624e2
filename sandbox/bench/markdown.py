"""Tables of stored rows for a page of Markdown: speed relative to peers on the paper's grid, or problem by problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from .ladder import label
from .report import times
from .rows import by_problem

Row = Mapping[str, Any]


def of_chosen(rows: Sequence[Row], chosen: Callable[[Any], str]) -> list[Row]:
    """The rows of peers, and of each problem that of the kernel that `attention` chooses, as contender `attention`.
    chosen: the kernel's name for a problem."""
    found: list[Row] = []
    for problem, there in by_problem(rows).items():
        if own := there.get(chosen(problem)):
            found.append({**own, "contender": "attention"})
        found += (row for row in there.values() if row["kind"] == "peer")
    return found


def points_markdown(rows: Sequence[Row], kernel: str, against: Sequence[str]) -> str:
    """The kernel's speed over the fastest of `against` at each point: a line for each head width and mask, a column for
    each sequence length, and geometric means."""
    ratios: dict[tuple[int, bool], dict[int, float]] = {}
    for p, there in by_problem(rows).items():
        own, others = _speed(there.get(kernel)), [t for name in against if (t := _speed(there.get(name)))]
        if own and others:
            ratios.setdefault((p.D, bool(p.causal)), {})[p.Sq] = own / max(others)
    lengths = sorted({S for points in ratios.values() for S in points})
    lines = [
        f"| `{kernel}` | {' | '.join(f'S = {_length(S)}' for S in lengths)} | mean |",
        f"| --- |{' --- |' * len(lengths)} --- |",
    ]
    for (D, causal), points in sorted(ratios.items()):
        cells = [times(points[S]) if S in points else "–" for S in lengths]
        name = f"D = {D}, causal" if causal else f"D = {D}"
        lines.append(f"| {name} | {' | '.join(cells)} | {geometric_mean(points.values()):.3f} |")
    means = {
        D: geometric_mean([x for (d, _), points in ratios.items() if d == D for x in points.values()])
        for D in sorted({D for D, _ in ratios})
    }
    every = [x for points in ratios.values() for x in points.values()]
    said, peers = ", ".join(f"D = {D} {mean:.3f}" for D, mean in means.items()), ", ".join(map(_head, against))
    caption = (
        f"Speed of `{kernel}` relative to {'the fastest of ' * (len(against) > 1)}{peers} in the same run. Geometric"
        f" means: {said},"
        f" all {len(every)} points {geometric_mean(every):.3f}; smallest {min(every):.3f}."
    )
    return "\n".join([*lines, "", caption]) + "\n"


def problems_markdown(rows: Sequence[Row], contenders: Sequence[str], microseconds: bool = False) -> str:
    """A line for each problem, a column for each contender: TFLOP/s, or microseconds; the fastest in bold.

    Rows without a time are shown as "–", wrong results as "wrong". The caption names the device and what a matrix
    product reached beside the rows, for each dtype.
    """
    lines = [f"| problem | {' | '.join(map(_head, contenders))} |", f"| --- |{' --- |' * len(contenders)}"]
    for p, there in by_problem(rows).items():
        speeds = [_speed(there.get(name)) for name in contenders]
        fastest = max((speed for speed in speeds if speed), default=None)
        cells = []
        for name, speed in zip(contenders, speeds, strict=True):
            row = there.get(name)
            if speed is None or row is None:
                cells.append("wrong" if row is not None and row["ok"] is False and row["bound"] is not None else "–")
                continue
            shown = f"{1e3 * row['ms']:.1f}" if microseconds else f"{speed:.0f}"
            cells.append(f"**{shown}**" if speed == fastest and len(contenders) > 1 else shown)
        lines.append(f"| {p} | {' | '.join(cells)} |")
    last, unit = rows[-1], "µs" if microseconds else "TFLOP/s"
    caption = f"{unit}, median of interleaved launches; {last['device']}, CUDA {last['cuda']}; a matrix product reaches"
    return "\n".join([*lines, "", f"{caption} {_products(rows)}."]) + "\n"


def _head(name: str) -> str:
    """A contender's name in a table: a kernel's as code."""
    return label(name) if label(name) != name else f"`{name}`"


def _products(rows: Iterable[Row]) -> str:
    """TFLOP/s of the matrix products measured beside the rows: "790 … 797 in bfloat16"."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("ceiling_tflops"):
            found.setdefault(row["dtype"], []).append(row["ceiling_tflops"])
    ranges = {
        dtype: " … ".join(dict.fromkeys(f"{top:.0f}" for top in (min(tops), max(tops))))
        for dtype, tops in found.items()
    }
    return " and ".join(f"{tops} TFLOP/s in {dtype}" for dtype, tops in ranges.items())


def _speed(row: Row | None) -> float | None:
    return row["tflops"] if row and row["ok"] and row["ms"] else None


def _length(S: int) -> str:
    return f"{S // 1024}k" if S % 1024 == 0 else str(S)
