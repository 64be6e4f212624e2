"""The timeline page: zoomable tracks, and tables."""

from __future__ import annotations

from typing import Any

from ..timeline import plot, report
from ..timeline.record import Timeline
from .render import render
from .tables import of_terminal


def page(timeline: Timeline) -> str:
    """HTML of a timeline. Raises ToolchainMissing without jinja2."""
    colours, shares = plot.colours(timeline), "Share of time by step" if timeline.timed else "Share of marks by step"
    about = [report.headline(timeline), *([] if timeline.timed else [report.ORDER_ONLY])]
    return render(
        "tracks.html", title=f"{timeline.kernel}: timeline", about=about, colours=colours,
        data=_data(timeline, [*colours]), table=of_terminal(report.shares_table(timeline), shares),
        heading=report.heading(timeline), remarks=report.remarks(timeline), unit=timeline.unit,
        until=plot.shown_until(timeline),
    )  # fmt: skip


def _data(timeline: Timeline, names: list[str]) -> dict[str, Any]:
    """Data for the script: per warp, its steps as [index of the name, begin, ticks, …]."""
    numbers = {name: n for n, name in enumerate(names)}
    tracks = [
        {"block": track.block, "warp": track.warp, "sm": track.sm, "steps": track.packed(numbers)}
        for track in timeline.tracks
    ]
    waits = [
        name for name in names if any(s.name == name and s.waits for track in timeline.tracks for s in track.steps)
    ]
    return {"names": names, "waits": waits, "tracks": tracks, "unit": timeline.unit}
