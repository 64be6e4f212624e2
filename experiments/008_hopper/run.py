"""Which tile of the Hopper forward is the fastest, and where fwd_mma takes over. See README.md beside this file.

python experiments/008_hopper/run.py tiles    every tile of the spec on four lengths: the source of its `rank`
python experiments/008_hopper/run.py small    few heads and short rows, beside fwd_mma
python experiments/008_hopper/run.py real     problems of models, bfloat16
python experiments/008_hopper/run.py table    writes the table of results.jsonl to README.md; no GPU

The measurements need a Hopper GPU; rows go to --out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox import Problem
from sandbox.bench import benchmark, ladder, markdown
from sandbox.bench.peers import PEERS
from sandbox.bench.rows import problem_of, read_rows, recorded
from sandbox.bench.timing import Limits
from sandbox.core import registry
from sandbox.spec import Tile

HERE = Path(__file__).resolve().parent
MASKS: tuple[Any, ...] = (False, "bottom-right")


def measure(problems: Sequence[Problem], names: Sequence[str], out: Path, tiles: Sequence[Tile] = ()) -> None:
    """Interleaved beside cuDNN and FlashAttention-2; prints TFLOP/s and the ratio to cuDNN."""
    peers = [PEERS[name] for name in ("sdpa-cudnn", "sdpa-flash")]
    limits = Limits(rounds=12 if tiles else 30, seconds=0.1)
    rows = recorded(
        benchmark.run([registry.get(name) for name in names], problems, peers, tiles=tiles, limits=limits), out
    )
    for problem, group in itertools.groupby(rows, key=problem_of):
        there = {row["contender"]: row for row in group}
        cudnn = there["sdpa-cudnn"]["tflops"]
        for name, row in there.items():
            ratio = f" ({row['tflops'] / cudnn:.2f} of cuDNN)" if row["tflops"] and cudnn else ""
            print(f"{problem!s:40} {name:50} {row['tflops'] or row['message']}{ratio}", flush=True)


def tiles() -> list[Problem]:
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype="float16", causal=causal)
        for D, causal, S in itertools.product((64, 128, 256), MASKS, (512, 1024, 4096, 16384))
    ]


def small() -> list[Problem]:
    heads = ((1, 12, 64), (8, 12, 64), (1, 16, 128), (1, 8, 256))
    return [
        Problem(B, H, S, S, D, dtype="float16", causal=causal)
        for (B, H, D), S, causal in itertools.product(heads, (64, 128, 256, 512, 1024), MASKS)
    ]


def real() -> list[Problem]:
    """Odd lengths, few heads, grouped heads, few keys."""
    causal = ((1, 16, 16, 8191, 8191, 128), (8, 12, 12, 1024, 1024, 64), (2, 16, 16, 4000, 4000, 96))
    causal += ((1, 32, 8, 8192, 8192, 128), (4, 32, 8, 2048, 2048, 128), (1, 8, 8, 16384, 16384, 256))
    whole = ((64, 16, 16, 197, 197, 64), (8, 20, 20, 1500, 1500, 64), (2, 10, 10, 4096, 77, 64))
    whole += ((2, 10, 10, 4096, 4096, 64), (1, 24, 24, 4608, 4608, 128))
    return [
        Problem(B, H, Sq, Sk, D, Hk=Hk, dtype="bfloat16", causal=mask)
        for shapes, mask in ((causal, MASKS[1]), (whole, MASKS[0]))
        for B, H, Hk, Sq, Sk, D in shapes
    ]


def table() -> None:
    """The forward with shorter epilogues relative to the state before."""
    rows = [row for row in read_rows(HERE / "results.jsonl") if row["dtype"] == "float16" and row["Sq"] == row["Sk"]]
    text = markdown.points_markdown(rows, "fwd_wgmma", ["before"])
    ladder.write_table(HERE / "README.md", "epilogue", Path(__file__), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tiles", "small", "real", "table"])
    parser.add_argument("--out", type=Path, default=HERE / "measured.jsonl", help="append rows to this file")
    options = parser.parse_args()
    if options.what == "tiles":
        measure(tiles(), ["fwd_wgmma"], options.out, registry.get("fwd_wgmma").tiles)
    elif options.what == "small":
        measure(small(), ["fwd_wgmma", "fwd_mma"], options.out)
    elif options.what == "real":
        measure(real(), ["fwd_wgmma"], options.out)
    else:
        table()


if __name__ == "__main__":
    main()
