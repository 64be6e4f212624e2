"""The float64 reference on sampled rows, for problems that are too large for all rows.

Rows of attention are independent: a strip of query rows of one head is an attention problem of its own, which
`sandbox.reference` computes. Each strip has its own error bound: the first rows of a causal problem have the largest
outputs, and their bound would be too loose for the last rows.

Gradients: if dO is zero except in some strips of query rows, only these strips contribute to the gradients: to dQ of
their rows, and to dK and dV of every key. With the complete dO, only finiteness is checked. Of a ragged batch,
sequences are sampled, each a problem of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.problem import Problem
from ..reference import (
    attention,
    attention_backward,
    backward_magnitudes,
    errors,
    gradient_bound,
    lse_bound,
    max_error,
    naive,
    naive_backward,
    output_bound,
    output_rounding,
)
from .scores import part_options
from .sequences import Sequence, sequences_of

Array = NDArray[Any]
HEADS, STRIPS, ROWS = 4, 5, 16  # sampled heads, strips per head, rows per strip


@dataclass(frozen=True)
class Strip:
    """Query rows [start, stop) of the sampled heads: the reference, (heads, 1, rows, D) and (heads, 1, rows), and the
    error bound."""

    start: int
    stop: int
    out: Array
    lse: Array
    bound: float


@dataclass(frozen=True)
class Expected:
    """The expected output on strips of the heads (b, h)."""

    problem: Problem
    heads: tuple[tuple[int, int], ...]
    strips: tuple[Strip, ...]

    def check(self, poison: Callable[[], None], launch: Callable[[], tuple[Any, ...]]) -> Verdict:
        """Compares the outputs of one call, after poisoning them."""
        poison()
        return compare(self, *launch())


@dataclass(frozen=True)
class Verdict:
    """`error` and `bound` of the strip with the largest ratio. `message` describes the fault, "" if there is none."""

    error: float
    bound: float
    message: str = ""


def expect(
    problem: Problem,
    q: Any,
    k: Any,
    v: Any,
    seed: int = 0,
    option_tensors: Mapping[str, Any] | None = None,
    number: int = 0,
) -> Expected:
    """Reference and bounds for PyTorch tensors q (B, H, Sq, D), k (B, Hk, Sk, D) and v (B, Hk, Sk, Dv), on any
    device. `option_tensors`: tensors of the options, by their names in a spec's `args`. `number`: index of the
    problem's first batch entry, for a sequence of a ragged batch.

    The sample always contains the first and last head, and the first and last rows.
    """
    rng = np.random.default_rng(seed)
    heads = tuple((n // problem.H, n % problem.H) for n in spread(rng, problem.B * problem.H, HEADS))
    group = problem.H // problem.Hk
    keys, values = ({(b, h): host(x[b : b + 1, h // group, None]) for b, h in heads} for x in (k, v))
    if problem.Sq <= STRIPS * ROWS:
        ranges = [(0, problem.Sq)]
    else:
        ranges = [(start, start + ROWS) for start in spread(rng, problem.Sq - ROWS + 1, STRIPS)]
    how: dict[str, Any] = {"dtype": problem.dtype, "v_dtype": problem.dtype_of("V"), "out_dtype": problem.dtype_of("O")}
    strips = []
    for start, stop in ranges:
        found, roundings = [], []
        for b, h in heads:
            inputs = host(q[b : b + 1, h : h + 1, start:stop]), keys[b, h], values[b, h]
            options = part_options(problem, option_tensors or {}, b, h, start, stop, number)
            exact = attention(*inputs, **options)
            found.append((*exact, naive(*inputs, **{**options, **how})))
            if problem.dtype == "float32":
                roundings.append(output_rounding(*inputs, exact[0], **options))
        out, lse, plain = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        bound = output_bound(out, plain, problem.dtype_of("O"), rounding=roundings or 0.0)
        strips.append(Strip(start, stop, out, lse, bound))
    return Expected(problem, heads, tuple(strips))


def compare(expected: Expected, out: Any, lse: Any = None) -> Verdict:
    """Compares O (B, H, Sq, D) and LSE (B, H, Sq, may be None), PyTorch tensors. The sampled rows must be within their
    bounds, all elements of O finite, and no element of LSE NaN."""
    errors_and_bounds, excess = [], -math.inf
    for strip in expected.strips:
        rows = slice(strip.start, strip.stop)
        got = np.stack([host(out[b, h, rows]) for b, h in expected.heads])[:, None]
        errors_and_bounds.append((max_error(got, strip.out), strip.bound))
        if lse is not None:
            got = np.stack([host(lse[b, h, rows]) for b, h in expected.heads])[:, None]
            beyond = errors(got, strip.lse) - lse_bound(strip.lse, expected.problem.dtype)
            excess = max(excess, float(beyond.max(initial=-math.inf)))
    error, bound = max(errors_and_bounds, key=lambda pair: pair[0] / pair[1])
    if not bool(out.isfinite().all()) or (lse is not None and bool(lse.isnan().any())):
        return Verdict(math.inf, bound, "an element is not finite, or was not written")
    if not error <= bound:
        return Verdict(error, bound, f"error {error:.1e} against a bound of {bound:.1e}")
    return Verdict(error, bound, "" if excess <= 0 else f"LSE exceeds its bound by {excess:.1e}")


def host(x: Any) -> Array:
    """A PyTorch tensor as a float32 NumPy array, which represents all supported dtypes exactly."""
    return x.detach().float().cpu().numpy()


def spread(rng: np.random.Generator, n: int, most: int) -> list[int]:
    """At most `most` of the numbers 0 … n − 1, always with the first and the last."""
    if n <= most:
        return list(range(n))
    between = rng.choice(np.arange(1, n - 1), most - 2, replace=False)
    return sorted([0, n - 1, *map(int, between)])


# ---- gradients

GRADIENT_HEADS, GRADIENT_STRIPS = 2, 3  # sampled query heads, strips per head, of ROWS rows


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

    def verdict(self, name: str, got: Array, dtype: str, D: int) -> Verdict:
        bound = gradient_bound(self.expected, self.plain, self.size, dtype, terms=D)
        error = max_error(got, self.expected)
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
            got = host(gradients[which][b, head])
            yield sums.verdict(("dQ", "dK", "dV")[which], got, self.problem.dtype, self.problem.D)

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
    heads = [(n // p.H, n % p.H) for n in spread(rng, p.B * p.H, GRADIENT_HEADS)]
    starts = spread(rng, max(1, p.Sq - ROWS + 1), GRADIENT_STRIPS)
    strips = tuple((b, h, *rows) for b, h in heads for rows in _without_overlap(starts, p.Sq))
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


def _without_overlap(starts: list[int], end: int) -> list[tuple[int, int]]:
    """The rows of the strips that begin at `starts`, up to row `end`, each without those of the preceding one."""
    strips, stop = [], 0
    for start in starts:
        begin, stop = max(start, stop), min(start + ROWS, end)
        if begin < stop:
            strips.append((begin, stop))
    return strips


# ---- ragged batches

SEQUENCES = 4  # sampled, always with the first and the last


@dataclass(frozen=True)
class ExpectedSequences:
    """The expected results, named `names`, in the sampled sequences."""

    names: tuple[str, ...]
    sequences: tuple[tuple[Sequence, Expected | ExpectedGradients], ...]

    def check(self, poison: Callable[[], None], launch: Callable[[], tuple[Any, ...]]) -> Verdict:
        """The verdict of the worst sequence. Each sequence is checked after separate calls on poisoned outputs."""

        def results_of(sequence: Sequence) -> tuple[Any, ...]:
            results = zip(self.names, launch(), strict=True)
            return tuple(x if x is None else x[sequence.slices(name, x)] for name, x in results)

        verdicts = [expected.check(poison, partial(results_of, sequence)) for sequence, expected in self.sequences]
        return max(verdicts, key=lambda v: (bool(v.message), v.error / v.bound if v.bound else math.inf))


def expect_sequences(
    problem: Problem, inputs: tuple[Any, ...], computes: str, option_tensors: Mapping[str, Any]
) -> ExpectedSequences:
    """Reference and bounds for PyTorch tensors q, k, v and, for a backward, dout, in the layout of the kernels."""
    candidates = [s for s in sequences_of(problem) if s.problem.Sq and s.problem.Sk]
    found: list[tuple[Sequence, Expected | ExpectedGradients]] = []
    for i in spread(np.random.default_rng(0), len(candidates), SEQUENCES):
        sequence = candidates[i]
        own = {name: x[sequence.slices(name, x)] for name, x in option_tensors.items() if "seqlens" not in name}
        q, k, v, *dout = (x[sequence.slices(n, x)] for n, x in zip(("Q", "K", "V", "dO"), inputs, strict=False))
        expected: Expected | ExpectedGradients
        if computes == "forward":
            expected = expect(sequence.problem, q, k, v, option_tensors=own, number=sequence.b)
        else:
            expected = expect_gradients(sequence.problem, q, k, v, dout[0], option_tensors=own, number=sequence.b)
        found.append((sequence, expected))
    return ExpectedSequences(("O", "LSE") if computes == "forward" else ("dQ", "dK", "dV"), tuple(found))
