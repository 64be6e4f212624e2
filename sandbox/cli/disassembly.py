"""`sass` and `ptx`: machine code and PTX of a kernel."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import click

from ..core import registry
from ..core.normalise import normalise_causal
from ..core.tile import Tile
from ..disassembly import listing
from ..disassembly import report as code_report
from ..pages import disassembly as pages
from ..pages.tables import of_terminal
from ..verify.check import pick_device
from ..watch.job import quick_cases
from .group import cli
from .options import (
    SCORE_NAMES,
    Scored,
    causal_option,
    dtype_option,
    entry_argument,
    excluding,
    given_without,
    html_option,
    json_option,
    parsed_tile,
    problem_or_default,
    score_options,
    shape_option,
    tile_option,
)
from .output import print_json, save_page, say, screen


def _command(language: str, doc: str) -> None:
    @cli.command(language, help=doc)
    @entry_argument
    @shape_option("Default: a problem without score options.")
    @click.option("-D", "--head-dim", "D", type=int, hidden=True)  # older spelling of --shape
    @dtype_option
    @causal_option
    @score_options
    @tile_option()
    @click.option("--arch", help="Architecture, such as sm_90a. Default: this machine's GPU, else sm_90a.")
    @click.option("--diff", "reference", metavar="REF",
                  help="Compare with a git revision, tile, .cu file, or history:N (stored by watch).")  # fmt: skip
    @click.option("--summary", is_flag=True, help="Omit the list of instructions on the terminal and in --json.")
    @html_option
    @json_option
    def show(
        kernel: str, shape: str | None, D: int | None, dtype: str, causal: str | None, scored: Scored, tile: str | None,
        arch: str | None, reference: str | None, summary: bool, html: Path | None, as_json: bool,
    ) -> None:  # fmt: skip
        wanted, spec = parsed_tile(tile), registry.entry_owner(kernel)
        if not (shape or D or spec.custom):
            given_without("--shape", *SCORE_NAMES)
        if reference:
            excluding("--diff", "summary")
        first = quick_cases(spec, pick_device(None))[0].problem
        if shape or D or spec.custom:
            problem = problem_or_default(spec, shape or f"1,1,1,{D}", dtype, causal, scored, pick_device(None))
        else:
            problem = dataclasses.replace(first, dtype=dtype, causal=normalise_causal(causal or False))
        read = functools.partial(listing.translate, language=language, problem=problem, arch=arch)
        if reference is None:
            _show_code(read(spec, tile=wanted, entry=kernel), summary, html, as_json)
        elif "=" in reference:
            before = read(spec, tile=Tile.parse(reference), entry=kernel)
            _show_changes(before, read(spec, tile=wanted, entry=kernel), html, as_json)
        else:
            old = listing.version(spec, reference)
            entry = old.name + kernel.removeprefix(spec.name)
            before = read(old, tile=wanted, label=reference, entry=entry)
            now = spec.source.name if reference.endswith(".cu") else "now"
            _show_changes(before, read(spec, tile=wanted, label=now, entry=kernel), html, as_json)


def _show_code(shown: listing.Code, summary: bool, html: Path | None, as_json: bool) -> None:
    counted = code_report.summary_table(shown)
    if html:
        save_page(html, pages.page([shown], tables=[of_terminal(counted, "Instructions by kind")]))
    if as_json:
        fields = listing.as_json(shown)
        print_json({name: x for name, x in fields.items() if not (summary and name == "instructions")})
        return
    if not summary and not html:
        say(code_report.listing(shown))
    say(code_report.headline(shown))
    screen().print(counted)
    for text in code_report.live_lines(shown):
        say(text)


def _show_changes(before: listing.Code, after: listing.Code, html: Path | None, as_json: bool) -> None:
    changed = code_report.changes_table(before, after)
    if html:
        save_page(html, pages.page([before, after], tables=[of_terminal(changed, "Changes")]))
    if as_json:
        print_json(listing.changes_as_json(before, after))
        return
    for text in code_report.changed_line_texts(before, after):
        say(text)
    say(code_report.headline(after))
    screen().print(changed)


_ENTRIES = "\n\nKERNEL may also be another entry point of a kernel, such as bwd_mma_postprocess."
_command("sass", f"Show machine code by source line, with instruction counts. Needs no GPU.{_ENTRIES}")
_command("ptx", f"Show PTX by source line, with instruction counts. Needs no GPU.{_ENTRIES}")
