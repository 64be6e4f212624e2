"""A Score for `bench --score`: eight documents of equal length in a sequence; a query sees its document only."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.core.problem import Problem
from sandbox.core.score import Score


def score(problem: Problem) -> Score:
    """The mask as a Score."""
    doc = (np.arange(problem.Sk) * 8 // max(problem.Sk, 1)).astype(np.int32)
    return Score(mask="doc(i) == doc(j)", tensors={"doc": doc})


def flex(problem: Problem, option_tensors: Any) -> tuple[Any, Any]:
    """The same for flex_attention: (score_mod, mask_mod)."""
    doc = option_tensors["score.doc"]
    return None, lambda b, h, i, j: doc[i] == doc[j]
