"""What `watch` finds out about one version of a kernel, and on which problems."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.kernel import Kernel
from ..core.problem import Problem
from ..core.tile import Tile
from ..launch.dlpack import HOST, Device
from ..toolchain.arch import Occupancy
from ..toolchain.nvrtc import Resources
from ..verify.cases import Case
from ..verify.check import Result
from ..verify.findings import Finding

_WIDTHS = (64, 128, 32, 16, 256)
# Instructions worth a line: tensor cores and what feeds them, memory by width, barriers, exponentials, spills.
_OPCODES = ("HMMA", "HGMMA", "LDSM", "LDGSTS", "UTMALDG", "LDG", "STG", "BAR", "MUFU", "LDL", "STL")


@dataclass(frozen=True)
class Job:
    """What to examine: `problem` instead of the quick set; `seconds` that one run may take."""

    kernel: str
    device: Device
    problem: Problem | None = None
    tile: Tile | None = None
    seconds: float = 10.0


@dataclass(frozen=True)
class Cost:
    """What the compiler made of the first problem's kernel for `arch`: of several entries, the largest figures and the
    lowest occupancy. `opcodes`: all their instructions by class; {} when nothing can disassemble."""

    arch: str
    tile: str
    resources: Resources
    smem_bytes: int  # static and dynamic
    occupancy: Occupancy
    opcodes: dict[str, int]


@dataclass(frozen=True)
class Examination:
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

    @property
    def ok(self) -> bool:
        return self.stage == "ok"


def quick_cases(kernel: Kernel, device: Device) -> list[Case]:
    """One to time, and small ones with ragged lengths, groups, strides, large scores: two compilations in all."""
    dtype = "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]

    def of(B: int, H: int, Sq: int, Sk: int, Hk: int = 0, causal: str | bool = False) -> Problem:
        problems = [Problem(B, H, Sq, Sk, D, Hk, dtype, causal) for D in _WIDTHS]  # type: ignore[arg-type]
        return next((p for p in problems if not kernel.refuses(p)), problems[0])

    H, S = (2, 192) if device == HOST else (12, 1024)
    M, N = kernel.tiles[0].get("BLOCK_M", 64), kernel.tiles[0].get("BLOCK_N", 64)
    return [
        Case("plain", of(1, H, S, S)),
        Case("causal", of(1, H, S, S, causal="bottom-right")),
        Case("edges", of(1, 1, M + 1, 2 * N - 1)),
        Case("ragged", of(2, 4, 77, 97, Hk=2, causal="bottom-right"), layout="bshd"),
        Case("large", of(1, 2, 97, 77, causal="bottom-right"), inputs="large"),
    ]


def figures(found: Examination) -> dict[str, float]:
    """The numbers of a version that are compared with other versions'. Seconds, bytes, counts."""
    numbers: dict[str, float | None] = {}
    if found.cost:
        r = found.cost.resources
        numbers |= {"registers": r.registers, "spills": r.spill_stores + r.spill_loads, "smem": found.cost.smem_bytes,
                    "occupancy": found.cost.occupancy.fraction}  # fmt: skip
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
