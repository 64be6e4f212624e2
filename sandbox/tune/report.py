"""The result of a tile search: a table of the best tiles, a summary of the others, and a plot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..core import picture
from ..core.errors import UnsupportedProblem
from ..engine.tuned import problem_class
from ..verify.report import si_time
from ..verify.suite import suite_of
from . import executors
from .search import STATES, Candidate, Search

_SHOWN = 12


def _tflops(search: Search, candidate: Candidate) -> float:
    flops = suite_of(search.kernel).flops(search.problem)
    return flops / candidate.timing.median * 1e-12 if candidate.timing else 0.0


def ranked(search: Search) -> list[Candidate]:
    """The correct tiles, fastest first: finalists, which have comparable times of many samples, before the others."""
    timed = [c for c in search.candidates.values() if c.state == "timed" and c.timing]
    return sorted(timed, key=lambda c: (not c.finalist, c.timing.median if c.timing else 0.0))


def faster(search: Search) -> list[Candidate]:
    """Finalists with a lower median than the winner. The difference is within the noise; otherwise they would win."""
    w = search.winner
    if not w or not w.timing:
        return []
    return [c for c in ranked(search) if c.finalist and c.timing and c.timing.median < w.timing.median]


def tune_table(search: Search, width: int) -> Table:
    """The best tiles: one column per tile number, or one column for all numbers on a narrow terminal."""
    names = list(search.kernel.tiles[0])
    wide = width >= 62 + 9 * len(names)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names if wide else (" ".join(names),):
        table.add_column(
            name.replace("_", "_\n", 1) if wide else name.replace(" ", "\n"), justify="right", no_wrap=True
        )
    for name in ("regs", "smem", "blocks\nper SM", "time", "TFLOP/s", "samples"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for c in ranked(search)[:_SHOWN]:
        assert c.timing
        numbers = [str(c.tile[name]) for name in names] if wide else [" ".join(str(c.tile[name]) for name in names)]
        blocks = str(c.occupancy.blocks_per_sm) if c.occupancy else "-"
        regs = str(c.resources.registers) if c.resources else "-"
        speed, samples = f"{_tflops(search, c):.3g}", str(c.timing.samples)
        mark = Text("the spec's" if c is search.own else "", "dim")
        if c is search.winner:
            mark = Text("best", "bold green")
        elif c in faster(search):
            mark = Text("no faster within the noise", "dim")
        table.add_row(
            *numbers, regs, f"{c.smem / 1024:.4g} KiB", blocks, si_time(c.timing.median), speed, samples, mark
        )
    return table


def verdict(search: Search) -> list[Text]:
    """How many tiles were measured, which is best, and for which problems it is stored."""
    states = Counter(c.state for c in search.candidates.values())
    others = ", ".join(f"{states[state]} {state}" for state in STATES if states[state])
    lines = [Text(f"{search.combinations} tiles, {len(search.candidates)} valid: {others}")]
    if search.executor.gpu == executors.EMULATION:
        lines.append(Text("emulated: not GPU times; attention does not use this result", "yellow"))
    w, own = search.winner, search.own
    if w and w.timing:
        against = ""
        if own and own.timing:
            ratio = own.timing.median / w.timing.median
            against = ", the spec's own" if w is own else f", {ratio:.2f} times as fast as the spec's own {own.tile}"
        if ahead := faster(search):
            gain = w.timing.median / ahead[0].timing.median if ahead[0].timing else 1.0
            against += f": {len(ahead)} more had a median up to {gain - 1:.1%} below its own, which is within the noise"
        head = Text.assemble((search.kernel.name, "bold"), f" on {search.problem}: ", (str(w.tile), "bold"), against)
        kept = f"stored for {problem_class(search.problem)} on {search.executor.gpu}"
        lines += [head, Text(kept, "dim")]
    return lines


def as_json(search: Search) -> dict[str, Any]:
    """The complete result, for JSON."""
    candidates = [{**vars(c), "tflops": _tflops(search, c)} for c in search.candidates.values()]
    return {
        "kernel": search.kernel.name,
        "problem": search.problem,
        "gpu": search.executor.gpu,
        "class": problem_class(search.problem),
        "combinations": search.combinations,
        "tile": search.winner.tile if search.winner else None,
        "own_tile": search.own.tile if search.own else None,
        "candidates": candidates,
    }


# ---- the plot


def draw(search: Search, prefix: Path | str) -> list[Path]:
    """Writes PREFIX.png and PREFIX.svg: a heat map of the best speed over the two tile numbers with the most values,
    and the speed of every tile against each number. Raises UnsupportedProblem if no tile was timed, ToolchainMissing
    without matplotlib."""
    if not ranked(search):
        raise UnsupportedProblem("there is nothing to plot: no tile was timed")
    values = {name: sorted({tile[name] for tile in search.candidates}) for name in search.kernel.tiles[0]}
    several = [name for name in values if len(values[name]) > 1] or list(values)[:1]
    y, x = (sorted(several, key=lambda name: -len(values[name]))[:2] * 2)[:2]
    with picture.figure(10, 3.6 + 0.42 * len(values[y])) as figure:
        grid = figure.add_gridspec(2, len(several), height_ratios=(1.4 + 0.42 * len(values[y]), 2.2))
        _heat(figure.add_subplot(grid[0, :]), search, x, y, values)
        strips: list[Any] = []
        for n, name in enumerate(several):
            strips.append(figure.add_subplot(grid[1, n], sharey=strips[0] if strips else None))
            _strip(strips[n], search, name, values[name])
        strips[0].set_ylabel("TFLOP/s")
        title = f"{search.kernel.name} on {search.problem}  ·  {search.executor.gpu}"
        figure.suptitle(title, x=0.01, ha="left", color="#444444")
        return picture.save(figure, prefix)


def _heat(axis: Any, search: Search, x: str, y: str, values: Mapping[str, Sequence[int]]) -> None:
    """Each cell has the best speed and the tile's other numbers, or the states of its tiles if none was timed."""
    import matplotlib

    best: dict[tuple[int, int], Candidate] = {}
    for c in reversed(ranked(search)):
        best[c.tile[x], c.tile[y]] = c
    speeds = [[_tflops(search, best[i, j]) if (i, j) in best else float("nan") for i in values[x]] for j in values[y]]
    top = max(s for row in speeds for s in row if s == s)
    colours = matplotlib.colormaps["YlGn"].with_extremes(bad="#eeeeee")
    axis.imshow(
        speeds, aspect="auto", cmap=colours, origin="lower", vmin=0, vmax=top * 1.6
    )  # light colours, for dark text
    others = [name for name in search.kernel.tiles[0] if name not in (x, y)]
    for row, j in enumerate(values[y]):
        for column, i in enumerate(values[x]):
            if (i, j) in best:
                c = best[i, j]
                rest = "  ".join(f"{name} {c.tile[name]}" for name in others)
                weight = "bold" if c is search.winner else "normal"
                axis.text(column, row + 0.12, f"{speeds[row][column]:.3g}", ha="center", va="center", weight=weight)
                axis.text(column, row - 0.28, rest, ha="center", va="center", fontsize=6, color="#333333")
            else:
                states = Counter(k.state for k in search.candidates.values() if (k.tile[x], k.tile[y]) == (i, j))
                text = ", ".join(states) or "not valid"
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color="#888888")
    axis.set_xticks(range(len(values[x])), values[x])
    axis.set_yticks(range(len(values[y])), values[y])
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title("TFLOP/s of the best tile, and its other numbers", loc="left", fontsize=10)


def _strip(axis: Any, search: Search, name: str, values: Sequence[int]) -> None:
    points = ranked(search)
    position = {value: n for n, value in enumerate(values)}
    axis.scatter(
        [position[c.tile[name]] for c in points], [_tflops(search, c) for c in points], s=9, color="#2ca02c", alpha=0.5
    )
    if search.winner:
        axis.scatter(
            [position[search.winner.tile[name]]], [_tflops(search, search.winner)], s=40, color="#d62728", zorder=4
        )
    axis.set_xticks(range(len(values)), values)
    axis.set_xlabel(name)
    axis.set_xlim(-0.5, len(values) - 0.5)
    axis.set_ylim(0, 1.1 * max(_tflops(search, c) for c in points))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e4e4e4")
