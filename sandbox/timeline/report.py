"""Text output of a timeline: the time of each role by step, and the longest waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..verify.report import si_time, table
from .record import Step, Timeline, Track, no_marks

_WAITS = 5
ORDER_ONLY = "a tick is one mark of the block: the CPU backend shows the order of the threads, not time"


@dataclass(frozen=True)
class Share:
    """A step of a role, summed over its warps and blocks: count, and fraction of all their ticks."""

    role: str
    step: str
    waits: bool
    times: int
    share: float
    mean: float
    longest: int


def shares(timeline: Timeline) -> list[Share]:
    """All steps by role, largest fraction first."""
    roles: dict[str, dict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
    for track in sorted(timeline.tracks, key=lambda track: track.warp):
        for step in track.steps:
            roles[track.role][step.name].append(step)
    found = []
    for role, named in roles.items():
        whole = sum(step.ticks for steps in named.values() for step in steps) or 1
        rows = [
            Share(role, name, steps[0].waits, len(steps), sum(s.ticks for s in steps) / whole,
                  sum(s.ticks for s in steps) / len(steps), max(s.ticks for s in steps))
            for name, steps in named.items()
        ]  # fmt: skip
        found += sorted(rows, key=lambda row: -row.share)
    return found


def longest_waits(timeline: Timeline, count: int = _WAITS) -> list[tuple[Track, Step]]:
    """The longest wait of each step in each block, longest first: warps of a block often wait together."""
    waits = [(track, step) for track in timeline.tracks for step in track.steps if step.waits]
    longest: dict[tuple[int, str], tuple[Track, Step]] = {}
    for track, step in sorted(waits, key=lambda pair: -pair[1].ticks):
        longest.setdefault((track.block, step.name), (track, step))
    return list(longest.values())[:count]


def shares_table(timeline: Timeline) -> Table:
    """The table of `timeline`."""
    numbers = ["times", "share" if timeline.timed else "share of marks", f"mean {timeline.unit}", "longest"]
    shown = table("role", "step", *numbers, right=numbers)
    last = ""
    for row in shares(timeline):
        role, last = ("" if row.role == last else row.role), row.role
        style = "dim" if row.waits else ""
        figures = (str(row.times), f"{row.share:.1%}", f"{row.mean:.0f}", str(row.longest))
        shown.add_row(role, row.step, *figures, style=style)
    return shown


def heading(timeline: Timeline) -> str:
    """The heading of the table."""
    return "Time by step" if timeline.timed else "Order of the steps (marks, not time)"


def headline(timeline: Timeline) -> str:
    """The kernel, problem, tile, device and blocks shown."""
    blocks = ", ".join(str(block) for block in dict.fromkeys(track.block for track in timeline.tracks))
    subject = f"{timeline.kernel} {timeline.problem}, tile {timeline.tile}, on {timeline.device}"
    return f"{subject}: blocks {blocks} of {timeline.blocks}"


def remarks(timeline: Timeline) -> Sequence[str]:
    """The longest waits, the cost of the marks, and notes on the numbers."""
    notes = [
        f"block {track.block} warp {track.warp}: {step.ticks} {timeline.unit} in {step.name}, from {step.begin} on"
        for track, step in longest_waits(timeline)
    ]
    if notes:
        notes.insert(0, "longest waits:" if timeline.timed else "waits with the most marks of other warps in between:")
    if timeline.seconds and timeline.slowdown is not None:
        plain, marked = map(si_time, timeline.seconds)
        notes.append(f"marks cost {timeline.slowdown:+.1%}: {plain} without them, {marked} with them")
    else:
        notes.append(ORDER_ONLY)
    if timeline.without_marks:
        notes.append(no_marks(timeline.without_marks))
    if timeline.lost:
        notes.append(f"{timeline.lost} marks were overwritten and are not shown: use a smaller problem")
    if timeline.same is False:
        notes.append("WRONG: the results with marks differ from those without")
    return notes


def as_json(timeline: Timeline) -> dict[str, Any]:
    """Tracks with their steps, shares, waits and the cost of the marks, as JSON types."""
    waits = [{"block": track.block, "warp": track.warp, "step": step} for track, step in longest_waits(timeline)]
    names = ("kernel", "problem", "tile", "device", "unit", "rate", "blocks", "seconds", "slowdown", "same", "lost")
    about = {name: getattr(timeline, name) for name in names}
    return {**about, "shares": shares(timeline), "longest_waits": waits, "tracks": timeline.tracks}
