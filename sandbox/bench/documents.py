"""Eight documents of one length in a sequence: a query sees keys of its own alone. As `bench --score` takes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.core.problem import Problem
from sandbox.core.score import Score


def score(problem: Problem) -> Score:
    """As expressions of our own."""
    doc = (np.arange(problem.Sk) * 8 // max(problem.Sk, 1)).astype(np.int32)
    return Score(mask="doc(i) == doc(j)", tensors={"doc": doc})


def flex(problem: Problem, option_tensors: Any) -> tuple[Any, Any]:
    """As flex_attention has them: (score_mod, mask_mod)."""
    doc = option_tensors["score.doc"]
    return None, lambda b, h, i, j: doc[i] == doc[j]
