"""Selection of kernel and tile for a problem, with the reasons why the others were rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..core import log, registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import Arch, Dim3, Kernel
from ..core.operation import OperationProblem
from ..core.problem import Problem
from ..core.tile import Tile
from ..launch.arguments import OPTIONAL_OUTPUTS
from ..toolchain import arch as architectures
from . import spills, tuned

_GRID_LIMITS = (2**31 - 1, 65535, 65535)
# Bytes per thread, of spill stores and loads, up to which a kernel still precedes lower rungs: bwd_wgmma with 4 to 112
# bytes was three times as fast as bwd_mma, which did not spill (notes of experiment 014 at 323513b). For a kernel that
# its spec places first for the problem (`first_for`), the limit is 0.
MAX_SPILLED_BYTES = 256


def why_tile_unsupported(kernel: Kernel, problem: Problem, tile: Tile, arch: Arch | None) -> str | None:
    """Why `kernel` cannot run with `tile` on `arch` (None: the CPU backend), as a sentence; None if it can."""
    if reason := kernel.why_tile_unsupported(problem, tile, arch):
        return reason
    sizes = [(entry, kernel.launch_sizes(entry, problem, tile)) for entry in kernel.entries]
    need = max(each.smem_bytes for _, each in sizes)
    have = architectures.limits(arch).smem_per_block if arch else architectures.LARGEST_SMEM
    if need > have:
        where = architectures.name_of(arch) if arch else "the CPU backend"
        return (
            f"{kernel.name}: tile {tile} is not supported: it needs {need} bytes of shared memory at {problem.widths}, "
            f"and {where} has {have} (choose a smaller tile)"
        )
    always = (each.grid for entry, each in sizes if not {*entry.args} & {*OPTIONAL_OUTPUTS})
    return next((reason for grid in always if (reason := why_grid_unsupported(kernel, grid, problem))), None)


def why_grid_unsupported(kernel: Kernel, grid: Dim3, problem: Problem) -> str | None:
    """Why a grid of the kernel cannot be launched, on either backend, as a sentence; None if it can."""
    for axis, size, limit in zip("xyz", grid, _GRID_LIMITS, strict=True):
        if size > limit:
            return (
                f"{kernel.name}: {problem} is not supported: its grid has {size} blocks along {axis}, and the limit is "
                f"{limit} (split the batch)"
            )
    return None


def why_unsupported(kernel: Kernel, problem: Problem, arch: Arch | None) -> str | None:
    """`Kernel.why_unsupported`, and the kernel that `attention` would choose for the problem."""
    reason = kernel.why_unsupported(problem, arch)
    other = _alternative(kernel, problem, arch) if reason else ""
    if not reason or not other:
        return reason
    return f"{reason[:-1]}, or use {other})" if reason.endswith(")") else f"{reason} (use {other})"


def _alternative(kernel: Kernel, problem: Problem, arch: Arch | None) -> str:
    """The kernel that is chosen for the problem; "" if no kernel supports it. If `kernel` is deterministic and the
    chosen one is not, also the one that is chosen among deterministic kernels."""
    if kernel.computes not in ("forward", "backward") or isinstance(problem, OperationProblem):
        return ""
    try:
        chosen, _ = _choice(problem, kernel.computes, arch, deterministic=False)
        if chosen.deterministic or not kernel.deterministic:
            return chosen.name
        repeatable, _ = _choice(problem, kernel.computes, arch, deterministic=True)
    except UnsupportedProblem:
        return ""
    return f"{chosen.name}; {repeatable.name} is deterministic"


def choose_tile(
    kernel: Kernel, problem: Problem, arch: Arch | None, tile: Tile | None = None, *, gpu: str = "",
    multiprocessors: int = 0,
) -> Tile:  # fmt: skip
    """`tile` if it is not None. Otherwise the candidates are the tuned tile for a GPU named `gpu` (not in a backward
    with `invariant`), then the spec's tiles in the order of `ranked`. The first one that fits `arch` and spills no
    registers (NAME.spills.json) is chosen; if all that fit spill, the one that spills the fewest bytes.

    If the spec's tiles have BLOCKS, it becomes `multiprocessors`, unless that is 0 (unknown).

    Raises UnsupportedProblem with the reason of the kernel or of the tile.
    """
    if reason := why_unsupported(kernel, problem, arch):
        raise UnsupportedProblem(reason)
    found = tuned.winner(kernel, problem, gpu) if gpu and tile is None else None
    decisive = deciding(problem, kernel.computes) if kernel.computes == "backward" else problem
    if decisive is not problem:
        found = None  # a tuned tile depends on the sizes of the batch

    def tried() -> Iterator[tuple[Tile, str]]:
        if tile is not None:
            yield tile, "as passed by the caller"
            return
        if found:
            yield found, f"tuned on {gpu}"
        for own in ranked(kernel, decisive):
            yield _fitted(own, multiprocessors), "the first of the spec's tiles that fits and does not spill"

    reasons: list[str] = []
    spilled: dict[Tile, int] = {}
    for candidate, why in tried():
        if reason := why_tile_unsupported(kernel, problem, candidate, arch):
            reasons.append(reason)
            continue
        spilled[candidate] = 0 if tile is not None else spills.spilled(kernel, decisive, candidate, arch)
        if not spilled[candidate]:
            log.logger.log(log.CHOICES, "%s on %s: tile %s, %s", kernel.name, problem, candidate, why)
            return candidate
    if not spilled:
        raise UnsupportedProblem(reasons[-1])
    least = min(spilled, key=lambda candidate: spilled[candidate])
    log.logger.log(log.CHOICES, "%s on %s: tile %s, all tiles spill registers", kernel.name, problem, least)
    return least


@lru_cache(maxsize=256)  # a launch needs it twice: for the kernel, and for its tile on the device
def ranked(kernel: Kernel, problem: Problem) -> tuple[Tile, ...]:
    """The spec's tiles in the order in which they are tried."""
    return tuple(sorted(kernel.tiles, key=lambda candidate: kernel.rank(problem, candidate)))


_SIZE = 4096  # queries and keys of the problem for a choice that must not depend on them


def deciding(problem: Problem, computes: object) -> Problem:
    """The problem that determines the kernel, and in a backward the tile. Without `invariant`: `problem`. With
    `invariant`, so that the choice does not depend on the batch: a dense problem of one batch entry that has the same
    dtypes, head dimensions and score options except key_lengths. If `problem` is the dense problem of a backward, the
    result also has its H, Hk, Sq and Sk, and the shapes of its bias and mask with B = 1. For a forward, and for the
    backward of a ragged batch, the result has one head, and `_SIZE` queries and keys. The tile of a forward is chosen
    for `problem` itself: `Kernel.why_tile_unsupported` rejects tiles in which the numbers that affect the bits of a row
    differ from those of `Kernel.invariant_tile`."""
    if not problem.invariant or computes not in ("forward", "backward"):
        return problem
    if computes == "forward" or problem.ragged:
        return problem.one_entry(_SIZE)
    return problem.one_entry()


def _fitted(tile: Tile, multiprocessors: int) -> Tile:
    return Tile(**{**tile, "BLOCKS": multiprocessors}) if multiprocessors and "BLOCKS" in tile else tile


BY_NAME = "selected by name only (default=True in its spec allows automatic selection)"


@dataclass(frozen=True)
class Candidate:
    """A kernel considered for a problem: its tile, or the reason why it does not support the problem.

    With both a tile and a reason, the kernel supports the problem, and the reason says why it is not selected.
    `spills`: the reason is that the kernel spills registers; the first such candidate is selected if all candidates
    have a reason.
    """

    kernel: Kernel
    tile: Tile | None
    reason: str = ""
    spills: bool = False


def candidates(problem: Problem, computes: str, arch: Arch | None, deterministic: bool = False) -> Iterator[Candidate]:
    """Every kernel that computes `computes`: first those with `first_for(problem)`, then by rung, highest first, then
    by `preference`. The first candidate with a tile and no reason is selected."""
    found = [kernel for kernel in reversed(registry.kernels().values()) if kernel.computes == computes]
    for kernel in sorted(found, key=lambda k: (not k.first_for(problem), -k.rung, -k.preference)):
        if deterministic and not kernel.deterministic:
            yield Candidate(kernel, None, f"{kernel.name}: not deterministic")
            continue
        if refused := kernel.why_unsupported(problem, arch):
            yield Candidate(kernel, None, refused)
            continue
        try:
            tile = choose_tile(kernel, problem, arch)
        except UnsupportedProblem as reason:
            yield Candidate(kernel, None, str(reason))
            continue
        spilled = spills.spilled(kernel, problem, tile, arch)
        if not kernel.default:
            yield Candidate(kernel, tile, f"{kernel.name}: {BY_NAME}")
        elif spilled > (0 if kernel.first_for(problem) else MAX_SPILLED_BYTES):
            said = f"the tile with the fewest spilled bytes spills {spilled} per thread"
            yield Candidate(kernel, tile, f"{kernel.name}: {said}", True)
        else:
            yield Candidate(kernel, tile)


def choose_kernel(problem: Problem, computes: str, arch: Arch | None, deterministic: bool = False) -> Kernel:
    """The first of `candidates` that has a tile and no reason: the one of the highest rung, unless a kernel of a lower
    rung is `first_for` the problem. If all have a reason, the first that was rejected only because it spills registers.
    `deterministic`: only kernels whose results are bitwise equal in every launch.

    With `problem.invariant`: the same among the candidates for `deciding(problem)` that are deterministic.

    Raises UnsupportedProblem with every kernel's reason.
    """
    kernel, said = _choice(problem, computes, arch, deterministic)
    log.logger.log(log.CHOICES, "%s of %s: kernel %s%s", computes, problem, kernel.name, said)
    return kernel


def _choice(problem: Problem, computes: str, arch: Arch | None, deterministic: bool) -> tuple[Kernel, str]:
    """`choose_kernel`, and what the log says about the kernel and about the others."""
    decisive = deciding(problem, computes)
    if decisive is problem:
        return _first_candidate(problem, computes, arch, deterministic)
    kernel, said = _first_candidate(decisive, computes, arch, deterministic=True, named=problem)
    if reason := kernel.why_unsupported(problem, arch):
        raise UnsupportedProblem(
            f"{reason}. With invariant=True the choice of the kernel must not depend on layouts and lengths: no other "
            "one is tried"
        )
    return kernel, said


def _first_candidate(
    problem: Problem, computes: str, arch: Arch | None, deterministic: bool, named: Problem | None = None
) -> tuple[Kernel, str]:
    """`_choice` for this problem. `named`: the problem that the message names, by default the same."""
    reasons: list[str] = []
    spilling: list[Kernel] = []
    for candidate in candidates(problem, computes, arch, deterministic):
        if candidate.tile is not None and not candidate.reason:
            return candidate.kernel, "".join(f"\n  not {reason}" for reason in reasons)
        reasons.append(candidate.reason)
        spilling += [candidate.kernel] * candidate.spills
    if spilling:
        return spilling[0], ", which spills"
    listed = "\n  ".join(reasons)
    raise UnsupportedProblem(f"no {computes} kernel supports {named or problem}:\n  {listed}")
