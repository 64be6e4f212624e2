"""What is asked for of a score as an operator's arguments, which are tensors and texts, and its gradients.

An operator has an argument for each option that is a tensor, a list for those of a user's score, and one text, "" when
there is nothing to say, for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.score import Score, TensorLike, like_of
from . import asked
from .asked import ARRAYS, NOTHING, Asked
from .passes import run_backward

Spread = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, list[Tensor], str]


def spread(what: Asked, arrays: tuple[Tensor, ...]) -> Spread:
    """`what` and the arrays that it names as an operator's arguments."""
    if not what.names and what.window is None and not what.softcap and what.score is None:
        return None, None, None, None, None, [], ""
    given = dict(zip(what.names, arrays, strict=True))
    tensors = [array for name, array in given.items() if name.startswith("score.")]
    bias, mask, alibi, sink, key_lengths = (given.get(name) for name in ARRAYS)
    return bias, mask, alibi, sink, key_lengths, tensors, _text(what.window, what.softcap, what.score)


@torch.compiler.assume_constant_result
def _text(window: Any, softcap: float, score: Score | None) -> str:
    said: dict[str, Any] = {"window": window, "softcap": softcap}
    if score is not None:
        said["score"] = [score.score, score.mask, list(score.tensors)]
    return json.dumps(said)


def gathered(
    options: tuple[Tensor | None, ...], tensors: Sequence[Tensor], text: str
) -> tuple[Asked, tuple[Tensor, ...]]:  # fmt: skip
    """What an operator's arguments ask for, and the arrays of its names."""
    if not text:
        return NOTHING, ()
    given = {name: option for name, option in zip(ARRAYS, options, strict=True) if option is not None}
    what = _asked(text, tuple(given), tuple(like_of(tensor) for tensor in tensors))
    return what, (*given.values(), *tensors)


@lru_cache(maxsize=256)
def _asked(text: str, names: tuple[str, ...], likes: tuple[TensorLike, ...]) -> Asked:
    said = json.loads(text)
    score = None
    if "score" in said:
        expression, mask, read = said["score"]
        score = Score(expression, mask, dict(zip(read, likes, strict=True)))
        names = (*names, *(f"score.{name}" for name in read))
    window = said["window"] if said["window"] is None else tuple(said["window"])
    return Asked(names, window, said["softcap"], score)


def gradients(
    arrays: tuple[Tensor, ...], dlse: Tensor | None, what: Asked, more: tuple[Tensor, ...], options: tuple[Any, ...],
    wanted: Sequence[str],
) -> dict[str, Tensor]:  # fmt: skip
    """{"q": dq, "k": dk, "v": dv}, and of "bias" and "sink" those wanted. `arrays`: dout, q, k, v, out, lse; options in
    the order of `plan.Options`, without `what`, which `more` belong to.

    A sink has no value, so that its dP is 0: dS is -exp(sink - LSE) delta, of each row.
    """
    results = (*(["dbias"] if "bias" in wanted else []), *(["delta"] if "sink" in wanted else []))
    asks, rest = asked.backward(what, more, dlse, results)
    dq, dk, dv, *others = run_backward((*arrays, *rest), (*options, asks))
    extra = dict(zip(results, others, strict=True))
    found = {"q": dq, "k": dk, "v": dv}
    if "bias" in wanted:
        found["bias"] = extra["dbias"]
    if "sink" in wanted:
        sink, lse = more[what.names.index("sink")], arrays[5].nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0)
        found["sink"] = -((sink[:, None] - lse).exp_().mul_(extra["delta"])).sum((0, 2))
    return found
