"""Text output of a profile, and of two profiles side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..verify.report import si_time
from .ncu import HotLine
from .profiler import Profile

_LINES, _STALLS = 8, 6
_WAITS = {  # names of a stall reason on the pages raw and source -> what the warp waits for
    "long_scoreboard long_sb": "data from global or local memory",
    "short_scoreboard short_sb": "data from shared memory, or a special function",
    "mio_throttle mio": "room in the queue to shared memory and special functions",
    "lg_throttle lg": "room in the queue to global memory",
    "math_pipe_throttle math": "a busy arithmetic pipe or tensor core",
    "gmma warpgroup_arrive": "a warpgroup's matrix product",
    "wait": "the fixed latency of the previous instruction",
    "barrier": "other warps at a barrier",
    "not_selected": "the scheduler: ready, but another warp was issued",
    "selected": "nothing: it was issued",
    "dispatch_stall dispatch": "the dispatcher",
    "no_instructions no_instruction no_inst": "instructions that are not in the instruction cache",
    "branch_resolving branch_resolve": "a branch's target",
    "drain": "its last stores before exit",
    "membar": "a memory fence",
    "imc_miss imc": "a constant that is not in the constant cache",
    "tex_throttle tex": "room in the queue to the texture unit",
    "sleeping sleep": "the end of its nanosleep",
}
WAITS = {name: waits for names, waits in _WAITS.items() for name in names.split()}


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    unit, factor = next(((u, f) for u, f in _UNITS if value >= 0.9995 * f), ("B", 1.0))  # 0.9995 becomes 1.00
    return f"{value / factor:.3g} {unit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


Measure = tuple[str, Callable[[Profile], float | None], Callable[[float | None], str]]
MEASURES: tuple[Measure, ...] = (
    ("time", lambda p: p.counters.seconds, si_time),
    ("TFLOP/s", lambda p: p.tflops, lambda v: "-" if v is None else f"{v:.3g}"),
    ("of the tensor peak", lambda p: p.tflops / p.tensor_peak if p.tflops and p.tensor_peak else None, _share),
    ("tensor cores active", lambda p: p.counters.tensor_active, _share),
    ("DRAM read", lambda p: p.counters.dram_read, _bytes),
    ("DRAM written", lambda p: p.counters.dram_written, _bytes),
    ("L2 to and from SMs", lambda p: p.counters.l2_bytes, _bytes),
    ("L2 hits", lambda p: p.counters.l2_hits, _share),
    ("shared memory", lambda p: p.counters.smem_bytes, _bytes),
    ("bank conflicts", lambda p: p.counters.bank_conflicts, _count),
    ("occupancy", lambda p: p.counters.occupancy, _share),
    ("registers", lambda p: p.counters.first("launch__registers_per_thread"), _count),
)


def page(profile: Profile, width: int) -> Iterator[Text | Table]:
    """All parts of the report, from the totals to the source lines."""
    s, where = profile.subject, profile.where.get("device") or ""
    yield Text.assemble((s.entry, "bold"), f" {s.problem} on {where}, {s.label}")
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("", "measured", "compared with"):
        table.add_column(column, justify="right" if column == "measured" else "left", overflow="fold")
    for name, value, shown in MEASURES:
        table.add_row(name, Text(shown(value(profile)), "bold"), Text(_baseline(profile, name), "dim"))
    yield table
    if profile.counters.stalls:
        yield Text("\nStall reasons by samples", "bold")
        yield _stall_table(profile)
    if any(line.samples for line in profile.lines):
        yield Text("\nHottest lines", "bold")
        yield _line_table(profile.lines, width)
    elif profile.counters.stalls:
        yield Text('\nsource lines need nvdisasm: pip install "attention-sandbox[sass]"', "yellow")


def _baseline(profile: Profile, name: str) -> str:
    """The baseline of a measure."""
    c, work = profile.counters, profile.work
    written, read = sum(work.model.written.values()), sum(work.model.read.values())
    if name == "of the tensor peak":
        peak = profile.tensor_peak
        return f"{peak:.0f} TFLOP/s at {(c.clock or 0) * 1e-9:.2f} GHz" if peak else ""
    if work.declared and name in ("DRAM read", "DRAM written", "L2 to and from SMs"):
        return f"declared {_bytes({'DRAM read': read, 'DRAM written': written}.get(name, read + written))}"
    if name == "DRAM read":
        least = sum(work.least.read.values())
        kept = 1 - (c.dram_read - least) / (read - least) if c.dram_read is not None and read > least else None
        baseline = f"compulsory {_bytes(least)}; without caches (IO model) {_bytes(read)}"
        if kept is None:
            return baseline
        return f"{baseline}: caches served {min(max(kept, 0.0), 1.0):.0%} of the difference"
    if name == "DRAM written":
        return f"IO model {_bytes(written)} (measured: without data still in L2 at the end)"
    if name == "L2 to and from SMs":
        ratio = (
            f": {c.l2_bytes / work.model.total:.2f} of it (concurrent requests of SMs are merged)" if c.l2_bytes else ""
        )
        return f"IO model {_bytes(work.model.total)}{ratio}"
    if name == "bank conflicts" and c.conflict_share is not None:
        return f"{c.conflict_share:.1%} of shared memory's cycles"
    if name == "occupancy":
        blocks = c.first("launch__occupancy_per_block_size", "sm__maximum_warps_per_active_cycle_pct")
        waves = c.first("launch__waves_per_multiprocessor")
        parts = (
            f"at most {_share(blocks)}" if blocks and blocks <= 1 else "",
            f"{waves:.2f} waves of blocks" if waves else "",
        )
        return ", ".join(filter(None, parts))
    return f"{work.flops * 1e-9:.3g} GFLOP" if name == "TFLOP/s" else ""


def _stall_table(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for reason, share in [*profile.counters.stalls.items()][:_STALLS]:
        table.add_row(_share(share), reason, Text(f"waits for {WAITS[reason]}" if reason in WAITS else "", "dim"))
    return table


def _line_table(lines: Sequence[HotLine], width: int) -> Table:
    total = sum(line.samples for line in lines)  # not 0: otherwise there is no table
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("samples", "line", "code", "reasons", "bank conflicts"):
        table.add_column(column, justify="right" if column == "samples" else "left", no_wrap=column in ("code", "line"))
    for line in lines[:_LINES]:
        at = line.where
        place, text = (str(at), at.text()) if at else ("(no line)", "")
        reasons = sorted(((n, r) for r, n in line.reasons.items() if r != "selected"), reverse=True)[:2]
        because = ", ".join(f"{reason} {n / max(line.samples, 1):.0%}" for n, reason in reasons)
        excess = _bytes(line.excess) if line.excess else ""
        table.add_row(_share(line.samples / total), place, Text(text[: max(24, width - 62)]), because, excess)
    return table


def comparison(a: Profile, b: Profile) -> Table:
    """Each measure of both profiles, and the change."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in (a.subject.label, b.subject.label, "change"):
        table.add_column(column.replace(",", "\n").replace(" ", "\n"), justify="right")
    stalls = [*dict.fromkeys([*a.counters.stalls][:_STALLS] + [*b.counters.stalls][:_STALLS])]
    waiting: list[Measure] = [(f"stalled: {r}", lambda p, r=r: p.counters.stalls.get(r), _share) for r in stalls]  # type: ignore[misc]
    for name, value, shown in (*MEASURES, *waiting):
        old, new = value(a), value(b)
        change = f"{new / old - 1:+.1%}" if old and new is not None else ""
        table.add_row(name, shown(old), shown(new), change)
    return table


def as_json(profile: Profile) -> dict[str, Any]:
    """Measures, the model's bytes, stalls, lines and every metric, as JSON types."""
    lines = [
        {"file": h.where and h.where.file, "line": h.where and h.where.line, "samples": h.samples, "reasons": h.reasons,
         "excess_bytes": h.excess}
        for h in profile.lines
    ]  # fmt: skip
    s, work = profile.subject, profile.work
    return {
        "kernel": s.entry,
        "problem": s.problem,
        "tile": s.tile,
        "arch": s.arch,
        "version": s.version,
        "measures": {name: value(profile) for name, value, _ in MEASURES},
        "model_bytes": {"read": dict(work.model.read), "written": dict(work.model.written)},
        "least_bytes": work.least.total,
        "stalls": profile.counters.stalls,
        "lines": lines,
        "metrics": dict(profile.counters.metrics),
        **profile.where,
    }
