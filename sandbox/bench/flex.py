"""Score options for flex_attention: a score_mod and a mask_mod, which Inductor compiles to Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import UnsupportedProblem
from ..core.files import names_of
from ..core.options import DIAGONAL
from ..core.problem import Problem

Mod = Callable[..., Any]


def flex_modifications(problem: Problem, option_tensors: Mapping[str, Any]) -> tuple[Mod | None, Mod | None]:
    """(score_mod, mask_mod), None if not needed. Raises UnsupportedProblem for options that flex_attention lacks.

    A user's own expressions are CUDA code: their file must define the same in Python, as
    `flex(problem, option_tensors)`.
    """
    p = problem
    if others := p.options - {"window", "softcap", "alibi", "bias", "mask", "key_lengths", "score"}:
        raise UnsupportedProblem(f"flex: {', '.join(sorted(others))} not supported by this peer")
    if p.key_lengths and p.causal != "top-left" and (p.causal or p.options & DIAGONAL):
        raise UnsupportedProblem(
            "flex: key_lengths with causal, a window or ALiBi is supported only with a top-left mask: otherwise the "
            "diagonal depends on the key length of the batch entry"
        )
    scores, masks = _of_file(p, option_tensors) if p.score else ([], [])
    return _chain([*_scores(p, option_tensors), *scores]), _all_of([*_masks(p, option_tensors), *masks])


def _of_file(p: Problem, option_tensors: Mapping[str, Any]) -> tuple[list[Mod], list[Mod]]:
    assert p.score is not None
    function = names_of(p.score.file).get("flex") if p.score.file else None
    if function is None:
        raise UnsupportedProblem(
            "flex: this Score is not supported: its file must define flex(problem, option_tensors), the expressions in "
            "Python"
        )
    score, mask = function(p, option_tensors)
    return [score] if score else [], [mask] if mask else []


def _scores(p: Problem, option_tensors: Mapping[str, Any]) -> list[Mod]:
    found: list[Mod] = []
    if p.softcap:
        cap = p.softcap
        found.append(lambda x, b, h, i, j: cap * (x / cap).tanh())
    if p.alibi:
        slopes, diagonal = option_tensors["slopes"].expand(p.B, p.H), p.diagonal
        found.append(lambda x, b, h, i, j: x - slopes[b, h] * (i + diagonal - j).abs())
    if p.bias:
        bias = option_tensors["bias"].expand(p.B, p.H, p.Sq, p.Sk)
        found.append(lambda x, b, h, i, j: x + bias[b, h, i, j])
    return found


def _masks(p: Problem, option_tensors: Mapping[str, Any]) -> list[Mod]:
    found: list[Mod] = []
    (left, right), diagonal = p.bounds, p.diagonal
    if left is not None:
        found.append(lambda b, h, i, j: j >= i + diagonal - left)
    if right is not None:
        found.append(lambda b, h, i, j: j <= i + diagonal + right)
    if p.mask:
        mask = option_tensors["mask"].expand(p.B, p.H, p.Sq, p.Sk)
        found.append(lambda b, h, i, j: mask[b, h, i, j])
    if p.key_lengths:
        lengths = option_tensors["key_lengths"]
        found.append(lambda b, h, i, j: j < lengths[b])
    return found


def _chain(mods: list[Mod]) -> Mod | None:
    def score_mod(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for mod in mods:
            x = mod(x, b, h, i, j)
        return x

    return score_mod if mods else None


def _all_of(mods: list[Mod]) -> Mod | None:
    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = mods[0](b, h, i, j)
        for mod in mods[1:]:
            seen = seen & mod(b, h, i, j)
        return seen

    return mask_mod if mods else None
