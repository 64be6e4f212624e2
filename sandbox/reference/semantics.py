"""What a query row sees: shapes, causal alignment, tile ranges, and sums over visible keys alone.

The dense and the tiled references both build on these functions, so that a mask is defined once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]
Causal: TypeAlias = bool | str


class Shape(NamedTuple):
    """Sizes of one attention call."""

    B: int
    H: int
    Hk: int
    Sq: int
    Sk: int
    D: int
    Dv: int

    def key_head(self, h: int) -> int:
        """The key/value head that query head h reads."""
        return h // (self.H // self.Hk)


def plain_array(x: Any) -> Array:
    """x as an array. Raises ValueError for a masked array (np.ma), whose mask would be ignored."""
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError("a MaskedArray is not supported: pass its numbers (.filled(0)), and what is hidden as mask=")
    return np.asarray(x)


def shape_of(q: Array, k: Array, v: Array) -> Shape:
    """Sizes of q (B, H, Sq, D), k (B, Hk, Sk, D) and v (B, Hk, Sk, Dv).

    Raises ValueError, naming the shapes, unless they agree, D ≥ 1 and Hk divides H.
    """
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"q must be (B, H, Sq, D), k (B, Hk, Sk, D) and v (B, Hk, Sk, Dv); got {shapes}")
    (B, H, Sq, D), (Bk, Hk, Sk, Dk) = q.shape, k.shape
    if (Bk, Dk) != (B, D) or 0 in (D, v.shape[3]):
        raise ValueError(f"q, k and v must share B, q and k D, and D and Dv must be at least 1; got {shapes}")
    if Hk == 0 or H % Hk:
        raise ValueError(f"H={H} query heads must be a multiple of Hk={Hk} key/value heads; got {shapes}")
    return Shape(B, H, Hk, Sq, Sk, D, v.shape[3])


def check_gradient_shapes(
    shape: Shape, dout: Array, out: Array | None, lse: Array | None, dlse: Array | None = None
) -> None:
    """Raises ValueError unless dout and out are (B, H, Sq, Dv), lse and dlse (B, H, Sq); None passes."""
    rows = (shape.B, shape.H, shape.Sq)
    wide = (*rows, shape.Dv)
    for name, x, wanted in (("dout", dout, wide), ("out", out, wide), ("lse", lse, rows), ("dlse", dlse, rows)):
        if x is not None and x.shape != wanted:
            raise ValueError(f"{name} must be {wanted} to go with q and v; got {x.shape}")


def check_tile(BLOCK_M: int, BLOCK_N: int) -> None:
    """Raises ValueError unless both sides of the tile are at least 1."""
    if BLOCK_M < 1 or BLOCK_N < 1:
        raise ValueError(f"a tile needs at least one row on each side; got BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}")


def softmax_scale(scale: float | None, D: int) -> float:
    """The factor of q·k: `scale`, or 1/sqrt(D) when it is None."""
    return D**-0.5 if scale is None else float(scale)


def causal_offset(Sq: int, Sk: int, causal: Causal) -> int:
    """The offset for which query i sees key j exactly when j ≤ i + offset.

    `False` gives Sk (every key), `True` and "bottom-right" Sk − Sq (the last query sees the last key, as
    FlashAttention ≥ 2.1), "top-left" 0 (the first query sees the first key, as PyTorch's `is_causal`).
    Raises ValueError for anything else.
    """
    offsets: dict[Causal, int] = {False: Sk, True: Sk - Sq, "bottom-right": Sk - Sq, "top-left": 0}
    if not isinstance(causal, bool | np.bool_ | str) or causal not in offsets:
        raise ValueError(f"causal={causal!r} must be one of {', '.join(map(repr, offsets))}")
    return offsets[causal]


def causal_bounds(causal: Causal, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """(left, right) of causal and window together: how far to either side of its place a query sees; None: no bound.

    Raises ValueError for an unknown `causal`.
    """
    causal_offset(0, 0, causal)
    # At most 2^62: rows and keys are fewer, and NumPy's int64 holds the sum with a row number.
    left, right = (None if n is None else min(n, 2**62) for n in (window or (None, None)))
    return left, (0 if right is None else min(right, 0)) if causal else right


def visible(Sq: int, Sk: int, causal: Causal) -> Mask:
    """Mask (Sq, Sk), True where query row i sees key column j. ValueError for an unknown `causal`."""
    return visible_tile(0, Sq, 0, Sk, causal_offset(Sq, Sk, causal))


def visible_tile(m0: int, rows: int, n0: int, cols: int, offset: int) -> Mask:
    """The part (rows, cols) of the mask whose first query row is m0 and first key column n0."""
    query_row, key_col = np.arange(m0, m0 + rows)[:, None], np.arange(n0, n0 + cols)[None, :]
    return np.less_equal(key_col, query_row + offset)


def key_end(m0: int, BLOCK_M: int, Sq: int, Sk: int, offset: int) -> int:
    """One past the last key that any row of the query tile [m0, m0 + BLOCK_M) sees; 0 when it sees none."""
    last_row = min(m0 + BLOCK_M, Sq) - 1
    return max(0, min(Sk, last_row + offset + 1))


def query_start(n0: int, BLOCK_M: int, Sq: int, offset: int) -> int:
    """First row, a multiple of BLOCK_M, of the first query tile that sees key n0; Sq when none does."""
    first_row = max(0, n0 - offset)
    return first_row // BLOCK_M * BLOCK_M if first_row < Sq else Sq


def dot_seen(A: Array, X: Array, seen: Mask) -> Array:
    """A @ X, (M, N) by (N, D) -> (M, D), summed over the pairs `seen` (M, N) alone.

    A must be 0 elsewhere, save in rows that are NaN as a whole. A zero is no mask when X holds NaN or inf, as
    0 · NaN = NaN: rows of X that are not finite leave the product and join only the sums that see them.
    """
    finite = np.all(np.isfinite(X), axis=1)
    if finite.all():
        return A @ X
    Y = A @ np.where(finite[:, None], X, 0)
    for j in np.flatnonzero(~finite):
        rows = seen[:, j]
        Y[rows] += A[rows, j, None] * X[j]
    return Y


def or_zero(x: Array) -> Array:
    """x with 0 for −inf: a maximum or LSE to subtract from scores of −inf, so that exp gives 0 and not NaN."""
    return np.where(x == -np.inf, 0, x)


def or_one(x: Array) -> Array:
    """x with 1 for 0: a row sum to divide by, so that the output of a row without keys stays 0."""
    return np.where(x == 0, 1, x)
