"""How fast is decoding? The grid `decode`, the crossing with the kernels of many queries, and other numbers of splits.

python experiments/020_decode/run.py            needs a GPU
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = f"sdpa-cudnn,sdpa-flash,{HERE.parent / 'flash_attention_peers.py'}"
KERNELS = ("fwd_decode", "fwd_mma", "fwd_wgmma")
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128)  # times four heads a group: packed rows
SPLIT = ("1,32/8,1,2048,128", "1,32/8,1,32768,128", "8,32/8,1,8192,128")
BLOCKS = (66, 132, 264)  # what the spec takes for the number of multiprocessors, half of it, twice


def commands() -> Iterator[tuple[str, ...]]:
    """What `sandbox bench` is told, run after run."""
    yield (*KERNELS, "--grid", "decode", "--peers", PEERS, "--plot", str(HERE / "decode"))
    for B in (1, 16):
        shapes = [word for Sq in QUERIES for word in ("--shape", f"{B},32/8,{Sq},8192,128")]
        yield (*KERNELS, *shapes, "--causal", "--peers", "none")
    shapes = [word for shape in SPLIT for word in ("--shape", shape)]
    tiles = [word for n in BLOCKS for word in ("--tile", f"BLOCK_M=16,BLOCK_N=16,WARPS=4,STAGES=3,BLOCKS={n}")]
    yield ("fwd_decode", *shapes, *tiles, "--peers", "none")


def main() -> int:
    worst = 0
    for options in commands():
        command = [sys.executable, "-m", "sandbox", "bench", *options, "--dtype", "bfloat16"]
        done = subprocess.run([*command, "--out", str(HERE / "results.jsonl")], check=False)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
