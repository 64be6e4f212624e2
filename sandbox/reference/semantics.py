"""Semantics of a call: shapes, causal alignment, ranges of tiles, and sums over visible keys.

The dense and the tiled reference share these functions, so that the mask is defined once.
"""

from __future__ import annotations

import math
from operator import index
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
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


NUMBER, REAL, INTEGER, BOOL = "fViub", "fViu", "iu", "b"  # kinds of NumPy dtypes; V: some of ml_dtypes


def plain_array(x: Any, name: str = "an array", kinds: str = NUMBER) -> Array:
    """x as a NumPy array, also a PyTorch tensor, with its dtype. Raises ValueError for another kind of dtype, and for a
    masked array (np.ma), because its mask would be ignored."""
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError("a MaskedArray is not supported: pass its data (.filled(0)) and, separately, mask=")
    if hasattr(x, "detach"):  # a PyTorch tensor, which may require a gradient, be on a GPU, or lazily negated
        other = getattr(ml_dtypes, str(x.dtype).removeprefix("torch."), None)
        x = x.float().numpy(force=True).astype(other) if other else x.numpy(force=True)
    x = np.asarray(x)
    if x.dtype.kind not in kinds:
        what = {INTEGER: "integer", BOOL: "bool"}.get(kinds, "real")
        raise ValueError(f"{name} is {x.dtype}: its dtype must be {what}")
    return x


def finite(name: str, value: Any) -> float:
    """`value` as a float. Raises ValueError unless it is a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={value!r} must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={number!r} must be finite")
    return number


def shape_of(q: Array, k: Array, v: Array) -> Shape:
    """Sizes of q (B, H, Sq, D), k (B, Hk, Sk, D) and v (B, Hk, Sk, Dv).

    Raises ValueError with the shapes unless they are consistent, D ≥ 1, and H is a multiple of Hk.
    """
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"q must be (B, H, Sq, D), k (B, Hk, Sk, D) and v (B, Hk, Sk, Dv); got {shapes}")
    (B, H, Sq, D), (Bk, Hk, Sk, Dk) = q.shape, k.shape
    if (Bk, Dk) != (B, D) or 0 in (D, v.shape[3]):
        raise ValueError(f"q, k, v must have the same B, q and k the same D, and D and Dv be at least 1; got {shapes}")
    if Hk == 0 or H % Hk:
        raise ValueError(f"H={H} query heads must be a multiple of Hk={Hk} key/value heads; got {shapes}")
    return Shape(B, H, Hk, Sq, Sk, D, v.shape[3])


def check_gradient_shapes(
    shape: Shape, dout: Array, out: Array | None, lse: Array | None, dlse: Array | None = None
) -> None:
    """Raises ValueError unless dout and out are (B, H, Sq, Dv), and lse and dlse (B, H, Sq). None is accepted."""
    rows = (shape.B, shape.H, shape.Sq)
    wide = (*rows, shape.Dv)
    for name, x, wanted in (("dout", dout, wide), ("out", out, wide), ("lse", lse, rows), ("dlse", dlse, rows)):
        if x is not None and x.shape != wanted:
            raise ValueError(f"{name} must be {wanted} to match q and v; got {x.shape}")


def check_tile(BLOCK_M: int, BLOCK_N: int) -> None:
    """Raises ValueError unless both tile sizes are at least 1."""
    if BLOCK_M < 1 or BLOCK_N < 1:
        raise ValueError(f"tile sizes must be at least 1; got BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}")


def softmax_scale(scale: float | None, D: int) -> float:
    """The factor of q·k: `scale`, or 1/sqrt(D) when it is None."""
    return D**-0.5 if scale is None else finite("scale", scale)


def causal_offset(Sq: int, Sk: int, causal: Causal) -> int:
    """The offset such that query i sees key j if and only if j ≤ i + offset.

    `False`: Sk (every key); `True` and "bottom-right": Sk − Sq (the last query sees the last key, as
    FlashAttention ≥ 2.1); "top-left": 0 (the first query sees the first key, as PyTorch's `is_causal`).
    Raises ValueError for other values.
    """
    offsets: dict[Causal, int] = {False: Sk, True: Sk - Sq, "bottom-right": Sk - Sq, "top-left": 0}
    if not isinstance(causal, bool | np.bool_ | str) or causal not in offsets:
        raise ValueError(f"causal={causal!r} must be one of {', '.join(map(repr, offsets))}")
    return offsets[causal]


def causal_bounds(causal: Causal, window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """(left, right): the combined window of causal and window, relative to the query's position. None: unbounded.

    Raises ValueError for an unknown `causal` and an invalid window.
    """
    causal_offset(0, 0, causal)
    try:
        left, right = (None, None) if window is None else window
        if any(isinstance(n, bool) or (n is not None and index(n) < 0) for n in (left, right)):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"window={window!r} must be (left, right), the keys visible to either side: each an integer >= 0, or None "
            "for no bound (FlashAttention's -1 is not supported)"
        ) from None
    # At most 2^62, so that the sum with a row number fits in int64.
    left, right = (None if n is None else min(index(n), 2**62) for n in (left, right))
    return left, (0 if right is None else min(right, 0)) if causal else right


def visible(Sq: int, Sk: int, causal: Causal) -> Mask:
    """Mask (Sq, Sk), True where query row i sees key column j. ValueError for an unknown `causal`."""
    return visible_tile(0, Sq, 0, Sk, causal_offset(Sq, Sk, causal))


def visible_tile(m0: int, rows: int, n0: int, cols: int, offset: int) -> Mask:
    """The tile (rows, cols) of the mask that begins at query row m0 and key column n0."""
    query_row, key_col = np.arange(m0, m0 + rows)[:, None], np.arange(n0, n0 + cols)[None, :]
    return np.less_equal(key_col, query_row + offset)


def key_end(m0: int, BLOCK_M: int, Sq: int, Sk: int, offset: int) -> int:
    """One past the last key that is visible to the query tile [m0, m0 + BLOCK_M); 0 if there is none."""
    last_row = min(m0 + BLOCK_M, Sq) - 1
    return max(0, min(Sk, last_row + offset + 1))


def query_start(n0: int, BLOCK_M: int, Sq: int, offset: int) -> int:
    """First row (a multiple of BLOCK_M) of the first query tile to which key n0 is visible; Sq if there is none."""
    first_row = max(0, n0 - offset)
    return first_row // BLOCK_M * BLOCK_M if first_row < Sq else Sq


def dot_visible(A: Array, X: Array, visible_pairs: Mask) -> Array:
    """A @ X, (M, N) by (N, D) -> (M, D), summed over the pairs in `visible_pairs` (M, N) only.

    A must be 0 for other pairs, except in rows that are entirely NaN. Zeros in A do not mask NaN or inf in X, because
    0 · NaN = NaN. Rows of X that are not finite are therefore excluded from the product and added only to the sums of
    rows that see them.
    """
    finite = np.all(np.isfinite(X), axis=1)
    if finite.all():
        return A @ X
    Y = A @ np.where(finite[:, None], X, 0)
    for j in np.flatnonzero(~finite):
        rows = visible_pairs[:, j]
        Y[rows] += A[rows, j, None] * X[j]
    return Y


def or_zero(x: Array) -> Array:
    """x with −inf replaced by 0: a maximum or LSE to subtract from scores of −inf, so that exp gives 0 instead of
    NaN."""
    return np.where(x == -np.inf, 0, x)


def or_one(x: Array) -> Array:
    """x with 0 replaced by 1: a row sum to divide by, so that the output of a row without visible keys stays 0."""
    return np.where(x == 0, 1, x)
