"""Results -> tables for people. JSON for programs comes straight from the results, in `cli`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from .arch import Occupancy
from .check import Result
from .choose import Offer
from .doctor import Finding
from .errors import without_options
from .nvrtc import Resources
from .spec import Kernel

WIDE = 118  # columns from which a case fits on one line


def si_time(seconds: float | None) -> str:
    """Seconds in the unit that leaves one to three digits before the point."""
    if seconds is None:
        return "-"
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if seconds * f >= 0.9995), ("µs", 1e6))
    return f"{seconds * factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"


def _kib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1024:.4g} KiB"


def _error(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if math.isfinite(value) else str(value)


def errors_shown(r: Result) -> str:
    """As "1.2e-4 <= 1.2e-3"; "-" without numbers."""
    if r.error is None or r.bound is None:
        return "-"
    return f"{_error(r.error)} {'<=' if r.error <= r.bound else '>'} {_error(r.bound)}"


def verdict(result: Result) -> Text:
    """ok, WRONG, FAIL or skip."""
    if result.ok is None:
        return Text("skip", "yellow")
    return Text("ok", "green") if result.ok else Text("WRONG" if result.error is not None else "FAIL", "bold red")


_SLOW = "regs +n: n bytes of each thread are spilled, or on its stack, in slow memory"


def _registers(resources: Resources | None) -> Text:
    """Registers a thread, and what should not be: see _SLOW."""
    if resources is None:
        return Text("-")
    slow = _slow(resources)
    return Text(f"{resources.registers} +{slow}", "bold red") if slow else Text(f"{resources.registers}")


def _slow(resources: Resources | None) -> int:
    return (resources.spill_stores + resources.spill_loads or resources.stack) if resources else 0


def _table(*columns: str, right: Sequence[str] = (), caption: str = "") -> Table:
    table = Table(caption=caption or None, caption_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def results_table(results: Sequence[Result], width: int) -> Table:
    """What `run` prints: one line a case, or two where the screen is narrow."""
    archs = sorted({r.arch for r in results if r.backend == "cpu" and r.arch})
    notes = [f"cpu: emulated, slow by nature; regs and smem are NVRTC's for {', '.join(archs)}"] if archs else []
    caption = "\n".join((*notes, *({_SLOW} if any(_slow(r.resources) for r in results) else ())))
    if width >= WIDE:
        numbers = ["regs", "smem", "compile", "error <= bound", "time", "TFLOP/s"]
        table = _table("kernel", "case", "problem", *numbers, "", right=numbers, caption=caption)
    else:
        numbers = ["regs\nsmem", "compile", "error\n<= bound", "time\nTFLOP/s"]
        table = _table("kernel and case\nproblem", *numbers, "", right=numbers, caption=caption)
    for r in results:
        compiling = "cached" if r.cached else si_time(r.compile_seconds)
        regs, smem = _registers(r.resources), _kib(r.smem_dynamic)
        speed = f"{r.tflops:.2f}" if r.tflops else "emulated" if r.backend == "cpu" and r.seconds is not None else "-"
        error, time = errors_shown(r), si_time(r.seconds)
        if width >= WIDE:
            table.add_row(r.kernel, r.case, r.problem, regs, smem, compiling, error, time, speed, verdict(r))
        else:
            what = Text.assemble(r.kernel, " ", r.case, "\n", (r.problem, "dim"))
            held = Text.assemble(regs, "\n", smem)
            table.add_row(what, held, compiling, error.replace(" ", "\n", 1), f"{time}\n{speed}", verdict(r))
    return table


def failures(results: Iterable[Result]) -> Iterator[Text]:
    """What went wrong, and notes: one paragraph for each reason, with the cases that share it."""
    sharing: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        if r.ok is False or r.message:
            sharing.setdefault((r.kernel, without_options(_reason(r))), []).append(r)
    for same in sharing.values():
        r = same[0]
        cases = ", ".join(r.case for r in same[:4]) + (f" and {len(same) - 4} more" if len(same) > 4 else "")
        mark = Text("note", "yellow") if r.ok is not False else verdict(r)
        yield Text.assemble(mark, f" {r.kernel} on {cases} [{r.backend}]: {_reason(r).removeprefix(f'{r.kernel}: ')}")


def _reason(r: Result) -> str:
    if r.ok is not False or r.error is None:
        return r.message
    numbers = f"{r.tensor} error {_error(r.error)} against a bound of {_error(r.bound)}"
    lse = "" if r.lse_excess is None else "LSE ok"
    if r.lse_excess is not None and r.lse_excess > 0:
        lse = f"LSE exceeds its bound by {_error(r.lse_excess)}"
    return "; ".join(filter(None, (numbers, lse, r.message))) + (f"\n{r.where.text}" if r.where else "")


@dataclass(frozen=True)
class Cost:
    """What one tile of a kernel costs on `arch`. `message` says why there are no numbers: the kernel does not take the
    tile or the problem (`ok` is None), or the compiler refused it (`ok` is False)."""

    kernel: str
    problem: str  # what of it the compiler sees: head width, dtype, mask
    tile: str
    arch: str
    ok: bool | None
    resources: Resources | None = None
    smem_dynamic: int | None = None
    occupancy: Occupancy | None = None
    seconds: float | None = None
    cached: bool | None = None
    message: str = ""


def compiled_table(costs: Sequence[Cost], width: int) -> Table:
    """What `compile` prints: one line a tile, or two where the screen is narrow."""
    caption = _SLOW if any(_slow(c.resources) for c in costs) else ""
    if width >= WIDE:
        numbers = ["regs", "smem", "blocks/SM", "occupancy", "compile"]
        table = _table("kernel", "problem", "arch", "tile", *numbers, "limited by", right=numbers, caption=caption)
        table.columns[3].no_wrap = True  # to be copied
    else:
        numbers = ["regs\nsmem", "blocks\nper SM", "compile"]
        last = "occupancy\nlimited by"
        table = _table("kernel, arch\nproblem", "tile", *numbers, last, right=numbers, caption=caption)
    for c in costs:
        r, o = c.resources, c.occupancy
        if r is None or o is None or c.smem_dynamic is None:
            continue
        regs, smem, blocks = _registers(r), _kib(c.smem_dynamic + r.smem_static), str(o.blocks_per_sm)
        compiling, occupancy = "cached" if c.cached else si_time(c.seconds), f"{o.fraction:.0%}"
        if width >= WIDE:
            table.add_row(c.kernel, c.problem, c.arch, c.tile, regs, smem, blocks, occupancy, compiling, o.limiter)
        else:
            what = Text.assemble(c.kernel, " ", c.arch, "\n", (c.problem, "dim"))
            held = Text.assemble(regs, "\n", smem)
            table.add_row(what, c.tile.replace(",", "\n"), held, blocks, compiling, f"{occupancy}\n{o.limiter}")
    return table


def ladder_table(kernels: Iterable[Kernel]) -> Table:
    """What `list` prints."""
    table = _table("kernel", "rung", "dtypes", "D", "arch", "idea")
    for k in kernels:
        arch = f"sm_{k.min_arch[0]}{k.min_arch[1]}" + (k.arch_suffix or "+")  # sm_90a: that very one
        table.add_row(k.name, str(k.rung), " ".join(k.dtypes), f"<= {k.max_D}", arch, k.summary)
    return table


def offers_table(offers: Iterable[Offer]) -> Table:
    """What `list --problem` prints: what would be chosen, what else would do, and why the rest would not."""
    table = _table("kernel", "computes", "", "tile, or why not")
    chosen = set()
    for offer in offers:
        name, computes = offer.kernel.name, offer.kernel.computes
        if offer.tile is None:
            table.add_row(name, computes, Text("refuses", "yellow"), offer.reason.removeprefix(f"{name}: "))
        else:
            state = "takes it" if computes in chosen else Text("chosen", "green")
            table.add_row(name, computes, state, str(offer.tile))
            chosen.add(computes)
    return table


def doctor_table(findings: Iterable[Finding]) -> Table:
    """What `doctor` prints."""
    table = _table("", "what", "found, or how to get it")
    for f in findings:
        missing = Text("needed", "bold red") if f.required else Text("missing", "yellow")
        table.add_row(Text("ok", "green") if f.ok else missing, f.what, f.found if f.ok else f.remedy)
    return table
