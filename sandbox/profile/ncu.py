"""Parses the CSV text of the pages `raw` and `source` of Nsight Compute, any version.

Metrics that this version or GPU does not have are None, never 0. Names: Nsight Compute's Kernel Profiling Guide,
"Metrics Reference". Bytes, seconds and fractions of 1 throughout.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import UnsupportedProblem
from ..core.source_line import SourceLine
from ..toolchain.disassembly import Instruction

_FACTORS = {  # by unit name, of --print-units base and of older versions
    "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6,
    "nsecond": 1e-9, "ns": 1e-9, "%": 1e-2, "cycle/usecond": 1e6, "Mhz": 1e6, "cycle/nsecond": 1e9, "Ghz": 1e9,
    "Kbyte/second": 1e3, "Mbyte/second": 1e6, "Gbyte/second": 1e9, "Tbyte/second": 1e12,
}  # fmt: skip
_SECTOR = 32  # bytes
_WAVEFRONT = 128  # bytes per cycle of shared memory: 32 banks of 4 bytes
_STALL = re.compile(r"smsp__pcsamp_warps_issue_stalled_(\w+)(?<!_not_issued)")
_AVERAGE = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)(?:_not_issued)?_per_issue_active\.ratio")
_TENSOR = re.compile(
    r"sm__(pipe_tensor\w*cycles_active|inst_executed_pipe_tensor\w*)\.avg\.pct_of_peak_sustained_(active|elapsed)"
)
_SAMPLES = ("Warp Stall Sampling (All Samples)", "Warp Stall Sampling (All Cycles)", "# Samples")


@dataclass(frozen=True)
class Counters:
    """The metrics of one launch, in base units."""

    metrics: Mapping[str, float]

    def first(self, *names: str) -> float | None:
        """The first of these metrics that is available."""
        return next((self.metrics[name] for name in names if name in self.metrics), None)

    def total(self, *names: str) -> float | None:
        """The sum of the available ones of these metrics; None if there are none."""
        found = [self.metrics[name] for name in names if name in self.metrics]
        return sum(found) if found else None

    @property
    def seconds(self) -> float | None:
        """GPU time of the launch in seconds. Under a profiler it is slightly longer, and clocks may be lower."""
        return self.first("gpu__time_duration.sum", "gpu__time_duration_measured_user.sum")

    @property
    def dram_read(self) -> float | None:
        """Bytes read from DRAM."""
        return self.first("dram__bytes_read.sum")

    @property
    def dram_written(self) -> float | None:
        """Bytes written to DRAM."""
        return self.first("dram__bytes_write.sum")

    @property
    def dram_peak(self) -> float | None:
        """Peak DRAM bandwidth in bytes per second at the clock of the launch."""
        share = self.first("dram__throughput.avg.pct_of_peak_sustained_elapsed",
                           "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed")  # fmt: skip
        moved = self.total("dram__bytes_read.sum", "dram__bytes_write.sum")
        return moved / self.seconds / share if moved and self.seconds and share else None

    @property
    def l2_bytes(self) -> float | None:
        """Bytes transferred between SMs and L2, read and written."""
        sectors = self.first("lts__t_sectors_srcunit_tex.sum")
        if sectors is not None:
            return sectors * _SECTOR
        return self.total("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum")

    @property
    def l2_hits(self) -> float | None:
        """Hit rate of L2, by sectors."""
        return self.first("lts__t_sector_hit_rate.pct", "lts__average_t_sector_hit_rate.pct")

    @property
    def smem_bytes(self) -> float | None:
        """Bytes moved by shared memory, including the cycles of bank conflicts."""
        wavefronts = self.first(
            "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "smsp__l1tex_data_pipe_lsu_wavefronts_mem_shared.sum"
        )
        return None if wavefronts is None else wavefronts * _WAVEFRONT

    @property
    def bank_conflicts(self) -> float | None:
        """Additional cycles of shared-memory accesses due to bank conflicts."""
        whole = self.first("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")
        parts = [
            f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum" for op in ("ld", "st", "ldsm", "atom", "red")
        ]
        return whole if whole is not None else self.total(*parts)

    @property
    def conflict_share(self) -> float | None:
        """Fraction of shared memory's cycles that are due to bank conflicts."""
        if self.bank_conflicts is None or not self.smem_bytes:
            return None
        return self.bank_conflicts * _WAVEFRONT / self.smem_bytes

    @property
    def tensor_active(self) -> float | None:
        """Fraction of the cycles in which the tensor cores were active."""
        return max((value for name, value in self.metrics.items() if _TENSOR.fullmatch(name)), default=None)

    @property
    def occupancy(self) -> float | None:
        """Average number of resident warps as a fraction of an SM's warp slots."""
        return self.first("sm__warps_active.avg.pct_of_peak_sustained_active")

    @property
    def clock(self) -> float | None:
        """SM clock in Hz."""
        return self.first(
            "sm__cycles_elapsed.avg.per_second",
            "smsp__cycles_elapsed.avg.per_second",
            "gpc__cycles_elapsed.avg.per_second",
        )

    @property
    def stalls(self) -> dict[str, float]:
        """{stall reason: fraction of the samples of stalled warps}, most frequent first."""
        for pattern in (_STALL, _AVERAGE):
            found = {m[1]: value for name, value in self.metrics.items() if (m := pattern.fullmatch(name)) and value}
            found.pop("selected", None)  # not a stall
            if found:
                whole = sum(found.values())
                return {reason: value / whole for reason, value in sorted(found.items(), key=lambda item: -item[1])}
        return {}


def parse_raw(text: str, kernel: str) -> Counters:
    """Parse the page `raw`: a row of names, a row of units, one row per launch. Returns the first launch of `kernel`.

    Raises UnsupportedProblem if there is none.
    """
    rows = [row for row in _table(text, "Kernel Name") if len(row) > 3]
    names, units = (rows[0], rows[1]) if len(rows) > 1 else ([], [])
    launches = [dict(zip(names, row, strict=False)) for row in rows[2:]]
    chosen = next((row for row in launches if re.match(rf"{re.escape(kernel)}\b", row.get("Kernel Name", ""))), None)
    if chosen is None:
        raise UnsupportedProblem(f"the report has no launch of {kernel}, but {len(launches)} launches of other kernels")
    unit = dict(zip(names, units, strict=False))
    numbers = {
        name: number * _FACTORS.get(unit[name], 1)
        for name, value in chosen.items()
        if (number := _number(value)) is not None
    }
    return Counters(numbers)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _table(text: str, column: str) -> Iterator[list[str]]:
    """The rows of CSV text from the header with `column` on. Messages of ncu before it are skipped."""
    begun = False
    for row in csv.reader(io.StringIO(text)):
        begun = begun or (column in row and len(row) > 2)
        if begun and row and not row[0].startswith("=="):
            yield row


@dataclass(frozen=True)
class HotLine:
    """A source line with its `samples`, also by stall reason. `excess`: additional bytes of its shared-memory accesses
    due to bank conflicts."""

    where: SourceLine | None
    samples: int
    reasons: Mapping[str, int]
    excess: float


def parse_source(text: str, instructions: Sequence[Instruction]) -> list[HotLine]:
    """Parse the page `source`, one row per instruction, and sum up by the source lines of `instructions`, which must be
    of the same cubin. Most samples first; [] if the page has no samples."""
    rows = list(_table(text, "Address"))
    if not rows:
        return []
    header = rows[0]
    samples_column = next((name for name in _SAMPLES if name in header), None)
    stalls = [name for name in header if name.startswith("stall_") and "(" not in name]
    lines = {i.address: i.line for i in instructions}
    found: dict[SourceLine | None, tuple[Counter[str], list[float]]] = {}
    parsed = [dict(zip(header, row, strict=False)) for row in rows[1:]]
    addresses = [_address(row.get("Address", "")) for row in parsed]
    base = min((a for a in addresses if a is not None), default=0)
    for row, address in zip(parsed, addresses, strict=True):
        if address is None:
            continue
        reasons, sums = found.setdefault(lines.get(address - base), (Counter(), [0.0, 0.0]))
        sums[0] += _number(row.get(samples_column or "", "")) or 0
        sums[1] += _WAVEFRONT * (_number(row.get("L1 Wavefronts Shared Excessive", "")) or 0)
        for name in stalls:
            reasons[name.removeprefix("stall_")] += int(_number(row.get(name, "")) or 0)
    hot = [HotLine(at, int(sums[0]), dict(+reasons), sums[1]) for at, (reasons, sums) in found.items()]
    return sorted((line for line in hot if line.samples or line.excess), key=lambda line: -line.samples)


def parse_samples(text: str) -> dict[int, int]:
    """{offset in bytes from the start of the kernel: samples} of the page `source`; {} if it has none."""
    rows = list(_table(text, "Address"))
    column = next((name for name in _SAMPLES if rows and name in rows[0]), None)
    parsed = [dict(zip(rows[0], row, strict=False)) for row in rows[1:]] if column else []
    counted = {
        a: _number(row.get(column or "", "")) for row in parsed if (a := _address(row.get("Address", ""))) is not None
    }
    base = min(counted, default=0)
    return {address - base: int(number) for address, number in counted.items() if number}


def _address(text: str) -> int | None:
    """Parse a hexadecimal number with or without 0x."""
    try:
        return int(text, 16)
    except ValueError:
        return None
