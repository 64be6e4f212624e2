"""The float64 reference on sampled rows, for problems that are too large for all rows.

Rows of attention are independent: a strip of query rows of one head is an attention problem of its own, which
`sandbox.reference` computes. Each strip has its own error bound: the first rows of a causal problem have the largest
outputs, and their bound would be too loose for the last rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.problem import Problem
from ..reference import attention, errors, lse_bound, max_error, naive, output_bound
from .scores import part_options

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
    device. `option_tensors`: tensors of the score options, by their names in a spec's `args`. `number`: index of the
    first batch entry.

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
        found = []
        for b, h in heads:
            inputs = host(q[b : b + 1, h : h + 1, start:stop]), keys[b, h], values[b, h]
            options = part_options(problem, option_tensors or {}, b, h, start, stop, number)
            found.append((*attention(*inputs, **options), naive(*inputs, **{**options, **how})))
        out, lse, plain = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        strips.append(Strip(start, stop, out, lse, output_bound(out, plain, problem.dtype_of("O"))))
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
