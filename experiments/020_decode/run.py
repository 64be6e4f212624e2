"""How fast is decoding? The grid `decode`, of float8 too, the crossing with the kernels of many queries, other splits.

python experiments/020_decode/run.py               needs a GPU
python experiments/020_decode/run.py grid splits   these parts of it
python experiments/020_decode/run.py plot          draws the stored rows of the grid
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
PEERS = f"sdpa-cudnn,sdpa-flash,{HERE.parents[1] / 'sandbox' / 'bench' / 'flash_attention_peers.py'}"
KERNELS = ("fwd_decode", "fwd_decode_wgmma", "fwd_mma", "fwd_wgmma")
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128)  # times four heads a group: packed rows
FEWER = (4, 8, 16, 32, 64)  # likewise, where the width is another
WIDTHS = (64, 256)
SPLIT = ("1,32/8,1,2048,128", "4,16,1,8192,128", "1,64/8,1,131072,128", "8,32/8,1,32768,128")
BLOCKS = (66, 132, 264, 528)  # what the spec takes for the number of multiprocessors, and others
DYNAMIC_SPLITS = (33, 66, 132, 264)  # likewise, where blocks are dealt to entries of different numbers of keys
FLOAT8 = (
    "BLOCK_N=32,WARPS=4,STAGES=3",
    "BLOCK_N=16,WARPS=4,STAGES=5",
    "BLOCK_N=16,WARPS=4,STAGES=3",
    "BLOCK_N=32,WARPS=8,STAGES=3",
)


def parts() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(part, what `sandbox bench` is told), run after run."""
    yield "grid", (*KERNELS, "--grid", "decode", "--peers", PEERS)
    float8 = ("--dtype", "float8_e4m3", "--peers", "none")
    yield "float8", ("fwd_decode", "fwd_wgmma_fp8", "--grid", "decode", *float8)
    of_float8 = [f"BLOCK_M=16,{tile},BLOCKS=132,CLUSTER=1" for tile in FLOAT8]
    yield "float8", ("fwd_decode", *_shapes("32,32/8,1,4096,128", SPLIT[2]), *_tiles(of_float8), *float8)
    for B in (1, 16):
        yield "crossing", (*KERNELS, *_shapes(*_of_queries(B, QUERIES, 128)), "--causal", "--peers", "none")
    for D in WIDTHS:
        shapes = [shape for B in (1, 16) for shape in _of_queries(B, FEWER, D)]
        yield "widths", (*KERNELS, *_shapes(*shapes), "--causal", "--peers", "none")
    shapes = [shape for B in (1, 16) for shape in _of_queries(B, FEWER, 128)]
    yield "widths", ("fwd_decode", "fwd_wgmma_fp8", *_shapes(*shapes), "--causal", *float8)
    of_blocks, of_dealt = (
        [f"BLOCK_M=16,BLOCK_N=16,WARPS=4,STAGES=3,BLOCKS={n},CLUSTER=1" for n in ns] for ns in (BLOCKS, DYNAMIC_SPLITS)
    )
    yield "splits", ("fwd_decode", *_shapes(*SPLIT), *_tiles(of_blocks), "--peers", "none")
    lengths = ("fwd_decode", *_shapes("32,32/8,1,4096,128"), "--key-lengths")
    yield "splits", (*lengths, *_tiles(of_dealt), "--peers", "none")


def _of_queries(B: int, queries: tuple[int, ...], D: int) -> list[str]:
    return [f"{B},32/8,{Sq},8192,{D}" for Sq in queries]


def _shapes(*shapes: str) -> list[str]:
    return [word for shape in shapes for word in ("--shape", shape)]


def _tiles(tiles: list[str]) -> list[str]:
    return [word for tile in tiles for word in ("--tile", tile)]


def draw() -> None:
    """The grid alone, each contender with the tile that it chose."""
    grid = decode.problems("bfloat16")
    plot.draw([r for r in read_rows(ROWS) if problem_of(r) in grid and " " not in r["contender"]], HERE / "decode")


def main() -> int:
    if sys.argv[1:] == ["plot"]:
        draw()
        return 0
    worst, wanted = 0, sys.argv[1:]
    for part, options in parts():
        if wanted and part not in wanted:
            continue
        command = [sys.executable, "-m", "sandbox", "bench", *options]
        command += [] if "--dtype" in options else ["--dtype", "bfloat16"]
        done = subprocess.run([*command, "--out", str(ROWS)], check=False)
        worst = max(worst, done.returncode)
    draw()
    return worst


if __name__ == "__main__":
    sys.exit(main())
