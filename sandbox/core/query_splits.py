"""Work tiles of the backward that are split: by queries, those that do not fill a wave (include/bwd_stream_k.cuh); by
query heads, all of them (include/bwd_combine_group.cuh). For which problems this is faster."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import NamedTuple

from .kernel import HOPPER_SMS, Entry
from .normalise import cdiv
from .problem import Problem
from .tile import Tile

# Fitted to 32 problems (experiments/013_hopper_backward).
MIN_SHARE = 2  # m_blocks of a part of a work tile: about the time that a block needs to begin and end
LOST = 9  # m_blocks that splitting costs: two parts begin and end, and partial results are added in some 10 us
LEAST_SAVED = {128: 0.01, 64: 0.04}  # by BLOCK_N: share of the time that it must save; with 64, 2% were not gained


class Split(NamedTuple):
    """How the work tiles that do not fill a wave are split: StreamKParts of the kernel."""

    full_wave_tiles: int  # work tiles that are not split: those of full waves, or all
    tiles: int  # of a period of the others: they are divided into so many shares
    shares: int

    @property
    def inverse(self) -> int:
        """Of `shares`, modulo `tiles`."""
        return pow(self.shares, -1, self.tiles)


def work_tiles(p: Problem, t: Tile) -> int:
    """Number of work tiles: n_blocks of all key/value heads."""
    return p.B * p.Hk * p.key_tiles(t.BLOCK_N)


def split(p: Problem, t: Tile) -> Split:
    """The split for `t.BLOCKS` SMs, with shares of at least MIN_SHARE m_blocks of each head."""
    count = work_tiles(p, t)
    rest = count % t.BLOCKS
    shares = min(t.BLOCKS, rest * cdiv(p.Sq, t.BLOCK_M) // MIN_SHARE)
    if shares <= rest:
        return Split(count, 1, 1)
    divisor = gcd(rest, shares)
    return Split(count - rest, rest // divisor, shares // divisor)


def split_work_tiles(p: Problem, t: Tile) -> int:
    """Number of work tiles that are split."""
    return work_tiles(p, t) - split(p, t).full_wave_tiles


def parts(p: Problem, t: Tile) -> int:
    """Number of parts of all work tiles that are split."""
    _, tiles, shares = split(p, t)
    return split_work_tiles(p, t) // tiles * (tiles + shares - 1)


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """A block for each work tile that is not split, and for each part of the others."""
    return split(p, t).full_wave_tiles + parts(p, t), 1, 1


def pays(p: Problem, t: Tile) -> bool:
    """Whether the last wave gets shorter by more than it costs. A part has the same m_blocks of each head of a group:
    up to one more of each."""
    (_, tiles, shares), m_blocks = split(p, t), p.group * cdiv(p.Sq, t.BLOCK_M)
    saved = m_blocks * (1 - tiles / shares) - LOST - p.group
    return saved >= LEAST_SAVED[t.BLOCK_N] * cdiv(work_tiles(p, t), t.BLOCKS) * (m_blocks + MIN_SHARE)


NUMBERS: dict[str, Callable[[Problem, Tile], int]] = {
    "full_wave_tiles": lambda p, t: split(p, t).full_wave_tiles,
    "tiles_of_period": lambda p, t: split(p, t).tiles,
    "shares_of_period": lambda p, t: split(p, t).shares,
    "inverse": lambda p, t: split(p, t).inverse,
}


def combine(name: str) -> Entry:
    """The entry point that adds the partial dK and dV. A block has 16 keys."""
    return Entry(
        name=name,
        programmatic_launch=True,
        grid=lambda p, t: (split_work_tiles(p, t) * t.BLOCK_N // 16, 1, 1),
        block=lambda t: (256, 1, 1),
        args=("Q", "K", "V", "dO", "LSE", "delta", "dK", "dV", "Hk", "group", "score", "dKV_partials", *NUMBERS),
        numbers=NUMBERS,
    )


def split_group_pays(p: Problem) -> bool:
    """Whether work tiles of query heads are faster than those of key/value heads. Fitted to 42 problems on an H200
    (experiments/026_sampled_shapes); the unit of time is the longest work tile of one query head.

    Without a right bound, or with a left bound, all work tiles are taken as equally long, and run in waves. With a
    causal mask alone the average work tile is half as long as the longest one, the longest start first, and the last SM
    ends later than the average SM, by 0.25 of the longest work tile, 0.5 in a ragged batch that is not split. With
    splitting, the partial results of dK and dV must be summed, which takes 4%. Splitting is chosen if it gains at least
    2% beyond these 4%, with a causal mask alone at least 8% beyond them."""
    if p.group == 1 or p.has_block_map:
        return False
    key_rows = 128 if p.D <= 128 or (p.D <= 192 and p.Dv <= 128) else 64
    tiles = p.batches * p.Hk * p.key_tiles(key_rows)
    if p.bounds[1] is None or p.bounds[0] is not None:
        return cdiv(tiles, HOPPER_SMS) * p.group > 1.06 * max(cdiv(tiles * p.group, HOPPER_SMS), 1)
    plain = p.group * max(tiles / (2 * HOPPER_SMS) + (0.5 if p.ragged else 0.25), 1)
    return plain > 1.08 * 1.04 * max(tiles * p.group / (2 * HOPPER_SMS) + 0.25, 1)
