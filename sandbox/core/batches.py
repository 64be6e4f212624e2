"""Ragged and paged batches: the fields of a problem that they set."""

from __future__ import annotations

from typing import Any

from . import limits
from .errors import SpecError
from .integers import integer

PAGE_ROWS = 16  # the rows of a page are a multiple of this, which kernels copy at a time


def ragged_fields(ragged: Any, lengths: Any) -> dict[str, Any]:
    """`ragged` and `lengths` of a problem as it keeps them, and B, Sq and Sk where they follow. Raises SpecError."""
    ragged, lengths = tuple(ragged or ()), tuple(lengths or ())
    found: dict[str, Any] = {}
    if lengths:
        pairs = tuple(tuple(integer("lengths", n, 0) for n in pair) for pair in lengths)
        if any(len(pair) != 2 for pair in pairs):
            raise SpecError(f"lengths={lengths} must be pairs: queries and keys of each sequence")
        queries, keys = zip(*pairs, strict=True)
        found = {"B": len(pairs), "Sq": max(queries), "Sk": max(keys)}
        lengths, ragged = pairs, ragged or (sum(queries), sum(keys))
    if ragged and (len(ragged) != 2 or not all(0 <= n < 2**31 for n in ragged)):
        raise SpecError(f"ragged={ragged} must be two numbers below 2^31: rows of q and of k")
    if lengths and not all(sum(n) <= rows for n, rows in zip((queries, keys), ragged, strict=True)):
        raise SpecError(f"lengths={lengths} are more than ragged={ragged} rows of q and of k")
    return {**found, "ragged": ragged, "lengths": lengths}


def paged_fields(page_size: Any, pages: Any, ragged: tuple[int, ...], B: int, Sk: int) -> dict[str, Any]:
    """`page_size` and `pages` of a problem as it keeps them, and `key_lengths`, which pages always have. Raises
    SpecError."""
    page_size, pages = integer("page_size", page_size, 0), integer("pages", pages, 0)
    if not page_size:
        return {"page_size": 0, "pages": 0}
    if page_size % PAGE_ROWS:
        raise SpecError(f"page_size={page_size} must be a multiple of {PAGE_ROWS}, or 0 for keys without pages")
    if ragged:
        raise SpecError(
            f"page_size={page_size} of a ragged batch is not supported: pass the same number of queries per sequence"
        )
    if Sk % page_size:
        raise SpecError(f"Sk={Sk} must be a multiple of page_size={page_size}: whole pages")
    pages = pages or B * Sk // page_size
    limits.check_count("pages", pages, "page numbers are int32")
    return {"page_size": page_size, "pages": pages, "key_lengths": True}
