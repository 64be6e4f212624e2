"""How fast the float8 forward is, beside our bfloat16 forward in one run.

python experiments/015_fp8/speed.py [ROWS.jsonl]     needs an H200, some minute; rows go to that file, or to speed.jsonl
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from sandbox import Problem
from sandbox.bench import contest
from sandbox.bench.rows import recorded
from sandbox.bench.timing import Limits
from sandbox.core import registry

HERE = Path(__file__).resolve().parent
ROWS = HERE / "speed.jsonl"
WIDTHS, LENGTHS, MASKS = (64, 128, 256), (1024, 4096, 16384), (False, "bottom-right")
KERNELS = {"float8_e4m3": "fwd_wgmma_fp8", "bfloat16": "fwd_wgmma"}


def problems() -> list[Problem]:
    """16k tokens of hidden size 2048, each in float8 and then in bfloat16."""
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for D, causal, S, dtype in itertools.product(WIDTHS, MASKS, LENGTHS, KERNELS)
    ]


def measure(file: Path) -> None:
    """Appends the rows of one run to `file`, and prints them as they come."""
    kernels = [registry.get(name) for name in KERNELS.values()]
    rows = contest.run(kernels, problems(), limits=Limits(seconds=0.1, rounds=60))
    for row in recorded((row for row in rows if row.contender == KERNELS[row.problem.dtype]), file):
        said = f"{row['tflops']:.0f} TFLOP/s, product {row['ceiling_tflops']:.0f}" if row["ok"] else row["message"]
        print(row["dtype"], f"D{row['D']} S{row['Sq']} causal={row['causal']}", row["tile"], said, flush=True)


if __name__ == "__main__":
    measure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
