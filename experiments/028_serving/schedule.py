"""Model of schedules for a batch with long and short sequences: how much time each one needs on 132 SMs.

python experiments/028_serving/schedule.py [--sample 20] [--seed 39] [--bandwidth 4.2]     needs no GPU

A work tile of a long sequence has 128 rows of one head; it takes its operations at the rate of one SM, plus a fixed
cost. Short sequences take the time to read their keys: blocks of equal size, four per SM, each at one SM's share of the
bandwidth. No schedule here lets two blocks share an SM, except for `overlap`.

serial: two launches, the second after the first. two launches: the second one fills the SMs that the first one leaves
idle. one launch: one list of all work tiles and blocks, longest first. overlap: a lower bound, reading hidden behind
matrix products.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Iterable

from sandbox.bench.sampled_shapes import sampled
from sandbox.core.problem import Problem

SMS = 132
TFLOPS = {128: 600.0, 256: 530.0}  # of fwd_wgmma with causal ragged batches, by head dimension (016_ragged)
TILE_ROWS, TILE_US, LAUNCH_US = 128, 2.0, 4.0  # fixed cost per work tile; a launch and its combine kernel


def tiles(p: Problem) -> list[float]:
    """Times of the work tiles of the long sequences, µs."""
    found = []
    for queries, keys in p.lengths:
        for row0 in range(0, queries if queries > p.short_queries else 0, TILE_ROWS):
            visible = keys - queries + min(row0 + TILE_ROWS, queries)
            flops = 4 * TILE_ROWS * visible * p.D
            found += [TILE_US + flops / (TFLOPS[p.D] * 1e6 / SMS)] * p.H
    return found


def blocks(p: Problem, bandwidth: float) -> list[float]:
    """Times of the blocks of the short sequences, µs."""
    keys = sum(keys for queries, keys in p.lengths if 0 < queries <= p.short_queries)
    time = keys * p.Hk * 2 * p.D * 2 / (bandwidth * 1e6)  # if all SMs read
    return [time / 4 + 1.0] * 4 * SMS if keys else []


def makespan(*lists: Iterable[float]) -> float:
    """The time until all is done: each SM takes the next one, in order."""
    free = [0.0] * SMS
    for times in lists:
        for time in times:
            heapq.heapreplace(free, free[0] + time)
    return max(free)


def schedules(p: Problem, bandwidth: float) -> dict[str, float]:
    """{schedule: µs}."""
    long, short = sorted(tiles(p), reverse=True), blocks(p, bandwidth)
    alone = makespan(long) + LAUNCH_US * bool(long), makespan(short) + LAUNCH_US * bool(short)
    return {
        "serial": sum(alone),
        "two launches": makespan(long, short) + LAUNCH_US * (1.5 if long and short else 1.0),
        "one launch": makespan(sorted([*long, *short], reverse=True)) + LAUNCH_US,
        "overlap": max(alone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--seed", type=int, default=39)
    parser.add_argument("--bandwidth", type=float, default=4.2, help="TB/s. Default: an H200.")
    given = parser.parse_args()
    gains: dict[str, list[float]] = {}
    print("| batch | serial, µs | two launches | one launch | overlap |\n| --- | --- | --- | --- | --- |")
    for p in sampled("serving", given.sample, given.seed, "bfloat16"):
        times = schedules(p, given.bandwidth)
        long = [(q, k) for q, k in p.lengths if q > p.short_queries]
        name = f"{len(p.lengths) - len(long)} tokens, {len(long)} chunks, H{p.H}/{p.Hk} D{p.D}"
        row = [times["serial"] / times[other] for other in ("two launches", "one launch", "overlap")]
        print(f"| {name} | {times['serial']:.0f} | {' | '.join(f'{gain:.2f}' for gain in row)} |")
        if 0 < len(long) < len(p.lengths):
            for other, gain in zip(("two launches", "one launch", "overlap"), row, strict=True):
                gains.setdefault(other, []).append(gain)
    for other, found in gains.items():
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(f"{other}: {mean:.3f} of serial on {len(found)} mixed batches, lowest {min(found):.3f}")


if __name__ == "__main__":
    main()
