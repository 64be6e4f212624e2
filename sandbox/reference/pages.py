"""Gathers paged keys and values into dense arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .semantics import plain_array

Array = NDArray[Any]


def gather_pages(pages: Array, block_table: Array, key_lengths: Array) -> Array:
    """Dense keys or values (B, Hk, max pages * page_size, D) from pages (pages, page_size, Hk, D), block_table
    (B, max pages) and key_lengths (B,). Rows beyond key_lengths are zero.

    Raises ValueError if a valid key is in a page that does not exist, or beyond the table.
    """
    pages, block_table, key_lengths = plain_array(pages), plain_array(block_table), plain_array(key_lengths)
    count, page_size, Hk, D = pages.shape
    B, max_pages = block_table.shape
    found = np.zeros((B, max_pages * page_size, Hk, D), pages.dtype)
    for b in range(B):
        length = max(int(key_lengths[b]), 0)
        if length > max_pages * page_size:
            raise ValueError(f"key_lengths[{b}]={length}: block_table has pages for {max_pages * page_size} keys")
        used = block_table[b, : -(-length // page_size)]
        if ((used < 0) | (used >= count)).any():
            raise ValueError(f"block_table[{b}] has pages {used.tolist()}: valid page numbers are 0 to {count - 1}")
        found[b, :length] = pages[used].reshape(-1, Hk, D)[:length]
    return np.ascontiguousarray(found.swapaxes(1, 2))
