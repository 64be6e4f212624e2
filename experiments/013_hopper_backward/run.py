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
        cells = [f"{row['contender']} {row['tflops']:.1f}" for row in group if row["tflops"]]
        print(f"{problem}: {', '.join(cells)}", flush=True)


def real() -> list[Problem]:
    """Odd lengths, few heads, grouped heads, one long sequence without mask."""
    causal = ((1, 16, 16, 8191, 128), (8, 12, 12, 1024, 64), (2, 16, 16, 4000, 96), (1, 32, 8, 8192, 128))
    whole = ((64, 16, 16, 197, 64), (1, 40, 40, 32760, 128))
    return [
        Problem(B, H, S, S, D, Hk=Hk, dtype="bfloat16", causal=mask)
        for shapes, mask in ((causal, MASKS[1]), (whole, MASKS[0]))
        for B, H, Hk, S, D in shapes
    ]


def grid(lengths: Sequence[int], tokens: int = 16384) -> list[Problem]:
    return [
        Problem(tokens // S, 2048 // D, S, S, D, dtype="float16", causal=causal)
        for D, causal, S in itertools.product((64, 128, 256), MASKS, lengths)
    ]


def measure_tiles(out: Path) -> None:
    kernel = registry.get(ANY_ORDER)
    for problem in grid((512, 2048, 16384)):
        fitting = [tile for tile in kernel.tiles if kernel.why_tile_unsupported(problem, tile, (9, 0)) is None]
        measure([problem], [ANY_ORDER], out, tiles=fitting)


def parts() -> None:
    """The median time of each kernel that one call launches, µs."""
    import torch

    import sandbox

    for D, S, causal in itertools.product((64, 128, 256), (512, 16384), MASKS):
        shape = (16384 // S, 2048 // D, S, D)
        dout, q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(4))
        out, lse = sandbox.attention_forward(q, k, v, causal=causal)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(6):
                sandbox.attention_backward(dout, q, k, v, out, lse, causal=causal, kernel=ANY_ORDER)
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in profile.events():
            times.setdefault(event.name, []).append(event.device_time)
        cells = [f"{name} {statistics.median(us):.0f}" for name, us in times.items()]
        print(f"D {D} S {S} {causal or 'no mask'}, µs: {', '.join(cells)}", flush=True)


def narrow_heads() -> list[Problem]:
    """Short sequences and windows, for which a kernel for narrow heads may be faster than bwd_wgmma."""
    short = ((8, 16, 128), (8, 16, 256), (8, 16, 512), (32, 16, 256), (64, 32, 512))
    return [
        *(
            Problem(B, H, S, S, D, dtype="float16", causal=mask)
            for D, (B, H, S), mask in itertools.product((32, 64), short, MASKS)
        ),
        *(Problem(64, 12, 197, 197, D, dtype="bfloat16") for D in (32, 64)),
        *(
            Problem(2, 16, S, S, D, dtype="bfloat16", causal=MASKS[1], window=(left, 0))
            for D, (S, left) in itertools.product((32, 64), ((4096, 512), (8192, 256)))
        ),
    ]


def graphs(out: Path) -> None:
    """Microseconds of a backward with its preprocess, the median of REPLAYS graphs of GRAPH_CALLS calls: without the
    host time of the launches, in which bwd_wgmma_head, with two launches instead of four, has an advantage."""
    import torch

    import sandbox

    def graph_of(p: Problem, kernel: str) -> torch.cuda.CUDAGraph:
        dout, q, k, v = (torch.randn(p.B, p.H, p.Sq, p.D, device="cuda", dtype=getattr(torch, p.dtype)) for _ in "doqk")
        causal, window = bool(p.causal), None if p.window == (None, None) else p.window
        o, lse = sandbox.attention_forward(q, k, v, causal=causal, window=window)

        def call() -> object:
            return sandbox.attention_backward(dout, q, k, v, o, lse, causal=causal, window=window, kernel=kernel)

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call()
        return graph

    def microseconds(graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / GRAPH_CALLS

    for p in narrow_heads():
        names = [n for n in NARROW if not registry.get(n).why_unsupported(p, (9, 0))]
        found = {name: graph_of(p, name) for name in names}
        samples = [{name: microseconds(graph) for name, graph in found.items()} for _ in range(REPLAYS)]
        us = {name: round(statistics.median(sample[name] for sample in samples), 2) for name in names}
        jsonl.append(out, {"problem": str(p), "us": us, "commit": environment.commit(), **environment.describe()})
        print(f"{p}: {us}", flush=True)


def graphs_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each problem: microseconds of each kernel, the shortest in bold."""
    lines = [f"| problem | {' | '.join(f'`{name}`' for name in NARROW)} |", f"| --- |{' --- |' * len(NARROW)}"]
    for row in rows:
        us = row["us"]
        bold = {name: "**" if us[name] == min(us.values()) else "" for name in us}
        shown = [f"{bold[name]}{us[name]:.1f}{bold[name]}" if name in us else "–" for name in NARROW]
        lines.append(f"| {row['problem']} | {' | '.join(shown)} |")
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
