"""Writes a timeline in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .record import Timeline


def write(timeline: Timeline, path: Path) -> None:
    """Write the trace: a process per block, a thread per warp, a complete event per step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"kernel": timeline.kernel, "problem": str(timeline.problem), "tile": str(timeline.tile),
             "device": timeline.device, "unit": timeline.unit, "lost": timeline.lost}  # fmt: skip
    path.write_text(json.dumps({"traceEvents": [*_events(timeline)], "displayTimeUnit": "ns", "otherData": about}))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    microseconds = 1e6 / timeline.rate if timeline.rate else 1.0  # per tick
    named: set[int] = set()
    for track in timeline.tracks:
        at = {"pid": track.block, "tid": track.warp}
        if track.block not in named:
            named.add(track.block)
            where = "" if track.sm is None else f", SM {track.sm}"
            yield {**at, "ph": "M", "name": "process_name", "args": {"name": f"block {track.block}{where}"}}
        yield {**at, "ph": "M", "name": "thread_name", "args": {"name": f"warp {track.warp} ({track.role})"}}
        for step in track.steps:
            yield {
                **at, "ph": "X", "name": step.name, "cat": "wait" if step.waits else "work",
                "ts": step.begin * microseconds, "dur": step.ticks * microseconds,
                "args": {timeline.unit: step.ticks},
            }  # fmt: skip
