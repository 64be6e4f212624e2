"""The load balance of a ragged batch's work tiles over the SMs, in several orders, by simulation without a GPU.

python experiments/016_ragged/balance.py        prints the table of README.md

A work tile costs its key tiles plus one, in the backward its query tiles plus three. The balance is the mean time of
the SMs over the maximum.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator

from sandbox.bench.ragged import DOCUMENTS, DRAWN, EQUAL

ROWS, KEYS, SMS, AHEAD = 128, 128, 132, 1  # AHEAD: work tiles that a block has scheduled in advance
HEADS, GROUP_BYTES, ROW_BYTES = 16, 16 << 20, 512  # include/tile_scheduler.cuh; a key and a value of D = 128


def numbered(lengths: tuple[int, ...], causal: bool) -> list[int]:
    """The cost of each query tile of a head by its index (include/seqlen.cuh), 0 for invalid tiles."""
    costs, begin = [0] * (sum(lengths) // ROWS + len(lengths)), 0
    for b, n in enumerate(lengths):
        for row in range(0, n, ROWS):
            keys = min(n, row + ROWS) if causal else n
            costs[begin // ROWS + b + row // ROWS] = -(-keys // KEYS) + 1
        begin += n
    return costs


def numbered_keys(lengths: tuple[int, ...], causal: bool) -> list[int]:
    """The cost of each key tile of the backward: KEYS keys, 64 queries per tile."""
    costs, begin = [0] * (sum(lengths) // KEYS + len(lengths)), 0
    for b, n in enumerate(lengths):
        for key in range(0, n, KEYS):
            costs[begin // KEYS + b + key // KEYS] = -(-(n - key if causal else n) // 64) + 3
        begin += n
    return costs


def serpentine(costs: list[int], causal: bool) -> list[float]:
    """The static schedule of dense batches: waves in serpentine order, each head group from another block on."""
    tiles, loads = len(costs), [0.0] * SMS
    group = max(2 * SMS // tiles, 1) if causal else HEADS
    head = 0
    while head < HEADS:
        size = HEADS - head if HEADS - head < (2 * group if group < 16 else group) else group
        for block in range(SMS):
            i, first = (block + 17 * head) % SMS, 0
            while first < size * tiles:
                if i < size * tiles:
                    loads[block] += costs[tiles - 1 - i // size] if causal else costs[i % tiles]
                first += SMS
                i = 2 * first - 1 - i
        head += size
    return loads


def longest_first(costs: list[int], rows: int, bucket: int = 2, more: int = 1) -> Iterator[int]:
    """The work tiles in the order of include/tile_scheduler.cuh: lengths within one bucket count as equal."""
    ordered, head = sorted((cost for cost in costs if cost), key=lambda cost: -(cost // bucket)), 0
    group = max(GROUP_BYTES // (rows * ROW_BYTES) + more, 1)
    while head < HEADS:
        size = group if HEADS - head > 2 * group else HEADS - head
        yield from (cost for cost in ordered for _ in range(size))
        head += size


def dynamic(work_tiles: Iterator[int], ahead: int) -> list[float]:
    """The dynamic schedule: the next work tile goes to the first idle block, which has `ahead` more in advance."""
    ready, loads = [(0.0, block) for block in range(SMS)], [0.0] * SMS
    scheduled: list[list[int]] = [[] for _ in ready]
    while ready:
        time, block = heapq.heappop(ready)
        while len(scheduled[block]) <= ahead and (tile := next(work_tiles, None)) is not None:
            scheduled[block].append(tile)
        if scheduled[block]:
            heapq.heappush(ready, (time + scheduled[block].pop(0), block))
        loads[block] = time
    return loads


def balance(loads: list[float]) -> str:
    return f"{sum(loads) / len(loads) / max(loads):.3f}"


BATCHES = (("16 of 359 … 3532", DRAWN), ("20 documents", DOCUMENTS), ("16 of 2048", EQUAL))


def backward() -> None:
    """One block per work tile: in the order of the grid, head after head; and longest first."""
    print("\n| batch, backward | in the order of the grid | longest first |\n| --- | --- | --- |")
    for name, lengths in BATCHES:
        for causal in (True, False):
            costs, rows = numbered_keys(lengths, causal), sum(lengths)
            in_grid = (cost for _ in range(HEADS) for cost in costs if cost)
            found = [dynamic(order, 0) for order in (in_grid, longest_first(costs, rows, 4, 0))]
            print(f"| {name}{', causal' if causal else ''} | {' | '.join(map(balance, found))} |")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("| batch | static, serpentine | dynamic, longest first | one tile in advance |\n| --- | --- | --- | --- |")
    for name, lengths in BATCHES:
        for causal in (True, False):
            costs, rows = numbered(lengths, causal), sum(lengths)
            found = [serpentine(costs, causal)]
            found += [dynamic(longest_first(costs, rows), ahead) for ahead in (0, AHEAD)]
            print(f"| {name}{', causal' if causal else ''} | {' | '.join(map(balance, found))} |")
    backward()


if __name__ == "__main__":
    main()
