"""Work tiles whose keys are shared by several blocks, or summed up in fixed ranges: the specs of the kernels with
KEY_SPLITS (include/key_splits.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from . import wgmma_tiles
from .estimates import keys_of_row, wgmma_us
from .kernel import HOPPER_SMS, Entry
from .normalise import cdiv
from .packed_gqa import packs, work_tiles
from .problem import Problem
from .tile import Tile

# The ranges of keys of fwd_wgmma_invariant (KeyRange of n_block_range.cuh), rounded to whole key tiles: the first
# SHORT_RANGES of a row have RANGE_KEYS, the others 2 * RANGE_KEYS.
RANGE_KEYS, SHORT_RANGES = 1024, 8


def ascending_from_0(p: Problem) -> bool:
    """Whether key tile j begins at key j * BLOCK_N: not with a left window bound, a block map or ALiBi."""
    return p.bounds[0] is None and not p.has_block_map and not p.alibi


def key_ranges(p: Problem, t: Tile) -> int:
    """Ranges of keys of the longest row; of a ragged batch an upper bound. 1 unless `ascending_from_0`."""
    if not ascending_from_0(p):
        return 1
    short = (RANGE_KEYS + t.BLOCK_N // 2) // t.BLOCK_N
    count = cdiv(cdiv(p.rows[1], t.BLOCK_N), short)  # if all of them were short
    return max(1, min(count, SHORT_RANGES) + cdiv(max(count - SHORT_RANGES, 0), 2))


@lru_cache(maxsize=1024)  # grid, macros and scratch memory depend on it
def splits_by_range(p: Problem, t: Tile) -> int:
    """Blocks that share the keys of a work tile, one for each range of keys: if there are too few work tiles for the
    GPU, and merging the ranges takes less time than that saves. 1 in a ragged batch, whose number of work tiles the
    host does not know."""
    count = 1 if p.ragged or work_tiles(p, t) >= 2 * HOPPER_SMS else key_ranges(p, t)
    one, several = (wgmma_us(p, t, splits, packs(p, t)) for splits in (1, count))
    return count if several <= 1.1 * one else 1  # 1.1: `one` does not include merging ranges in the block


def split_blocks(p: Problem, t: Tile, count: int) -> int:
    """Persistent blocks for `count` splits of each work tile: at most BLOCKS."""
    return min(work_tiles(p, t) * count, t.BLOCKS)


def split_floats(p: Problem, count: int) -> int:
    """Floats of O, m and l of every row and split; 0 without splits."""
    return p.batches * p.H * p.Sq * count * (p.Dv + 2) if count > 1 else 0


LEAST_KEYS, MOST_WAVES = 512, 6  # fewest keys of a split; most waves of blocks if keys are split


@lru_cache(maxsize=1024)  # grid, macros and scratch memory depend on it
def best_splits(p: Problem, t: Tile) -> int:
    """Blocks that share the keys of a work tile: of 1 to 40 and up to 40 larger numbers, as far as LEAST_KEYS and
    MOST_WAVES permit, the one with the lowest estimate."""
    most = min(keys_of_row(p) // LEAST_KEYS, MOST_WAVES * t.BLOCKS // max(work_tiles(p, t), 1))
    tried = (*range(1, min(max(1, most), 40) + 1), *range(41, most + 1, 1 + most // 40))
    return min(tried, key=lambda splits: wgmma_us(p, t, splits, packs(p, t)))


def split_us(p: Problem, t: Tile) -> float:
    """Sort key of tiles: the estimated time; tiles that were not timed with the options last."""
    return wgmma_us(p, t, best_splits(p, t), packs(p, t)) + (
        0 if wgmma_tiles.was_timed(p, t, wgmma_tiles.pure(p)) else 1e9
    )


def fields_of_splits(name: str, count: Callable[[Problem, Tile], int]) -> dict[str, Any]:
    """The fields of a spec that follow from the number of splits of each work tile."""
    combine = Entry(
        name=f"{name}_combine",
        programmatic_launch=True,
        grid=lambda p, t: (p.Sq if count(p, t) > 1 else 0, p.H, p.batches),
        block=lambda t: (64, 1, 1),
        numbers={"splits": count},
        args=("Q", "K", "V", "O", "LSE", "H", "heads", "group", "score", "partials", "splits"),
    )
    return {
        "grid": lambda p, t: (split_blocks(p, t, count(p, t)), 1, 1),
        "macros_of": lambda p, t: {"SPLIT_KEYS": int(count(p, t) > 1), "PACK_GQA": int(packs(p, t))},
        "scratch": {"partials": lambda p, t: (split_floats(p, count(p, t)), 0)},
        "numbers": {"splits": count},
        "then": (combine,),
    }
