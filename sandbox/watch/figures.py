"""What `watch` finds out about one version of a kernel, and its figures, which others' are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.tile import Tile
from ..toolchain.arch import Occupancy
from ..toolchain.nvrtc import Resources
from ..verify.check import Result
from ..verify.findings import Finding

# Instructions worth a line: tensor cores and what feeds them, memory by width, barriers, exponentials, spills.
_OPCODES = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "LDG", "STG", "BAR", "MUFU", "LDL", "STL")


@dataclass(frozen=True)
class Cost:
    """What the compiler made of the first problem's kernel for `arch`: of several entries, the largest figures and the
    lowest occupancy; its stack and spills are the most that any of the problems' has. `opcodes`: all instructions of
    the first by class; {} when nothing can disassemble, or until it has."""

    arch: str
    tile: Tile
    resources: Resources
    smem_bytes: int  # static and dynamic
    occupancy: Occupancy
    opcodes: dict[str, int]


@dataclass(frozen=True)
class VersionResult:
    """What came of a version. `stage` is where it ended: "spec", "compile", "refused", "sanitize", "run", "hang",
    "crash", "wrong" (a result exceeds its bound), "ok". `setting`: the device and the problem that figures are about;
    `notes` say what could not be looked at."""

    stage: str
    message: str = ""
    results: tuple[Result, ...] = ()
    findings: tuple[Finding, ...] = ()
    cost: Cost | None = None
    setting: str = ""
    notes: tuple[str, ...] = ()
    output: str = ""  # what the kernel printed
    seconds: float = 0.0
    compiling: float = 0.0  # seconds of them
    counting: bool = False  # True: the instructions are not counted yet (`examine` with None for a job has them)

    @property
    def ok(self) -> bool:
        return self.stage == "ok"


def figures(found: VersionResult) -> dict[str, float]:
    """The numbers of a version that are compared with other versions'. Seconds, bytes, counts."""
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
