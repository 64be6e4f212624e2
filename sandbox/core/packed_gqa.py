"""Packed GQA: the rows of a work tile may belong to several query heads of a group (include/work_tile.cuh)."""

from __future__ import annotations

from .normalise import cdiv
from .options import SAME_FOR_GROUP
from .problem import Problem
from .tile import Tile

SLOT = 16  # query rows of a warp, all of one head


def may_pack(p: Problem) -> bool:
    """Whether heads may share a work tile: few queries, no option that depends on the head, and Dv = D (others were not
    timed). Fewer queries if causal, when a packed work tile reads the keys that any row of the head sees, or if
    invariant (not timed)."""
    most = 128 if p.causal or p.invariant else 256
    return p.group > 1 and 0 < p.Sq <= most and p.options <= SAME_FOR_GROUP and p.Dv == p.D


def packed_rows(p: Problem) -> int:
    """Query rows of a group of heads, those of each head rounded up to whole slots."""
    return p.group * SLOT * cdiv(p.Sq, SLOT)


def packs(p: Problem, t: Tile) -> bool:
    """PACK_GQA: whether the heads of a group share work tiles, because this makes fewer of them."""
    return may_pack(p) and cdiv(packed_rows(p), t.BLOCK_M) < p.group * p.query_tiles(t.BLOCK_M)


def tiles_of_heads(p: Problem, t: Tile) -> int:
    """Number of work tiles, each with rows of one head."""
    return p.query_tiles(t.BLOCK_M) * p.batches * p.H


def work_tiles(p: Problem, t: Tile) -> int:
    """Number of work tiles, not multiplied by the splits: of a group of heads with PACK_GQA, otherwise of each head."""
    return cdiv(packed_rows(p), t.BLOCK_M) * p.batches * p.Hk if packs(p, t) else tiles_of_heads(p, t)
