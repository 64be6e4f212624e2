"""Score modifications, masks and dropout of the dense and the tiled references, and the derivatives of a score.

For query i and key j of batch entry b and head h, where Sk is the number of valid keys and `diagonal` is Sk − Sq, or 0
with "top-left". A step whose option is off is left out:

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

from operator import index
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np

from .dropout import dropout_threshold, keep_tile
from .semantics import (
    BOOL,
    INTEGER,
    REAL,
    Array,
    Causal,
    Mask,
    Shape,
    causal_bounds,
    finite,
    or_zero,
    plain_array,
    softmax_scale,
)


class Expressions(Protocol):
    """A user's own expressions, such as a `sandbox.Score`, element by element."""

    def evaluate(
        self, x: Array, b: int, h: int, i: Array, j: Array, Sq: int, Sk: int
    ) -> tuple[Array, Array, Mask]:  # fmt: skip
        """The modified scores, their derivative with respect to x, and the mask of visible pairs, (M, N) each, of
        scores x (M, N) in float64, query rows i (M, 1) and keys j (1, N)."""
        ...


class Part(NamedTuple):
    """Position of q, k and v in a larger problem: their batch entry 0, head 0 and query row 0 are its b, h and row; Sq
    is its number of query rows."""

    b: int
    h: int
    row: int
    Sq: int


class Options(TypedDict, total=False):
    """Score options, seed, descale and part, without scale and causal; NumPy arrays of any float dtype."""

    window: tuple[int | None, int | None] | None  # keys to the left, to the right of i + diagonal; None: no bound
    softcap: float  # 0: none
    alibi: Array | None  # slopes, (H,) or (B, H)
    bias: Array | None  # broadcastable to (B, H, Sq, Sk)
    mask: Array | None  # bool, broadcastable to (B, H, Sq, Sk): False hides
    sink: Array | None  # (H,)
    key_lengths: Array | None  # (B,): the number of valid keys of each batch entry
    score: Expressions | None
    dropout: float  # p, 0 <= p <= 1
    seed: int | None  # of dropout: 64 bits
    descale: tuple[Array | float, ...] | None  # the factors of q, k and v, broadcastable to (B, heads) each
    part: Part | None  # the position in a larger problem; all options except `score` belong to the part alone


class Scores(NamedTuple):
    """The scores of a tile, and what their gradients and error bounds need; (M, N) each."""

    x: Array  # −inf where not visible
    visible: Mask
    dx_ddot: Array | float  # derivative of x with respect to the scaled dot product
    dx_dbias: Array | float  # derivative of x with respect to the bias
    magnitude: Array | float  # sum of the absolute values of the terms of x


class ScoreOptions:
    """The checked options of one attention call. Raises ValueError for an option that does not fit the shapes, and
    TypeError for an unknown one."""

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
        self.shape, self.scale = shape, softmax_scale(scale, shape.D)
        self.softcap, self.expressions = finite("softcap", softcap or 0.0), score
        if self.softcap < 0:
            raise ValueError(f"softcap={self.softcap!r} must be positive, or 0 for none")
        if score is not None and not hasattr(score, "evaluate"):
            raise ValueError(f'score={score!r} must be a sandbox.Score, such as sandbox.Score("x - 0.1f * abs(i - j)")')
        self.part = part or Part(0, 0, 0, shape.Sq)
        self.aligned_right = causal != "top-left"
        self.left, self.right = causal_bounds(causal, window)
        self.bias_shape = None if bias is None else np.shape(bias)
        self.bias = _broadcast("bias", bias, full)
        self.mask = _broadcast("mask", mask, full, kinds=BOOL)
        self.slopes = _broadcast("alibi", alibi, full[:2])
        self.sink = _broadcast("sink", sink, full[1:2], exact=True)
        self.lengths = _broadcast("key_lengths", key_lengths, full[:1], exact=True, kinds=INTEGER)
        dropout = finite("dropout", dropout or 0.0)
        if dropout and seed is None:
            raise ValueError(f"dropout={dropout} needs a seed: pass the one that the kernels were given")
        dropout_threshold(dropout)
        self.dropout, self.seed = dropout, None if seed is None else _integer("seed", seed)
        heads = (shape.H, shape.Hk, shape.Hk)
        if len(descale or heads) != 3:
            raise ValueError(f"descale={descale!r} must have three elements: the factors of q, k and v")
        self.descale = [
            np.broadcast_to(plain_array(x, "descale").astype(np.float64), (shape.B, n))
            for x, n in zip(descale or (1.0, 1.0, 1.0), heads, strict=True)
        ]

    def head(self, b: int, h: int) -> Head:
        """The scores of head h of batch entry b."""
        return Head(self, b, h)

    def dbias(self, dx: Array) -> Array:
        """The gradient of the bias, in its shape: the sum of dx (B, H, Sq, Sk) over the axes it was broadcast along."""
        assert self.bias_shape is not None
        extra = dx.ndim - len(self.bias_shape)
        summed = dx.sum(axis=tuple(range(extra)))
        along = tuple(axis for axis, n in enumerate(self.bias_shape) if n == 1)
        return np.asarray(summed.sum(axis=along, keepdims=True)).reshape(self.bias_shape)


class Head:
    """Scores of one head of one batch entry.

    `Sk` is the number of valid keys; `sink` is −inf without the option. Rows are counted from the first of q; the
    diagonal of a row is key row + `diagonal`.
    """

    def __init__(self, score_options: ScoreOptions, b: int, h: int):
        shape = score_options.shape
        self._options, self._b, self._h, self._Sq = score_options, b, h, shape.Sq
        self.Sk = shape.Sk if score_options.lengths is None else int(np.clip(score_options.lengths[b], 0, shape.Sk))
        self.diagonal = score_options.part.row + (self.Sk - score_options.part.Sq if score_options.aligned_right else 0)
        self.sink = -np.inf if score_options.sink is None else float(score_options.sink[h])
        descale_q, descale_k, descale_v = score_options.descale
        self.scale = score_options.scale * float(descale_q[b, h]) * float(descale_k[b, shape.key_head(h)])
        self.descale = float(descale_v[b, shape.key_head(h)])  # of O

    def visible(self, m0: int, rows: int, n0: int, cols: int) -> Mask:
        """The tile (rows, cols) of the mask that begins at query row m0 and key n0, without `score`'s condition."""
        j, at_diagonal = np.arange(n0, n0 + cols)[None, :], np.arange(m0, m0 + rows)[:, None] + self.diagonal
        visible = np.broadcast_to(j < self.Sk, (rows, cols))
        if (left := self._options.left) is not None:
            visible = visible & (at_diagonal - left <= j)
        if (right := self._options.right) is not None:
            visible = visible & (j <= at_diagonal + right)
        if self._options.mask is not None:
            visible = visible & self._options.mask[self._b, self._h, m0 : m0 + rows, n0 : n0 + cols]
        return visible

    def scores(self, Q: Array, K: Array, m0: int = 0, n0: int = 0, *, magnitude: bool = False) -> Scores:
        """Scores of query rows Q (M, D) from m0 on and keys K (N, D) from n0 on, in Q's dtype. Without `magnitude`,
        that field is not computed."""
        options, dtype = self._options, Q.dtype
        i, j = np.arange(m0, m0 + len(Q))[:, None], np.arange(n0, n0 + len(K))[None, :]
        visible = self.visible(m0, len(Q), n0, len(K))
        dx_ddot: Array | float = 1.0
        dx_dbias: Array | float = 1.0  # the bias is added before the user's expression only
        x: Array = self.scale * (Q @ K.T)
        terms: Array | float = abs(self.scale) * (abs(Q) @ abs(K).T) if magnitude else 0.0
        if options.softcap:
            y = np.tanh(x / options.softcap)
            x, dx_ddot = options.softcap * y, 1 - y * y
            terms = dx_ddot * terms + abs(x)
        if options.slopes is not None:
            term = (options.slopes[self._b, self._h] * abs(i + self.diagonal - j)).astype(dtype)
            x, terms = x - term, terms + abs(term)
        if options.bias is not None:
            term = options.bias[self._b, self._h, m0 : m0 + len(Q), n0 : n0 + len(K)].astype(dtype)
            x, terms = x + term, terms + abs(term)
        if options.expressions is not None:
            b, h, row, Sq = options.part
            position = (b + self._b, h + self._h, row + i, j, Sq, self.Sk)
            new_x, dx_dbias, condition = options.expressions.evaluate(x.astype(np.float64), *position)
            dx_dbias = dx_dbias.astype(dtype)
            x, dx_ddot, visible = new_x.astype(dtype), dx_ddot * dx_dbias, visible & condition
            terms = abs(dx_dbias) * terms + abs(x)
        return Scores(np.where(visible, x, -np.inf), visible, dx_ddot, dx_dbias, terms)

    def apply_dropout(self, x: Array, m0: int = 0, n0: int = 0) -> Array:
        """P or dP (M, N), from query row m0 and key n0 on, after dropout: x / (1 − p), or 0."""
        options = self._options
        if not options.dropout or options.seed is None:
            return x
        b, h, row, _ = options.part
        kept = keep_tile(options.seed, b + self._b, h + self._h, row + m0, x.shape[0], n0, x.shape[1], options.dropout)
        return np.where(kept, x / x.dtype.type(1 - options.dropout), 0) if options.dropout < 1 else np.zeros_like(x)

    def key_range(self, m0: int, BLOCK_M: int) -> tuple[int, int]:
        """[begin, end) of the keys that causal and window leave visible to the query tile [m0, m0 + BLOCK_M)."""
        first, last = m0 + self.diagonal, min(m0 + BLOCK_M, self._Sq) - 1 + self.diagonal
        begin = 0 if self._options.left is None else max(0, first - self._options.left)
        end = self.Sk if self._options.right is None else max(0, min(self.Sk, last + self._options.right + 1))
        return (begin, end) if begin < end else (0, 0)

    def query_range(self, n0: int, BLOCK_N: int) -> tuple[int, int]:
        """[begin, end) of the query rows to which causal and window leave a key of the tile [n0, n0 + BLOCK_N)
        visible."""
        last = min(n0 + BLOCK_N, self.Sk) - 1
        if last < n0:
            return 0, 0
        begin = 0 if self._options.right is None else max(0, n0 - self.diagonal - self._options.right)
        end = self._Sq if self._options.left is None else min(self._Sq, last - self.diagonal + self._options.left + 1)
        return (begin, end) if begin < end else (0, 0)

    def dsink(self, LSE: Array, delta: Array) -> Array:
        """The gradient of the sink from each row, (M,), of rows with this LSE and delta. The dP of a sink is 0."""
        return -(np.exp(self.sink - or_zero(LSE)) * delta)


def _integer(name: str, value: Any) -> int:
    """`value` as an int. Raises ValueError unless it is an integer, or an array of one."""
    try:
        return index(value)
    except TypeError:
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in INTEGER:
            raise ValueError(f"{name}={value!r} must be an integer, or an array of one") from None
        return int(array.item())


def _broadcast(
    name: str, x: Array | None, shape: tuple[int, ...], exact: bool = False, kinds: str = REAL
) -> Array | None:  # fmt: skip
    if x is None:
        return None
    x = plain_array(x, name, kinds)
    try:
        if exact and x.shape != shape:
            raise ValueError
        return np.broadcast_to(x, shape)
    except ValueError:
        requirement = "must be" if exact else "must broadcast to"
        raise ValueError(f"{name} has shape {x.shape}: it {requirement} {shape}") from None
