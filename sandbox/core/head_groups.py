"""Grids of the Hopper backward: L2 head groups, whose work tiles start together (L2_HEAD_GROUPS in
include/tile_scheduler_bwd.cuh). A grid is (heads of a group, n_blocks, groups)."""

from __future__ import annotations

from .kernel import HOPPER_SMS
from .normalise import cdiv
from .problem import Problem
from .tile import Tile

MIN_WINDOW_HEADS = 16  # fewest heads of a group with a left bound (window): such work tiles are short


def one_wave(p: Problem, t: Tile) -> tuple[int, int, int]:
    """A group has one wave of work tiles, half a wave if a head has at most four n_blocks; with a left bound (window)
    it has at least MIN_WINDOW_HEADS heads, or all heads."""
    tiles, heads = p.key_tiles(t.BLOCK_N), p.batches * p.Hk
    if not heads:
        return 1, tiles, 0
    groups = round(heads * tiles / (HOPPER_SMS if tiles > 4 else HOPPER_SMS / 2))
    width = cdiv(heads, min(max(groups, 1), heads))
    if p.bounds[0] is not None:
        width = max(width, min(heads, MIN_WINDOW_HEADS))
    return width, tiles, cdiv(heads, width)


def grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """Groups if the mask limits the last key (causal): work tiles then have different lengths. Otherwise (n_blocks,
    heads, batch entries)."""
    return (p.key_tiles(t.BLOCK_N), p.Hk, p.batches) if p.ragged or p.bounds[1] is None else one_wave(p, t)


def deterministic_grid(p: Problem, t: Tile) -> tuple[int, int, int]:
    """With a left bound (window) work tiles are about equally long, and a group has a wave, rounded up to whole heads.

    Without a mask the width of `one_wave` is multiplied, so that fewer blocks of the same head start together and wait
    for each other's semaphores: with BLOCK_N = 128 by 2 for 4096 to 8192 keys, with BLOCK_N = 64 by 2 from 4096 keys on
    and by 4 from 8192 on (measured).
    """
    width, tiles, _ = one_wave(p, t)
    heads, keys = p.batches * p.Hk, tiles * t.BLOCK_N
    if p.bounds[0] is not None and tiles:
        width = min(cdiv(HOPPER_SMS, tiles), heads)
    elif p.bounds[1] is None and heads and keys >= 4096 and (t.BLOCK_N == 64 or keys <= 8192):
        width = min((4 if t.BLOCK_N == 64 and keys >= 8192 else 2) * width, heads)
    return width, tiles, cdiv(heads, width) if heads else 0
