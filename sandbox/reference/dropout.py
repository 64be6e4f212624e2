"""The dropout mask: a pure function of the seed and the position (b, h, i, j).

Philox 4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter of four words and a
key of two into four words. With seven rounds it passes BigCrush, as they found. One call covers the eight elements of
(query, key) space that one lane has of a 16 × 16 block in the accumulators of two adjacent m16n8 products, with 16 bits
per element:

    lane 4 g + q of block (i // 16, j // 16):  i % 8 = g,  (j % 8) // 2 = q
    element 4 (j // 8 % 2) + 2 (i // 8 % 2) + j % 2:  half-words of the four words, the low half of word 0 first
    counter (i // 16 * 32 + lane, j // 16, h, b),  key (seed's low word, seed's high word)

A lane of a forward kernel makes one call for eight elements. In a backward kernel, which has the block transposed, two
lanes make one call each and exchange halves.

An element is kept if its 16 bits, as an integer, are at least p · 2^16. The resolution of p is 2^-16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 7
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # increments of the key per round
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def philox(counter: Words, seed: int) -> Words:
    """Philox 4x32-7 of counters (four arrays of 32-bit words of the same shape) with a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32 & 0xFFFFFFFF)
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32-bit factors, 64-bit products
        c0, c1, c2, c3 = product1 >> _WORD ^ c1 ^ k0, product1 & _LOW, product0 >> _WORD ^ c3 ^ k1, product0 & _LOW
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3


def dropout_threshold(p: float) -> int:
    """The smallest 16-bit value of a kept element: p · 2^16, rounded. Raises ValueError unless 0 <= p <= 1."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout={p} is not supported: it must be a probability, 0 <= p <= 1")
    return round(p * 65536)


def dropout_keep(seed: int, B: int, H: int, Sq: int, Sk: int, p: float) -> NDArray[np.bool_]:
    """The elements of P that dropout keeps, (B, H, Sq, Sk) bool; the same in every kernel, tile and backend.

    seed: a 64-bit integer, signed or unsigned. Raises ValueError unless 0 <= p <= 1.
    """
    kept = np.empty((B, H, Sq, Sk), np.bool_)
    for b, h in np.ndindex(B, H):
        kept[b, h] = keep_tile(seed, b, h, 0, Sq, 0, Sk, p)
    return kept


def keep_tile(seed: int, b: int, h: int, m0: int, rows: int, n0: int, cols: int, p: float) -> NDArray[np.bool_]:
    """The tile (rows, cols) of `dropout_keep` for batch entry b and head h that begins at query row m0 and key n0."""
    M, N = -(-(m0 + rows) // 16) - m0 // 16, -(-(n0 + cols) // 16) - n0 // 16  # complete 16 × 16 blocks
    position = np.ogrid[m0 // 16 : m0 // 16 + M, :8, n0 // 16 : n0 // 16 + N, :4]
    block_row, g, block_col, q = (x.astype(np.uint64) for x in position)
    counter = (block_row * np.uint64(32) + np.uint64(4) * g + q, block_col, np.uint64(h), np.uint64(b))
    counters = np.broadcast_arrays(*counter)
    words = np.stack(philox((counters[0], counters[1], counters[2], counters[3]), seed))
    halves = np.stack((words & np.uint64(0xFFFF), words >> np.uint64(16)), axis=-1)  # elements with even j, odd j
    halves = halves.reshape(2, 2, M, 8, N, 4, 2)  # (j // 8 % 2, i // 8 % 2, i // 16, i % 8, j // 16, j % 8 // 2, j % 2)
    kept = halves.transpose(2, 1, 3, 4, 0, 5, 6).reshape(16 * M, 16 * N) >= np.uint64(dropout_threshold(p))
    return kept[m0 % 16 : m0 % 16 + rows, n0 % 16 : n0 % 16 + cols]
