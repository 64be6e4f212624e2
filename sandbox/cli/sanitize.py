"""`sanitize`: run a kernel under sanitizers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ..core import registry
from ..verify import check as checking
from ..verify import sanitize
from .group import cli
from .options import (
    SCORE_NAMES,
    Scored,
    backend_option,
    causal_option,
    dtype_option,
    given_without,
    json_option,
    kernel_argument,
    parsed_tile,
    problem_for,
    score_options,
    shape_option,
    tile_option,
    timeout_option,
)
from .output import exit_status, followed, print_json, say


@cli.command("sanitize")
@kernel_argument
@shape_option("Default: small problems, with the smallest tile and with the tiles that are chosen for large problems.")
@dtype_option
@causal_option
@score_options
@tile_option("Default with --shape: chosen from the kernel's spec; without --shape: those of the default of --shape.")
@backend_option()
@timeout_option(
    120.0, "Time limit in seconds for each run of a tool. A run is one problem on a GPU, one launch on the CPU backend."
)
@json_option
def sanitize_(
    kernel: str, shape: str | None, dtype: str, causal: str | None, scored: Scored, tile: str | None,
    backend: str | None, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Find memory and synchronisation errors, by line of the .cu.

    Out-of-bounds accesses, races, uninitialised reads, missing waits and barriers, results that depend on the order of
    threads. Tools: compute-sanitizer on a GPU; on the CPU backend the host compiler's sanitizers and the emulator's
    own checks.
    """
    if not shape:
        given_without("--shape", "dtype", "causal", *SCORE_NAMES)
    chosen = registry.get(kernel)
    problem = problem_for([chosen], shape, dtype, causal, scored) if shape else None
    device = checking.pick_device(backend)
    tried = sanitize.inspect(chosen, device, parsed_tile(tile), timeout, problem)
    results = list(followed(tried, lambda r: f"{r.tool} on {r.problem}"))
    if as_json:
        print_json(results)
    else:
        for line in _lines(results):
            say(line)
    sys.exit(exit_status(r.clean for r in results))


def _lines(results: list[sanitize.Inspection]) -> Iterator[str]:
    for problem, tile in dict.fromkeys((r.problem, r.tile) for r in results):
        of_problem = [r for r in results if (r.problem, r.tile) == (problem, tile)]
        yield f"{of_problem[0].kernel} on {problem}, tile {tile}"
        for r in of_problem:
            state = {True: "clean", False: f"{len(r.findings)} found", None: f"not used: {r.message}"}[r.clean]
            yield f"  {r.tool:13}  {state}"
            for finding in r.findings:
                yield f"    {finding.what}"
                yield from (f"      {place}  {place.text()}" for place in finding.places[:6])
