"""Every tile of fwd_mma with 4 warps: shared memory, occupancy and speed, beside FlashAttention's rule. See README.md.

python experiments/005_block_size/run.py [measure]     needs a GPU; writes results.jsonl
python experiments/005_block_size/run.py report        prints the figures of results.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from sandbox.bench import environment
from sandbox.core import jsonl, registry
from sandbox.reference import paper_block_sizes
from sandbox.spec import Problem, Tile
from sandbox.toolchain import arch
from sandbox.tune import executors
from sandbox.tune.search import Search

HERE = Path(__file__).resolve().parent
WIDTHS = (64, 128)


def measure() -> list[dict[str, Any]]:
    """Searches the whole space; the result is not kept for `attention`."""
    where, rows, kernel = environment.describe(), [], registry.get("fwd_mma")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SANDBOX_CACHE_DIR"] = folder
        with executors.make_executor(kernel, None, [0]) as executor:
            for D in WIDTHS:
                problem = Problem(4, 16, 4096, 4096, D, dtype="float16")
                search = Search(kernel, problem, executor, {"WARPS": 4})
                for _ in search:
                    pass
                rows += [_row(search, c) | where for c in search.candidates.values()]
    (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _row(search: Search, c: Any) -> dict[str, Any]:
    seconds = c.timing.median if c.timing else None
    return {
        "D": search.problem.D, "problem": str(search.problem), "tile": str(c.tile), "state": c.state, "smem": c.smem,
        "registers": c.resources.registers if c.resources else None, "finalist": c.finalist,
        "occupancy": c.occupancy.fraction if c.occupancy else None, "ms": seconds and seconds * 1e3,
        "samples": c.timing.samples if c.timing else None,
        "tflops": seconds and search.problem.flops / seconds * 1e-12,
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> None:
    """The figures of the prediction, for each head width."""
    for D in WIDTHS:
        timed = [row for row in rows if row["D"] == D and row["tflops"]]
        best = max(timed, key=lambda row: row["tflops"])
        M, N = paper_block_sizes(arch.limits((9, 0)).smem_per_block, D, 2)
        rule = min(timed, key=lambda row: (_distance(row, M, N), -row["tflops"]))
        print(f"D={D}: {len(timed)} tiles timed; best {best['tile']}: {_described(best)}")
        share = rule["tflops"] / best["tflops"]
        print(f"  the rule gives {M} x {N}; nearest {rule['tile']}: {_described(rule)}, {share:.2f} of it")
        speeds = [row["tflops"] for row in timed]
        for what in ("occupancy", "smem"):
            print(f"  rank correlation of {what} and speed: {_spearman([row[what] for row in timed], speeds):+.2f}")


def _described(row: dict[str, Any]) -> str:
    return f"{row['tflops']:.0f} TFLOP/s, {row['smem'] / 1024:.0f} KiB, occupancy {row['occupancy']:.0%}"


def _distance(row: dict[str, Any], M: int, N: int) -> float:
    tile = Tile.parse(row["tile"])
    return abs(np.log2(tile.BLOCK_M / M)) + abs(np.log2(tile.BLOCK_N / N))


def _spearman(x: list[float], y: list[float]) -> float:
    """Rank correlation; equal values share their mean rank."""

    def ranks(values: list[float]) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "report"], nargs="?", default="measure")
    report(measure() if parser.parse_args().what == "measure" else jsonl.read(HERE / "results.jsonl"))


if __name__ == "__main__":
    main()
