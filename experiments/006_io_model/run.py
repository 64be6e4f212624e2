"""Bytes between DRAM, L2 and the SMs, counted by the GPU and by the IO model. See README.md beside this file.

python experiments/006_io_model/run.py [measure]     needs a GPU and ncu; writes results.jsonl
python experiments/006_io_model/run.py table         writes the table of results.jsonl to README.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from sandbox.bench.ladder import write_table
from sandbox.core import jsonl
from sandbox.profile import profiler
from sandbox.profile import report as profile_report
from sandbox.spec import Problem

HERE = Path(__file__).resolve().parent
PROBLEMS = (
    Problem(8, 16, 1024, 1024, 64, dtype="float16"),
    Problem(4, 16, 4096, 4096, 64, dtype="float16"),
    Problem(4, 16, 4096, 4096, 64, dtype="float16", causal="bottom-right"),
    Problem(2, 16, 8192, 8192, 64, dtype="float16"),
    Problem(4, 16, 4096, 4096, 128, dtype="float16"),
)


def measure() -> list[dict[str, Any]]:
    """One launch of each problem, profiled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for problem in PROBLEMS:
            subject = profiler.subject("fwd_mma", problem, None)
            profiler.collect("ncu", subject, Path(folder) / "p")
            row = profile_report.as_json(profiler.read(Path(folder) / "p"))
            rows.append({name: value for name, value in row.items() if name not in ("metrics", "lines")})
            print(f"profiled {problem}", flush=True)
    (HERE / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Measured bytes relative to the minimum and to the model."""
    lines = [
        "| problem | DRAM read | of the minimum | of the model | L2 | of the model | L2 hits | DRAM written |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        m, model = row["measures"], row["model_bytes"]
        read, written = sum(model["read"].values()), sum(model["written"].values())
        least = row["least_bytes"] - written
        dram, l2 = m["DRAM read"], m["L2 to and from SMs"]
        cells = (
            row["problem"], f"{dram * 1e-6:.1f} MB", f"{dram / least:.2f}", f"{dram / read:.3f}", f"{l2 * 1e-6:.0f} MB",
            f"{l2 / (read + written):.2f}", f"{m['L2 hits']:.0%}", f"{m['DRAM written'] / written:.2f} of O and LSE",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"], nargs="?", default="measure")
    rows = measure() if parser.parse_args().what == "measure" else jsonl.read(HERE / "results.jsonl")
    write_table(HERE / "README.md", "bytes", Path(__file__), table(rows))


if __name__ == "__main__":
    main()
