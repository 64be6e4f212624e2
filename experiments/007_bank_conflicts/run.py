"""fwd_mma with its rows swizzled, plain and padded: speed, and conflicts as the GPU counts them. See README.md.

python experiments/007_bank_conflicts/run.py [measure]     needs a GPU; counts conflicts if ncu has permission
python experiments/007_bank_conflicts/run.py report        prints the figures of results.jsonl
python experiments/007_bank_conflicts/run.py check         tests that the lines to change are in the kernel; no GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from sandbox.bench import benchmark
from sandbox.bench.peers import Contender
from sandbox.core import jsonl, registry
from sandbox.core.errors import GpuUnavailable, ToolchainMissing
from sandbox.profile import profiler
from sandbox.profile import report as profile_report
from sandbox.spec import Kernel, Problem, Tile, cdiv

HERE = Path(__file__).resolve().parent
PROBLEMS = tuple(Problem(4, 16, 4096, 4096, D, dtype="float16") for D in (64, 128))
SWIZZLE = "return row * ROW + (chunk ^ row * PLACES / ROWS % PLACES * ADJACENT) * 16;"
PLAIN = "return row * ROW + chunk * 16;"
ROW = "ROW = 2 * COLUMNS;"
PADDED_ROW = "ROW = 2 * COLUMNS + 16;"


def variants(folder: Path) -> dict[str, Kernel]:
    """The kernel, and two copies with another `mma_smem.cuh` beside them, one or two lines changed."""
    kernel = registry.get("fwd_mma")
    tiles = (registry.FOLDER / "include" / "mma_smem.cuh").read_text()
    assert SWIZZLE in tiles, "the lines that this experiment changes are no longer there"
    assert ROW in tiles, "the lines that this experiment changes are no longer there"
    edits = {"plain": tiles.replace(SWIZZLE, PLAIN), "padded": tiles.replace(SWIZZLE, PLAIN).replace(ROW, PADDED_ROW)}
    found = {"swizzled": kernel}
    for name, edited in edits.items():
        file = folder / name / "fwd_mma.cu"
        (file.parent / "include").mkdir(parents=True)
        (file.parent / "include" / "mma_smem.cuh").write_text(edited)
        file.write_text(kernel.source.read_text())
        found[name] = dataclasses.replace(kernel, source=file)
    found["padded"] = dataclasses.replace(found["padded"], smem_bytes=_padded_smem)
    return found


def _padded_smem(p: Problem, t: Tile) -> int:
    return (2 * cdiv(p.D, 16) * 16 + 16) * (t.BLOCK_M + 4 * t.BLOCK_N)


def measure() -> list[dict[str, Any]]:
    """The three variants interleaved, each verified before it is timed; then the conflicts of the first two."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kernels = variants(Path(folder))
        contenders = [_contender(name, kernel) for name, kernel in kernels.items()]
        rows += [row.as_json() for row in benchmark.run([], PROBLEMS, contenders)]
        for row in rows:
            if row["contender"] != "padded":  # its spec exists in this process only, not in that of ncu
                problem = {p.D: p for p in PROBLEMS}[row["D"]]
                row["profile"] = _profile(kernels[row["contender"]], problem, Path(folder) / "p")
    (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _contender(name: str, kernel: Kernel) -> Contender:
    (contender,) = benchmark.kernel_contenders([kernel])
    return dataclasses.replace(contender, name=name)


def _profile(kernel: Kernel, problem: Problem, prefix: Path) -> dict[str, Any] | None:
    own = registry.get("fwd_mma")
    subject = profiler.subject(own.name, problem, None, "" if kernel.source == own.source else str(kernel.source))
    try:
        profiler.collect("ncu", subject, prefix)
    except (GpuUnavailable, ToolchainMissing) as reason:
        print(f"conflicts are not counted: {reason}", flush=True)
        return None
    found = profile_report.as_json(profiler.read(prefix))
    return {"measures": found["measures"], "stalls": found["stalls"]}


def report(rows: list[dict[str, Any]]) -> None:
    """The ratios and the conflicts of the prediction."""
    for problem in PROBLEMS:
        there = {row["contender"]: row for row in rows if row["D"] == problem.D}
        swizzled = there["swizzled"]["tflops"]
        for name, row in there.items():
            if not row["tflops"]:
                print(f"D={problem.D} {name}: {row['message']}")
                continue
            print(
                f"D={problem.D} {name:9} {row['tflops']:6.1f} TFLOP/s, {row['tflops'] / swizzled:.2f} of the swizzled"
            )
            measures = (row.get("profile") or {}).get("measures", {})
            conflicts, moved = measures.get("bank conflicts"), measures.get("shared memory")
            if conflicts is not None and moved:
                print(f"      {conflicts:.3g} conflicts, {conflicts * 128 / moved:.1%} of shared memory's cycles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "report", "check"], nargs="?", default="measure")
    what = parser.parse_args().what
    if what == "check":
        with tempfile.TemporaryDirectory() as folder:
            print(", ".join(variants(Path(folder))))
    else:
        report(measure() if what == "measure" else jsonl.read(HERE / "results.jsonl"))


if __name__ == "__main__":
    main()
