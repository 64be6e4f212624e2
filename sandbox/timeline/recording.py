"""Stores a timeline in a file, so that it can be shown on a machine without a GPU."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from ..core.errors import SpecError
from ..core.operation import problem_from_json
from ..core.tile import Tile
from .record import Step, Timeline, Track

_FORMAT = 1
_SCALARS = ("kernel", "device", "unit", "rate", "blocks", "seconds", "same")


def save(timeline: Timeline, path: Path) -> None:
    """Write the timeline as JSON, compressed with gzip."""
    names = list(dict.fromkeys(step.name for track in timeline.tracks for step in track.steps))
    numbers = {name: n for n, name in enumerate(names)}
    tracks = [
        {"block": t.block, "warp": t.warp, "sm": t.sm, "role": t.role, "lost": t.lost, "steps": t.packed(numbers)}
        for t in timeline.tracks
    ]
    data = {"format": _FORMAT, **{name: getattr(timeline, name) for name in _SCALARS},
            "problem": timeline.problem.as_json(), "tile": dict(timeline.tile), "names": names,
            "tracks": tracks}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))  # mtime: equal timelines give equal files


def load(path: Path) -> Timeline:
    """The timeline that `save` wrote. Raises SpecError if the file is something else."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data["format"] == _FORMAT:
            return _timeline(data)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError) as error:
        raise SpecError(f"{path} is not a recording of `timeline --save`: {error}") from None
    raise SpecError(f"{path} has format {data['format']}, this version reads {_FORMAT}: record it again")


def _timeline(data: dict[str, Any]) -> Timeline:
    seconds = data["seconds"]
    return Timeline(
        **{**{name: data[name] for name in _SCALARS}, "seconds": seconds and (seconds[0], seconds[1])},
        problem=problem_from_json(data["problem"]), tile=Tile(**data["tile"]),
        tracks=tuple(_track(data["names"], row) for row in data["tracks"]),
    )  # fmt: skip


def _track(names: list[str], row: dict[str, Any]) -> Track:
    flat = row["steps"]
    steps = (
        Step(names[n], begin, begin + ticks) for n, begin, ticks in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    )
    return Track(row["block"], row["warp"], row["sm"], row["role"], tuple(steps), row["lost"])
