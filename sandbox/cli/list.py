"""`list`: the available kernels, and which one would be chosen for a problem."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import click
from rich.table import Table
from rich.text import Text

from ..core import registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import INVARIANCES, Arch, Kernel
from ..core.operation import Operation
from ..core.problem import Problem
from ..engine import choose, pipeline
from ..toolchain import arch as architectures
from ..verify.check import pick_device
from ..verify.report import table
from .group import cli
from .options import (
    SCORE_NAMES,
    Scored,
    causal_option,
    dtype_option,
    excluding,
    given_without,
    json_option,
    problem_of,
    score_options,
    shape_option,
)
from .output import print_json, say, screen, show_table


@cli.command("list")
@shape_option("Shows the kernel that would be chosen, and why others would not.", operations=False)
@click.option("--problem", hidden=True)  # older spelling of --shape
@dtype_option
@causal_option
@score_options
@click.option("--arch", help="Choose for this architecture, such as sm_80, or for cpu. Default: this machine.")
@click.option("--guarantees", is_flag=True,
              help="Show which changes of a problem are guaranteed to leave rows of the results bitwise "
                   "equal (docs/bits.md).")  # fmt: skip
@json_option
def list_(
    shape: str | None,
    problem: str | None,
    dtype: str,
    causal: str | None,
    scored: Scored,
    arch: str | None,
    guarantees: bool,
    as_json: bool,
) -> None:
    """List the kernels; with --shape, the kernel that is chosen for the problem.

    Columns: kernel, rung, dtypes, head dimensions (of a custom operation its dims), architecture, idea. The options
    from --dtype to --arch need --shape.
    """
    shape = shape or problem
    if guarantees:
        excluding("--guarantees", "shape", "problem")
    if shape is None:
        given_without("--shape", "dtype", "causal", *SCORE_NAMES, "arch")
        kernels = registry.kernels().values()
        if as_json:
            fields = ("name", "computes", "rung", "dtypes", "max_D", "min_arch", "summary", "source", "default",
                      "invariant_to")  # fmt: skip
            more = [{"computes": k.operation.name, "tiles": [dict(t) for t in k.tiles]} for k in kernels]
            print_json([{f: getattr(k, f) for f in fields} | own for k, own in zip(kernels, more, strict=True)])
        else:
            if guarantees:
                show_table(_guarantees_table(kernels))
                say(_GUARANTEES)
                for name, what in INVARIANCES.items():
                    say(f"  {name:10}  {what}")
            else:
                screen().print(_ladder_table(kernels))
        return
    wanted = _latent_if_wide(problem_of(shape, dtype, causal, scored))
    target = _arch(arch)
    found: list[choose.Candidate] = []
    chosen: list[Kernel] = []
    refused: list[str] = []
    for computes in ("forward", "backward"):
        candidates = [*choose.candidates(wanted, computes, target)]
        found += candidates
        try:
            chosen.append(choose.choose_kernel(wanted, computes, target))
        except UnsupportedProblem as error:
            if any(candidate.tile for candidate in candidates):  # else the table has all reasons
                refused.append(f"no {computes} kernel is chosen: {error}")
    if as_json:
        print_json([_row(candidate, candidate.kernel in chosen) for candidate in found])
    else:
        screen().print(_candidates_table(found, chosen))
    for text in refused:
        say(text, stderr=True)
    sys.exit(0 if chosen else 2)


def _latent_if_wide(problem: Problem) -> Problem:
    """The problem of latent attention with these sizes, if D is too large for all other kernels."""
    kernels = [kernel for kernel in registry.kernels().values() if not kernel.custom]
    latent = [kernel for kernel in kernels if kernel.latent]
    others = max((kernel.max_D for kernel in kernels if not kernel.latent), default=0)
    return latent[0].adapted(problem) if latent and others < problem.D else problem


def _row(candidate: choose.Candidate, chosen: bool) -> dict[str, object]:
    tile = dict(candidate.tile) if candidate.tile else None
    return {
        "kernel": candidate.kernel.name,
        "computes": candidate.kernel.operation.name,
        "chosen": chosen,
        "tile": tile,
        "reason": candidate.reason,
    }


def _arch(name: str | None) -> Arch | None:
    if name is None:
        return pipeline.arch_of(pick_device(None))
    return None if name == "cpu" else architectures.parse(name)


_GUARANTEES = "yes: guaranteed by the spec; blank: no guarantee; -: does not apply. What may change:"
_SIZES_WIDTH = 12  # wider lists of an operation's sizes would fold the last column


def _ladder_table(kernels: Iterable[Kernel]) -> Table:
    """The table of `list`."""
    shown = table("kernel", "rung", "dtypes", "D or dims", "arch", "idea")
    for k in kernels:
        arch = f"sm_{k.min_arch[0]}{k.min_arch[1]}" + (k.arch_suffix or "+")  # sm_90a runs on that architecture only
        rung, sizes = (str(k.rung), f"<= {k.max_D}") if k.rung else ("", "")
        idea = k.summary or (k.operation.name if k.operation.name != k.name else "")
        if isinstance(k.computes, Operation):
            sizes = ",".join(k.computes.dims)
            sizes = sizes if len(sizes) <= _SIZES_WIDTH else f"{len(k.computes.dims)} dims"
        shown.add_row(k.name, rung, " ".join(k.dtypes), sizes, arch, idea)
    return shown


def _guarantees_table(kernels: Iterable[Kernel]) -> Table:
    """The table of `list --guarantees`: what may change without changing the bits of a row, as the specs declare it."""
    shown = table("kernel", *INVARIANCES)
    for k in kernels:
        if k.invariances:
            cells = ("yes" if name in k.invariant_to else "" if name in k.invariances else "-" for name in INVARIANCES)
            shown.add_row(k.name, *cells)
    return shown


def _candidates_table(candidates: Iterable[choose.Candidate], chosen: Sequence[Kernel]) -> Table:
    """The table of `list --shape`: the chosen kernels, other possible kernels, and why the rest do not apply."""
    shown = table("kernel", "computes", "", "tile, or why not")
    for candidate in candidates:
        name, computes = candidate.kernel.name, candidate.kernel.operation.name
        reason = candidate.reason.removeprefix(f"{name}: ")
        if candidate.tile is None:
            shown.add_row(name, computes, Text("unsupported", "yellow"), reason)
            continue
        other = "spills" if candidate.spills else "by name only" if reason else "supported"
        state = Text("chosen", "green") if candidate.kernel in chosen else other
        shown.add_row(name, computes, state, f"{candidate.tile}{f' ({reason})' if reason else ''}")
    return shown
