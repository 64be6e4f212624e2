"""What options of the score and dropout cost the Hopper kernels, beside the peers that support them. See README.md.

python experiments/014_scores/run.py measure    needs a GPU; some ten minutes on an H200; rows go to results.jsonl
python experiments/014_scores/run.py table      writes the tables of README.md
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from sandbox.bench import ladder, markdown
from sandbox.bench.rows import read_rows

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
PEERS = ("flex", "sdpa-cudnn", "fa4")
KERNELS = {"forward": ("fwd_wgmma",), "backward": ("bwd_wgmma", "bwd_wgmma_deterministic")}


def measure() -> None:
    packages = HERE.parents[1] / "sandbox" / "bench" / "flash_attention_peers.py"
    for grid, peers in (("scores", f"flex,sdpa-cudnn,{packages}"), ("dropout", "sdpa-cudnn")):
        for computes, kernels in KERNELS.items():
            options = ["--grid", grid, "--dtype", "bfloat16", "--peers", peers, "--out", str(ROWS)]
            options += ["--backward"] if computes == "backward" else []
            command = [sys.executable, "-m", "sandbox", "bench", *kernels, *options]
            subprocess.run(command, check=False)  # a wrong result of a peer is a row, and the exit status 1


def table() -> None:
    rows = read_rows(ROWS)
    for computes, kernels in KERNELS.items():
        own = [row for row in rows if row["computes"] == computes]
        text = markdown.problems_markdown(own, [*kernels, *PEERS])
        ladder.write_table(HERE / "README.md", computes, Path(__file__), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    if parser.parse_args().what == "measure":
        measure()
    table()


if __name__ == "__main__":
    main()
