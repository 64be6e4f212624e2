"""Few work tiles: fwd_wgmma_split beside the other kernels and cuDNN on sampled problems.

python experiments/031_few_tiles/run.py measure [--seed 80] [--variants]      needs a GPU; replaces the rows
python experiments/031_few_tiles/run.py table      writes the table in README.md

--variants: also other tiles and numbers of splits, to fit the constants of the estimates in sandbox/core/estimates.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox.bench import benchmark, environment, peers
from sandbox.bench.ladder import write_table
from sandbox.bench.rows import read_rows
from sandbox.bench.sampled_shapes import sampled
from sandbox.bench.timing import Events, Limits
from sandbox.core import registry
from sandbox.core.errors import UnsupportedProblem
from sandbox.core.kernel import Kernel
from sandbox.engine import choose, pipeline
from sandbox.spec import Problem, Tile, best_splits, decode_us, fields_of_splits, wgmma_tiles

HERE = Path(__file__).resolve().parent
ROWS = HERE / "results.jsonl"
HOPPER = (9, 0)
SPLIT = registry.get("fwd_wgmma_split")
OTHERS = {"fwd_wgmma": 10**9, "fwd_decode_wgmma": 128, "fwd_decode": 256}  # {kernel: most packed rows}
FIXED = [  # of issues and earlier experiments
    Problem(B, H, Sq, Sk, D, Hk=Hk, dtype="bfloat16", causal="bottom-right")
    for B, H, Hk, Sq, Sk, D in (
        (1, 64, 8, 16, 131072, 128), (1, 64, 8, 8, 131072, 128), (1, 64, 8, 4, 131072, 128), (1, 32, 8, 64, 8192, 128),
        (152, 21, 3, 68, 68, 128), (16, 32, 8, 64, 8192, 128), (1, 8, 8, 1000, 20000, 128), (8, 32, 8, 16, 8192, 128),
    )
]  # fmt: skip


def problems(seed: int) -> list[Problem]:
    """Sampled ones with more than 32 packed rows for which the kernel would pack heads or split keys, at most 40 with
    few operations; and fixed ones."""
    drawn = [p for grid in ("real", "decode") for p in sampled(grid, 80, seed, "bfloat16")]
    return FIXED + [p for p in drawn if is_candidate(p)][:40]


def is_candidate(p: Problem) -> bool:
    if p.Sq * p.group <= 32 or SPLIT.why_unsupported(p, HOPPER) or (p.causal and 2 * p.Sq > p.Sk and p.Sq > 128):
        return False
    tile = choose.choose_tile(SPLIT, p, HOPPER)
    macros = SPLIT.defines(p, tile)
    return p.B * p.H * p.visible_pairs * p.D < 3e10 and bool(macros["SPLIT_KEYS"] or macros["PACK_GQA"])


def with_splits(count: int) -> Kernel:
    """The kernel with a fixed number of splits."""
    return replace(SPLIT, **fields_of_splits(SPLIT.name, lambda p, t: count))


def contenders(p: Problem, variants: bool) -> dict[str, tuple[Kernel, Tile | None]]:
    found: dict[str, tuple[Kernel, Tile | None]] = {SPLIT.name: (SPLIT, None)}
    for name, most in OTHERS.items():
        kernel = registry.get(name)
        if p.Sq * p.group <= most and not kernel.why_unsupported(p, HOPPER):
            found[name] = kernel, None
    for tile in SPLIT.tiles if variants else ():
        if (
            choose.why_tile_unsupported(SPLIT, p, tile, HOPPER)
            or not wgmma_tiles.was_timed(p, tile, wgmma_tiles.pure(p))
            or tile.BLOCK_N < 64
        ):
            continue
        best = best_splits(p, tile)
        for count in sorted({max(1, best // 2), best, best + 1, 2 * best}):
            found[f"{tile.BLOCK_M}x{tile.BLOCK_N} s{count}"] = with_splits(count), tile
    return found


def load(job: tuple[Problem, tuple[Kernel, Tile | None]]) -> bool:
    """Compiles and loads a kernel; whether it supports the problem."""
    p, (kernel, tile) = job
    try:
        pipeline.load(kernel, pipeline.tile_on(("cuda", 0), kernel, p, tile), p, ("cuda", 0))
    except UnsupportedProblem:
        return False
    return True


def measured(seed: int, variants: bool, seconds: float) -> Iterator[dict[str, Any]]:
    import torch

    start, stopwatch, others = time.monotonic(), Events(0), peers.get("sdpa-cudnn")
    drawn = problems(seed)
    jobs = [(p, name, what) for p in drawn for name, what in contenders(p, variants).items()]
    with ThreadPoolExecutor() as pool:
        usable = dict(zip(((p, n) for p, n, _ in jobs), pool.map(load, [(p, x) for p, _, x in jobs]), strict=True))
    print(f"{len(drawn)} problems, compiled after {time.monotonic() - start:.0f} s", flush=True)
    for p in drawn:
        if time.monotonic() - start > seconds:
            print("the time is over: the other problems are left out", flush=True)
            return
        own = [
            replace(benchmark.kernel_contenders([kernel], (tile,) if tile else ())[0], name=name)
            for name, (kernel, tile) in contenders(p, variants).items()
            if usable[p, name]
        ]
        limits = Limits(seconds=0.03, rounds=15)
        try:
            rows = benchmark.time_contenders(p, [*own, *others], benchmark.make_inputs(p), stopwatch, limits, {})
        except torch.cuda.OutOfMemoryError:
            print(f"{p}: out of memory", flush=True)
            continue
        torch.cuda.empty_cache()
        us = {row.contender: round(1e6 * row.timing.median, 1) for row in rows if row.timing}
        wrong = [f"{row.contender}: {row.message}" for row in rows if row.ok is False]
        tile = choose.choose_tile(SPLIT, p, HOPPER)
        estimates = round(SPLIT.rank(p, tile), 1), round(decode_us(p), 1)
        chosen = choose.choose_kernel(p, "forward", HOPPER).name
        row = {"problem": str(p), "chosen": chosen, "us": us, "estimates": estimates}
        yield row | ({"wrong": wrong} if wrong else {})


def gain(row: dict[str, Any]) -> float:
    """Time of the fastest other kernel of this project / time of the chosen one."""
    return float(min(us for name, us in row["us"].items() if name in OTHERS) / row["us"][row["chosen"]])


def table(found: list[dict[str, Any]], device: str) -> str:
    if not found:
        return "Not measured yet.\n"
    lines = ["| problem | fwd_wgmma | fwd_decode | fwd_wgmma_split | cuDNN | chosen | gain |", "| --- |" + " --- |" * 6]
    shown = ("fwd_wgmma", "fwd_decode", SPLIT.name, "sdpa-cudnn")
    for row in sorted(found, key=gain, reverse=True):
        times = " | ".join(str(row["us"].get(name, "–")) for name in shown)
        lines.append(f"| {row['problem'].removesuffix(' bfloat16')} | {times} | {row['chosen']} | {gain(row):.2f} |")
    gains = list(map(gain, found))
    errors = [abs(1 - row["estimates"][0] / row["us"][SPLIT.name]) for row in found if SPLIT.name in row["us"]]
    beside = [row["us"]["sdpa-cudnn"] / row["us"][row["chosen"]] for row in found if "sdpa-cudnn" in row["us"]]
    said = (
        f"µs, bfloat16, {device}. Gain: the fastest other kernel / the chosen one, geometric mean "
        f"{statistics.geometric_mean(gains):.2f}, lowest {min(gains):.2f}; cuDNN / the chosen one "
        f"{statistics.geometric_mean(beside):.2f}, lowest {min(beside):.2f}, {len(beside)} problems. Mean error of the "
        f"estimate for fwd_wgmma_split: {statistics.mean(errors):.0%}."
    )
    return "\n".join([*lines, "", said]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("--seed", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=600.0, help="No problem begins later.")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--rows", type=Path, default=ROWS)
    args = parser.parse_args()
    if args.what == "measure":
        benchmark.need_gpu()
        rows = []
        for row in measured(args.seed, args.variants, args.seconds):
            print(json.dumps(row), flush=True)
            rows.append(row)
        described = {"seed": args.seed, **environment.describe()}
        args.rows.write_text("".join(json.dumps(row) + "\n" for row in [described, *rows]))
    else:
        described, *rows = [*read_rows(args.rows), {}] if not args.rows.is_file() else read_rows(args.rows)
        write_table(HERE / "README.md", "few tiles", HERE / "run.py", table(rows, described.get("device", "")))


if __name__ == "__main__":
    main()
