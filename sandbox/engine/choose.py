"""Selection of kernel and tile for a problem, with the reasons why the others were rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..core import log, registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import Arch, Entry, Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..launch.arguments import NOT_ALWAYS
from ..toolchain import arch as architectures
from . import tuned

_GRID_LIMITS = (2**31 - 1, 65535, 65535)


def why_tile_unsupported(kernel: Kernel, problem: Problem, tile: Tile, arch: Arch | None) -> str | None:
    """Why `kernel` cannot run with `tile` on `arch` (None: the CPU backend), as a sentence; None if it can."""
    if reason := kernel.why_tile_unsupported(problem, tile, arch):
        return reason
    need = max(entry.smem_bytes(problem, tile) for entry in kernel.entries)
    have = architectures.limits(arch).smem_per_block if arch else architectures.LARGEST_SMEM
    if need > have:
        where = f"sm_{arch[0]}{arch[1]}" if arch else "the CPU backend"
        return (
            f"{kernel.name}: tile {tile} is not supported: it needs {need} bytes of shared memory at D={problem.D}, "
            f"and {where} has {have} (choose a smaller tile)"
        )
    always = (entry for entry in kernel.entries if not {*entry.args} & {*NOT_ALWAYS})
    return next((reason for entry in always if (reason := why_grid_unsupported(kernel, entry, problem, tile))), None)


def why_grid_unsupported(kernel: Kernel, entry: Entry, problem: Problem, tile: Tile) -> str | None:
    """Why the grid of `entry` cannot be launched, on either backend, as a sentence; None if it can."""
    for axis, size, limit in zip("xyz", entry.grid(problem, tile), _GRID_LIMITS, strict=True):
        if size > limit:
            return (
                f"{kernel.name}: {problem} is not supported: its grid has {size} blocks along {axis}, and the limit is "
                f"{limit} (split the batch)"
            )
    return None


def choose_tile(
    kernel: Kernel, problem: Problem, arch: Arch | None, tile: Tile | None = None, *, gpu: str = "",
    multiprocessors: int = 0,
) -> Tile:  # fmt: skip
    """`tile` if it is not None; else the tuned tile for a GPU named `gpu`; else the spec's best tile that fits `arch`.
    BLOCKS of the spec's tiles, if they have it, becomes `multiprocessors` (0: unknown, BLOCKS is unchanged).

    Raises UnsupportedProblem with the reason of the kernel or of the tile.
    """
    if reason := kernel.why_unsupported(problem, arch):
        raise UnsupportedProblem(reason)
    found = tuned.winner(kernel, problem, gpu) if gpu and tile is None else None
    ranked = sorted(kernel.tiles, key=lambda candidate: kernel.rank(problem, candidate))
    own = dict.fromkeys((_fitted(candidate, multiprocessors) for candidate in ranked), "the spec's best legal tile")
    candidates = (
        {tile: "as requested"} if tile is not None else {**({found: f"tuned on {gpu}"} if found else {}), **own}
    )
    reasons = []
    for candidate, why in candidates.items():
        reason = why_tile_unsupported(kernel, problem, candidate, arch)
        if reason is None:
            log.logger.log(log.CHOICES, "%s on %s: tile %s, %s", kernel.name, problem, candidate, why)
            return candidate
        reasons.append(reason)
    raise UnsupportedProblem(reasons[-1])


def _fitted(tile: Tile, multiprocessors: int) -> Tile:
    return Tile(**{**tile, "BLOCKS": multiprocessors}) if multiprocessors and "BLOCKS" in tile else tile


BY_NAME = "is selected by name only (default=True in its spec allows automatic selection)"


@dataclass(frozen=True)
class Candidate:
    """A kernel considered for a problem: its tile, or the reason why it does not support the problem.

    With both a tile and a reason, the kernel supports the problem, but is not selected for that reason.
    """

    kernel: Kernel
    tile: Tile | None
    reason: str = ""


def candidates(problem: Problem, computes: str, arch: Arch | None, deterministic: bool = False) -> Iterator[Candidate]:
    """Every kernel of the kind `computes`: first those with `first_for(problem)`, then by rung, highest first. The
    first candidate with a tile and no reason is selected."""
    found = [kernel for kernel in reversed(registry.kernels().values()) if kernel.computes == computes]
    for kernel in sorted(found, key=lambda k: (not k.first_for(problem), -k.rung, -k.preference)):
        if deterministic and not kernel.deterministic:
            yield Candidate(kernel, None, f"{kernel.name}: is not deterministic")
            continue
        try:
            tile = choose_tile(kernel, problem, arch)
            yield Candidate(kernel, tile, "" if kernel.default else f"{kernel.name}: {BY_NAME}")
        except UnsupportedProblem as reason:
            yield Candidate(kernel, None, str(reason))


def choose_kernel(problem: Problem, computes: str, arch: Arch | None, deterministic: bool = False) -> Kernel:
    """The first candidate that supports `problem` on `arch`: the highest default rung, unless another kernel is
    `first_for` the problem. `deterministic`: only kernels whose results are bitwise equal in every launch.

    Raises UnsupportedProblem with every kernel's reason.
    """
    reasons: list[str] = []
    for candidate in candidates(problem, computes, arch, deterministic):
        if candidate.tile is not None and not candidate.reason:
            because = "".join(f"\n  not {reason}" for reason in reasons)
            log.logger.log(log.CHOICES, "%s of %s: kernel %s%s", computes, problem, candidate.kernel.name, because)
            return candidate.kernel
        reasons.append(candidate.reason)
    listed = "\n  ".join(reasons)
    raise UnsupportedProblem(f"no {computes} kernel supports {problem}:\n  {listed}")
