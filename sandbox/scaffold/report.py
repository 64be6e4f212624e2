"""Output of the command `doctor`."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from ..verify.report import table
from .doctor import Finding


def doctor_table(findings: Iterable[Finding]) -> Table:
    """The table that `doctor` prints."""
    shown = table("", "what", "found, or how to install it")
    for f in findings:
        missing = Text("required", "bold red") if f.required else Text("missing", "yellow")
        shown.add_row(Text("ok", "green") if f.ok else missing, f.what, f.found if f.ok else f.remedy)
    return shown
