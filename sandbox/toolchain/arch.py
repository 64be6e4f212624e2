"""GPU architectures: names, limits, and theoretical occupancy.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..core.errors import UnsupportedProblem
from ..core.kernel import Arch
from ..core.normalise import cdiv

KIB = 1024
REGISTERS_PER_SM = 65536
REGISTER_UNIT = 256  # registers are allocated to a warp in multiples of this
WARP_UNIT = 4  # an SM's registers are split between four sub-partitions
WARP = 32
PATTERN = re.compile(r"sm_(\d+)(\d)[af]?")  # major, minor


@dataclass(frozen=True)
class Limits:
    """Limits of one multiprocessor (SM) of a compute capability. Shared memory in bytes."""

    warps_per_sm: int
    blocks_per_sm: int
    smem_per_sm: int
    smem_per_block: int  # maximum after opt-in
    smem_reserved: int = KIB  # reserved by the system per block
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
    """`"sm_90a"` -> (9, 0). Raises UnsupportedProblem for an unknown architecture."""
    if not isinstance(name, str):
        raise UnsupportedProblem(f'arch={name!r} must be text, such as "sm_90a"')
    match = PATTERN.fullmatch(name)
    arch = (int(match[1]), int(match[2])) if match else None
    if arch not in _LIMITS:
        known = ", ".join(f"sm_{major}{minor}" for major, minor in _LIMITS)
        raise UnsupportedProblem(
            f'arch "{name}" is not supported: choose one of {known}, optionally with the suffix a (from sm_90 on) or f '
            "(from sm_100 on)"
        )
    return arch


def name_of(arch: Arch) -> str:
    """(9, 0) -> "sm_90"."""
    return f"sm_{arch[0]}{arch[1]}"


def limits(arch: Arch) -> Limits:
    """The limits of a compute capability. An unknown minor version has the limits of the preceding one."""
    known = [a for a in _LIMITS if a <= arch]
    if not known:
        raise UnsupportedProblem(
            f"compute capability {arch[0]}.{arch[1]} is not supported: 7.5 is the oldest one that is"
        )
    return _LIMITS[max(known)]


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks per SM, the fraction of its warp slots that they fill, and the limiting resource."""

    blocks_per_sm: int
    fraction: float
    limiter: str


def occupancy(arch: Arch, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """Theoretical occupancy of a kernel: `threads` per block, `registers` per thread, `smem_bytes` (static + dynamic).

    Same rule as the driver's cuOccupancyMaxActiveBlocksPerMultiprocessor; a `gpu` test compares the two.
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
