"""Text output of machine code: instructions by source line, a summary, and differences between versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from ..toolchain.disassembly import Instruction, by_kind, kind, opcode_class
from .listing import Code, changed_classes, changed_lines

_STYLES = {"tensor cores": "green", "shared memory": "cyan", "global memory": "blue", "local memory": "bold red",
           "synchronisation": "magenta", "special functions": "yellow"}  # fmt: skip
_PEAKS = 5


def listing(code: Code) -> Text:
    """Every instruction in order, below its source line, with the number of live registers if known."""
    shown, last = Text(), None
    for i in code.instructions:
        if i.where != last:
            shown.append_text(_source_line(i))
            last = i.where
        style = _STYLES.get(kind(opcode_class(i)), "")
        address = f"{i.address:05x}" if code.language == "sass" else f"{i.address:5d}"
        live = f"{i.live:>4} live" if i.live is not None else ""
        shown.append(f"  {address}  ", "dim").append(f"{i.text:<76}" if live else i.text, style).append(
            f"{live}\n", "dim"
        )
    return shown


def _source_line(instruction: Instruction) -> Text:
    at = instruction.line
    if at is None:
        return Text("(no source line)\n", "dim")
    within = instruction.where[0]
    header = f"  by {within}" if within != at else ""
    return Text.assemble((str(at), "bold"), (header, "dim"), "  ", (at.text(), "bold"), "\n")


def summary_table(code: Code) -> Table:
    """The number of instructions of each kind and class."""
    counted = code.counts
    total = sum(counted.values())
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kind", no_wrap=True)
    table.add_column(str(total), justify="right")
    table.add_column("share", justify="right")
    table.add_column("classes", overflow="fold")
    for name, classes in by_kind(counted).items():
        number = sum(classes.values())
        named = "  ".join(f"{n} {c}" for n, c in classes.items())
        table.add_row(Text(name, _STYLES.get(name, "")), str(number), f"{number / total:.0%}", named)
    return table


def headline(code: Code) -> Text:
    """The compiled variant, and its registers and spills per thread."""
    r = code.resources
    spilled = r.spill_stores + r.spill_loads
    spills = Text(f", {spilled} bytes spilled", "bold red") if spilled else Text()
    return Text.assemble(
        (code.kernel, "bold"), f" {code.problem.variant} {code.arch} {code.tile}: {r.registers} registers", spills
    )


def live_lines(code: Code) -> Iterator[Text]:
    """The source lines with the most live registers."""
    for at, live in [*code.live_peaks.items()][:_PEAKS]:
        yield Text.assemble(f"{live:>4} registers live at ", (str(at), "bold"), f"  {at.text()}")


# ---- differences


def changes_table(before: Code, after: Code) -> Table:
    """Registers, instructions and every opcode class whose number differs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in (before.label, after.label, "change"):
        table.add_column(column.replace(",", "\n"), justify="right")  # a tile, on as many lines as it has numbers
    sides = (before, after)
    rows: dict[str, tuple[int, int]] = {
        "registers": tuple(c.resources.registers for c in sides),  # type: ignore[dict-item]
        "bytes spilled": tuple(c.resources.spill_stores + c.resources.spill_loads for c in sides),  # type: ignore[dict-item]
        "most registers live": tuple(max(c.live_peaks.values(), default=0) for c in sides),  # type: ignore[dict-item]
        "instructions": tuple(len(c.instructions) for c in sides),  # type: ignore[dict-item]
    }
    for name, (old, new) in {**{n: p for n, p in rows.items() if any(p)}, **changed_classes(before, after)}.items():
        table.add_row(Text(name, _STYLES.get(kind(name), "")), str(old), str(new), _change(old, new))
    return table


def _change(old: int, new: int) -> str:
    share = f" ({(new - old) / old:+.0%})" if old and new else ""
    return f"{new - old:+d}{share}" if new != old else "="


def changed_line_texts(before: Code, after: Code) -> Iterator[Text]:
    """Each source line whose instructions differ, with the change of each class."""
    for change in changed_lines(before, after):
        classes = ", ".join(_changes(change.before, change.after))
        side = "" if change.before and change.after else "  (only after)" if change.after else "  (only before)"
        place = (f"{change.file}:{change.line}", "bold")
        yield Text.assemble(place, (side, "dim"), f"  {change.text}\n    ", (classes, "cyan"))


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    for name in {**before, **after}:
        old, new = before.get(name, 0), after.get(name, 0)
        if old != new:
            yield f"{name} {old} → {new}"
