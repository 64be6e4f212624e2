"""Splits a ragged batch into its sequences, so that the reference can compute each one separately."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SpecError
from ..core.kernel import Kernel
from ..core.normalise import Causal
from ..core.options import BY_ARGUMENT
from ..core.problem import Problem
from ..reference import Part, attention
from .pages import gathered
from .scores import option_cases, reference_options

Array = NDArray[Any]
Compute = Callable[[Mapping[str, Array], Mapping[str, Any]], Mapping[str, Array]]

_OF_KEYS = ("K", "V", "dK", "dV")
_OF_QUERIES = ("Q", "O", "dO", "dQ", "LSE", "dLSE", "delta")


class Sequence(NamedTuple):
    """One sequence of a ragged batch: its number, its own problem, and its rows in the batch. `key_entries`: the batch
    entries of K and V in which its keys are: all (there is one), or if the keys were in pages its own (`gathered`)."""

    b: int
    problem: Problem
    queries: slice
    keys: slice
    key_entries: slice

    def slices(self, name: str, x: Array) -> tuple[Any, ...]:
        """The index of this sequence in the batch's tensor `x` with that name."""
        if name in _OF_QUERIES:
            return slice(None), slice(None), self.queries
        if name in _OF_KEYS:
            return self.key_entries, slice(None), self.keys
        own = slice(self.b, self.b + 1)
        array = BY_ARGUMENT.get(name) or BY_ARGUMENT.get(name.removeprefix("d"))  # or its gradient
        if array and array.axes:
            sizes = {"b": own, "i": slice(self.problem.Sq), "j": slice(self.problem.Sk)}
            axes = array.axes[-x.ndim :]
            return tuple(
                sizes.get(axis, slice(None)) if n > 1 else slice(None) for n, axis in zip(x.shape, axes, strict=True)
            )
        return (own,) if name.startswith("descale_") and len(x) > 1 else ()


def sequences_of(p: Problem) -> Iterator[Sequence]:
    """The sequences of a ragged batch. Raises SpecError if the problem has no lengths."""
    if not p.lengths and p.B:
        raise SpecError(f"{p} without lengths is not supported: a ragged test case needs them (lengths=)")
    ends = (itertools.accumulate(n) for n in zip(*p.lengths, strict=True))
    for b, (part, *end) in enumerate(zip(p.sequences, *ends, strict=True)):
        queries, keys = (slice(e - n, e) for e, n in zip(end, p.lengths[b], strict=True))
        of_keys = (slice(part.Sk), slice(b, b + 1)) if p.page_size else (keys, slice(None))
        yield Sequence(b, part, queries, *of_keys)


def offsets_of(p: Problem) -> dict[str, Array]:
    """cu_seqlens_q of a ragged batch with lengths, and cu_seqlens_k unless its keys are in pages."""
    sums, which_ragged = np.cumsum([(0, 0), *p.lengths], axis=0, dtype=np.int32), "q" if p.page_size else "qk"
    return {f"cu_seqlens_{which}": np.ascontiguousarray(sums[:, i]) for i, which in enumerate(which_ragged)}


def forward(own: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
    """O and LSE of the float64 reference."""
    return dict(zip(("O", "LSE"), attention(own["Q"], own["K"], own["V"], **options), strict=True))


def by_sequence(p: Problem, inputs: Mapping[str, Array], compute: Compute) -> dict[str, Array]:
    """`compute(inputs, reference_options)`. For a ragged batch: computed for each sequence and written to the rows of
    the batch's outputs, as kernels do; the gradients of bias and sink are sums over sequences."""
    if p.page_size:
        inputs = gathered(p, inputs)
    if not p.ragged:
        return dict(compute(inputs, reference_options(p, inputs)))
    shapes = {"dbias": p.bias, "dsink": (p.H,)}
    found: dict[str, Array] = {}
    for sequence in sequences_of(p):
        own = {name: x[sequence.slices(name, x)] for name, x in inputs.items() if not name.startswith("cu_seqlens")}
        options = reference_options(sequence.problem, own)
        options["part"] = Part(sequence.b, 0, 0, sequence.problem.Sq)
        for name, x in compute(own, options).items():
            shape = shapes.get(name) or (1, x.shape[1], p.rows[name in _OF_KEYS], *x.shape[3:])
            whole = found.setdefault(name, np.zeros(shape, x.dtype))
            whole[sequence.slices(name, whole)] += x
    return found


def ragged_problems(kernel: Kernel) -> Iterator[tuple[str, Problem, str]]:
    """(name, problem, layout) for ragged batches that `kernel` supports: sequences with no row, with one row, with more
    queries than keys and with fewer, without options and with each option."""
    M, N = (kernel.tiles[0].get(name, 64) for name in ("BLOCK_M", "BLOCK_N"))
    layouts, heads = itertools.cycle(("bshd", "bhsd", "offset")), itertools.cycle(((2, 2), (4, 2), (6, 1)))
    widths = (64, 32, 128)
    masks: tuple[Causal, ...] = (False, "bottom-right", "top-left")
    lengths = (
        ((0, 5), (77, 97), (1, 1), (M + 5, N + 13), (5, 0), (33, 1)),
        ((N, N), (0, 0), (2 * M, 17), (M - 1, N - 1)),
        ((130, 130), (1, 200)),
    )

    def small_problem(**fields: Any) -> Problem:
        return Problem(0, 4, 0, 0, fields.pop("D", 32), Hk=2, lengths=((9, 20), (0, 3), (40, 17), (1, 1)), **fields)

    for n, (dtype, causal) in enumerate(itertools.product(kernel.dtypes, masks)):
        (H, Hk), layout, own = next(heads), next(layouts), lengths[(n + n // 3) % 3]  # each dtype: another mask
        problem = Problem(0, H, 0, 0, widths[n % 3], Hk=Hk, dtype=dtype, causal=causal, lengths=own)
        if kernel.why_unsupported(problem) is None:
            yield f"{problem} {layout}", problem, layout
    for name, problem in option_cases(kernel, small_problem):
        if kernel.why_unsupported(problem) is None:
            yield f"{name}: {problem}", problem, "bhsd"
