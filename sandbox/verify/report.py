"""Results as tables. `cli` writes JSON directly from the results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

from ..core.errors import without_options
from ..toolchain.nvrtc import Resources
from .cases import Case
from .check import Result

WIDE = 118  # terminal columns that a case needs on one line


def si_time(seconds: float | None) -> str:
    """A time with the unit that leaves one to three digits before the decimal point."""
    if seconds is None:
        return "-"
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if seconds * f >= 0.9995), ("µs", 1e6))
    return f"{seconds * factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"


def kib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1024:.4g} KiB"


def _error(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if math.isfinite(value) else str(value)


def errors_shown(r: Result) -> str:
    """Error and bound as "1.2e-4 <= 1.2e-3"; "-" if there are none."""
    if r.error is None or r.bound is None:
        return "-"
    return f"{_error(r.error)} {'<=' if r.error <= r.bound else '>'} {_error(r.bound)}"


def verdict(result: Result) -> Text:
    """ok, WRONG, FAIL or skip."""
    if result.ok is None:
        return Text("skip", "yellow")
    return Text("ok", "green") if result.ok else Text("WRONG" if result.error is not None else "FAIL", "bold red")


def in_parts(table: Table, width: int) -> list[Table]:
    """The table itself if it fits `width` characters; else tables without a caption, each with the first column and as
    many others as fit beside it. The first column is at most two thirds of the width."""
    first, *others = table.columns
    widths = [*map(_width_of, others)]
    if _width_of(first) + sum(2 + n for n in widths) <= width or not others:
        return [table]
    problem = min(_width_of(first), 2 * width // 3)
    parts: list[list[Column]] = []
    left = 0
    for column, n in zip(others, widths, strict=True):
        if not parts or 2 + n > left:
            parts.append([])
            left = width - problem
        parts[-1].append(column)
        left -= 2 + n
    return [_part(first, problem, columns) for columns in parts]


def _width_of(column: Column) -> int:
    cells = (str(cell) for cell in (column.header, *column.cells))
    return max(cell_len(line) for cell in cells for line in cell.splitlines() or [""])


def _part(first: Column, width: int, others: Sequence[Column]) -> Table:
    part = Table(box=None, pad_edge=False, header_style="bold")
    part.add_column(first.header, overflow="fold", min_width=width)
    for column in others:
        part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow="fold")
    for row in zip(first.cells, *(column.cells for column in others), strict=True):
        part.add_row(*row)
    return part


SLOW = "regs +n: n bytes of spill stores and loads per thread; without spills, n bytes of stack"


def registers(resources: Resources | None) -> Text:
    """Registers per thread, and the use of local memory: see SLOW."""
    if resources is None:
        return Text("-")
    lost = slow(resources)
    return Text(f"{resources.registers} +{lost}", "bold red") if lost else Text(f"{resources.registers}")


def slow(resources: Resources | None) -> int:
    return (resources.spill_stores + resources.spill_loads or resources.stack) if resources else 0


def table(*columns: str, right: Sequence[str] = (), caption: str = "") -> Table:
    shown = Table(caption=caption or None, caption_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return shown


_NUMBERS = {"regs": 8, "smem": 9, "compile": 7, "error <= bound": 16, "time": 7, "TFLOP/s": 8}  # usual column widths
_FOLDED = {"regs\nsmem": 9, "compile": 7, "error\n<= bound": 9, "time\nTFLOP/s": 8}
_GAP, _VERDICT = 2, 5


def results_table(
    results: Sequence[Result], width: int, *, expected: Sequence[Result] = (), head: bool = True
) -> Table:
    """The output of `run`: one line per case, or two on a narrow terminal.

    To print results as they arrive, each is a table of its own, only the first with a `head`. Columns are wide enough
    for the names of all `expected` results, so that the lines are aligned.
    """
    wide, room = width >= WIDE, [*results, *expected]
    numbers = _NUMBERS if wide else _FOLDED
    shown = table()
    shown.show_header = head
    if wide:
        for field, most in (("kernel", 24), ("case", 24), ("problem", 64)):  # one long name must not take all columns
            longest = max(len(field), *(len(str(getattr(r, field))) for r in room))
            shown.add_column(field, min_width=min(longest, most), overflow="fold")
    else:
        longest = max(max(len(f"{r.kernel} {r.case}"), len(str(r.problem))) for r in room)
        free = width - sum(numbers.values()) - _VERDICT - _GAP * (len(numbers) + 1)
        shown.add_column("kernel and case\nproblem", min_width=min(longest, max(free, 1)), overflow="fold")
    for name, usual in numbers.items():
        shown.add_column(name, justify="right", min_width=usual if expected else None, overflow="fold")
    shown.add_column("", overflow="fold")
    for r in results:
        shown.add_row(*_cells(r, wide))
    return shown


def _cells(r: Result, wide: bool) -> list[str | Text]:
    compiling = "cached" if r.cached else si_time(r.compile_seconds)
    regs, smem = registers(r.resources), kib(r.smem)
    speed = f"{r.tflops:.2f}" if r.tflops else "emulated" if r.backend == "cpu" and r.seconds is not None else "-"
    error, time = errors_shown(r), si_time(r.seconds)
    if wide:
        return [r.kernel, r.case, str(r.problem), regs, smem, compiling, error, time, speed, verdict(r)]
    what = Text.assemble(r.kernel, " ", r.case, "\n", (str(r.problem), "dim"))
    memory = Text.assemble(regs, "\n", smem)
    return [what, memory, compiling, error.replace(" ", "\n", 1), f"{time}\n{speed}", verdict(r)]


def notes(results: Sequence[Result]) -> Iterator[Text]:
    """Notes below the table."""
    if archs := sorted({r.arch for r in results if r.backend == "cpu" and r.arch}):
        yield Text(f"cpu: times of an emulation; regs and smem of NVRTC's code for {', '.join(archs)}", "dim italic")
    if any(slow(r.resources) for r in results):
        yield Text(SLOW, "dim italic")


def failures(results: Iterable[Result]) -> Iterator[Text]:
    """Failures and notes: one paragraph per reason, with the cases that share it."""
    sharing: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        if r.ok is False or r.message:
            sharing.setdefault((r.kernel, reason(r)), []).append(r)
    for same in sharing.values():
        r = same[0]
        more = f" and {len(same) - 4} more" if len(same) > 4 else ""
        cases = ", ".join(Case(r.case, r.problem).described for r in same[:4]) + more
        mark = Text("note", "yellow") if r.ok is not False else verdict(r)
        yield Text.assemble(mark, f" {r.kernel} on {cases} [{r.backend}]: {_reason(r).removeprefix(f'{r.kernel}: ')}")


def hints(results: Iterable[Result]) -> Iterator[Text]:
    """For each kernel with a failure that `sanitize` may explain, the command to run."""
    for r in {r.kernel: r for r in results if r.sanitize}.values():
        backend = f" --backend {r.backend}"
        what = "races, missing waits, accesses out of bounds, by line"
        yield Text.assemble(("hint", "cyan"), f" sanitize {r.kernel}{backend} looks for {what}")


def counts(results: Sequence[Result]) -> str:
    """Numbers of correct, wrong or failed, and unsupported cases, and the names of the wrong or failed ones."""
    wrong = [r.case for r in results if r.ok is False]
    which = f" ({', '.join(wrong[:4])}{f' and {len(wrong) - 4} more' if len(wrong) > 4 else ''})" if wrong else ""
    right, unsupported = (sum(r.ok is state for r in results) for state in (True, None))
    return f"{right} ok, {len(wrong)} wrong or failed{which}, {unsupported} not supported"


def reason(r: Result) -> str:
    """The failure or note, worded so that the same fault on other cases has the same text."""
    return without_options(_reason(r))


def _reason(r: Result) -> str:
    if r.ok is not False or r.error is None:
        return r.message
    numbers = f"{r.tensor} error {_error(r.error)} against a bound of {_error(r.bound)}"
    lse = "" if r.lse_excess is None else "LSE ok"
    if r.lse_excess is not None and r.lse_excess > 0:
        lse = f"LSE exceeds its bound by {_error(r.lse_excess)}"
    head = "; ".join(filter(None, (numbers, lse, r.message)))
    return "\n".join(filter(None, (head, r.cause, r.where.text if r.where else "")))
