"""Gradients of the float64 reference on sampled rows, for problems that are too large for all rows.

If dO is zero except in some strips of query rows, only these strips contribute to the gradients: to dQ of their rows,
and to dK and dV of every key. Each strip is an attention problem of its own, which `sandbox.reference` computes. With
the complete dO, only finiteness is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.problem import Problem
from ..reference import attention, attention_backward, backward_magnitudes, gradient_bound, max_error, naive_backward
from .sampled import Verdict, host, spread
from .scores import part_options

Array = NDArray[Any]
HEADS, STRIPS, ROWS = 2, 3, 16  # sampled query heads, strips per head, rows per strip


@dataclass(frozen=True)
class Sums:
    """For one head of one gradient, summed over strips: the reference, the naive result in the input dtype, and the
    magnitudes that the bound depends on; (rows, D), float64."""

    expected: Array
    plain: Array
    size: Array

    @classmethod
    def zeros(cls, rows: int, D: int) -> Sums:
        return cls(*(np.zeros((rows, D)) for _ in range(3)))

    def add(self, rows: slice, expected: Array, plain: Array, size: Array) -> None:
        for mine, more in ((self.expected, expected), (self.plain, plain), (self.size, size)):
            mine[rows] += more[0, 0]

    def verdict(self, name: str, got: Array, dtype: str) -> Verdict:
        error, bound = max_error(got, self.expected), gradient_bound(self.expected, self.plain, self.size, dtype)
        return Verdict(error, bound, "" if error <= bound else f"{name}: error {error:.1e}, bound {bound:.1e}")


@dataclass(frozen=True)
class ExpectedGradients:
    """The expected dq, dk and dv if dO is zero outside of `strips`. sums: {(0: dQ, 1: dK or 2: dV, b, head): Sums}."""

    problem: Problem
    dout: Any  # the tensor that contenders read, (B, H, Sq, D); a check changes it in place and restores it
    strips: tuple[tuple[int, int, int, int], ...]  # (b, h, first row, one past the last)
    sums: dict[tuple[int, int, int], Sums]

    def check(self, poison: Callable[[], None], launch: Callable[[], tuple[Any, ...]]) -> Verdict:
        """Two calls on poisoned outputs: with the complete dO, and with the strips only."""
        poison()
        whole = launch()
        if not all(bool(x.isfinite().all()) for x in whole):
            return Verdict(math.inf, 0.0, "an element is not finite, or was not written")
        with self._strips_alone():
            poison()
            gradients = launch()
            return max(self._verdicts(gradients), key=lambda v: v.error / v.bound if v.bound else math.inf)

    def _verdicts(self, gradients: tuple[Any, ...]) -> Iterator[Verdict]:
        for (which, b, head), sums in self.sums.items():
            yield sums.verdict(("dQ", "dK", "dV")[which], host(gradients[which][b, head]), self.problem.dtype)

    @contextmanager
    def _strips_alone(self) -> Iterator[None]:
        whole = self.dout.clone()
        self.dout.zero_()
        for b, h, start, stop in self.strips:
            self.dout[b, h, start:stop] = whole[b, h, start:stop]
        try:
            yield
        finally:
            self.dout.copy_(whole)


def expect_gradients(
    problem: Problem, q: Any, k: Any, v: Any, dout: Any, seed: int = 0, option_tensors: Mapping[str, Any] | None = None,
    number: int = 0,
) -> ExpectedGradients:  # fmt: skip
    """Reference and bounds for PyTorch tensors q (B, H, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv) and dout
    (B, H, Sq, Dv), on any device; `option_tensors` and `number` as in `sampled.expect`."""
    rng = np.random.default_rng(seed)
    p, group = problem, problem.H // problem.Hk
    heads = [(n // p.H, n % p.H) for n in spread(rng, p.B * p.H, HEADS)]
    starts = spread(rng, max(1, p.Sq - ROWS + 1), STRIPS)
    strips = tuple((b, h, start, min(start + ROWS, p.Sq)) for b, h in heads for start in _without_overlap(starts))
    sums: dict[tuple[int, int, int], Sums] = {}
    for b, h, start, stop in strips:
        dq = sums.setdefault((0, b, h), Sums.zeros(p.Sq, p.D))
        dk, dv = (sums.setdefault((n, b, h // group), Sums.zeros(p.Sk, width)) for n, width in ((1, p.D), (2, p.Dv)))
        rows, keys = slice(start, stop), slice(0, p.Sk)
        dO, Q = (host(x[b : b + 1, h : h + 1, rows]) for x in (dout, q))
        K, V = (host(x[b : b + 1, h // group : h // group + 1]) for x in (k, v))
        options = part_options(p, option_tensors or {}, b, h, start, stop, number)
        found = (
            attention_backward(dO, Q, K, V, **options),
            naive_backward(dO, Q, K, V, **options, dtype=p.dtype),
            backward_magnitudes(dO, Q, K, V, *attention(Q, K, V, **options), **options),
        )
        for total, at, expected, plain, size in zip((dq, dk, dv), (rows, keys, keys), *found, strict=True):
            total.add(at, expected, plain, size)
    return ExpectedGradients(problem, dout, strips, sums)


def _without_overlap(starts: list[int]) -> list[int]:
    """Drops starts whose strip overlaps the preceding one."""
    kept = starts[:1]
    for start in starts[1:]:
        if start >= kept[-1] + ROWS:
            kept.append(start)
    return kept
