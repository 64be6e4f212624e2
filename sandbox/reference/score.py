"""What a score is, once for the dense and the tiled references: each step of its making, which keys are seen, and the
gradients of what it is made from.

For query i and key j of batch entry b and head h, `diagonal` being Sk − Sq, or 0 with "top-left", and Sk the number of
valid keys, each step if it is requested:

    x = scale · (q_i · k_j)                                 scale times the descale of q and of k
    x = softcap · tanh(x / softcap)
    x = x − slope[b, h] · |i + diagonal − j|
    x = x + bias[b, h, i, j]
    x = score(x, b, h, i, j)
    visible = j < Sk and causal and i + diagonal − left ≤ j ≤ i + diagonal + right and mask[b, h, i, j] and the
              score's own condition
    P = exp(x) / (Σ_visible exp(x) + exp(sink[h]))          0 if not visible; exp(sink[h]) only with a sink
    P = P ∘ keep / (1 − p)
    O = P v times the descale of v
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypedDict

import numpy as np

from .dropout import dropout_threshold, keep_tile
from .semantics import Array, Causal, Mask, Shape, causal_bounds, or_zero, plain_array, softmax_scale


class Expressions(Protocol):
    """A user's own expressions, such as a `sandbox.Score`, element by element."""

    def evaluate(
        self, x: Array, b: int, h: int, i: Array, j: Array, Sq: int, Sk: int
    ) -> tuple[Array, Array, Mask]:  # fmt: skip
        """(what x becomes, its derivative with respect to x, which are seen) of scores x (M, N) in float64 for query
        rows i (M, 1) and keys j (1, N)."""
        ...


class Part(NamedTuple):
    """q, k and v as a part of more: their batch entry 0, head 0 and row 0 are b, h and row, of Sq query rows."""

    b: int
    h: int
    row: int
    Sq: int


class Options(TypedDict, total=False):
    """What a score may be beyond scale and causal; NumPy arrays of any float dtype."""

    window: tuple[int | None, int | None] | None  # keys to the left, to the right of i + diagonal; None: no bound
    softcap: float  # 0: none
    alibi: Array | None  # slopes, (H,) or (B, H)
    bias: Array | None  # broadcastable to (B, H, Sq, Sk)
    mask: Array | None  # bool, broadcastable to (B, H, Sq, Sk): False hides
    sink: Array | None  # (H,)
    key_lengths: Array | None  # (B,): so many keys of each batch entry count
    score: Expressions | None
    dropout: float  # p, 0 <= p <= 1
    seed: int | None  # of dropout: 64 bits
    descale: tuple[Array | float, ...] | None  # what q, k, v are to be multiplied by, broadcastable to (B, heads) each
    part: Part | None  # what all others but `score` have of it is this part alone


class Scores(NamedTuple):
    """Of a tile, (M, N) each: x, −inf where it is not seen; what is seen; the derivatives of x with respect to the
    scaled dot product and to the bias; and the sizes of all that x is summed up from, were no two terms to cancel."""

    x: Array
    seen: Mask
    steep: Array | float
    steep_bias: Array | float
    size: Array | float


class ScoreOptions:
    """What the scores of one attention call are. Raises ValueError naming an option that does not fit its shapes,
    TypeError naming an unknown one."""

    def __init__(
        self, shape: Shape, causal: Causal, scale: float | None, *, window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0, alibi: Array | None = None, bias: Array | None = None, mask: Array | None = None,
        sink: Array | None = None, key_lengths: Array | None = None, score: Expressions | None = None,
        dropout: float = 0.0, seed: int | None = None, descale: tuple[Array | float, ...] | None = None,
        part: Part | None = None, **unknown: object,
    ):  # fmt: skip
        if unknown:
            raise TypeError(
                f"sandbox.reference: unexpected keyword argument {next(iter(unknown))!r}: the options are causal, "
                f"scale, {', '.join(Options.__annotations__)}"
            )
        full = (shape.B, shape.H, shape.Sq, shape.Sk)
        self.shape, self.scale, self.softcap, self.user = shape, softmax_scale(scale, shape.D), float(softcap), score
        self.part = part or Part(0, 0, 0, shape.Sq)
        self.aligned_right = causal != "top-left"
        self.left, self.right = causal_bounds(causal, window)
        self.bias_shape = None if bias is None else np.shape(bias)
        self.bias = _broadcast("bias", bias, full)
        self.mask = _broadcast("mask", mask, full)
        self.slopes = _broadcast("alibi", alibi, full[:2])
        self.sink = _broadcast("sink", sink, full[1:2], exact=True)
        self.lengths = _broadcast("key_lengths", key_lengths, full[:1], exact=True)
        if dropout and seed is None:
            raise ValueError(f"dropout={dropout} needs a seed: pass the one that the kernels were given")
        dropout_threshold(dropout)
        self.dropout, self.seed = float(dropout), seed
        heads = (shape.H, shape.Hk, shape.Hk)
        self.descale = [
            np.broadcast_to(np.asarray(x, np.float64), (shape.B, n))
            for x, n in zip(descale or (1.0, 1.0, 1.0), heads, strict=True)
        ]

    def head(self, b: int, h: int) -> Head:
        """The scores of head h of batch entry b."""
        return Head(self, b, h)

    def dbias(self, dx: Array) -> Array:
        """The sum of dx (B, H, Sq, Sk) over all that the bias was broadcast along, in its shape."""
        assert self.bias_shape is not None
        extra = dx.ndim - len(self.bias_shape)
        summed = dx.sum(axis=tuple(range(extra)))
        along = tuple(axis for axis, n in enumerate(self.bias_shape) if n == 1)
        return np.asarray(summed.sum(axis=along, keepdims=True)).reshape(self.bias_shape)


class Head:
    """Scores of one head: `Sk` keys that count, `sink` or −inf, and what follows from a dot product's place.

    Rows count from the first of q; row + `diagonal` is the row's own place among the keys.
    """

    def __init__(self, score_options: ScoreOptions, b: int, h: int):
        shape = score_options.shape
        self._options, self._b, self._h, self._Sq = score_options, b, h, shape.Sq
        self.Sk = shape.Sk if score_options.lengths is None else int(np.clip(score_options.lengths[b], 0, shape.Sk))
        self.diagonal = score_options.part.row + (self.Sk - score_options.part.Sq if score_options.aligned_right else 0)
        self.sink = -np.inf if score_options.sink is None else float(score_options.sink[h])
        of_q, of_k, of_v = score_options.descale
        self.scale = score_options.scale * float(of_q[b, h]) * float(of_k[b, shape.key_head(h)])
        self.descale = float(of_v[b, shape.key_head(h)])  # of O

    def seen(self, m0: int, rows: int, n0: int, cols: int) -> Mask:
        """The part (rows, cols) of what is seen, without the user's own condition, at query row m0 and key n0."""
        j, own = np.arange(n0, n0 + cols)[None, :], np.arange(m0, m0 + rows)[:, None] + self.diagonal
        seen = np.broadcast_to(j < self.Sk, (rows, cols))
        if (left := self._options.left) is not None:
            seen = seen & (own - left <= j)
        if (right := self._options.right) is not None:
            seen = seen & (j <= own + right)
        if self._options.mask is not None:
            seen = seen & self._options.mask[self._b, self._h, m0 : m0 + rows, n0 : n0 + cols]
        return seen

    def scores(self, Q: Array, K: Array, m0: int = 0, n0: int = 0, *, sized: bool = False) -> Scores:
        """Of query rows Q (M, D) from m0 on and keys K (N, D) from n0 on, in their dtype; their sizes if `sized`."""
        of, dtype = self._options, Q.dtype
        i, j = np.arange(m0, m0 + len(Q))[:, None], np.arange(n0, n0 + len(K))[None, :]
        seen = self.seen(m0, len(Q), n0, len(K))
        steep: Array | float = 1.0
        own: Array | float = 1.0  # the derivative of the last step alone
        x: Array = self.scale * (Q @ K.T)
        size: Array | float = abs(self.scale) * (abs(Q) @ abs(K).T) if sized else 0.0
        if of.softcap:
            y = np.tanh(x / of.softcap)
            x, steep = of.softcap * y, 1 - y * y
            size = steep * size + abs(x)
        if of.slopes is not None:
            term = (of.slopes[self._b, self._h] * abs(i + self.diagonal - j)).astype(dtype)
            x, size = x - term, size + abs(term)
        if of.bias is not None:
            term = of.bias[self._b, self._h, m0 : m0 + len(Q), n0 : n0 + len(K)].astype(dtype)
            x, size = x + term, size + abs(term)
        if of.user is not None:
            b, h, row, Sq = of.part
            place = (b + self._b, h + self._h, row + i, j, Sq, self.Sk)
            value, own, condition = of.user.evaluate(x.astype(np.float64), *place)
            own = own.astype(dtype)
            x, steep, seen = value.astype(dtype), steep * own, seen & condition
            size = abs(own) * size + abs(x)
        return Scores(np.where(seen, x, -np.inf), seen, steep, own, size)

    def dropped(self, x: Array, m0: int = 0, n0: int = 0) -> Array:
        """What dropout makes of P, or of dP, (M, N) from query row m0 and key n0 on: x / (1 − p), or 0."""
        of = self._options
        if not of.dropout or of.seed is None:
            return x
        b, h, row, _ = of.part
        kept = keep_tile(of.seed, b + self._b, h + self._h, row + m0, x.shape[0], n0, x.shape[1], of.dropout)
        return np.where(kept, x / x.dtype.type(1 - of.dropout), 0) if of.dropout < 1 else np.zeros_like(x)

    def keys(self, m0: int, BLOCK_M: int) -> tuple[int, int]:
        """[begin, end) of the keys that some row of the query tile [m0, m0 + BLOCK_M) may see by its place."""
        first, last = m0 + self.diagonal, min(m0 + BLOCK_M, self._Sq) - 1 + self.diagonal
        begin = 0 if self._options.left is None else max(0, first - self._options.left)
        end = self.Sk if self._options.right is None else max(0, min(self.Sk, last + self._options.right + 1))
        return (begin, end) if begin < end else (0, 0)

    def queries(self, n0: int, BLOCK_N: int) -> tuple[int, int]:
        """[begin, end) of the query rows that may see some key of the tile [n0, n0 + BLOCK_N) by its place."""
        last = min(n0 + BLOCK_N, self.Sk) - 1
        if last < n0:
            return 0, 0
        begin = 0 if self._options.right is None else max(0, n0 - self.diagonal - self._options.right)
        end = self._Sq if self._options.left is None else min(self._Sq, last - self.diagonal + self._options.left + 1)
        return (begin, end) if begin < end else (0, 0)

    def dsink(self, LSE: Array, delta: Array) -> Array:
        """What rows of that LSE and delta add to the gradient of the sink: its dP is 0."""
        return -(np.exp(self.sink - or_zero(LSE)) * delta)


def _broadcast(name: str, x: Array | None, shape: tuple[int, ...], exact: bool = False) -> Array | None:
    if x is None:
        return None
    x = plain_array(x)
    try:
        if exact and x.shape != shape:
            raise ValueError
        return np.broadcast_to(x, shape)
    except ValueError:
        how = "must be" if exact else "must broadcast to"
        raise ValueError(f"{name} has shape {x.shape}: it {how} {shape}") from None
