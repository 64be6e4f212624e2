"""Estimated times of forward kernels, by which specs choose between tiles, splits and kernels. The constants are fitted
to times on an H200 (experiments/031_few_tiles; on other problems the mean error for fwd_wgmma_split is 12%), that of
BLOCK_M = 256 to six problems at D = 64 (few queries in experiments/014_scores/tiles.jsonl; -3 … 7%).
"""

from __future__ import annotations

from .normalise import cdiv
from .packed_gqa import packed_rows
from .problem import Problem
from .tile import Tile

RATES = {64: 3.8, 128: 5.6, 256: 7.0}  # TFLOP/s of an SM, up to these head dimensions
NARROW = {64: 0.96, 80: 0.92, 128: 1.0}  # by BLOCK_N: the rate, relative to BLOCK_N = 128, up to D = 128
NARROW_WIDE = {32: 0.82, 48: 0.95}  # for larger D, relative to BLOCK_N = 64 (experiment 026)
DECODE = {64: 0.85, 128: 0.6, 256: 0.8}  # time of fwd_decode for 32 rows, relative to reading their keys
LAUNCH = 7.5  # µs of a launch without work


def at_width(values: dict[int, float], p: Problem) -> float:
    """The value for the larger head dimension."""
    return next(value for width, value in values.items() if max(p.D, p.Dv) <= width)


def keys_of_row(p: Problem) -> int:
    """Keys that a query sees, on average, about; with a causal mask and up to 128 queries, at most."""
    keys = min(p.Sq, p.Sk) if p.causal == "top-left" else p.Sk
    if not p.causal or p.Sq <= 128:
        return keys
    below = min(p.Sq, p.Sk) ** 2 // (2 * p.Sq)  # the triangle of the mask, per query
    return max(1, below if p.causal != "top-left" and p.Sq > p.Sk else keys - below)


def reading_us(p: Problem) -> float:
    """Estimated time to read the keys and values, in µs: 3.8 TB/s."""
    return 2 * p.batches * p.Hk * keys_of_row(p) * (p.D + p.Dv) / 3.8e6


def work_tile_us(p: Problem, t: Tile, splits: int = 1, packed: bool = False) -> tuple[float, int]:
    """Estimated time of a work tile of fwd_wgmma_split in µs, and the number of work tiles. A row that a work tile
    lacks costs half as much as one that it has."""
    heads, rows = (p.Hk, packed_rows(p)) if packed else (p.H, p.Sq)
    of_head, width = cdiv(rows, t.BLOCK_M), p.D + p.Dv
    keys = t.BLOCK_N * cdiv(cdiv(keys_of_row(p), splits), t.BLOCK_N)
    filled = 64 * cdiv(cdiv(rows, 64), max(of_head, 1))
    rate = at_width(RATES, p) * {64: 0.5, 192: 1.2, 256: 1.35}.get(t.BLOCK_M, 1.0)
    rate *= NARROW.get(t.BLOCK_N, 0.75) if max(p.D, p.Dv) <= 128 else NARROW_WIDE.get(t.BLOCK_N, 1.0)
    us = 1e-6 * (t.BLOCK_M + filled) * keys * width / rate + 1 + 3e-5 * t.BLOCK_N * width
    return us, p.batches * heads * of_head * splits


def wgmma_us(p: Problem, t: Tile, splits: int = 1, packed: bool = False) -> float:
    """Estimated time of fwd_wgmma_split in µs; with one split and not packed, also of fwd_wgmma: the launch, plus the
    waves of work tiles or reading the keys, whichever takes longer, plus merging the splits."""
    work_tile, count = work_tile_us(p, t, splits, packed)
    merging = 4.3 + 3e-6 * p.batches * p.H * p.Sq * splits * p.Dv if splits > 1 else 0.0
    return LAUNCH + max(cdiv(count, t.BLOCKS) * work_tile, reading_us(p)) + merging


def stream_k_us(p: Problem, t: Tile) -> float:
    """Estimated time of fwd_wgmma_stream_k in µs: all blocks compute equally long."""
    work_tile, count = work_tile_us(p, t)
    return LAUNCH + max(count / t.BLOCKS * work_tile, reading_us(p))


def decode_us(p: Problem) -> float:
    """Estimated time of fwd_decode in µs: it computes 32 rows of a group at a time."""
    return 12 + max(1.0, at_width(DECODE, p) * cdiv(p.Sq * p.group, 32)) * reading_us(p)
