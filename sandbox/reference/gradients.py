"""The gradients of one attention call, and their accumulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from .score import ScoreOptions
from .semantics import Array, Mask, dot_visible


class Gradients(tuple[Array, Array, Array]):
    """(dq, dk, dv) with attributes `dbias` and `dsink`, which are None without the option."""

    dbias: Array | None
    dsink: Array | None

    def __new__(
        cls, dq: Array, dk: Array, dv: Array, dbias: Array | None = None, dsink: Array | None = None
    ) -> Gradients:
        self = super().__new__(cls, (dq, dk, dv))
        self.dbias, self.dsink = dbias, dsink
        return self

    def named(self) -> dict[str, Array]:
        """The existing gradients by their names in a spec's `args`."""
        extra = {"dbias": self.dbias, "dsink": self.dsink}
        return dict(zip(("dQ", "dK", "dV"), self, strict=True)) | {k: x for k, x in extra.items() if x is not None}


class Sums:
    """Accumulates the gradients over chunks of query rows; dsink is one number per head."""

    def __init__(self, score_options: ScoreOptions, dtype: DTypeLike):
        B, H, Hk, Sq, Sk, D, Dv = score_options.shape
        self._options = score_options
        self._dq, self._dk, self._dv = (np.zeros(s, dtype) for s in ((B, H, Sq, D), (B, Hk, Sk, D), (B, Hk, Sk, Dv)))
        self._dx = np.zeros((B, H, Sq, Sk), dtype) if score_options.bias is not None else None
        self.dsink = np.zeros(H, dtype)

    def add(
        self, b: int, h: int, rows: slice, visible: Mask, P: Array, dS: Array, dx: Array, Q: Array, K: Array, dO: Array
    ) -> None:
        """Add a chunk of query rows: P, the gradients dS of the scaled dot products and dx of the bias."""
        hk = self._options.shape.key_head(h)
        self._dq[b, h, rows] = self._options.scale * dot_visible(dS, K, visible)
        self._dk[b, hk] += self._options.scale * dot_visible(dS.T, Q, visible.T)
        self._dv[b, hk] += dot_visible(P.T, dO, visible.T)
        if self._dx is not None:
            self._dx[b, h, rows] = dx

    def gradients(self, rounded: Callable[[Array], Array] = lambda x: x) -> Gradients:
        """The rounded sums. dsink is fp32 for all input dtypes and is not rounded."""
        dbias = None if self._dx is None else rounded(self._options.dbias(self._dx))
        dsink = None if self._options.sink is None else self.dsink
        return Gradients(rounded(self._dq), rounded(self._dk), rounded(self._dv), dbias, dsink)
