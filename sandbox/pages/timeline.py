"""The page of a timeline: lanes to zoom into, and its tables."""

from __future__ import annotations

from typing import Any

from ..timeline import plot, report
from ..timeline.record import Timeline
from .render import render
from .tables import of_terminal


def page(timeline: Timeline) -> str:
    """HTML. Raises ToolchainMissing without jinja2."""
    colours, shares = plot.colours(timeline), "Share of time by step" if timeline.timed else "Share of marks by step"
    return render(
        "lanes.html", title=f"{timeline.kernel}: timeline", about=[report.headline(timeline)], colours=colours,
        data=_data(timeline, [*colours]), table=of_terminal(report.shares_table(timeline), shares),
        heading=report.heading(timeline), remarks=report.remarks(timeline), unit=timeline.unit,
        until=plot.shown_until(timeline),
    )  # fmt: skip


def _data(timeline: Timeline, names: list[str]) -> dict[str, Any]:
    """Steps as [name's number, begin, ticks, …], a row for each warp."""
    numbers = {name: n for n, name in enumerate(names)}
    lanes = [
        {"block": lane.block, "warp": lane.warp, "sm": lane.sm,
         "steps": [n for s in lane.steps for n in (numbers[s.name], s.begin, s.ticks)]}
        for lane in timeline.lanes
    ]  # fmt: skip
    waits = [name for name in names if any(s.name == name and s.waits for lane in timeline.lanes for s in lane.steps)]
    return {"names": names, "waits": waits, "lanes": lanes, "unit": timeline.unit}
