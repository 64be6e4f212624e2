"""Work tiles whose keys are shared by several blocks, or summed up in fixed ranges: the specs of the kernels with
KEY_SPLITS (include/key_splits.cuh), and of those with stream-K (include/stream_k.cuh)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .estimates import wgmma_us
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


def saved_key_tiles(p: Problem, t: Tile, count: int) -> float:
    """Key tiles that a block has less if, of `count` work tiles that see all keys, those that do not fill a wave are
    split by key tiles."""
    return cdiv(p.Sk, t.BLOCK_N) * (1 - count % t.BLOCKS / t.BLOCKS)


def tiles_of_full_waves(p: Problem, t: Tile, count: int) -> int:
    """Stream-K (include/stream_k.cuh): of `count` work tiles that see all keys, those that one block processes whole.
    All of them, or only those of full waves, if splitting the others saves more key tiles than it costs to store and
    add partial O. Then each block has a key tile, and 32 bits suffice to count them."""
    remainder = count % t.BLOCKS
    if remainder * cdiv(p.Sk, t.BLOCK_N) * t.BLOCKS >= 2**32:
        return count
    return count - remainder if remainder and saved_key_tiles(p, t, count) > 4 + t.BLOCKS / remainder else count


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
