"""Roofline plot of profiles (Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core import picture
from ..core.errors import UnsupportedProblem
from .profiler import Profile


def draw(profiles: Sequence[Profile], prefix: Path | str) -> list[Path]:
    """Writes the roofline to PREFIX.png and PREFIX.svg: a filled circle per profile, a hollow one for its IO model.

    Raises UnsupportedProblem if the necessary metrics are missing, ToolchainMissing without matplotlib.
    """
    known = [p for p in profiles if p.tflops and p.counters.dram_read and p.counters.dram_peak and p.tensor_peak]
    if not known:
        raise UnsupportedProblem(
            "a roofline needs matrix products, time, DRAM bytes and throughput, clock, SMs: one of them is not known"
        )
    with picture.figure(8, 4.5, dpi=125) as figure:
        axis = figure.add_subplot()
        _roof(axis, known)
        for n, p in enumerate(known):
            colour = f"C{n}"
            measured = (p.counters.dram_read or 0) + (p.counters.dram_written or 0)
            flops, label = p.work.flops, f"{p.subject.entry} {p.subject.label}"
            axis.plot([flops / measured], [p.tflops or 0.0], "o", color=colour, label=label, markersize=8)
            uncached, tflops = flops / p.work.model.total, p.tflops or 0.0
            axis.plot([uncached], [tflops], "o", color=colour, mfc="none", label="IO model, without caches")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
        axis.set_title(f"{known[0].subject.problem} on {known[0].where.get('device') or ''}", loc="left", fontsize=9)
        return picture.save(figure, prefix)


def _roof(axis: Any, profiles: Sequence[Profile]) -> None:
    """Draw the roof: the highest DRAM bandwidth and tensor-core peak of the profiles."""
    bandwidth = max(p.counters.dram_peak or 0.0 for p in profiles) * 1e-12
    peak = max(p.tensor_peak or 0.0 for p in profiles)
    ridge = peak / bandwidth
    intensities = [p.work.flops / p.work.model.total for p in profiles]
    low, high = 10 ** math.floor(math.log10(min(ridge / 20, *intensities))), ridge * 200
    axis.plot([low, ridge, high], [low * bandwidth, peak, peak], color="#444444")
    axis.text(high, peak, f"{peak:.0f} TFLOP/s", ha="right", va="bottom", color="#444444")
    axis.text(low, low * bandwidth, f"  {bandwidth:.2f} TB/s", ha="left", va="top", color="#444444")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte of DRAM traffic")
    axis.set_ylabel("TFLOP/s")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#eeeeee")
