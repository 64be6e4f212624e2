"""How fast is decoding? The grid `decode`, the crossing with the kernels of many queries, and other numbers of splits.

python experiments/020_decode/run.py            needs a GPU
python experiments/020_decode/run.py plot       draws the stored rows of the grid
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sandbox.bench import decode, plot
from sandbox.bench.rows import problem_of, read_rows

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
PEERS = f"sdpa-cudnn,sdpa-flash,{HERE.parent / 'flash_attention_peers.py'}"
KERNELS = ("fwd_decode", "fwd_mma", "fwd_wgmma")
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128)  # times four heads a group: packed rows
WIDTHS = ("16,32/8,4,8192,64", "16,32/8,16,8192,64", "16,16,32,4096,64",
          "16,32/8,4,8192,256", "16,32/8,16,8192,256", "16,16,32,4096,256")  # fmt: skip
SPLIT = ("1,32/8,1,2048,128", "4,16,1,8192,128", "1,64/8,1,131072,128", "8,32/8,1,32768,128")
BLOCKS = (66, 132, 264, 528)  # what the spec takes for the number of multiprocessors, and others
DEALT = (66, 132, 264)  # likewise, where each takes an equal stretch of all keys


def commands() -> Iterator[tuple[str, ...]]:
    """What `sandbox bench` is told, run after run."""
    yield (*KERNELS, "--grid", "decode", "--peers", PEERS)
    for B in (1, 16):
        yield (*KERNELS, *_shapes(*(f"{B},32/8,{Sq},8192,128" for Sq in QUERIES)), "--causal", "--peers", "none")
    yield (*KERNELS, *_shapes(*WIDTHS), "--causal", "--peers", "none")
    yield ("fwd_decode", *_shapes(*SPLIT), *_tiles(BLOCKS), "--peers", "none")
    yield ("fwd_decode", *_shapes("32,32/8,1,4096,128"), "--key-lengths", *_tiles(DEALT), "--peers", "none")


def _shapes(*shapes: str) -> list[str]:
    return [word for shape in shapes for word in ("--shape", shape)]


def _tiles(blocks: tuple[int, ...]) -> list[str]:
    return [word for n in blocks for word in ("--tile", f"BLOCK_M=16,BLOCK_N=16,WARPS=4,STAGES=3,BLOCKS={n}")]


def draw() -> None:
    """The grid alone, each contender with the tile that it chose."""
    grid = decode.problems("bfloat16")
    plot.draw([r for r in read_rows(ROWS) if problem_of(r) in grid and " " not in r["contender"]], HERE / "decode")


def main() -> int:
    if sys.argv[1:] == ["plot"]:
        draw()
        return 0
    worst = 0
    for options in commands():
        command = [sys.executable, "-m", "sandbox", "bench", *options, "--dtype", "bfloat16"]
        done = subprocess.run([*command, "--out", str(ROWS)], check=False)
        worst = max(worst, done.returncode)
    draw()
    return worst


if __name__ == "__main__":
    sys.exit(main())
