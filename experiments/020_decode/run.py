"""Decoding: the grid `decode` in bfloat16 and float8, and the number of queries from which other kernels are faster.

python experiments/020_decode/run.py measure [grid|float8|queries …]    needs a GPU
python experiments/020_decode/run.py table     writes the tables of README.md, and decode.png
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandbox.bench import decode, ladder, markdown, plot
from sandbox.bench.rows import by_problem, problem_of, read_rows
from sandbox.core import picture

HERE = Path(__file__).resolve().parent
ROWS, QUERIES = HERE / "results.jsonl", HERE / "queries.jsonl"
PACKAGES = HERE.parents[1] / "sandbox" / "bench" / "flash_attention_peers.py"
KERNELS = ("fwd_decode", "fwd_decode_wgmma")
LENGTHS = (1, 4, 16, 32, 64, 128)  # queries; four times as many packed rows
Row = Mapping[str, Any]


def parts() -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """(part, file for the rows, options of `bench`)."""
    yield (
        "grid",
        ROWS,
        (*KERNELS, "--grid", "decode", "--sample", "0", "--dtype", "bfloat16", "--peers", f"sdpa-cudnn,{PACKAGES}"),
    )
    options = ("--grid", "decode", "--sample", "0", "--dtype", "float8_e4m3", "--peers", "none")
    yield "float8", ROWS, ("fwd_decode", "fwd_wgmma_fp8", *options)
    shapes = [f"--shape={B},32/8,{Sq},8192,128" for B in (1, 16) for Sq in LENGTHS]
    options = ("--causal", "--dtype", "bfloat16", "--peers", "none")
    yield "queries", QUERIES, (*KERNELS, "fwd_wgmma", *shapes, *options)


def measure(wanted: Sequence[str]) -> int:
    worst = 0
    for part, out, options in parts():
        if not wanted or part in wanted:
            command = [sys.executable, "-m", "sandbox", "bench", *options, "--out", str(out)]
            worst = max(worst, subprocess.run(command, check=False).returncode)
    return worst


def grid_table(rows: Sequence[Row], contenders: Sequence[str]) -> str:
    """µs of each contender, and the share of the fastest kernel in reading as many bytes."""
    heads = [ladder.label(name) if ladder.label(name) != name else f"`{name}`" for name in contenders]
    lines = [f"| problem | MiB | {' | '.join(heads)} | of reading |", f"| --- | --- |{' --- |' * len(heads)} --- |"]
    for p, there in by_problem(rows).items():
        cells = [f"{1e3 * there[name]['ms']:.1f}" if name in there else "–" for name in contenders]
        best = max((row for name, row in there.items() if name in contenders[:2]), key=lambda row: row["gbps"])
        size = best["gbps"] * best["ms"] * 1e6 / 2**20
        share = best["gbps"] / best["ceiling_keys_gbps"]
        lines.append(f"| {p} | {size:.0f} | {' | '.join(cells)} | {share:.3f} |")
    last = rows[-1]
    caption = (
        f"µs, medians of interleaved launches, L2 flushed; {last['device']}, CUDA {last['cuda']}. “of reading”: speed"
        " of the fastest kernel relative to a kernel that only reads as many bytes. 1 GiB is read at"
        f" {last['ceiling_read_gbps']:.0f} GB/s."
    )
    return "\n".join([*lines, "", caption]) + "\n"


def table() -> None:
    rows = read_rows(ROWS)
    of_16_bits, of_8_bits = ([r for r in rows if r["dtype"].startswith(kind)] for kind in ("bfloat16", "float8"))
    texts = {
        "grid": grid_table(of_16_bits, [*KERNELS, "sdpa-cudnn", "fa4"]),
        "float8": grid_table(of_8_bits, ["fwd_decode", "fwd_wgmma_fp8"]),
        "queries": markdown.problems_markdown(read_rows(QUERIES), [*KERNELS, "fwd_wgmma"], microseconds=True),
    }
    for name, text in texts.items():
        ladder.write_table(HERE / "README.md", name, Path(__file__), text)
    grid = decode.problems("bfloat16")
    picture.compact(plot.draw([row for row in of_16_bits if problem_of(row) in grid], HERE / "decode"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("parts", nargs="*", help="grid, float8, queries; all by default")
    options = parser.parse_args()
    status = measure(options.parts) if options.what == "measure" else 0
    table()
    return status


if __name__ == "__main__":
    sys.exit(main())
