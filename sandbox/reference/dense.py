"""Dense attention, forward and backward: the reference in float64, and naive attention in the input dtype.

Both share the same code. The reference computes in float64 without rounding. Naive attention computes in float32 and
rounds the stored tensors (S, P, O, dP, dS and the gradients) to the input dtype.

A row whose scores are all −inf, because no key is visible or because of its inputs, has O = 0, LSE = −inf (or the
sink's value), and gradients 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .gradients import Gradients, Sums
from .rounding import LARGEST_FINITE, dtype_name, quantised, round_to, sum_rounding
from .score import Options, ScoreOptions
from .semantics import (
    REAL,
    Array,
    Causal,
    Mask,
    check_gradient_shapes,
    dot_visible,
    or_one,
    or_zero,
    plain_array,
    shape_of,
)

Round = Callable[[Array], Array]

CHUNK = 1 << 18  # scores computed at once: 2^18 * 8 B = 2 MiB, which fits in cache


def attention(
    q: Array, k: Array, v: Array, *, causal: Causal = False, scale: float | None = None, **options: Unpack[Options]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The reference: out = softmax(scores of q kᵀ) v and its LSE, in float64 on the same inputs.

    q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), any float dtypes and strides, NumPy arrays or PyTorch tensors;
    H is a multiple of Hk. `scale` defaults to 1/sqrt(D). `causal` is False, True ("bottom-right") or "top-left". The
    score options are those of `reference.score.Options`.
    Returns out (B, H, Sq, Dv) and lse (B, H, Sq), the natural log of the sum of the exponentials of the scores and the
    sink. Raises ValueError for inconsistent shapes and for an invalid option.

    Source: FlashAttention-2 (Dao 2023), section 2.2: S, P and O.
    """
    return _forward(q, k, v, causal, scale, options, np.float64, _EXACTLY)


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
    dlse: Array | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """The reference gradients (dq, dk, dv) of the loss sum(dout ∘ out) + sum(dlse ∘ lse), in float64 on the same
    inputs.

    dout and out (B, H, Sq, Dv), lse and dlse (B, H, Sq); the other arguments as in `attention`. P = exp(S − LSE) and
    delta = rowsum(dO ∘ O) use the given `out` and `lse`; if None, they are computed. dk and dv sum over the query heads
    of a group. The result is a tuple of three with attributes `dbias` (in the bias's shape) and `dsink`, which are None
    without the option. Raises ValueError like `attention`, and for dout, out, lse or dlse with a wrong shape.

    Source: FlashAttention-2 (Dao 2023), section 2.2: dV, dP, dS, dQ, dK; delta from Algorithm 2, line 4.
    """
    if out is None or lse is None:
        ref_out, ref_lse = attention(q, k, v, causal=causal, scale=scale, **options)
        out = ref_out if out is None else out
        lse = ref_lse if lse is None else lse
    return _backward(dout, q, k, v, out, lse, dlse, causal, scale, options, np.float64, _exact)


def naive(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    dtype: DTypeLike | None = None,
    v_dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    **options: Unpack[Options],
) -> NDArray[np.float32]:
    """Naive attention: out (B, H, Sq, Dv) of plain attention in `dtype` (default: q's) with fp32 accumulation.

    Scores are computed in fp32 and rounded once; the softmax is computed in fp32 and P rounded; P V is accumulated in
    fp32 and rounded. The result is a float32 array with values of `dtype`. Inputs of other dtypes are first rounded to
    it, except tensors of options. Scores beyond float16's range become inf, and their rows NaN. For float8, scores stay
    in fp32, P is rounded to `v_dtype` (default: q's) with `quantised`, and the result to `out_dtype` (default:
    bfloat16). Raises ValueError like `attention`, and for an unknown dtype.
    """
    name = dtype_name(plain_array(q, "q").dtype if dtype is None else dtype)
    rounded = _rounding(q, name)
    if name not in LARGEST_FINITE:
        same = Roundings(rounded, rounded, rounded, rounded)
        return _forward(rounded(q), rounded(k), rounded(v), causal, scale, options, np.float32, same)[0]
    v_name, out_name = dtype_name(v_dtype or name), dtype_name(out_dtype or "bfloat16")

    def round_P(P: Array) -> Array:
        row_max = or_one(np.where(P == P, P, 0).max(axis=1, keepdims=True, initial=0))
        return quantised(P / row_max, v_name) * row_max

    steps = Roundings(_exact, round_P, _exact, lambda x: round_to(x, out_name))
    return _forward(rounded(q), rounded(k), round_to(v, v_name), causal, scale, options, np.float32, steps)[0]


def naive_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: Causal = False,
    scale: float | None = None,
    dlse: Array | None = None,
    dtype: DTypeLike | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """Gradients (dq, dk, dv) of naive attention: backpropagation through `naive`, with stored tensors rounded to
    `dtype`.

    P, dP and dS are rounded. Matrix products and the sums over the heads of a group and over broadcast axes of a bias
    are accumulated in fp32 and rounded once; dsink is not rounded. delta is rowsum(P ∘ dP), as in the backward of
    softmax. Shapes, dtypes and errors as in `naive`, the result as in `attention_backward`.
    """
    rounded = _rounding(q, dtype)
    inputs = (rounded(dout), rounded(q), rounded(k), rounded(v))
    return _backward(*inputs, None, None, dlse, causal, scale, options, np.float32, rounded)


@np.errstate(all="ignore")
def output_rounding(
    q: Array, k: Array, v: Array, out: Array, *, causal: Causal = False, scale: float | None = None,
    **options: Unpack[Options],
) -> NDArray[np.float64]:  # fmt: skip
    """The rounding error of O if all steps are computed in fp32, in O's shape (B, H, Sq, Dv), in float64.

    It has two parts: that of the sum of P v, whose magnitude is the sum of |P v|, and that of the scores. An error of a
    score changes O by P (v − O) times as much, so that the magnitude of the second part is the sum of P |S| |v − O|,
    where |S| is the sum of the absolute terms of a score. Its upper bound of Cauchy and Schwarz is used, which matrix
    products compute. `out` is the reference's; the other arguments as in `attention`.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1, to first order.
    """
    q, k, v, out = (plain_array(x).astype(np.float64) for x in (q, k, v, out))
    shape = shape_of(q, k, v)
    score_options = ScoreOptions(shape, causal, scale, **options)
    errors = np.empty_like(out)
    for b, h in np.ndindex(shape.B, shape.H):
        head, hk = score_options.head(b, h), shape.key_head(h)
        V = v[b, hk] * head.descale
        for rows in _chunks(shape.Sq, shape.Sk):
            S, O = head.scores(q[b, h, rows], k[b, hk], rows.start, magnitude=True), out[b, h, rows]
            P = _softmax(S.x, S.visible, head.sink)[0]
            weights = np.where(S.visible, P * S.magnitude, 0)
            dropped = head.apply_dropout(weights, rows.start)  # with dropout, v has the factor keep / (1 − p)
            dropped_twice, total = head.apply_dropout(dropped, rows.start), weights.sum(axis=1, keepdims=True)
            squares = (
                dot_visible(dropped_twice, V * V, S.visible)
                - 2 * O * dot_visible(dropped, V, S.visible)
                + O * O * total
            )
            score_error = np.sqrt(total * np.maximum(squares, 0))
            sum_terms = dot_visible(head.apply_dropout(P, rows.start), abs(V), S.visible)
            keys = S.visible.sum(axis=1, keepdims=True)
            errors[b, h, rows] = sum_rounding(sum_terms, keys) + sum_rounding(score_error, shape.D)
    return errors


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
    dlse: Array | None = None,
    **options: Unpack[Options],
) -> Gradients:
    """The magnitudes to which the rounding errors of dq, dk and dv are relative: sums of the terms' absolute values.

    All factors are replaced by their absolute values, dP − delta by |dP| + |delta|. P = exp(S − LSE) is multiplied by 1
    + |S| + |LSE|, where |S| is the sum of the absolute terms of a score, because an error of the exponent is a relative
    error of P. Arguments as in `attention_backward`, results in the gradients' shapes, in float64.

    Source: Higham, Accuracy and Stability of Numerical Algorithms (2002), section 3.1, to first order.
    """
    dout, q, k, v, out, lse = (plain_array(x).astype(np.float64) for x in (dout, q, k, v, out, lse))
    shape = shape_of(q, k, v)
    check_gradient_shapes(shape, dout, out, lse, dlse)
    score_options = ScoreOptions(shape, causal, scale, **options)
    sums = Sums(score_options, np.float64)
    for b, h in np.ndindex(shape.B, shape.H):
        head, hk = score_options.head(b, h), shape.key_head(h)
        V = abs(v[b, hk])
        for rows in _chunks(shape.Sq, shape.Sk):
            S = head.scores(q[b, h, rows], k[b, hk], rows.start, magnitude=True)
            dO, LSE = abs(dout[b, h, rows]), or_zero(lse[b, h, rows])[:, None]
            P = np.where(S.visible, np.exp(S.x - LSE) * (1 + S.magnitude + abs(LSE)), 0)
            delta = (dO * abs(out[b, h, rows])).sum(axis=1)
            if dlse is not None:
                delta += abs(plain_array(dlse).astype(np.float64)[b, h, rows])
            dx = np.where(S.visible, P * (head.apply_dropout(dO @ V.T, rows.start) + delta[:, None]), 0)
            P = head.apply_dropout(P, rows.start)
            Q, K = abs(q[b, h, rows]), abs(k[b, hk])
            # The derivatives may be NaN in rows without visible keys.
            dS, dbias = (np.where(S.visible, abs(s) * dx, 0) for s in (S.dx_ddot, S.dx_dbias))
            sums.add(b, h, rows, S.visible, P, dS, dbias, Q, K, dO)
            sums.dsink[h] += abs(head.dsink(lse[b, h, rows], delta) * (1 + abs(head.sink) + abs(LSE[:, 0]))).sum()
    return sums.gradients(np.abs)  # for a negative scale


def _exact(x: Array) -> Array:
    return x


class Roundings(NamedTuple):
    """Rounding of S, of P before and after dropout, and of O."""

    S: Round
    P: Round
    dropped: Round
    O: Round


_EXACTLY = Roundings(_exact, _exact, _exact, _exact)


def _rounding(q: Array, dtype: DTypeLike | None) -> Round:
    name = dtype_name(plain_array(q, "q").dtype if dtype is None else dtype)
    return lambda x: round_to(x, name)


def _chunks(Sq: int, Sk: int) -> Iterator[slice]:
    rows = max(1, CHUNK // max(1, Sk))
    return (slice(m0, min(Sq, m0 + rows)) for m0 in range(0, Sq, rows))


def _softmax(S: Array, visible: Mask, sink: float) -> tuple[Array, Array]:
    """P (M, N) and LSE (M,) of S (M, N). Masked entries of P are exactly 0, even if l is NaN."""
    m = or_zero(np.maximum(S.max(axis=1, initial=-np.inf), S.dtype.type(sink)))
    P = np.exp(S - m[:, None])
    l = P.sum(axis=1) + np.exp(S.dtype.type(sink) - m)
    return np.where(visible, P / or_one(l)[:, None], 0), m + np.log(l)


@np.errstate(all="ignore")  # NaN and inf are legal inputs, and a row without visible keys computes log(0)
def _forward(
    q: Array, k: Array, v: Array, causal: Causal, scale: float | None, options: Options, dtype: DTypeLike,
    rounded: Roundings,
) -> tuple[Array, Array]:  # fmt: skip
    q, k, v = (plain_array(x, name, REAL) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    shape = shape_of(q, k, v)
    score_options = ScoreOptions(shape, causal, scale, **options)
    out, lse = np.empty((*q.shape[:3], shape.Dv), dtype), np.empty(q.shape[:3], dtype)
    for b, h in np.ndindex(shape.B, shape.H):
        K, V = (x[b, shape.key_head(h)].astype(dtype) for x in (k, v))
        head = score_options.head(b, h)
        for rows in _chunks(shape.Sq, shape.Sk):
            S = head.scores(q[b, h, rows].astype(dtype), K, rows.start)
            P, lse[b, h, rows] = _softmax(rounded.S(S.x), S.visible, head.sink)
            P = rounded.dropped(head.apply_dropout(rounded.P(P), rows.start))
            out[b, h, rows] = rounded.O(dot_visible(P, V, S.visible) * P.dtype.type(head.descale))
    return out, lse


@np.errstate(all="ignore")
def _backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array | None, lse: Array | None, dlse: Array | None,
    causal: Causal, scale: float | None, options: Options, dtype: DTypeLike, rounded: Round,
) -> Gradients:  # fmt: skip
    """P and delta come from out and lse if given (as in FlashAttention), else from the softmax (as in autograd)."""
    dout = plain_array(dout, "dout", REAL)
    q, k, v = (plain_array(x, name, REAL) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    out, lse, dlse = (x if x is None else plain_array(x, n) for x, n in ((out, "out"), (lse, "lse"), (dlse, "dlse")))
    shape = shape_of(q, k, v)
    check_gradient_shapes(shape, dout, out, lse, dlse)
    score_options = ScoreOptions(shape, causal, scale, **options)
    sums = Sums(score_options, dtype)
    for b, h in np.ndindex(shape.B, shape.H):
        head, hk = score_options.head(b, h), shape.key_head(h)
        K, V = k[b, hk].astype(dtype), v[b, hk].astype(dtype)
        for rows in _chunks(shape.Sq, shape.Sk):
            Q, dO = q[b, h, rows].astype(dtype), dout[b, h, rows].astype(dtype)
            S = head.scores(Q, K, rows.start)
            dP = rounded(head.apply_dropout(rounded(dO @ V.T), rows.start))
            if out is None or lse is None:
                P, LSE = _softmax(rounded(S.x), S.visible, head.sink)
                P = rounded(P)
                delta = np.where(S.visible, P * dP, 0).sum(axis=1)
            else:
                LSE = lse[b, h, rows].astype(dtype)
                P = np.where(S.visible, np.exp(S.x - or_zero(LSE)[:, None]), 0)
                delta = (dO * out[b, h, rows].astype(dtype)).sum(axis=1)
            if dlse is not None:
                delta = delta - dlse[b, h, rows].astype(dtype)
            dx = rounded(np.where(S.visible, P * (dP - delta[:, None]), 0))
            dS, dbias = (dx if isinstance(s, float) else rounded(np.where(S.visible, dx * s, 0)) for s in S[2:4])
            P = rounded(head.apply_dropout(P, rows.start))
            sums.add(b, h, rows, S.visible, P, dS, dbias, Q, K, dO)
            sums.dsink[h] += head.dsink(LSE, delta).sum()
    return sums.gradients(rounded)
