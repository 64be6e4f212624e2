"""The Hopper backward on problems of models, its tiles, and the time of its kernels. See README.md beside this file.

python experiments/013_hopper_backward/run.py real             problems of models, bfloat16, beside cuDNN
python experiments/013_hopper_backward/run.py deterministic    bwd_wgmma with and without a fixed order of dQ's sums
python experiments/013_hopper_backward/run.py tiles            every tile of the spec
python experiments/013_hopper_backward/run.py parts            time of each kernel of one call, by PyTorch's profiler
python experiments/013_hopper_backward/run.py graphs           narrow heads: kernels beside bwd_wgmma in CUDA graphs
python experiments/013_hopper_backward/run.py table            writes the tables of README.md; no GPU

The measurements need a Hopper GPU; rows go to --out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox import Problem
from sandbox.bench import benchmark, environment, ladder, markdown, peers
from sandbox.bench.rows import problem_of, read_rows, recorded
from sandbox.bench.timing import Limits
from sandbox.core import jsonl, registry
from sandbox.spec import Tile

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "sandbox" / "bench" / "flash_attention_peers.py"
MASKS: tuple[Any, ...] = (False, "bottom-right")
ANY_ORDER, FIXED_ORDER = "bwd_wgmma", "bwd_wgmma_deterministic"
KERNELS = (ANY_ORDER, "bwd_wgmma_persistent", FIXED_ORDER)
NARROW = (ANY_ORDER, "bwd_wgmma_persistent", "bwd_wgmma_head")
GRAPH_CALLS, REPLAYS = 20, 15  # calls in a CUDA graph; replays of each graph, in turns


def measure(
    problems: Sequence[Problem], kernels: Sequence[str], out: Path, others: bool = False, tiles: Sequence[Tile] = ()
) -> None:
    """Interleaved, `others`: beside cuDNN and FlashAttention's packages; prints TFLOP/s."""
    found = [*peers.get("sdpa-cudnn"), *peers.get(str(PACKAGES))] if others else []
    own, limits = [registry.get(name) for name in kernels], Limits(rounds=60, seconds=0.1)
    rows = recorded(benchmark.run(own, problems, found, tiles=tiles, limits=limits, computes="backward"), out)
    for problem, group in itertools.groupby(rows, key=problem_of):
        bold = {name: "**" if us[name] == min(us.values()) else "" for name in us}
        cells = [f"{bold[name]}{us[name]:.1f}{bold[name]}" if name in us else "–" for name in NARROW]
        lines.append(f"| {row['problem']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"µs of a backward in a CUDA graph; {rows[-1]['device']}."]) + "\n"


def table() -> None:
    rows = read_rows(HERE / "results.jsonl")
    texts = {
        "problems": markdown.problems_markdown(rows, [*KERNELS, "sdpa-cudnn", "fa4"]),
        "graphs": graphs_table(jsonl.read(HERE / "graphs.jsonl")),
        "deterministic": markdown.points_markdown(read_rows(HERE / "deterministic.jsonl"), FIXED_ORDER, [ANY_ORDER]),
    }
    for name, text in texts.items():
        ladder.write_table(HERE / "README.md", name, Path(__file__), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["real", "deterministic", "tiles", "parts", "graphs", "table"])
    parser.add_argument("--out", type=Path, default=HERE / "measured.jsonl", help="append rows to this file")
    options = parser.parse_args()
    if options.what == "real":
        measure(real(), KERNELS, options.out, others=True)
    elif options.what == "deterministic":
        measure(grid((4096, 8192, 16384)), (ANY_ORDER, FIXED_ORDER), options.out)
    elif options.what == "tiles":
        measure_tiles(options.out)
    elif options.what == "parts":
        parts()
    elif options.what == "graphs":
        graphs(options.out)
    else:
        table()


if __name__ == "__main__":
    main()
