"""Dense attention, forward and backward: the truth in float64, and the yardstick in the input dtype.

One body serves both. The truth runs it in float64 and rounds nothing; the yardstick runs it in float32 and rounds
to the input dtype whatever plain attention stores (S, P, O, dP, dS and the gradients).

A row whose scores are all −inf, because it sees no key or because its inputs make them so, has no probability
mass: O = 0, LSE = −inf, gradients 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .rounding import dtype_name, round_to
from .semantics import (
    Array,
    Causal,
    Mask,
    check_gradient_shapes,
    dot_seen,
    or_one,
    or_zero,
    scores,
    shape_of,
    softmax_scale,
    visible,
)

Round = Callable[[Array], Array]

CHUNK = 1 << 18  # scores held at once: 2^18 * 8 B = 2 MiB, small enough to stay in cache from pass to pass


def attention(
    q: Array, k: Array, v: Array, *, causal: Causal = False, scale: float | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The truth: out = softmax(scale · q kᵀ) v and its LSE, float64 on the very inputs.

    q (B, H, Sq, D), k and v (B, Hk, Sk, D), any float dtypes and strides, Hk dividing H. `scale` defaults to
    1/sqrt(D). `causal` is False, True ("bottom-right") or "top-left". Returns out (B, H, Sq, D) and lse
    (B, H, Sq), the natural-log log-sum-exp of the scaled scores. Raises ValueError for shapes that do not fit and
    for an unknown `causal`.

    Source: FlashAttention-2 (Dao 2023), section 2.2: S, P and O.
    """
    return _forward(q, k, v, causal, scale, np.float64, _exact)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The true gradients (dq, dk, dv) of the loss sum(dout ∘ out), float64 on the very inputs.

    dout and out (B, H, Sq, D), lse (B, H, Sq); the other arguments as in `attention`. P = exp(S − LSE) and
    delta = rowsum(dO ∘ O) use `out` and `lse` as given; one that is None is computed. dk and dv sum over the query
    heads that share a key/value head. Raises ValueError as `attention` does, and for a misshapen dout, out or lse.

    Source: FlashAttention-2 (Dao 2023), section 2.2: dV, dP, dS, dQ, dK; delta from Algorithm 2, line 4.
    """
    if out is None or lse is None:
        true_out, true_lse = attention(q, k, v, causal=causal, scale=scale)
        out = true_out if out is None else out
        lse = true_lse if lse is None else lse
    return _backward(dout, q, k, v, out, lse, causal, scale, np.float64, _exact)


def naive(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    dtype: DTypeLike | None = None,
) -> NDArray[np.float32]:
    """The yardstick: out (B, H, Sq, D) of plain attention in `dtype` (by default q's) with fp32 accumulation.

    The scaled scores accumulate in fp32 and are rounded, the softmax is fp32 and its P rounded, P V accumulates in
    fp32 and is rounded. The result is float32 holding numbers of `dtype`; inputs of another dtype are rounded to it
    first. Scores beyond float16's range become inf and their rows NaN, as plain attention has them. Raises
    ValueError as `attention` does, and for a dtype other than float16, bfloat16, float32.
    """
    rounded = _rounding(q, dtype)
    return _forward(rounded(q), rounded(k), rounded(v), causal, scale, np.float32, rounded)[0]


def naive_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """The yardstick's gradients (dq, dk, dv): backpropagation through `naive`, each stored step rounded to `dtype`.

    P, dP and dS are rounded; the matrix products and the sum over a group's heads accumulate in fp32 and round
    once. delta is rowsum(P ∘ dP), as a softmax's own backward takes it. Shapes, dtypes and errors as in `naive`.
    """
    rounded = _rounding(q, dtype)
    inputs = (rounded(dout), rounded(q), rounded(k), rounded(v))
    dq, dk, dv = _backward(*inputs, None, None, causal, scale, np.float32, rounded)
    return round_to(dq, np.float32), round_to(dk, np.float32), round_to(dv, np.float32)


@np.errstate(all="ignore")
def backward_magnitudes(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The sizes that the rounding errors of dq, dk and dv are relative to: their sums, were no two terms to cancel.

    Every factor of a sum counts by its absolute value, dP − delta as |dP| + |delta|. P = exp(S − LSE) counts
    1 + |S| + |LSE| times: an error of the exponent is a relative error of P. Arguments as in `attention_backward`,
    results of the gradients' shapes, in float64.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1, to first order.
    """
    dout, q, k, v, out, lse = (np.asarray(x).astype(np.float64) for x in (dout, q, k, v, out, lse))
    shape = shape_of(q, k, v)
    check_gradient_shapes(q, dout, out, lse)
    scale, mask = softmax_scale(scale, shape.D), visible(shape.Sq, shape.Sk, causal)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, h in np.ndindex(shape.B, shape.H):
        hk = shape.key_head(h)
        K, V = abs(k[b, hk]), abs(v[b, hk])
        for rows in _chunks(shape.Sq, shape.Sk):
            seen, Q, dO, LSE = mask[rows], abs(q[b, h, rows]), abs(dout[b, h, rows]), or_zero(lse[b, h, rows])[:, None]
            P = np.exp(scores(q[b, h, rows], k[b, hk], seen, scale) - LSE) * (1 + abs(scale) * (Q @ K.T) + abs(LSE))
            P = np.where(seen, P, 0)
            delta = (dO * abs(out[b, h, rows])).sum(axis=1)
            dS = np.where(seen, P * (dO @ V.T + delta[:, None]), 0)
            dq[b, h, rows] = abs(scale) * dot_seen(dS, K, seen)
            dk[b, hk] += abs(scale) * dot_seen(dS.T, Q, seen.T)
            dv[b, hk] += dot_seen(P.T, dO, seen.T)
    return dq, dk, dv


def _exact(x: Array) -> Array:
    return x


def _rounding(q: Array, dtype: DTypeLike | None) -> Round:
    name = dtype_name(np.asarray(q).dtype if dtype is None else dtype)
    return lambda x: round_to(x, name)


def _chunks(Sq: int, Sk: int) -> Iterator[slice]:
    rows = max(1, CHUNK // max(1, Sk))
    return (slice(m0, m0 + rows) for m0 in range(0, Sq, rows))


def _softmax(S: Array, seen: Mask) -> tuple[Array, Array]:
    """P (M, N) and LSE (M,) of S (M, N). Unseen entries of P are exactly 0, even in a row whose l is NaN."""
    m = or_zero(S.max(axis=1, initial=-np.inf))
    P = np.exp(S - m[:, None])
    l = P.sum(axis=1)
    return np.where(seen, P / or_one(l)[:, None], 0), m + np.log(l)


@np.errstate(all="ignore")  # NaN and inf are legal inputs, and a row without keys takes log(0)
def _forward(
    q: Array, k: Array, v: Array, causal: Causal, scale: float | None, dtype: DTypeLike, rounded: Round
) -> tuple[Array, Array]:
    q, k, v = np.asarray(q), np.asarray(k), np.asarray(v)
    shape = shape_of(q, k, v)
    scale, mask = softmax_scale(scale, shape.D), visible(shape.Sq, shape.Sk, causal)
    out, lse = np.empty(q.shape, dtype), np.empty(q.shape[:3], dtype)
    for b, h in np.ndindex(shape.B, shape.H):
        K, V = (x[b, shape.key_head(h)].astype(dtype) for x in (k, v))
        for rows in _chunks(shape.Sq, shape.Sk):
            seen = mask[rows]
            S = rounded(scores(q[b, h, rows].astype(dtype), K, seen, scale))
            P, lse[b, h, rows] = _softmax(S, seen)
            out[b, h, rows] = rounded(dot_seen(rounded(P), V, seen))
    return out, lse


@np.errstate(all="ignore")
def _backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array | None,
    causal: Causal,
    scale: float | None,
    dtype: DTypeLike,
    rounded: Round,
) -> tuple[Array, Array, Array]:
    """With out and lse, P and delta come from them (FlashAttention); without, from the softmax (autograd)."""
    dout, q, k, v = np.asarray(dout), np.asarray(q), np.asarray(k), np.asarray(v)
    shape = shape_of(q, k, v)
    check_gradient_shapes(q, dout, out, lse)
    scale, mask = softmax_scale(scale, shape.D), visible(shape.Sq, shape.Sk, causal)
    dq, dk, dv = np.zeros(q.shape, dtype), np.zeros(k.shape, dtype), np.zeros(v.shape, dtype)
    for b, h in np.ndindex(shape.B, shape.H):
        hk = shape.key_head(h)
        K, V = k[b, hk].astype(dtype), v[b, hk].astype(dtype)
        for rows in _chunks(shape.Sq, shape.Sk):
            seen, Q, dO = mask[rows], q[b, h, rows].astype(dtype), dout[b, h, rows].astype(dtype)
            S = rounded(scores(Q, K, seen, scale))
            dP = rounded(dO @ V.T)
            if out is None or lse is None:
                P = rounded(_softmax(S, seen)[0])
                delta = np.where(seen, P * dP, 0).sum(axis=1)
            else:
                LSE = lse[b, h, rows].astype(dtype)
                P = np.where(seen, np.exp(S - or_zero(LSE)[:, None]), 0)
                delta = (dO * out[b, h, rows].astype(dtype)).sum(axis=1)
            dS = rounded(np.where(seen, P * (dP - delta[:, None]), 0))
            dq[b, h, rows] = scale * dot_seen(dS, K, seen)
            dk[b, hk] += scale * dot_seen(dS.T, Q, seen.T)
            dv[b, hk] += dot_seen(P.T, dO, seen.T)
    return rounded(dq), rounded(dk), rounded(dv)
