"""Which tiles spill registers: tables that `compile --sweep` generates, `kernels_cu/NAME.spills.json` beside each spec.

A row has an architecture, a tile, a dtype, the options that were compiled in, and {head dimension: bytes per thread of
spill stores and loads}. A row applies to a problem that has all options of the row (and perhaps more), and whose dtype
has as many bits as the row's; the problem's head dimension is rounded up to one that is compiled (PLAIN_WIDTHS,
WIDTHS). A tile without a row does not spill, or was not compiled: automatic selection uses it. Register use differs
slightly between versions of NVRTC and changes with the source, so the table affects the order in which tiles and
kernels are selected, and excludes none.

Options, in this module: the macros of a row, CAUSAL included; "without options": none but those in ALWAYS.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..core.dtypes import FLOAT8
from ..core.kernel import Arch, Kernel
from ..core.options import macros
from ..core.problem import Problem
from ..core.tile import Tile
from ..toolchain import arch as architectures

PLAIN_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # head dimensions compiled without options
WIDTHS = (64, 96, 128, 192, 256)  # and with options
_LAST_WITH_OPTIONS = (9, 0)  # later architectures are compiled without options
CPU = _LAST_WITH_OPTIONS  # the CPU backend uses the tiles of this architecture
# The bits of a macro's value that matter here. What does not matter: the dtype of a bias, whether SOFTCAP is above
# 5000, the page size, the value of Dv. 0 keeps only that the macro is defined: "PAGE_SIZE=0" in a row is any page size.
# BIAS & 4: broadcast along the keys; BIAS & 8: TMA can copy tiles of the bias (`_bias_level` in core/options.py).
_BITS = {"BIAS": 12, "SOFTCAP": 1, "PAGE_SIZE": 0, "HEAD_DIM_V": 0}
_SUMS = {"WINDOW", "DESCALE"}  # each bit of the value adds code: a row has an option for each, such as "WINDOW=2"
_IGNORED = (
    "SCORE_BYTES",
    "BLOCK_MAP",  # follows from MASK or SCORE_HIDES
    "SCORE_SNIPPET",  # a hash; SCORE_CHANGES and SCORE_HIDES replace it
    "SHORT_SEQUENCES",
    "LONG_SEQUENCES",
)
# Macros of problems without options: `widths_for` does not count them. Every problem with float8 keys has DESCALE=8; a
# descale of q, k or v that is an array adds DESCALE=1, 2 or 4, which counts as an option.
ALWAYS = {"CAUSAL=1", "DESCALE=8"}


class Row(NamedTuple):
    """Spilled bytes per thread of one compiled variant of a tile, by head dimension."""

    arch: str  # without suffix, such as "sm_90"
    tile: str
    dtype: str
    options: str  # sorted, separated by spaces, such as "CAUSAL=1 DROPOUT=1"
    spilled: dict[int, int]


def options_of(problem: Problem) -> frozenset[str]:
    """The options of a problem that affect registers, as in a row."""
    found = {name: value & _BITS.get(name, -1) for name, value in macros(problem).items() if name not in _IGNORED}
    score = problem.score
    kinds = {"CAUSAL": problem.causal, "SCORE_CHANGES": score and score.changes, "SCORE_HIDES": score and score.hides}
    return frozenset(
        f"{name}={part}"
        for name, value in (found | {name: 1 for name in kinds if kinds[name]}).items()
        for part in ((1 << i for i in range(value.bit_length()) if value >> i & 1) if name in _SUMS else (value,))
    )


def dtype_of(problem: Problem) -> str:
    """The dtype of a problem in rows. The two dtypes of 16 bits need the same number of registers, and so do the two of
    8 bits: rows name one of each pair. The sweep does not compile float8 keys with 16-bit queries: for such problems
    the rows of 16 bits are an estimate."""
    return next(iter(FLOAT8)) if problem.float8 else "float16" if problem.itemsize == 2 else problem.dtype


def text_of(tile: Tile) -> str:
    """The tile in rows: without BLOCKS, which is the number of SMs and affects no registers."""
    return ",".join(f"{name}={value}" for name, value in tile.items() if name != "BLOCKS")


def widths_for(options: Iterable[str]) -> tuple[int, ...]:
    """The head dimensions that are compiled with these options."""
    return WIDTHS if {*options} - ALWAYS else PLAIN_WIDTHS


def path(kernel: Kernel) -> Path:
    """The file with a kernel's table."""
    return kernel.source.parent / f"{kernel.name}.spills.json"


def read(file: Path) -> dict[str, Any]:
    """{"nvrtc": version, "archs": names, "rows": list of Row}; without rows if there is no file."""
    if not file.is_file():
        return {"nvrtc": "", "archs": [], "rows": []}
    found = json.loads(file.read_text())
    rows = [
        Row(arch, tile, dtype, options, {int(D): n for D, n in spilled.items()})
        for arch, tile, dtype, options, spilled in found["rows"]
    ]
    return {**found, "rows": rows}


def write(file: Path, nvrtc: str, archs: Iterable[str], rows: Iterable[Row]) -> None:
    """The table, sorted, one row per line."""
    lines = [json.dumps(row) for row in sorted(rows, key=lambda row: row[:4])]
    body = "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"
    file.write_text(f'{{"nvrtc": {json.dumps(nvrtc)}, "archs": {json.dumps(sorted(archs))}, "rows": {body}}}\n')


class Table:
    """The rows of one kernel, for look-ups."""

    def __init__(self, archs: Iterable[str], rows: Iterable[Row]):
        self.archs = sorted(map(architectures.parse, archs))
        self._rows = defaultdict[tuple[Arch, str, str], list[tuple[frozenset[str], dict[int, int]]]](list)
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """One more row."""
        key = architectures.parse(row.arch), row.tile, row.dtype
        self._rows[key].append((frozenset(row.options.split()), row.spilled))

    def spilled(self, problem: Problem, tile: Tile, arch: Arch | None) -> int:
        """Bytes per thread that are spilled: the maximum of all rows that apply; 0 if there are none. Rows of sm_90
        also apply to later architectures, for which options are not compiled."""
        wanted = arch or CPU
        nearest = max((a for a in self.archs if a <= wanted), default=min(self.archs, default=wanted))
        key = text_of(tile), dtype_of(problem)
        rows = [row for a in {nearest, min(nearest, _LAST_WITH_OPTIONS)} for row in self._rows.get((a, *key), ())]
        if not rows:
            return 0
        width, options = max(problem.D, problem.Dv), options_of(problem)
        found = (
            spilled.get(next((w for w in widths_for(own) if w >= width), width), 0)
            for own, spilled in rows
            if own <= options
        )
        return max(found, default=0)


def spilled(kernel: Kernel, problem: Problem, tile: Tile, arch: Arch | None) -> int:
    """Bytes per thread of spill stores and loads with `tile`, by the kernel's table; 0: none, or not in the table."""
    file = path(kernel)
    try:
        changed = file.stat().st_mtime_ns
    except OSError:
        return 0
    return _table(file, changed).spilled(problem, tile, arch)


@lru_cache(maxsize=64)
def _table(file: Path, changed: int) -> Table:
    found = read(file)
    return Table(found["archs"], found["rows"])
