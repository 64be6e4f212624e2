"""How large the block map of a problem is (kernels_cu/include/block_map.cuh), and for which problem one was made."""

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
    """Keeps for which (B, H, Sq, Sk) `blocks` was made, as long as that very object is alive: its shape is rounded up
    to tiles. Arrays of libraries without weak references are not remembered."""
    key = id(blocks)
    try:
        _made[key] = weakref.ref(blocks, lambda _: _made.pop(key, None)), sizes
    except TypeError:
        _made.pop(key, None)


def sizes_of(blocks: Any) -> Sizes | None:
    """(B, H, Sq, Sk) that `blocks` was made for; None of a copy, and of a map made by hand."""
    found = _made.get(id(blocks))
    return found[1] if found is not None and found[0]() is blocks else None


def words_for(p: Problem) -> int:
    """Words per row for one bit per 16 keys, a multiple of 4."""
    return 4 * cdiv(p.Sk, 4 * WORD_KEYS)


def by_pair(p: Problem) -> bool:
    """Whether the map has a bit for each pair, too: of a mask alone, in an eighth of its bytes at most. A condition may
    have no tensor at all, and a bit for each of its pairs would take unexpected memory."""
    return len(p.mask) == 4 and p.mask[3] > 1 and not (p.score and p.score.hides)


def shape_for(p: Problem) -> tuple[int, int, int, int]:
    """(B, H, rows of 64 queries, words), each of B, H and rows 1 where neither mask nor condition varies along it;
    zeros where there is neither, and of a ragged or paged batch. Words: `words_for` for each of two kinds, then by_pair
    64 rows of a bit for each key."""
    named = p.score.named_by_mask if p.score and p.score.hides else set()
    if p.ragged or p.page_size or not (p.mask or named):
        return 0, 0, 0, 0
    varies = [n > 1 for n in p.mask[:3]] or [False] * 3
    varies[0] |= "b" in named or (p.key_lengths and bool(named))  # whose Sk is each entry's own
    varies[1] |= "h" in named
    varies[2] |= "i" in named
    sizes = p.B, p.H, cdiv(p.Sq, ROWS)
    B, H, rows = (n if v else min(n, 1) for n, v in zip(sizes, varies, strict=True))
    return B, H, rows, words_for(p) * (2 + (ROWS * WORD_KEYS // 32 if by_pair(p) else 0))
