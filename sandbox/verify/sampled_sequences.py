"""The float64 reference on sampled rows of sampled sequences of a ragged batch. Each sequence is one problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..core.problem import Problem
from .sampled import Expected, Verdict, expect, spread
from .sampled_gradients import ExpectedGradients, expect_gradients
from .sequences import Sequence, sequences_of

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
