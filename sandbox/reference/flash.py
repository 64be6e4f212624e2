"""FlashAttention-1 and -2 as tiled loops over NumPy arrays, to be read together with a kernel.

Names are those of the kernels: Q, K, V, O, … are one head's tensors in global memory; the suffixes `_smem` and `_rmem`
mark tiles on chip; S, P, dP, dS, m, l and alpha are never stored in global memory. Only `load` and `store` access
global memory; `io_model` counts their bytes. Slices past the end are short, so no boundary handling is needed.

Arithmetic is in `dtype`, by default float64; float32 is closer to the rounding of a kernel. If v is float8, P is
rounded to its dtype.
"""

from __future__ import annotations

from typing import Protocol, Unpack

import numpy as np
from numpy.typing import DTypeLike

from .rounding import quantised
from .score import Head, Options, ScoreOptions
from .semantics import REAL, Array, Causal, check_tile, dot_visible, or_one, or_zero, plain_array, shape_of


def load(x: Array, row: int, rows: int, dtype: DTypeLike) -> Array:
    """Rows [row, row + rows) of one head's tensor in global memory, (rows, D) or (rows,); fewer at the end."""
    return x[row : row + rows].astype(dtype)


def as_operand(P: Array, V: Array) -> Array:
    """P as an operand of P V: rounded to V's dtype if that is float8."""
    return quantised(P, V.dtype).astype(P.dtype) if V.dtype.itemsize == 1 else P


def store(x: Array, row: int, tile: Array) -> None:
    """Write `tile` to one head's tensor in global memory, from `row` on."""
    x[row : row + len(tile)] = tile


def flash1(
    q: Array,
    k: Array,
    v: Array,
    *,
    BLOCK_M: int,
    BLOCK_N: int,
    causal: Causal = False,
    scale: float | None = None,
    dtype: DTypeLike = np.float64,
    **options: Unpack[Options],
) -> tuple[Array, Array]:
    """FlashAttention's forward: outer loop over key tiles, inner loop over query tiles, which reads and writes O, l and
    m.

    q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), any float dtypes and strides; BLOCK_M, BLOCK_N ≥ 1, possibly
    larger than Sq, Sk; score options as in `attention`. Returns out (B, H, Sq, Dv) and lse (B, H, Sq) = m + ln l in
    `dtype`. As in the paper, causal skips no tiles. Raises ValueError for inconsistent shapes, an unknown `causal`, or
    a tile size below 1.

    Source: FlashAttention (Dao et al. 2022), Algorithm 2, which includes mask and dropout. Comments give its line
    numbers. `seed` replaces the generator state of line 1.
    """
    return _forward(_flash1_head, q, k, v, BLOCK_M, BLOCK_N, causal, scale, options, dtype)


def flash2(
    q: Array,
    k: Array,
    v: Array,
    *,
    BLOCK_M: int,
    BLOCK_N: int,
    causal: Causal = False,
    scale: float | None = None,
    dtype: DTypeLike = np.float64,
    **options: Unpack[Options],
) -> tuple[Array, Array]:
    """FlashAttention-2's forward: outer loop over query tiles, one division at the end, hidden key tiles skipped.

    Arguments, results and errors as in `flash1`.

    Source: FlashAttention-2 (Dao 2023), Algorithm 1; comments give its line numbers. Skipped tiles: section 3.1.
    """
    return _forward(_flash2_head, q, k, v, BLOCK_M, BLOCK_N, causal, scale, options, dtype)


def _flash1_head(Q: Array, K: Array, V: Array, O: Array, LSE: Array, BLOCK_M: int, BLOCK_N: int, head: Head) -> None:
    Sq, Sk, dtype = len(Q), len(K), O.dtype
    l, m = np.empty(Sq, dtype), np.empty(Sq, dtype)  # in global memory, unlike FlashAttention-2's
    store(O, 0, np.zeros(O.shape, dtype))  # line 3
    store(l, 0, np.full(Sq, head.sink > -np.inf, dtype))  # a sink acts as a key without a value that every row sees
    store(m, 0, np.full(Sq, head.sink, dtype))
    for n0 in range(0, Sk, BLOCK_N):  # line 6
        K_smem, V_smem = load(K, n0, BLOCK_N, dtype), load(V, n0, BLOCK_N, dtype)  # line 7
        for m0 in range(0, Sq, BLOCK_M):  # line 8
            Q_smem, O_rmem = load(Q, m0, BLOCK_M, dtype), load(O, m0, BLOCK_M, dtype)  # line 9
            l_old, m_old = load(l, m0, BLOCK_M, dtype), load(m, m0, BLOCK_M, dtype)
            S, visible, *_ = head.scores(Q_smem, K_smem, m0, n0)  # lines 10 and 11
            m_tile = S.max(axis=1)  # line 12
            P = np.exp(S - or_zero(m_tile)[:, None])
            l_tile = P.sum(axis=1)
            m_new = np.maximum(m_old, m_tile)  # line 13
            alpha, beta = np.exp(m_old - or_zero(m_new)), np.exp(m_tile - or_zero(m_new))
            l_new = alpha * l_old + beta * l_tile
            P = head.apply_dropout(as_operand(P, V), m0, n0)  # line 14
            O_rmem = (alpha * l_old)[:, None] * O_rmem + beta[:, None] * dot_visible(P, V_smem, visible)  # line 15
            store(O, m0, O_rmem / or_one(l_new)[:, None])
            store(l, m0, l_new)  # line 16
            store(m, m0, m_new)
    LSE[:] = m + np.log(l)  # for the caller: the algorithm itself leaves l and m


def _flash2_head(Q: Array, K: Array, V: Array, O: Array, LSE: Array, BLOCK_M: int, BLOCK_N: int, head: Head) -> None:
    Sq, dtype = len(Q), O.dtype
    for m0 in range(0, Sq, BLOCK_M):  # line 3
        Q_smem = load(Q, m0, BLOCK_M, dtype)  # line 4
        O_rmem = np.zeros((len(Q_smem), V.shape[1]), dtype)  # line 5
        l, m = (np.full(len(Q_smem), x, dtype) for x in (head.sink > -np.inf, head.sink))
        begin, end = head.key_range(m0, BLOCK_M)
        for n0 in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):  # line 6
            K_smem, V_smem = load(K, n0, BLOCK_N, dtype), load(V, n0, BLOCK_N, dtype)  # line 7
            S, visible, *_ = head.scores(Q_smem, K_smem, m0, n0)  # line 8
            m_new = np.maximum(m, S.max(axis=1))  # line 9
            P = np.exp(S - or_zero(m_new)[:, None])
            alpha = np.exp(m - or_zero(m_new))
            l = alpha * l + P.sum(axis=1)
            P = head.apply_dropout(as_operand(P, V), m0, n0)  # not in this paper; as in FlashAttention-1
            O_rmem = alpha[:, None] * O_rmem + dot_visible(P, V_smem, visible)  # line 10
            m = m_new
        store(O, m0, O_rmem / or_one(l)[:, None])  # lines 12 and 14
        store(LSE, m0, m + np.log(l))  # lines 13 and 15


class _ForwardHead(Protocol):
    def __call__(
        self, Q: Array, K: Array, V: Array, O: Array, LSE: Array, BLOCK_M: int, BLOCK_N: int, head: Head
    ) -> None: ...


@np.errstate(all="ignore")  # NaN and inf are legal inputs, and a row without visible keys computes log(0)
def _forward(
    one_head: _ForwardHead,
    q: Array,
    k: Array,
    v: Array,
    BLOCK_M: int,
    BLOCK_N: int,
    causal: Causal,
    scale: float | None,
    options: Options,
    dtype: DTypeLike,
) -> tuple[Array, Array]:
    q, k, v = (plain_array(x, name, REAL) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    shape = shape_of(q, k, v)
    check_tile(BLOCK_M, BLOCK_N)
    score_options = ScoreOptions(shape, causal, scale, **options)
    out, lse = np.empty((*q.shape[:3], shape.Dv), dtype), np.empty(q.shape[:3], dtype)
    for b, h in np.ndindex(shape.B, shape.H):
        hk = shape.key_head(h)
        scores = score_options.head(b, h)
        one_head(q[b, h], k[b, hk], v[b, hk], out[b, h], lse[b, h], BLOCK_M, BLOCK_N, scores)
        out[b, h] *= scores.descale
    return out, lse
