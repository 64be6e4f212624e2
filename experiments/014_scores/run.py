"""What options of a score, dropout and ragged batches cost the Hopper forward, beside the peers that know them.

python experiments/014_scores/run.py            needs a GPU; some four minutes on an H200
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
GRIDS = {
    "scores": ("fwd_wgmma", "--dtype", "bfloat16", "--peers", "flex,sdpa-cudnn"),
    "dropout": ("fwd_wgmma", "--dtype", "bfloat16", "--peers", "sdpa-cudnn"),
    "ragged": ("fwd_wgmma", "fwd_mma", "--dtype", "bfloat16", "--peers", "varlen"),
    "paper": ("fwd_wgmma", "fwd_mma", "--peers", "sdpa-cudnn"),  # the plain problem: what it had, it keeps
}


def main() -> None:
    for grid, options in GRIDS.items():
        command = [
            sys.executable,
            "-m",
            "sandbox",
            "bench",
            *options,
            "--grid",
            grid,
            "--out",
            str(HERE / "results.jsonl"),
        ]
        subprocess.run(command, check=False)  # what a peer gets wrong is a row, and the status 1


if __name__ == "__main__":
    main()
