"""FlashAttention-2's backward as tiled loops, in the style of `flash`."""

from __future__ import annotations

from typing import Unpack

import numpy as np
from numpy.typing import DTypeLike

from .flash import load, store
from .gradients import Gradients
from .score import Head, Options, ScoreOptions
from .semantics import Array, Causal, check_gradient_shapes, check_tile, dot_visible, or_zero, plain_array, shape_of


@np.errstate(all="ignore")  # NaN and inf are legal inputs
def flash2_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    BLOCK_M: int,
    BLOCK_N: int,
    causal: Causal = False,
    scale: float | None = None,
    dlse: Array | None = None,
    dtype: DTypeLike = np.float64,
    **options: Unpack[Options],
) -> Gradients:
    """(dq, dk, dv): outer loop over key tiles, dK and dV accumulated on chip, dQ accumulated in global memory.

    dout and out (B, H, Sq, Dv), lse (from `flash2`) and dlse (B, H, Sq); the other arguments as in `flash1`. Results
    are in `dtype`; dbias and dsink as in `attention_backward`; dk and dv sum over the query heads of a group. Query
    tiles without visible keys in a key tile are skipped. Raises ValueError like `flash1`, and for dout, out, lse or
    dlse with a wrong shape.

    Source: FlashAttention-2 (Dao 2023), Algorithm 2; comments give its line numbers.
    """
    dout, q, k, v, out, lse = (plain_array(x) for x in (dout, q, k, v, out, lse))
    shape = shape_of(q, k, v)
    check_tile(BLOCK_M, BLOCK_N)
    check_gradient_shapes(shape, dout, out, lse, dlse)
    score_options = ScoreOptions(shape, causal, scale, **options)
    dq, dk, dv = np.zeros(q.shape, dtype), np.zeros(k.shape, dtype), np.zeros(v.shape, dtype)  # line 3
    delta = (dout.astype(dtype) * out.astype(dtype)).sum(axis=3)  # line 4
    if dlse is not None:
        delta -= plain_array(dlse, "dlse")  # the only effect of a gradient of LSE
    dbias = (
        None if score_options.bias is None else np.zeros(score_options.bias.shape, dtype)
    )  # one per head, summed below
    dsink = None if score_options.sink is None else np.zeros(shape.H, dtype)
    for b, h in np.ndindex(shape.B, shape.H):
        hk = shape.key_head(h)
        inputs = (dout[b, h], q[b, h], k[b, hk], v[b, hk], lse[b, h], delta[b, h])
        head = score_options.head(b, h)
        outputs = (dq[b, h], dk[b, hk], dv[b, hk], None if dbias is None else dbias[b, h])
        _backward_head(*inputs, *outputs, BLOCK_M, BLOCK_N, head, score_options.scale)
        if dsink is not None:
            dsink[h] += head.dsink(lse[b, h], delta[b, h]).sum()
    return Gradients(dq, dk, dv, None if dbias is None else score_options.dbias(dbias), dsink)


def _backward_head(
    dO: Array,
    Q: Array,
    K: Array,
    V: Array,
    LSE: Array,
    delta: Array,
    dQ: Array,
    dK: Array,
    dV: Array,
    dbias: Array | None,
    BLOCK_M: int,
    BLOCK_N: int,
    head: Head,
    scale: float,
) -> None:
    Sk, dtype = len(K), dQ.dtype
    for n0 in range(0, Sk, BLOCK_N):  # line 5
        K_smem, V_smem = load(K, n0, BLOCK_N, dtype), load(V, n0, BLOCK_N, dtype)  # line 6
        dK_rmem = load(dK, n0, BLOCK_N, dtype)  # line 7: 0, or the sum over the group's earlier heads
        dV_rmem = load(dV, n0, BLOCK_N, dtype)
        begin, end = head.query_range(n0, BLOCK_N)
        for m0 in range(begin // BLOCK_M * BLOCK_M, end, BLOCK_M):  # line 8
            Q_smem, dO_smem = load(Q, m0, BLOCK_M, dtype), load(dO, m0, BLOCK_M, dtype)  # line 9
            LSE_rmem, delta_rmem = load(LSE, m0, BLOCK_M, dtype), load(delta, m0, BLOCK_M, dtype)
            S, visible, dx_ddot, dx_dbias, _ = head.scores(Q_smem, K_smem, m0, n0)  # line 10
            P = np.where(visible, np.exp(S - or_zero(LSE_rmem)[:, None]), 0)  # line 11
            dV_rmem += dot_visible(head.apply_dropout(P, m0, n0).T, dO_smem, visible.T)  # line 12
            dP = head.apply_dropout(dO_smem @ V_smem.T, m0, n0)  # line 13
            dx = np.where(visible, P * (dP - delta_rmem[:, None]), 0)  # line 14: gradient of the score
            if dbias is not None:
                dbias[m0 : m0 + len(dx), n0 : n0 + dx.shape[1]] = np.where(visible, dx * dx_dbias, 0)
            dS = np.where(visible, dx * dx_ddot, 0)  # gradient of the scaled dot product
            dQ_rmem = load(dQ, m0, BLOCK_M, dtype)  # line 15
            store(dQ, m0, dQ_rmem + scale * dot_visible(dS, K_smem, visible))
            dK_rmem += scale * dot_visible(dS.T, Q_smem, visible.T)  # line 16
        store(dK, n0, dK_rmem)  # line 18
        store(dV, n0, dV_rmem)
