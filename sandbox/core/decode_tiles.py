"""Which tiles of fwd_decode were timed on an H200 with which options, and which of them is the fastest: the spec's
preferences, from experiments/020_decode, 026_sampled_shapes and 028_serving."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from .kernel import HOPPER_SMS
from .normalise import cdiv
from .problem import Problem
from .tile import Tile

MAX_CLUSTER_KEYS = 4096  # most keys for clusters with key_lengths, and for tiles that avoid the combine kernel
BY_TMA = Tile(BLOCK_M=32, BLOCK_N=32, WARPS=8, STAGES=3, BLOCKS=132, CLUSTER=1)


def few_blocks(p: Problem) -> bool:
    """D above 192, up to 300 queries and keys: whether the tiles of 16 rows all run at once. fwd_decode then takes 6 …
    18% less time than fwd_wgmma with tiles of 128 rows (experiment 026: five problems)."""
    small = p.plain and not p.float8_keys and p.D > 192 and 0 < p.Sk <= 300 and p.Sq <= 300
    return small and 0 < p.B * p.Hk * cdiv(p.Sq * p.group, 16) <= HOPPER_SMS


def row_bytes(p: Problem) -> tuple[int, int]:
    """Bytes per row of K and of V, padded to MMA steps of 32 bytes."""
    return cdiv(p.D * p.key_itemsize, 32) * 32, cdiv(p.Dv * p.key_itemsize, 32) * 32


def in_pages(p: Problem, keys: int) -> bool:
    """Whether each tile of so many keys is in one page; also without pages."""
    return p.page_size % keys == 0


def pages_of_float8(p: Problem) -> bool:
    """16-bit queries over pages of float8 keys, for which tiles of their own were timed (experiment 028)."""
    return bool(p.kv_dtype and p.page_size and in_pages(p, 16) and not p.ragged)


def by_tma(p: Problem, t: Tile) -> bool:
    """Whether keys are loaded by TMA (decode_load_tma.cuh): tiles of 32 rows, and a page's rows of a key tile are one
    box. With fewer rows cp.async is as fast (experiment 028)."""
    boxes = pages_of_float8(p) and p.mappable and row_bytes(p) == (128, 128)
    return boxes and all(t[name] == BY_TMA[name] for name in t if name != "BLOCKS")


def rank(
    p: Problem, t: Tile, queries: int, row_tiles: int, needs_combine: Callable[[Problem, Tile], bool]
) -> int:  # fmt: skip
    """Sort key of tiles. queries: most of a batch entry; row_tiles: of a key/value head; needs_combine: whether a tile
    needs the combine kernel.

    Tiles that were timed with the options first; of these, fewest row tiles; then the preferred WARPS, CLUSTER and
    bytes in flight; then the smallest BLOCK_M, and for float8 the largest BLOCK_N.
    """
    *warps, in_flight = preferred(p, queries, row_tiles, needs_combine)
    penalty = 512 * (warps != [t.WARPS, t.CLUSTER]) + 256 * (in_flight != (t.STAGES - 1) * t.BLOCK_N * p.key_itemsize)
    rows = min(p.Sq, queries) * p.group
    size = 2 * t.BLOCK_M + (p.float8_keys and t.BLOCK_N == 16)
    return 2**40 * (not was_timed(p, t)) + 1024 * cdiv(rows, t.BLOCK_M) + penalty + size


@lru_cache(maxsize=1024)  # the rank of every tile depends on it
def preferred(
    p: Problem, queries: int, row_tiles: int, needs_combine: Callable[[Problem, Tile], bool]
) -> tuple[int, int, int]:
    """WARPS, CLUSTER, and bytes in flight per warp and column of K: the fastest for D + Dv = 256, 16 bits.

    Clusters if they make one wave of all row tiles, which needs no combine kernel: of two large blocks, or of two or
    four small ones, of which three run on an SM. Three waves and more: no cluster, and fewer bytes in flight per warp.

    With key_lengths up to MAX_CLUSTER_KEYS, small clusters for any number of waves, because one block reads while
    another one finishes: of two, or of four where clusters of two make 1 to 2 waves, of which the last is half empty
    (experiment 020).

    Otherwise, up to 16 rows, MAX_CLUSTER_KEYS keys and D + Dv = 256: eight warps, or one wave of clusters of four, if
    the default needs the combine kernel and these do not (B 12, H 28/7, 620 keys, D = 64 and 96: 9.4 and 10.6 instead
    of 11.8 and 14.9 us; experiment 026).

    float8 keys (experiment 028): more than 16 rows, three stages of four warps (B 64, H 64/8, 4 queries, 8192 keys: 263
    instead of 269 us with two of eight), or by TMA of eight. In pages of several entries: D + Dv < 256, up to 8 rows:
    two warps. Otherwise fewer bytes in flight per warp, so that more blocks run on an SM; from three waves on clusters
    of two if there are 2048 to MAX_CLUSTER_KEYS keys, or more than 16 rows; 9 to 16 rows otherwise one block of eight
    warps.
    """
    tiles, default, rows = row_tiles * p.Hk * p.batches, (4, 1, 64), queries * p.group
    many_rows, wide, wave = rows > 16, max(p.D, p.Dv) > 128, 3 * HOPPER_SMS  # of small blocks
    key_bytes = sum(row_bytes(p))
    if many_rows and by_tma(p, BY_TMA) and was_timed(p, BY_TMA):
        return 8, 1, 64
    if pages_of_float8(p) and p.B > 1 and (wide or not many_rows):
        if key_bytes < 256:
            return default if rows > 8 else (2, 1, 64)
        if tiles >= wave and (many_rows or 2048 <= p.Sk <= MAX_CLUSTER_KEYS):
            return 4, 2, 32
        return (4, 1, 32) if rows <= 8 or wide else (8, 1, 32)
    if p.float8_keys or p.ragged:
        return default
    if key_bytes == 512:
        if p.key_lengths:
            if 2 * tiles < 0.75 * HOPPER_SMS or p.Sk > MAX_CLUSTER_KEYS:
                return default
            return (4, 4, 32) if wave < 2 * tiles < 2 * wave else (4, 2, 32)
        if 0.75 * HOPPER_SMS <= 2 * tiles <= HOPPER_SMS:
            return 8, 2, 64
        for cluster in (4, 2):
            if 0.75 * wave <= cluster * tiles <= wave and not many_rows:
                return 4, cluster, 32
        if tiles >= wave:
            return 8, 1, 32
    few_keys = p.Sk <= MAX_CLUSTER_KEYS and not p.key_lengths
    one_split = partial(is_one_split, p, rows, needs_combine)
    if few_keys and not many_rows and key_bytes <= 512 and not one_split(*default):
        if one_split(8, 1, 32):
            return 8, 1, 32
        if 4 * tiles <= wave and one_split(4, 4, 32):
            return 4, 4, 32
    return default


def is_one_split(
    p: Problem, rows: int, needs_combine: Callable[[Problem, Tile], bool], warps: int, cluster: int, in_flight: int
) -> bool:
    """Whether such a tile of up to 16 rows and 16 keys needs no combine kernel."""
    stages, BLOCK_M = 1 + in_flight // (16 * p.key_itemsize), 8 if rows <= 8 else 16
    t = Tile(BLOCK_M=BLOCK_M, BLOCK_N=16, WARPS=warps, STAGES=stages, BLOCKS=HOPPER_SMS, CLUSTER=cluster)
    return not needs_combine(p, t)


def was_timed(p: Problem, t: Tile) -> bool:
    """Whether the tile was timed with such options: a preference, not a limit. A tile that was not timed may be faster.
    A tile that spills would be used only if all tiles spill."""
    hides = bool(p.score and p.score.hides)
    untimed = (
        t.BLOCK_M > 16 and (p.dropout or hides),
        t.BLOCK_M > 16 and p.ragged and p.page_size,
        t.BLOCK_M > 16 and t.WARPS == 8 and (p.ragged or p.Dv != p.D),
        t.BLOCK_M > 16 and p.float8_keys and p.D > 128 and p.Dv != p.D,
        t.BLOCK_N > 16 and (p.mask or (p.Dv > 128 and (t.BLOCK_M > 16 or not pages_of_float8(p)))),
        t.BLOCK_N > 16 and not in_pages(p, 32) and not pages_of_float8(p),
        t.BLOCK_N > 16 and t.STAGES == 2 and t.WARPS == 4 and not pages_of_float8(p),
        t.CLUSTER > 1 and hides and p.Dv < 128,
    )
    return not any(untimed)
