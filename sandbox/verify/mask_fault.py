"""Finds the wrong causal mask that explains an error, by computing the reference with candidate masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.options import DIAGONAL
from ..core.problem import Problem
from ..reference import attention, errors
from .scores import part_options

Array = NDArray[Any]
_ROWS = 16  # wrong rows of one head to compare
_REQUIRED = 0.75  # share of them that must match: in some rows another fault, such as 0 / 0, may hide the mask's


def explain(
    name: str, got: Array, bad: Array, head: tuple[int, ...], bound: Array | float, problem: Problem,
    inputs: Mapping[str, Array],
) -> str:  # fmt: skip
    """What is wrong with the mask of head (b, h), as text; "" if no candidate mask explains the error. `got`: O (B, H,
    Sq, Dv) or LSE (B, H, Sq), wrong where `bad`. `inputs`: Q, K, V and the tensors of the options, by their names in a
    spec's `args`."""
    # Candidates are computed without a causal mask, with the diagonal of "bottom-right".
    aligned = problem.causal == "bottom-right" or not problem.options & DIAGONAL
    if name not in ("O", "LSE") or not problem.causal or problem.ragged or problem.page_size or not aligned:
        return ""
    b, h = head
    wrong = np.nonzero(bad[b, h].reshape(problem.Sq, -1).any(1))[0]
    rows = wrong[np.unique(np.linspace(0, len(wrong) - 1, _ROWS).astype(int))]
    for shift, said in _masks(problem).items():
        fits = [_fits(name, got, b, h, int(row), shift, bound, problem, inputs) for row in rows]
        if np.mean(fits) >= _REQUIRED:
            return said
    return ""


def _masks(problem: Problem) -> dict[int | None, str]:
    """{shift: description} of wrong masks: `shift` is the number of additional visible keys (None: all keys)."""
    other, sign = ("top-left", -1) if problem.causal == "bottom-right" else ("bottom-right", 1)
    found: dict[int | None, str] = {
        1: "each row sees one key too many, the one after its last",
        -1: "each row misses its last key",
        None: "rows see every key, as without a causal mask",
    }
    return {sign * (problem.Sk - problem.Sq): f"the mask is aligned {other}"} | found


@np.errstate(all="ignore")
def _fits(
    name: str, got: Array, b: int, h: int, row: int, shift: int | None, bound: Array | float, problem: Problem,
    inputs: Mapping[str, Array],
) -> bool:  # fmt: skip
    """Whether a row of `got` matches attention with the causal mask shifted by `shift` keys."""
    hk = h // problem.group
    q, k, v = inputs["Q"][b : b + 1, h : h + 1, row : row + 1], *(inputs[x][b : b + 1, hk : hk + 1] for x in "KV")
    options = part_options(problem, inputs, b, h, row, row + 1)
    keys = problem.Sk if "key_lengths" not in inputs else int(inputs["key_lengths"][b])
    last = row + (0 if problem.causal == "top-left" else keys - problem.Sq)
    seen = np.ones(problem.Sk, bool) if shift is None else np.arange(problem.Sk) <= last + shift
    if options.get("mask") is not None:
        seen = seen & options["mask"]
    out, lse = attention(q, k, v, **{**options, "causal": False, "mask": seen})
    expected = out[0, 0, 0] if name == "O" else lse[0, 0, 0]
    allowed = bound if np.ndim(bound) == 0 else np.asarray(bound)[b, h, row]
    return bool(np.all(errors(got[b, h, row], expected) <= allowed))
