"""Plot of a timeline: a track per warp, a colour per step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core import picture
from ..core.errors import UnsupportedProblem
from .record import Timeline, Track

# Colours by Okabe and Ito, which are distinguishable with colour blindness, and lighter variants
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5fb0", "#8c6d31", "#b2df8a", "#f0e442")
WAITING = "#b4bcc6"
_MOST_STEPS = 160  # default limit per warp, without --between


def colours(timeline: Timeline) -> dict[str, str]:
    """{step: colour} in the order of first appearance; all waits are grey."""
    names = dict.fromkeys(step.name for track in timeline.tracks for step in track.steps if not step.waits)
    waits = dict.fromkeys(step.name for track in timeline.tracks for step in track.steps if step.waits)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)} | dict.fromkeys(waits, WAITING)


def shown_until(timeline: Timeline) -> int:
    """The last tick of a plot in which steps are still distinguishable."""
    ends = (track.steps[:_MOST_STEPS][-1].end for track in timeline.tracks if track.steps)
    busy = [track for track in timeline.tracks if len(track.steps) > _MOST_STEPS]
    return min(track.steps[_MOST_STEPS].begin for track in busy) if busy else max(ends, default=0)


def draw(timeline: Timeline, prefix: Path | str, between: tuple[int, int] | None = None) -> list[Path]:
    """Writes PREFIX.png and PREFIX.svg. `between`: first and last tick; by default 0 to `shown_until`.

    Raises UnsupportedProblem if no step is in the range, ToolchainMissing without matplotlib.
    """
    first, last = between or (0, shown_until(timeline))
    tracks = [track for track in timeline.tracks if any(s.begin < last and s.end > first for s in track.steps)]
    if not tracks:
        raise UnsupportedProblem(f"{timeline.kernel}: no warp has a step between ticks {first} and {last}")
    colour = colours(timeline)
    with picture.figure(11, 1.2 + 0.22 * len(tracks), dpi=110) as figure:
        axis = figure.add_subplot()
        labelled: set[str] = set()
        for name in colour:
            for n, track in enumerate(tracks):
                spans = [s for s in track.steps if s.name == name and s.begin < last and s.end > first]
                if spans:
                    label, place = ("waits", (n + 0.35, 0.3)) if spans[0].waits else (name, (n + 0.1, 0.8))
                    axis.broken_barh([(s.begin, s.ticks) for s in spans], place, color=colour[name], linewidth=0.3,
                                     edgecolor="white", label=None if label in labelled else label)  # fmt: skip
                    labelled.add(label)
        axis.set_xlim(first, last)
        axis.set_ylim(len(tracks), 0)
        axis.set_yticks([n + 0.5 for n in range(len(tracks))], _labels(tracks), fontsize=7)
        axis.set_xlabel(timeline.unit if timeline.timed else f"{timeline.unit}: order, not time")
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(f"{timeline.kernel} {timeline.problem} on {timeline.device}", loc="left", fontsize=9)
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")
        return picture.save(figure, prefix)


def _labels(tracks: Sequence[Track]) -> list[str]:
    return [f"block {track.block} warp {track.warp}" for track in tracks]
