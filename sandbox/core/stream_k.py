"""Stream-K (include/stream_k.cuh): all blocks share the key tiles of the work tiles that do not fill a wave."""

from __future__ import annotations

from typing import Any

from .kernel import Entry
from .normalise import cdiv
from .packed_gqa import tiles_of_heads
from .problem import Problem
from .tile import Tile

LEAST_SAVED, LEAST_SHARE = 8, 0.01  # key tiles, and share of the time, that splitting the last wave must save


def saved_key_tiles(p: Problem, t: Tile, count: int) -> float:
    """Key tiles that a block has less if, of `count` work tiles that see all keys, those that do not fill a wave are
    split by key tiles."""
    return cdiv(p.Sk, t.BLOCK_N) * (1 - count % t.BLOCKS / t.BLOCKS)


def tiles_of_full_waves(p: Problem, t: Tile, count: int) -> int:
    """Of `count` work tiles that see all keys, those that one block processes whole.
    All of them, or only those of full waves, if splitting the others saves more key tiles than it costs to store and
    add partial O. Then each block has a key tile, and 32 bits suffice to count them."""
    remainder = count % t.BLOCKS
    if remainder * cdiv(p.Sk, t.BLOCK_N) * t.BLOCKS >= 2**32:
        return count
    return count - remainder if remainder and saved_key_tiles(p, t, count) > 4 + t.BLOCKS / remainder else count


def full_wave_tiles(p: Problem, t: Tile) -> int:
    """Work tiles that one block processes whole; the others are split by key tiles."""
    return tiles_of_full_waves(p, t, tiles_of_heads(p, t))


def splits_last_wave(p: Problem, t: Tile) -> bool:
    """Whether there are work tiles that all blocks share."""
    return full_wave_tiles(p, t) < tiles_of_heads(p, t)


def pays_to_split_last_wave(p: Problem, t: Tile) -> bool:
    """Whether there is a full wave, and splitting the others saves enough (experiments/008_hopper)."""
    count = tiles_of_heads(p, t)
    if count <= t.BLOCKS or not splits_last_wave(p, t):
        return False
    of_all_waves = cdiv(count, t.BLOCKS) * cdiv(p.Sk, t.BLOCK_N)
    return saved_key_tiles(p, t, count) >= max(LEAST_SAVED, LEAST_SHARE * of_all_waves)


def partials(p: Problem, t: Tile) -> tuple[int, int]:
    """Size in floats; none is zeroed by the launch. Per block: four counters, and O, m and l of a work tile."""
    return (t.BLOCKS * (4 + t.BLOCK_M * (16 * cdiv(p.Dv, 16) + 8)) if splits_last_wave(p, t) else 0), 0


def fields_of_stream_k(name: str) -> dict[str, Any]:
    """The fields of a spec that follow from splitting the last wave."""
    clear = Entry(
        name=f"{name}_clear",
        launch_first=True,
        grid=lambda p, t: (int(splits_last_wave(p, t)), 1, 1),
        block=lambda t: (t.BLOCKS, 1, 1),
        args=("partials",),
    )
    return {
        "grid": lambda p, t: (t.BLOCKS if splits_last_wave(p, t) else min(tiles_of_heads(p, t), t.BLOCKS), 1, 1),
        "scratch": {"partials": partials},
        "numbers": {"full_wave_tiles": full_wave_tiles},
        "then": (clear,),
    }
