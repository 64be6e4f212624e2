"""How large the block map of a problem is (kernels_cu/include/block_map.cuh)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .integers import cdiv

if TYPE_CHECKING:
    from .problem import Problem

ROWS, WORD_KEYS = 64, 512  # queries of a row of the map, keys of a word


def shape_for(p: Problem) -> tuple[int, int, int, int]:
    """(B, H, rows of 64 queries, twice the words of 512 keys, in fours), each of B, H and rows 1 where neither mask nor
    condition varies along it; zeros where there is neither, and of a ragged or paged batch."""
    named = p.score.named_by_mask if p.score and p.score.hides else set()
    if p.ragged or p.page_size or not (p.mask or named):
        return 0, 0, 0, 0
    varies = [n > 1 for n in p.mask[:3]] or [False] * 3
    varies[0] |= "b" in named or (p.key_lengths and bool(named))  # whose Sk is each entry's own
    varies[1] |= "h" in named
    varies[2] |= "i" in named
    sizes = p.B, p.H, cdiv(p.Sq, ROWS)
    B, H, rows = (n if v else min(n, 1) for n, v in zip(sizes, varies, strict=True))
    return B, H, rows, 8 * cdiv(p.Sk, 4 * WORD_KEYS)
