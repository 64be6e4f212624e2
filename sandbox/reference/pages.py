"""Keys and values that lie in pages, put together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gather_pages(pages: Array, block_table: Array, key_lengths: Array) -> Array:
    """Of pages (pages, page_size, Hk, D), block_table (B, most pages) and key_lengths (B,): (B, Hk, most pages *
    page_size, D), keys that count where they belong, zeros for the others.

    Raises ValueError for a page that there is not, of a key that counts.
    """
    count, page_size, Hk, D = pages.shape
    B, most = block_table.shape
    found = np.zeros((B, most * page_size, Hk, D), pages.dtype)
    for b in range(B):
        length = min(max(int(key_lengths[b]), 0), most * page_size)
        used = block_table[b, : -(-length // page_size)]
        if ((used < 0) | (used >= count)).any():
            raise ValueError(f"block_table[{b}] names pages {used.tolist()} of {count}")
        found[b, :length] = pages[used].reshape(-1, Hk, D)[:length]
    return np.ascontiguousarray(found.swapaxes(1, 2))
