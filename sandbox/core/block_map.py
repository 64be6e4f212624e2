"""The size of a problem's block map (kernels_cu/include/block_map.cuh), and the sizes for which a map was made."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from .normalise import cdiv

if TYPE_CHECKING:
    from .problem import Problem

ROWS, WORD_KEYS = 64, 512  # queries of a row of the map, keys of a word

Sizes = tuple[int, int, int, int]  # B, H, Sq, Sk

_made: dict[int, tuple[weakref.ref[Any], Sizes]] = {}  # by the id of a map that is alive


def remember(blocks: Any, sizes: Sizes) -> None:
    """Stores the (B, H, Sq, Sk) for which `blocks` was made, while this object is alive. Its shape does not give them:
    it is rounded up to tiles. Arrays of libraries without weak references are not stored."""
    key = id(blocks)
    try:
        _made[key] = weakref.ref(blocks, lambda _: _made.pop(key, None)), sizes
    except TypeError:
        _made.pop(key, None)


def sizes_of(blocks: Any) -> Sizes | None:
    """(B, H, Sq, Sk) for which `blocks` was made; None for a copy, and for a map that `remember` did not store."""
    found = _made.get(id(blocks))
    return found[1] if found is not None and found[0]() is blocks else None


def words_for(p: Problem) -> int:
    """Words of a row of the map with one bit per 16 keys, rounded up to a multiple of 4."""
    return 4 * cdiv(p.Sk, 4 * WORD_KEYS)


def has_element_bits(p: Problem) -> bool:
    """Whether the map also has one bit per (query, key): only for a `mask` that varies along the keys and takes more
    memory itself (a byte per element, unless it broadcasts), and not with a mask in `score`. That may have no tensor: a
    bit per element would take memory that the caller does not expect."""
    return len(p.mask) == 4 and p.mask[3] > 1 and not (p.score and p.score.hides)


def shape_for(p: Problem) -> tuple[int, int, int, int]:
    """(B, H, rows of 64 queries, words). B, H or rows is 1 if neither `mask` nor the mask of `score` varies along it.
    Zeros if there is neither, and for a ragged or paged batch. Words: `words_for` of bits SOME_VISIBLE, as many of
    FULLY_VISIBLE, and if `has_element_bits` 64 rows of one bit per key."""
    named = p.score.named_by_mask if p.score and p.score.hides else set()
    if p.ragged or p.page_size or not (p.mask or named):
        return 0, 0, 0, 0
    varies = [n > 1 for n in p.mask[:3]] or [False] * 3
    varies[0] |= "b" in named or (p.key_lengths and bool(named))  # with key_lengths, Sk depends on b
    varies[1] |= "h" in named
    varies[2] |= "i" in named
    sizes = p.B, p.H, cdiv(p.Sq, ROWS)
    B, H, rows = (n if v else min(n, 1) for n, v in zip(sizes, varies, strict=True))
    return B, H, rows, words_for(p) * (2 + (ROWS * WORD_KEYS // 32 if has_element_bits(p) else 0))
