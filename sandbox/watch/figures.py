"""The result of examining one version of a kernel, and its figures: the numbers that versions are compared by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.tile import Tile
from ..toolchain.arch import Occupancy
from ..toolchain.nvrtc import Resources
from ..verify.check import Result
from ..verify.findings import Finding

# Instructions with a line of their own: tensor cores and their loads, memory by width, barriers, exponentials, spills.
_OPCODES = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "LDG", "STG", "BAR", "MUFU", "LDL", "STL")


@dataclass(frozen=True)
class Cost:
    """Resource usage of the first problem's kernel on `arch`: for several entries, the maxima, and the lowest
    occupancy. Stack and spills are the maxima over all problems. `opcodes`: instruction counts by class; {} without a
    disassembler, or until it has finished."""

    arch: str
    tile: Tile
    resources: Resources
    smem_bytes: int  # static and dynamic
    occupancy: Occupancy
    opcodes: dict[str, int]


@dataclass(frozen=True)
class VersionResult:
    """The result for one version. `stage`: where it ended: "spec", "compile", "refused" (not supported), "sanitize",
    "run", "hang", "crash", "wrong" (a result exceeds its bound), "ok". `setting`: device and problem of the figures;
    `notes`: what could not be examined."""

    stage: str
    message: str = ""
    results: tuple[Result, ...] = ()
    findings: tuple[Finding, ...] = ()
    cost: Cost | None = None
    setting: str = ""
    notes: tuple[str, ...] = ()
    output: str = ""  # what the kernel printed
    seconds: float = 0.0
    compiling: float = 0.0  # part of `seconds`
    pending: str = ""  # what is still being done for this version; "" if the result is complete

    @property
    def ok(self) -> bool:
        return self.stage == "ok"


def figures(found: VersionResult) -> dict[str, float]:
    """The numbers of a version that are compared with other versions: seconds, bytes, counts."""
    numbers: dict[str, float | None] = {}
    if found.cost:
        r = found.cost.resources
        numbers |= {"registers": r.registers, "spills": r.spill_stores + r.spill_loads, "smem": found.cost.smem_bytes,
                    "stack": r.stack or None, "occupancy": found.cost.occupancy.fraction}  # fmt: skip
        counts = found.cost.opcodes
        numbers |= {"instructions": sum(counts.values()) or None}
        numbers |= {name: counts[name] for name in sorted(counts) if name.partition(".")[0] in _OPCODES}
    ratios = [r.error / r.bound for r in found.results if r.error is not None and r.bound]
    timed = next((r for r in found.results if r.tflops), None)
    numbers |= {
        "error": max(ratios, default=None),
        "seconds": timed.seconds if timed else None,
        "tflops": timed.tflops if timed else None,
    }
    return {name: float(n) for name, n in numbers.items() if n is not None and math.isfinite(n)}
