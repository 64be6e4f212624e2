"""What a caller asks for of a score beyond scale and causal: arrays, and all else that a plan is made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.errors import SpecError
from ..core.score import BLOCK_MAP, Score

ARRAYS = ("bias", "mask", "alibi", "sink", "key_lengths")  # options that are arrays, by the caller's words


class Asked(NamedTuple):
    """Options without their arrays: hashable, and part of a plan's key. `names` are the arrays', as they follow q, k, v
    or dout, q, k, v, out, lse; `results` what a backward gives besides dq, dk and dv."""

    names: tuple[str, ...] = ()
    window: Any = None
    softcap: float = 0.0
    score: Score | None = None
    results: tuple[str, ...] = ()


NOTHING = Asked()


def asked(
    window: Any, softcap: float, alibi: Any, bias: Any, mask: Any, sink: Any, key_lengths: Any, score: Score | None
) -> tuple[Asked, tuple[Any, ...]]:
    """(what is asked for, the arrays of its `names`); NOTHING where every option is absent."""
    if (
        bias is None and mask is None and window is None and not softcap and alibi is None and sink is None
        and key_lengths is None and score is None
    ):  # fmt: skip
        return NOTHING, ()
    if score is not None and not isinstance(score, Score):
        raise SpecError(f"score={score!r} must be a sandbox.Score")
    if window is not None:
        window = tuple(window) if isinstance(window, Sequence) else window  # Problem says what is wrong with it
    given = zip(ARRAYS, (bias, mask, alibi, sink, key_lengths), strict=True)
    arrays = {name: array for name, array in given if array is not None}
    if score is not None:
        arrays |= {f"score.{name}": tensor for name, tensor in score.tensors.items()}
        arrays |= {} if score.blocks is None else {BLOCK_MAP: score.blocks}
    return Asked(tuple(arrays), window, softcap, score and score.described), tuple(arrays.values())


def backward(of: Asked, arrays: tuple[Any, ...], dlse: Any, results: tuple[str, ...]) -> tuple[Asked, tuple[Any, ...]]:
    """The same for a backward that is given the gradient of LSE too, unless it is None, and asked for more results."""
    if dlse is not None:
        of, arrays = of._replace(names=("dlse", *of.names)), (dlse, *arrays)
    return (of._replace(results=results) if results else of), arrays
