"""The Hopper backward on problems of models, its tiles, and the time of its kernels. See README.md beside this file.

python experiments/013_hopper_backward/run.py real             problems of models, bfloat16, beside cuDNN
python experiments/013_hopper_backward/run.py deterministic    bwd_wgmma with and without a fixed order of dQ's sums
python experiments/013_hopper_backward/run.py tiles            every tile of the spec
python experiments/013_hopper_backward/run.py parts            time of each kernel of one call, by PyTorch's profiler
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
from sandbox.bench import benchmark, ladder, markdown, peers
from sandbox.bench.rows import problem_of, read_rows, recorded
from sandbox.bench.timing import Limits
from sandbox.core import registry
from sandbox.spec import Tile

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parents[1] / "sandbox" / "bench" / "flash_attention_peers.py"
MASKS: tuple[Any, ...] = (False, "bottom-right")
ANY_ORDER, FIXED_ORDER = "bwd_wgmma", "bwd_wgmma_deterministic"
KERNELS = (ANY_ORDER, "bwd_wgmma_persistent", FIXED_ORDER)


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


def table() -> None:
    rows = read_rows(HERE / "results.jsonl")
    texts = {
        "problems": markdown.problems_markdown(rows, [*KERNELS, "sdpa-cudnn", "fa4"]),
        "deterministic": markdown.points_markdown(read_rows(HERE / "deterministic.jsonl"), FIXED_ORDER, [ANY_ORDER]),
    }
    for name, text in texts.items():
        ladder.write_table(HERE / "README.md", name, Path(__file__), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["real", "deterministic", "tiles", "parts", "table"])
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
    else:
        table()


if __name__ == "__main__":
    main()
