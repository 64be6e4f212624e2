"""Benchmark rows as a table, with the ratios to a peer."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.table import Table
from rich.text import Text

from ..core.errors import UnsupportedProblem
from .rows import by_problem, problem_of

Row = Mapping[str, Any]


def pick_peer(rows: Sequence[Row], wanted: str | None = None) -> str | None:
    """The contender to compare kernels with: `wanted`, else the first peer with a time. Raises UnsupportedProblem if
    `wanted` is not among the rows."""
    contenders = dict.fromkeys(row["contender"] for row in rows)
    if wanted and wanted not in contenders:
        raise UnsupportedProblem(f"{wanted} is not among the contenders: {', '.join(contenders) or 'none'}")
    return wanted or next((row["contender"] for row in rows if row["kind"] == "peer" and row["ms"]), None)


def _ratio(kernel: Row | None, peer: Row | None) -> float | None:
    """Speed relative to the peer; None if the two rows are from different commits, devices or modes."""
    if not kernel or not peer or not kernel["ms"] or not peer["ms"]:
        return None
    same = all(kernel.get(name) == peer.get(name) for name in ("commit", "device", "mode"))
    return peer["ms"] / kernel["ms"] if same else None


def bench_table(rows: Sequence[Row], against: str | None, width: int) -> Table:
    """One line per problem: TFLOP/s of each contender, % of the measured matrix product, each kernel's ratio to a peer.
    For memory-bound problems: GB/s, and % of the read ceiling, which has its own column.

    On a narrow terminal, only the speed. Quartiles, errors and other data are in the rows.
    """
    contenders = {row["contender"]: row["kind"] for row in rows}
    names = sorted(contenders, key=lambda name: contenders[name] != "kernel")
    kernels = [name for name in names if contenders[name] == "kernel"] if against else []
    wide = width >= 34 + 11 * len(names) + 12 * len(kernels)
    dtypes = {row["dtype"] for row in rows}
    only = f" {next(iter(dtypes))}" if len(dtypes) == 1 else ""  # then the dtype is shown in the heading only
    table = Table(caption=_caption(rows), caption_justify="left", box=None, pad_edge=False, header_style="bold")
    unit = unit_of(rows)
    ceiling = ["read\nceiling"] if unit == GBPS and any(row.get("ceiling_keys_gbps") for row in rows) else []
    table.add_column(f"{unit}{only}", overflow="fold")
    for name in (*names, *ceiling, *(f"{name} : {against}" for name in kernels if wide)):
        table.add_column(_broken(name), justify="right", no_wrap=" : " not in name and "," not in name)
    for problem, there in by_problem(rows).items():
        ratios = [_ratio(there.get(name), there.get(against or "")) for name in kernels if wide]
        cells = [_speed(there.get(name), wide, unit) for name in names]
        cells += [_read_ceiling(there) for _ in ceiling]
        said = str(problem).replace(only, "") if only else str(problem)
        table.add_row(said, *cells, *("-" if ratio is None else times(ratio) for ratio in ratios))
    return table


def times(ratio: float) -> str:
    """A ratio of speeds, as text."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _broken(name: str) -> str:
    """A contender's name on two or three lines, for a narrow column."""
    return name.replace(" : ", "\n: ").replace("-", "-\n", 1).replace("fwd_", "fwd_\n", 1).replace(" BLOCK", "\nBLOCK")


GBPS, GBPS_OF_ALL = "GB/s of keys", "GB/s"


def unit_of(rows: Sequence[Row]) -> str:
    """The unit of speed for these rows."""
    timed = [row for row in rows if row["ms"]]
    if not timed or not all(row.get("gbps") for row in timed):
        return "TFLOP/s"
    return GBPS_OF_ALL if all("operation" in row for row in timed) else GBPS


def _speed(row: Row | None, share: bool, unit: str) -> Text:
    if row is None or row["ok"] is None:
        return Text("-", "dim")
    if not row["ms"]:
        return Text("WRONG" if row["bound"] is not None else "FAIL", "bold red")
    percent = f" {row['percent_of_ceiling']:3.0f}%" if share and row["percent_of_ceiling"] else ""
    speed = row["gbps"] if unit in (GBPS, GBPS_OF_ALL) else row["tflops"]
    return Text.assemble(f"{speed:.1f}" if speed < 100 else f"{speed:.0f}", (percent, "dim"))


def _read_ceiling(there: Mapping[str, Row]) -> Text:
    """GB/s of a kernel that only reads as many bytes, from the latest of a problem's rows."""
    found = [row["ceiling_keys_gbps"] for row in there.values() if row.get("ceiling_keys_gbps")]
    return Text(f"{found[-1]:.0f}" if found else "-", "dim")


def _caption(rows: Sequence[Row]) -> str:
    """Environment and mode, from the last row."""
    last, reads, moves = rows[-1], unit_of(rows) == GBPS, unit_of(rows) == GBPS_OF_ALL
    clocks = last.get("clocks") or {}
    parts = (
        last.get("device") or "",
        f"CUDA {last['cuda']}" if last.get("cuda") else "",
        clocks.get("clocks.sm", ""),
        clocks.get("power.draw", ""),
        {"events": "single launches, L2 flushed", "graph": "CUDA graphs, L2 not flushed"}.get(last.get("mode", ""), ""),
        "% of the read ceiling: a kernel that only reads as many bytes"
        if reads and last.get("ceiling_keys_gbps")
        else "",
        f"1 GiB is read at {last['ceiling_read_gbps']:.0f} GB/s" if reads and last.get("ceiling_read_gbps") else "",
        f"% of a matrix product of {last['ceiling_tflops']:.0f} TFLOP/s"
        if last.get("ceiling_tflops") and not reads and not moves
        else "",
        f"{'% of a copy at' if moves else 'copy'} {last['ceiling_gbps']:.0f} GB/s" if last.get("ceiling_gbps") else "",
    )
    return "; ".join(filter(None, parts))


def ratios(rows: Sequence[Row], against: str) -> dict[str, dict[int, tuple[float, int]]]:
    """{contender: {D (0 for an operation): (geometric mean of its speed relative to the peer, problems timed)}}."""
    found: dict[str, dict[int, list[float]]] = {}
    for problem, there in by_problem(rows).items():
        for name, row in there.items():
            if ratio := _ratio(row, there.get(against)):
                found.setdefault(name, {}).setdefault(dict(problem.head_dims).get("D", 0), []).append(ratio)
    return {
        name: {D: (statistics.geometric_mean(values), len(values)) for D, values in sorted(widths.items())}
        for name, widths in found.items()
    }


def _worst(rows: Sequence[Row], name: str, against: str) -> tuple[float, Any]:
    """(the lowest speed of a contender relative to the peer, its problem)."""
    found = ((_ratio(there.get(name), there.get(against)), problem) for problem, there in by_problem(rows).items())
    return min(((ratio, problem) for ratio, problem in found if ratio), key=lambda pair: pair[0])


def choices(rows: Sequence[Row], chosen: Callable[[Any], str]) -> Iterator[Text]:
    """How fast the kernels are that `attention` chooses, relative to the fastest kernel and to the fastest peer of each
    problem. chosen: the kernel's name for a problem. Problems with fewer than two timed kernels are left out."""
    found: dict[str, list[tuple[float, Any]]] = {"the fastest kernel": [], "the fastest peer": []}
    for problem, there in by_problem(rows).items():
        kernels = {name: row for name, row in there.items() if name == row["kernel"] and row["ms"]}
        peers = [row for row in there.values() if row["kind"] == "peer"]
        own = kernels.get(chosen(problem)) if len(kernels) > 1 else None
        for values, others in zip(found.values(), (kernels.values(), peers), strict=True):
            if ratios_to := [ratio for other in others if (ratio := _ratio(own, other))]:
                values.append((min(ratios_to), problem))
    for other, values in found.items():
        if values:
            mean, (least, problem) = statistics.geometric_mean(x for x, _ in values), min(values, key=itemgetter(0))
            problems = f"{len(values)} problem{'s' if len(values) > 1 else ''}"
            text = f" : {other}, geometric mean of {problems}: {times(mean)}; lowest {times(least)} on"
            yield Text.assemble(("attention's choice", "bold"), f"{text} {problem}")


def notes(rows: Sequence[Row], against: str | None) -> Iterator[Text]:
    """Notes below the table: mean and lowest ratio of each kernel, then each reason why a contender has no time."""
    kernels = {row["contender"] for row in rows if row["kind"] == "kernel"}
    for name, widths in ratios(rows, against).items() if against else ():
        if name not in kernels:
            continue
        means = ", ".join(f"D{D} {times(mean)}" if D else times(mean) for D, (mean, _) in widths.items())
        count = sum(n for _, n in widths.values())
        least, problem = _worst(rows, name, against or "")
        lowest = f"; lowest {times(least)} on {problem}" if count > 1 else ""
        yield Text.assemble((name, "bold"), f" : {against}, geometric mean of {count} problems: {means}{lowest}")
    reasons: dict[tuple[str, str], list[Row]] = {}
    for row in (row for there in by_problem(rows).values() for row in there.values()):
        if row["ok"] is not True:
            plain = re.sub(r"[\d.]+", "", row["message"])  # messages that differ only in numbers are one reason
            reasons.setdefault((row["contender"], plain), []).append(row)
    for (name, _), same in reasons.items():
        row = same[0]
        mark = Text("skip", "yellow") if row["ok"] is None else Text("WRONG" if row["bound"] else "FAIL", "bold red")
        on = f"{problem_of(row)}" + (f" and {len(same) - 1} more" if len(same) > 1 else "")
        yield Text.assemble(mark, f" {name} on {on}: {row['message'].removeprefix(f'{name}: ')}")
