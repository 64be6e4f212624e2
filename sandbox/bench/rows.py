"""Results of a benchmark: one row per contender and problem, stored as JSON lines."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..core import jsonl
from ..core.errors import UnsupportedProblem
from ..core.operation import problem_from_json
from ..core.problem import Problem
from .decode import is_memory_bound, kv_bytes
from .timing import Timing

_FIELDS = tuple(f.name for f in fields(Problem) if f.name not in ("alignment", "mappable"))  # in a row
_OF_OPERATIONS = ("operation", "sizes")  # in a row of an operation's problem


@dataclass(frozen=True)
class Row:
    """One contender on one problem; `kernel` is the name of our kernel, "" for a peer. Errors are absolute.

    `ok` is None if the problem is not supported, and False if the result is wrong before or after timing, or the call
    failed; then there is no time, and `message` gives the reason. `setting` has the common values of a run: mode, seed,
    ceilings (for memory-bound problems `ceiling_keys_gbps`, the read ceiling), clocks, device, driver, versions,
    commit, time.
    """

    contender: str
    kernel: str
    problem: Problem
    ok: bool | None
    message: str = ""
    tile: str = ""
    arch: str = ""
    error: float | None = None
    bound: float | None = None
    timing: Timing | None = None
    computes: str = "forward"
    pairs: int | None = None  # visible (query, key) pairs, if the problem alone does not determine them
    work: tuple[int, int] | None = None  # of an operation: floating-point operations (0: unknown), bytes
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        """By the usual convention: half of the operations for causal, 2.5 times as many for a backward. With a window,
        a mask or key_lengths, only the visible pairs count."""
        if not self.timing:
            return None
        flops = self.work[0] if self.work else self.problem.flops_of(self.computes, self.pairs)
        return flops / self.timing.median * 1e-12

    @property
    def gbps(self) -> float | None:
        """GB/s of keys and values, for a memory-bound forward; of an operation, of all bytes that it must move, if they
        take longer than its operations."""
        if self.work and self.timing:
            flops, nbytes = (n / self.timing.median for n in self.work)
            rates = [self.setting.get(name) or 1.0 for name in ("ceiling_tflops", "ceiling_gbps")]
            return nbytes * 1e-9 if nbytes * 1e-9 / rates[1] > flops * 1e-12 / rates[0] else None
        if not self.timing or not is_memory_bound(self.problem, self.computes):
            return None
        return kv_bytes(self.problem, self.pairs) / self.timing.median * 1e-9

    def as_json(self) -> dict[str, Any]:
        """A flat dictionary, times in milliseconds. NaN and infinity, which JSON does not have, become None."""
        t, tflops, gbps = self.timing, self.tflops, self.gbps
        of_bytes = "ceiling_gbps" if self.work else "ceiling_keys_gbps"
        reached, ceiling = (gbps, of_bytes) if gbps else (tflops, "ceiling_tflops")
        top = self.setting.get(ceiling)
        row = {
            "contender": self.contender,
            "kind": "kernel" if self.kernel else "peer",
            "kernel": self.kernel,
            "tile": self.tile,
            "arch": self.arch,
            "computes": self.computes,
            **{name: x for name, x in self.problem.as_json().items() if name in (*_FIELDS, *_OF_OPERATIONS)},
            "ok": self.ok,
            "message": self.message,
            "ms": t and t.median * 1e3,
            "q1_ms": t and t.q1 * 1e3,
            "q3_ms": t and t.q3 * 1e3,
            "samples": t and t.samples,
            "noise": t and t.noise,
            "tflops": tflops,
            **({"gbps": gbps} if gbps else {}),
            "percent_of_ceiling": 100 * reached / top if reached and top else None,
            "error": self.error,
            "bound": self.bound,
            **self.setting,
        }
        return {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in row.items()}


def recorded(rows: Iterable[Row], path: Path | None) -> Iterator[dict[str, Any]]:
    """The rows as dictionaries. Each is appended to the file as a JSON line before the next is measured."""
    for row in rows:
        line = row.as_json()
        if path:
            jsonl.append(path, line)
        yield line


# Former names in stored rows: of kernels, and of numbers of a tile.
_RENAMED = {
    "bwd_ordered": "bwd_wgmma_deterministic",
    "bwd_stays": "bwd_wgmma_persistent",
    "bwd_heads": "bwd_wgmma_head",
    "bwd_delta": "bwd_preprocess",
    "TEAM": "CLUSTER",
}
_WORD = re.compile(r"\w+")


def _with_new_names(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("contender", "kernel", "tile"):
        if isinstance(row.get(name), str):
            row[name] = _WORD.sub(lambda word: _RENAMED.get(word[0], word[0]), row[name])
    return row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, [] if it does not exist. Former names of kernels are replaced. An incomplete last row is
    ignored."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(_with_new_names(row))
        elif number != len(lines) or not line.startswith("{"):
            raise UnsupportedProblem(f"{path}, line {number}, is not a row in JSON: {line[:40]!r}")
    return rows


_SHOWN = ("contender", "kind", "computes", "ok", "message", "ms", "tflops", "percent_of_ceiling", "bound", "dtype")
_SIZES = ("B", "H", "Sq", "Sk", "D")


def stored_rows(path: Path, computes: str) -> list[dict[str, Any]]:
    """The rows of the forward or of the backward in a file that `bench --out` wrote, and those of operations. Raises
    UnsupportedProblem if there are none, or other rows."""
    rows = read_rows(path)
    for number, row in enumerate(rows, 1):
        needed = (*_SHOWN, *(("sizes",) if "operation" in row else _SIZES))
        if missing := [name for name in needed if name not in row]:
            raise UnsupportedProblem(
                f"{path}, line {number}, is not a row of bench: it has no {missing[0]!r} (bench --out writes such rows)"
            )
    found = [row for row in rows if row["computes"] == computes or "operation" in row]
    if not found:
        other, how = ("forward", "omit") if computes == "backward" else ("backward", "pass")
        more = f", but {len(rows)} of the {other}: {how} --backward" if rows else ""
        raise UnsupportedProblem(f"{path} has no rows of the {computes}{more}")
    return found


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a row."""
    return problem_from_json({name: row[name] for name in (*_FIELDS, *_OF_OPERATIONS) if name in row})


def by_problem(rows: Iterable[Mapping[str, Any]]) -> dict[Problem, dict[str, Mapping[str, Any]]]:
    """{problem: {contender: its latest row}}, in the order of the rows."""
    found: dict[Problem, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(problem_of(row), {})[row["contender"]] = row
    return found
