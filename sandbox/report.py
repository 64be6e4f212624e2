"""Results -> tables for people. JSON for programs comes straight from the results, in `cli`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from .arch import Occupancy
from .check import Result
from .doctor import Finding
from .nvrtc import Compiled
from .spec import Kernel


def si_time(seconds: float | None) -> str:
    """Seconds in the unit that leaves one to three digits before the point."""
    if seconds is None:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    return ""


def _kib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1024:.4g} KiB"


def _error(value: float | None) -> str:
    return "-" if value is None else ("NaN or inf" if not math.isfinite(value) else f"{value:.1e}")


def _verdict(ok: bool | None) -> Text:
    return {True: Text("ok", "green"), False: Text("WRONG", "bold red"), None: Text("skipped", "yellow")}[ok]


def _table(*columns: str, right: Sequence[str] = (), title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def results_table(results: Iterable[Result]) -> Table:
    """What `run` prints: one line a case."""
    numbers = ("compile", "regs", "spills", "smem", "error", "bound", "LSE error", "time", "TFLOP/s")
    table = _table("kernel", "problem", "backend", *numbers, "", right=numbers)
    for r in results:
        compile_time = "cached" if r.cached else si_time(r.compile_seconds)
        spills = str(r.resources.spill_stores + r.resources.spill_loads) if r.resources else "-"
        what = Text.assemble((r.case, ""), "\n", (r.problem, "dim"))
        table.add_row(
            r.kernel, what, r.backend if r.backend == "cuda" else "cpu\n(emulated)", compile_time,
            str(r.resources.registers) if r.resources else "-", spills, _kib(r.smem_dynamic), _error(r.error),
            _error(r.bound), _error(r.lse_error), si_time(r.seconds), f"{r.tflops:.2f}" if r.tflops else "-",
            _verdict(r.ok),
        )  # fmt: skip
    return table


def failures(results: Iterable[Result]) -> Iterable[Text]:
    """What went wrong, and notes, one paragraph each."""
    for r in results:
        if r.ok is False:
            reason = r.message or (
                f"error {_error(r.error)} against a bound of {_error(r.bound)}; "
                f"LSE {'exceeds its bound by ' + _error(r.lse_excess) if (r.lse_excess or 0) > 0 else 'ok'}"
            )
            yield Text.assemble(("WRONG ", "bold red"), f"{r.kernel} on {r.case} [{r.backend}]: {reason}")
        elif r.message:
            yield Text.assemble(("note ", "yellow"), f"{r.kernel} on {r.case}: {r.message}")


def compiled_table(rows: Iterable[tuple[Kernel, str, str, Compiled, int, Occupancy]]) -> Table:
    """What `compile` prints: (kernel, what for, tile, compiled, dynamic shared memory, occupancy)."""
    numbers = ("regs", "spills", "stack", "smem", "blocks/SM", "occupancy", "compile")
    table = _table("kernel", "for", "tile", "arch", *numbers, "limited by", right=numbers)
    for kernel, what, tile, compiled, smem, occupancy in rows:
        r = compiled.resources
        spills = r.spill_stores + r.spill_loads
        table.add_row(
            kernel.name, what, tile, compiled.arch, str(r.registers), Text(str(spills), "bold red" if spills else ""),
            str(r.stack), _kib(smem + r.smem_static), str(occupancy.blocks_per_sm), f"{occupancy.fraction:.0%}",
            "cached" if compiled.cached else si_time(compiled.seconds), occupancy.limiter,
        )  # fmt: skip
    return table


def ladder_table(kernels: Iterable[Kernel]) -> Table:
    """What `list` prints."""
    table = _table("kernel", "computes", "rung", "dtypes", "D", "arch", "idea")
    for k in kernels:
        arch = f"sm_{k.min_arch[0]}{k.min_arch[1]}{k.arch_suffix}+"
        table.add_row(k.name, k.computes, str(k.rung), " ".join(k.dtypes), f"<= {k.max_D}", arch, k.summary)
    return table


def doctor_table(findings: Iterable[Finding]) -> Table:
    """What `doctor` prints."""
    table = _table("", "what", "found", "how to get it")
    for f in findings:
        mark = (
            Text("ok", "green")
            if f.ok
            else Text("needed" if f.required else "missing", "red" if f.required else "yellow")
        )
        table.add_row(mark, f.what, f.found, "" if f.ok else f.remedy)
    return table
