"""`watch`: edit and relaunch."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import click
from rich.text import Text

from ..core import registry
from ..core.kernel import Kernel
from ..pages import history as pages
from ..verify import check as checking
from ..watch import screen as watch_report
from ..watch import session
from ..watch.history import History, as_bytes, read_texts
from ..watch.job import Job
from .group import cli
from .options import (
    SCORE_NAMES,
    Scored,
    alone,
    backend_option,
    causal_option,
    dtype_option,
    given_without,
    html_option,
    json_option,
    kernel_argument,
    on_command_line,
    parsed_tile,
    problem_for,
    score_options,
    shape_option,
    tile_option,
    timeout_option,
)
from .output import plain, print_json, save_page, say, screen

# Options that measure nothing, and the parameters that have an effect with them.
_LOOKING_BACK = {
    "html": ("history",),
    "history": ("html", "as_json"),
    "show": ("as_json",),
    "old": ("new",),
    "restore": (),
}


@cli.command("watch")
@kernel_argument
@shape_option("Default: a small set of problems.")
@dtype_option
@causal_option
@score_options
@tile_option()
@backend_option()
@timeout_option(
    10.0,
    "Time limit in seconds for one run of the kernel. On the CPU backend without --tile, the tiles that are chosen for "
    "large problems are also run under sanitizers, each for at most 60 seconds, or this limit if it is longer.",
)
@click.option("--once", is_flag=True, help="Measure the current version once and exit.")
@click.option("--history", is_flag=True, help="List the stored versions.")
@click.option("--show", type=int, metavar="N", help="Print the source files of version N.")
@click.option(
    "--diff",
    "old",
    type=int,
    metavar="N [M]",
    help="Differences of the source files from version N to M, or to the current files.",
)
@click.option("--restore", type=int, metavar="N", help="Restore the .cu and its spec from version N.")
@click.argument("new", type=int, required=False, metavar="")
@html_option
@json_option
def watch_(
    kernel: str, shape: str | None, dtype: str, causal: str | None, scored: Scored, tile: str | None,
    backend: str | None, timeout: float, once: bool, history: bool, show: int | None, old: int | None, new: int | None,
    restore: int | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile, verify and time a kernel on every save.

    On every save of the .cu, its spec or a header: compile, verify, time, and compare with earlier versions; on the CPU
    backend also sanitize. The options from --dtype to --invariant need --shape: the default problems have their own.
    --json prints one line per version. --html only writes the stored versions to a page; it measures nothing.
    """
    chosen = registry.get(kernel)
    if new is not None and old is None:
        raise click.UsageError(f"unexpected argument {new}: only --diff takes a second version, as in --diff N M")
    for name, others in _LOOKING_BACK.items():
        if on_command_line(name):
            alone("--diff" if name == "old" else f"--{name}", "kernel", name, *others)
    if not shape:
        given_without("--shape", "dtype", "causal", *SCORE_NAMES)
    if html:
        save_page(html, pages.page(kernel, History(chosen).versions()))
        return
    if history or show is not None or old is not None or restore is not None:
        _look_back(History(chosen), show, old, new, restore, as_json)
        return
    problem = problem_for([chosen], shape, dtype, causal, scored) if shape else None
    job = Job(kernel, checking.pick_device(backend), problem, parsed_tile(tile), timeout, chosen.tiles)
    try:
        ok = _follow(chosen, job, once, as_json)
    except KeyboardInterrupt:
        if once:  # no verdict yet
            raise
        sys.exit(0)
    sys.exit(0 if ok else 1)


def _follow(kernel: Kernel, job: Job, once: bool, as_json: bool) -> bool:
    """Print every version; returns whether the last one was good."""
    console, ok = screen(), False
    with closing(session.watch(kernel, job, once=once)) as iterations, console.status("") as status:
        status.stop()
        for now in iterations:
            if now is None:
                if not as_json and console.is_terminal:
                    status.update(Text(f"examining {kernel.name}"))
                    status.start()
                continue
            if now.found.pending and (as_json or once or not console.is_terminal):
                continue  # print this version once, when complete
            status.stop()
            ok = now.found.ok
            if as_json:
                click.echo(json.dumps(plain(now)))
                continue
            if console.is_terminal and not once:
                console.clear()
            console.print(watch_report.screen(now))
            if console.is_terminal and not once:
                console.print(f"watching {kernel.source.name}, its spec and headers; Ctrl-C ends", style="dim")
    return ok


def _look_back(
    history: History, show: int | None, old: int | None, new: int | None, restore: int | None, as_json: bool
) -> None:
    if restore is not None:
        keep, headers = history.restore(restore)
        say(f"restored version {restore}" + (f"; the replaced files are version {keep.number}" if keep else ""))
        if headers:
            say(f"not restored, because other kernels include them: {', '.join(headers)}")
    elif old is not None:
        before = history.get(old).texts
        after = history.get(new).texts if new is not None else read_texts(history.kernel) or {}
        changed = history.diff(before, after, (f"#{old}", f"#{new}" if new is not None else "now"))
        click.echo(as_bytes(changed), nl=False)
    elif show is not None:
        version = history.get(show)
        if as_json:
            print_json({**version.__dict__})
            return
        for path, text in version.texts.items():
            click.echo(as_bytes(f"==> {path} <==\n{text}"), nl=not text.endswith("\n"))
    elif as_json:
        print_json(history.versions())
    else:
        console, versions = screen(), history.versions()
        if not versions:
            say(f"{history.kernel.name} has no versions yet: watch stores one at every save", stderr=True)
        for line in watch_report.history_lines(versions):
            console.print(line, no_wrap=True, overflow="ellipsis")
