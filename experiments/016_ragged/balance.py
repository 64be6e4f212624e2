"""How evenly a ragged batch's pieces fall on the multiprocessors, in several orders, without a GPU.

python experiments/016_ragged/balance.py        prints the tables of README.md

A piece costs its key tiles and one more, of the backward its query tiles and three more; the balance is the mean of the
multiprocessors' times over the greatest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from sandbox.bench.ragged import DOCUMENTS, DRAWN, EQUAL

ROWS, KEYS, MULTIPROCESSORS, AHEAD = 128, 128, 132, 1  # AHEAD: pieces that a block has been told beside its own
HEADS, SECTION_BYTES, ROW_BYTES = 16, 16 << 20, 512  # include/tile_scheduler.cuh; a key and a value of D = 128


def numbered(lengths: tuple[int, ...], causal: bool) -> list[int]:
    """The cost of each query tile of a head by its number (include/seqlen.cuh), 0 where no sequence needs it."""
    costs, begin = [0] * (sum(lengths) // ROWS + len(lengths)), 0
    for b, n in enumerate(lengths):
        for row in range(0, n, ROWS):
            keys = min(n, row + ROWS) if causal else n
            costs[begin // ROWS + b + row // ROWS] = -(-keys // KEYS) + 1
        begin += n
    return costs


def numbered_keys(lengths: tuple[int, ...], causal: bool) -> list[int]:
    """Likewise of each key tile of the backward: KEYS keys, and 64 queries a tile."""
    costs, begin = [0] * (sum(lengths) // KEYS + len(lengths)), 0
    for b, n in enumerate(lengths):
        for key in range(0, n, KEYS):
            costs[begin // KEYS + b + key // KEYS] = -(-(n - key if causal else n) // 64) + 3
        begin += n
    return costs


def there_and_back(costs: list[int], causal: bool) -> list[float]:
    """As a dense batch is dealt: rounds that go backwards by turns, each section of heads from another block on."""
    tiles, loads = len(costs), [0.0] * MULTIPROCESSORS
    section = max(2 * MULTIPROCESSORS // tiles, 1) if causal else HEADS
    head = 0
    while head < HEADS:
        size = HEADS - head if HEADS - head < (2 * section if section < 16 else section) else section
        for block in range(MULTIPROCESSORS):
            i, first = (block + 17 * head) % MULTIPROCESSORS, 0
            while first < size * tiles:
                if i < size * tiles:
                    loads[block] += costs[tiles - 1 - i // size] if causal else costs[i % tiles]
                first += MULTIPROCESSORS
                i = 2 * first - 1 - i
        head += size
    return loads


def longest_first(costs: list[int], rows: int, level: int = 2, more: int = 1) -> Iterator[int]:
    """The pieces in the order in which include/tile_scheduler.cuh hands them out: within so many tiles equally long."""
    ordered, head = sorted((cost for cost in costs if cost), key=lambda cost: -(cost // level)), 0
    section = max(SECTION_BYTES // (rows * ROW_BYTES) + more, 1)
    while head < HEADS:
        size = section if HEADS - head > 2 * section else HEADS - head
        yield from (cost for cost in ordered for _ in range(size))
        head += size


def dealt(pieces: Iterator[int], ahead: int) -> list[float]:
    """To whoever is ready, and `ahead` more that he is told of."""
    ready, loads = [(0.0, block) for block in range(MULTIPROCESSORS)], [0.0] * MULTIPROCESSORS
    told: list[list[int]] = [[] for _ in ready]
    while ready:
        time, block = heapq.heappop(ready)
        while len(told[block]) <= ahead and (piece := next(pieces, None)) is not None:
            told[block].append(piece)
        if told[block]:
            heapq.heappush(ready, (time + told[block].pop(0), block))
        loads[block] = time
    return loads


def balance(loads: list[float]) -> str:
    return f"{sum(loads) / len(loads) / max(loads):.3f}"


BATCHES = (("16 of 359 … 3532", DRAWN), ("20 documents", DOCUMENTS), ("16 of 2048", EQUAL))


def backward() -> None:
    """A block a piece: in the order of the grid, head after head; and dealt."""
    print("\n| batch, backward | in the order of the grid | longest first |\n| --- | --- | --- |")
    for name, lengths in BATCHES:
        for causal in (True, False):
            costs, rows = numbered_keys(lengths, causal), sum(lengths)
            in_grid = (cost for _ in range(HEADS) for cost in costs if cost)
            found = [dealt(order, 0) for order in (in_grid, longest_first(costs, rows, 4, 0))]
            print(f"| {name}{', causal' if causal else ''} | {' | '.join(map(balance, found))} |")


def main() -> None:
    print(
        "| batch | in rounds, there and back | longest first, dealt | and told one ahead |\n| --- | --- | --- | --- |"
    )
    for name, lengths in BATCHES:
        for causal in (True, False):
            costs, rows = numbered(lengths, causal), sum(lengths)
            found = [there_and_back(costs, causal)]
            found += [dealt(longest_first(costs, rows), ahead) for ahead in (0, AHEAD)]
            print(f"| {name}{', causal' if causal else ''} | {' | '.join(map(balance, found))} |")
    backward()


if __name__ == "__main__":
    main()
