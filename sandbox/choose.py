"""Which kernel and which tile serve a problem, and why not the others."""

from __future__ import annotations

from . import arch as architectures
from . import registry
from .errors import UnsupportedProblem
from .spec import Arch, Kernel, Problem, Tile


def refuses_tile(kernel: Kernel, problem: Problem, tile: Tile, arch: Arch | None) -> str | None:
    """Why `kernel` cannot run with `tile` on `arch` (None: the CPU backend), as a sentence; None if it can."""
    if reason := kernel.refuses_tile(problem, tile, arch):
        return reason
    need = kernel.smem_bytes(problem, tile)
    have = architectures.limits(arch).smem_per_block if arch else architectures.LARGEST_SMEM
    if need > have:
        where = f"sm_{arch[0]}{arch[1]}" if arch else "the CPU backend"
        return f"{kernel.name}: tile {tile} needs {need} bytes of shared memory at D={problem.D}, {where} has {have}"
    return None


def choose_tile(kernel: Kernel, problem: Problem, arch: Arch | None, tile: Tile | None = None) -> Tile:
    """`tile` if given, else the spec's best that `arch` can hold.

    Raises UnsupportedProblem with the kernel's or the tile's own reason.
    """
    if reason := kernel.refuses(problem, arch):
        raise UnsupportedProblem(reason)
    reasons = []
    ranked = sorted(kernel.tiles, key=lambda candidate: kernel.rank(problem, candidate))
    for candidate in (tile,) if tile is not None else ranked:
        reason = refuses_tile(kernel, problem, candidate, arch)
        if reason is None:
            return candidate
        reasons.append(reason)
    raise UnsupportedProblem(reasons[-1])


def choose_kernel(problem: Problem, computes: str, arch: Arch | None) -> Kernel:
    """The highest rung that takes `problem` on `arch`. Raises UnsupportedProblem with every kernel's reason."""
    reasons = []
    for kernel in reversed(registry.kernels().values()):
        if kernel.computes != computes:
            continue
        try:
            choose_tile(kernel, problem, arch)
        except UnsupportedProblem as reason:
            reasons.append(str(reason))
        else:
            return kernel
    listed = "\n  ".join(reasons)
    raise UnsupportedProblem(f"no {computes} kernel takes {problem}:\n  {listed}")
