"""GPU architectures: their names, their limits, and the occupancy that follows.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.errors import UnsupportedProblem
from ..core.integers import cdiv
from ..core.kernel import Arch

KIB = 1024
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256  # registers are given out to a warp in multiples of this
WARP_UNIT = 4  # an SM's registers are split between four sub-partitions
WARP = 32
PATTERN = re.compile(r"sm_(\d+)(\d)[af]?")  # major, minor


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor (SM) of a compute capability holds. Shared memory in bytes."""

    warps_per_sm: int
    blocks_per_sm: int
    smem_per_sm: int
    smem_per_block: int  # the most a block may opt in to
    smem_reserved: int = KIB  # taken by the system from every block
    smem_unit: int = 128


_LIMITS: dict[Arch, Limits] = {
    (7, 5): Limits(32, 16, 64 * KIB, 64 * KIB, smem_reserved=0, smem_unit=256),
    (8, 0): Limits(64, 32, 164 * KIB, 163 * KIB),
    (8, 6): Limits(48, 16, 100 * KIB, 99 * KIB),
    (8, 7): Limits(48, 16, 164 * KIB, 163 * KIB),
    (8, 9): Limits(48, 24, 100 * KIB, 99 * KIB),
    (9, 0): Limits(64, 32, 228 * KIB, 227 * KIB),
    (10, 0): Limits(64, 32, 228 * KIB, 227 * KIB),
    (10, 3): Limits(64, 32, 228 * KIB, 227 * KIB),
    (11, 0): Limits(48, 24, 228 * KIB, 227 * KIB),
    (12, 0): Limits(48, 24, 100 * KIB, 99 * KIB),
    (12, 1): Limits(48, 24, 100 * KIB, 99 * KIB),
}
LARGEST_SMEM = max(limits.smem_per_block for limits in _LIMITS.values())


def parse(name: str) -> Arch:
    """`"sm_90a"` -> (9, 0). Raises UnsupportedProblem for what is not an architecture this project knows."""
    match = PATTERN.fullmatch(name)
    arch = (int(match[1]), int(match[2])) if match else None
    if arch not in _LIMITS:
        known = ", ".join(f"sm_{major}{minor}" for major, minor in _LIMITS)
        raise UnsupportedProblem(f'arch "{name}" is not known: choose one of {known}, also with its suffix a or f')
    return arch


def limits(arch: Arch) -> Limits:
    """The limits of a compute capability; a later minor version than any known counts as its predecessor."""
    known = [a for a in _LIMITS if a <= arch]
    if not known:
        raise UnsupportedProblem(f"compute capability {arch[0]}.{arch[1]} is not supported: 7.5 is the oldest")
    return _LIMITS[max(known)]


@dataclass(frozen=True)
class Occupancy:
    """How many blocks live on an SM at once, the share of its warp slots they fill, and what stops one more."""

    blocks_per_sm: int
    fraction: float
    limiter: str


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Theoretical occupancy of a kernel: `threads` a block, `registers` a thread, `smem_bytes` (static + dynamic).

    The same rule as the driver's cuOccupancyMaxActiveBlocksPerMultiprocessor (held together by a `gpu` test).
    """
    limit = limits(arch)
    warps = cdiv(threads, WARP)
    registers_per_warp = max(cdiv(registers * WARP, REGISTER_UNIT), 1) * REGISTER_UNIT
    warps_by_registers = REGISTERS_PER_SM // WARP_UNIT // registers_per_warp * WARP_UNIT
    smem = cdiv(smem_bytes + limit.smem_reserved, limit.smem_unit) * limit.smem_unit
    bounds = {
        "registers": warps_by_registers // warps,
        "shared memory": limit.smem_per_sm // max(smem, 1),
        "warps": limit.warps_per_sm // warps,
        "blocks": limit.blocks_per_sm,
    }
    if smem_bytes > limit.smem_per_block:
        bounds["shared memory"] = 0
    limiter = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[limiter], bounds[limiter] * warps / limit.warps_per_sm, limiter)
