"""The pages of bench, tune, check and profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from ..bench import plot as bench_plot
from ..bench import report as bench_report
from ..disassembly.listing import Code
from ..profile import report as profile_report
from ..profile.profiler import Profile
from ..tune import report as tune_report
from ..tune.search import Search
from ..verify import report as verify_report
from ..verify.check import Result
from . import disassembly
from .tables import Section, drawn, of_terminal, page

_WIDE = 10_000  # characters; wide enough that no column is folded or omitted


def bench(rows: Sequence[Mapping[str, Any]], against: str | None) -> str:
    """HTML of benchmark rows. Like all functions here, raises ToolchainMissing without jinja2."""
    peer = bench_report.pick_peer(rows, against)
    table = bench_report.bench_table(rows, peer, _WIDE)
    notes = [str(text) for text in bench_report.notes(rows, peer)]
    caption = str(table.caption or "")
    sections = [Section("Speed", of_terminal(table, "TFLOP/s of each implementation"), notes)]
    if picture := drawn(lambda prefix: bench_plot.draw(rows, prefix)):
        heading = "By problem" if "operation" in rows[0] else "Against sequence length"
        sections.append(Section(heading, picture=picture, described="plot of the table above"))
    return page("bench", [caption], sections)


def tune(searches: Sequence[Search]) -> str:
    """HTML of tile searches, one section each."""
    sections = []
    for search in searches:
        heading = f"{search.kernel.name} on {search.problem}"
        table = of_terminal(tune_report.tune_table(search, _WIDE), f"The best tiles of {heading}")
        verdict = [str(text) for text in tune_report.verdict(search)]
        picture = drawn(lambda prefix, search=search: tune_report.draw(search, prefix))  # type: ignore[misc]
        sections.append(Section(heading, table, verdict, picture, "speed of every tile"))
    return page("tune", [searches[0].executor.gpu] if searches else [], sections)


def check(results: Sequence[Result]) -> str:
    """HTML of a sweep: failures first, then every case of each kernel."""
    wrong = [str(text) for text in verify_report.failures([r for r in results if r.ok is False])]
    sections = [Section("Failures", texts=wrong)] if wrong else []
    for kernel in dict.fromkeys(r.kernel for r in results):
        own = sorted((r for r in results if r.kernel == kernel), key=lambda r: r.ok is not False)
        table = of_terminal(verify_report.results_table(own, _WIDE), f"Every case of {kernel}")
        sections.append(Section(kernel, table, [verify_report.counts(own)]))
    return page("check", [verify_report.counts(results)], sections)


def profile(profiles: Sequence[Profile], executed: tuple[Code, Mapping[int, int]] | None) -> str:
    """HTML of one profile, or of two side by side. `executed`: code and {address: samples} of a single profile."""
    if len(profiles) == 2:
        table = of_terminal(profile_report.comparison(*profiles), "Two profiles")
        return page("profile", [str(p.subject.problem) for p in profiles[:1]], [Section("Measures", table)])
    parts = list(profile_report.page(profiles[0], _WIDE))
    texts = [str(part) for part in parts if isinstance(part, Text)]
    names = ("Measures", "Stall reasons", "Hottest lines")
    tables = [of_terminal(table, name) for table, name in zip([p for p in parts if not isinstance(p, Text)], names)]  # noqa: B905
    if executed:
        shown, samples = executed
        return disassembly.page([shown], samples or None, tables, texts[:1])
    return page("profile", texts[:1], [Section(table.heading, table) for table in tables])
