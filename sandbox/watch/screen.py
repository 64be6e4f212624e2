"""The screen of `watch`: the verdict, faults with their location, and figures compared with the last correct version
and the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core import registry
from ..verify.check import Result
from ..verify.report import errors_shown, si_time, verdict
from .figures import VersionResult
from .history import Version
from .session import Iteration

_TITLES = {
    "ok": ("ok", "bold green"),
    "wrong": ("WRONG", "bold red"),
    "spec": ("SPEC", "bold red"),
    "compile": ("DOES NOT COMPILE", "bold red"),
    "sanitize": ("NOT SAFE", "bold red"),
    "run": ("FAILS", "bold red"),
    "hang": ("HANGS", "bold red"),
    "crash": ("CRASHES", "bold red"),
    "refused": ("NOT SUPPORTED", "bold yellow"),
    "replaced": ("replaced", "dim"),
}
_LOWER, _HIGHER = -1, 1  # which is better; 0: neither
_FIGURES: dict[str, tuple[str, int, Callable[[float], str]]] = {
    "seconds": ("time", _LOWER, si_time),
    "tflops": ("TFLOP/s", _HIGHER, lambda x: f"{x:.2f}"),
    "error": ("error / bound", _LOWER, lambda x: f"{x:.2f}"),
    "registers": ("registers", _LOWER, lambda x: f"{x:.0f}"),
    "spills": ("spilled bytes", _LOWER, lambda x: f"{x:.0f}"),
    "stack": ("stack bytes", _LOWER, lambda x: f"{x:.0f}"),
    "smem": ("shared memory", _LOWER, lambda x: f"{x / 1024:.4g} KiB"),
    "occupancy": ("occupancy", _HIGHER, lambda x: f"{x:.1%}"),
}
_BRIEF = ("seconds", "tflops", "registers", "spills")
_COUNT = (0, lambda x: f"{x:.0f}")


def figure(name: str) -> tuple[str, Callable[[float], str]]:
    """The title of a figure, and the function that formats it."""
    title, _, show = _FIGURES.get(name, (name, *_COUNT))
    return title, show


def word(stage: str) -> str:
    """The title of a stage."""
    return _TITLES.get(stage, (stage, ""))[0]


def screen(now: Iteration) -> RenderableType:
    """Everything about one version, within 80 columns."""
    parts: list[RenderableType] = [_headline(now), ""]
    parts += _faults(now.found)
    if now.figures:
        parts += [Text(now.found.setting, "dim")] if now.found.findings else []
        parts += [_figures_table(now), ""]
    if now.found.results:
        parts += [_cases_table(now.found.results), ""]
    if now.found.output.strip():
        last = now.found.output.strip().splitlines()[-10:]
        parts += [Text("the kernel printed", "bold"), Text("\n".join(last)), ""]
    parts += [Text(f"note: {note}", "yellow") for note in now.found.notes]
    parts += [Text(now.found.pending, "dim")] if now.found.pending else []
    return Group(*parts)


def _headline(now: Iteration) -> Text:
    word, style = _TITLES[now.found.stage]
    # Sanitizer findings have their own problem; then the setting is shown above the figures.
    about = f"\n{now.found.setting}" if now.found.setting and not now.found.findings else ""
    compiling = f", {si_time(now.found.compiling)} of it compiling" if now.found.compiling else ""
    if now.elapsed > now.latency:  # the verdict came first
        compiling = f", complete after {si_time(now.elapsed)}"
    name = f"{now.kernel} #{now.number}" if now.number else now.kernel
    return Text.assemble((name, "bold"), "  ", (word, style),
                         f"  {si_time(now.latency)}{compiling}", (about, "dim"))  # fmt: skip


def _faults(found: VersionResult) -> Iterator[RenderableType]:
    if found.findings:
        for finding in found.findings:
            yield Text(finding.what, "red")
            yield Text(f"  on {finding.on}", "dim")
            for place in finding.places[:6]:
                line = Text.assemble("  ", (str(place), "bold"), f"  {place.text()}")
                line.no_wrap, line.overflow = True, "ellipsis"
                yield line
        yield ""
    elif not found.ok:
        for text in _shortened(found.message).splitlines():
            yield Text(text, "bold red" if found.stage != "compile" or "error:" in text else "")
        yield ""


def _shortened(message: str) -> str:
    """The message with paths relative to the project."""
    return message.replace(f"{registry.FOLDER.parent}/", "")


def _cases_table(results: Iterable[Result]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("case", "problem", "error <= bound", "time", ""):
        table.add_column(column, justify="right" if column in ("error <= bound", "time") else "left", overflow="fold")
    for r in results:
        table.add_row(r.case, str(r.problem), errors_shown(r), si_time(r.seconds), verdict(r))
    return table


def _gist(message: str) -> str:
    """One line of a message: the compiler's first error, else the first line."""
    lines = _shortened(message).strip().splitlines() or [""]
    return next((line for line in lines if "error:" in line), lines[0])


def _figures_table(now: Iteration) -> Table:
    """One line per figure; improvements are green."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("now", justify="right")
    named = {"last good": now.previous, "best": now.best}
    if now.previous and now.best and now.previous.number == now.best.number:
        named = {"last good, and best": now.best}
    others = [version for version in named.values() if version]
    for version, what in zip(others, named, strict=False):
        table.add_column(f"{what} #{version.number}", justify="right")
        table.add_column("", justify="right")
    for name in _order(now.figures, others):
        title, better, show = _FIGURES.get(name, (name, *_COUNT))
        value = now.figures.get(name)
        row: list[RenderableType] = [_limited(title, now.found), show(value) if value is not None else "-"]
        for version in others:
            old = version.figures.get(name)
            row += [show(old) if old is not None else "-", _change(old, value, better)]
        table.add_row(*row)
    return table


def _limited(title: str, found: VersionResult) -> str:
    return f"{title}, by {found.cost.occupancy.limiter}" if title == "occupancy" and found.cost else title


def _order(figures: Iterable[str], others: Iterable[Version]) -> list[str]:
    """The named figures first, then instructions, including those of the other versions."""
    seen = dict.fromkeys([*figures, *(name for version in others for name in version.figures)])
    return [name for name in _FIGURES if name in seen] + [name for name in seen if name not in _FIGURES]


def _change(old: float | None, new: float | None, better: int) -> Text:
    """The change: relative, or absolute if the old value is 0."""
    if old is None or new is None or old == new:
        return Text("")
    shown = f"{new - old:+.4g}" if not old else f"×{new / old:.0f}" if new > 10 * old else f"{(new - old) / old:+.1%}"
    good = (new - old) * better
    return Text(shown, "green" if good > 0 else "red" if good < 0 else "")


def history_lines(versions: Iterable[Version]) -> Iterator[Text]:
    """The output of `watch --history`: two lines per version, the newest last."""
    for v in versions:
        word, style = _TITLES.get(v.stage, (v.stage, ""))
        shown = [f"{_FIGURES[name][0]} {_FIGURES[name][2](v.figures[name])}" for name in _BRIEF if name in v.figures]
        yield Text.assemble((f"#{v.number:<4}", "bold"), f" {v.time}  ", (word, style), "  ", ", ".join(shown))
        yield Text(f"      {v.setting if v.ok else _gist(v.message)}", "dim")
