"""What a caller asks for of a score beyond scale and causal: arrays, and all else that a plan is made from."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from ..core.errors import SpecError, UnsupportedProblem
from ..core.integers import integer
from ..core.normalise import normalise_window, number
from ..core.score import Score
from ..launch.dlpack import library_of

CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_k")  # of a ragged batch, after all other arrays
PAGES = "block_table"  # of keys in pages, likewise
DESCALE = ("descale_q", "descale_k", "descale_v")  # those of float8 that are arrays, before cu_seqlens
ARRAYS = ("bias", "mask", "alibi", "sink", "key_lengths", "seed")  # options that are arrays, by the caller's words


class ScoreOptions(NamedTuple):
    """Options without their arrays: hashable, and part of a plan's key. `names` are the arrays', as they follow q, k, v
    or dout, q, k, v, out, lse; `results` what a backward gives besides dq, dk and dv. `descale`: of q, k, v, a number
    each, or None where it is an array. `longest`: of a ragged batch, the most queries and keys of a sequence,
    (None, None) where nobody has said.

    One is made of another by the class: `_replace` takes twice as long, and PyTorch 2.11's compiler makes it empty."""

    names: tuple[str, ...] = ()
    window: Any = None
    softcap: float = 0.0
    score: Score | None = None
    dropout: float = 0.0
    longest: tuple[int | None, int | None] | None = None
    descale: tuple[float | None, ...] = ()
    out_dtype: str = ""
    results: tuple[str, ...] = ()


NOTHING = ScoreOptions()


def asked(
    q: Any, window: Any, softcap: float, alibi: Any, bias: Any, mask: Any, sink: Any, key_lengths: Any,
    score: Score | None, dropout: float, seed: Any,
) -> tuple[ScoreOptions, tuple[Any, ...]]:  # fmt: skip
    """(what is asked for, the arrays of its `names`); NOTHING where every option is absent.

    A seed that is not an array becomes one of q's library, on its device; one that is None is drawn there.
    """
    if (
        bias is None and mask is None and window is None and not softcap and alibi is None and sink is None
        and key_lengths is None and score is None and not dropout
    ):  # fmt: skip
        return NOTHING, ()
    if type(softcap) is not float or type(dropout) is not float:
        softcap, dropout = constant("softcap", softcap or 0.0), constant("dropout", dropout or 0.0)
    if score is not None and not isinstance(score, Score):
        raise SpecError(f"score={score!r} must be a sandbox.Score")
    if window is not None:
        window = _plain_window(window)
    if not dropout:
        seed = None
    elif not hasattr(seed, "__dlpack__"):
        seed = library_of(q).seed(q, None if seed is None else _within_64_bits(seed))
    given = zip(ARRAYS, (bias, mask, alibi, sink, key_lengths, seed), strict=True)
    arrays = {name: array for name, array in given if array is not None}
    if score is not None:
        arrays |= score.arrays
    return ScoreOptions(tuple(arrays), window, softcap, score and score.described, dropout), tuple(arrays.values())


def _plain_window(window: Any) -> tuple[int | None, int | None]:
    """`window` as a tuple of type int and None, which it mostly is already: a plan's key holds it, and 3.0, True and
    np.int64(3) compare equal to 3. Raises SpecError."""
    if type(window) in (tuple, list) and len(window) == 2:
        left, right = window
        if (left is None or type(left) is int) and (right is None or type(right) is int):
            return left, right
    return normalise_window(window)


def constant(name: str, value: Any) -> float:
    """`value` as a float, so that a plan belongs to the number and not to the array that holds it just now. Raises
    SpecError for what is no number, UnsupportedProblem for a tensor whose derivative would be lost."""
    if hasattr(value, "requires_grad"):
        from .torch_autograd import differentiated

        if differentiated(value):
            raise UnsupportedProblem(no_derivative(name))
    return number(name, value)


def no_derivative(name: str) -> str:
    """The message for an option, or an array of `ScoreOptions.names`, that has no gradient and is asked for one."""
    tensor = name.removeprefix("score.")
    what = name if name == tensor else f"score's tensor {tensor}"
    other = _OTHERWISE.get(name if name == tensor else "score")
    return (
        f"{what} is a tensor to differentiate by, and attention has no derivative by its {what}: "
        f"pass {tensor}.detach(){f', or {other}' if other else ''}"
    )


_OTHERWISE = {  # ways to the same scores that have a gradient
    "scale": "multiply q by it and pass scale=1.0",
    "alibi": "what it adds as bias=-slopes[:, None, None] * distance",
    "score": "what it adds as bias=, such as bias=table[:, bucket]",
}
DIFFERENTIABLE = ("bias", "sink")  # of the arrays in `ScoreOptions.names`


def with_float8(
    of: ScoreOptions, arrays: tuple[Any, ...], descale: Any, out_dtype: Any
) -> tuple[ScoreOptions, tuple[Any, ...]]:
    """The same with what float8 q, k and v are to be multiplied by, and the dtype of out, as people write them."""
    name = "" if out_dtype is None else getattr(out_dtype, "__name__", None) or str(out_dtype)
    out_dtype = name.rpartition(".")[2]
    if descale is None:
        return ScoreOptions(*of[:7], out_dtype, of.results), arrays
    if not isinstance(descale, Sequence) or len(descale) != 3:
        raise SpecError(f"descale={descale!r} must be three: what q, k and v are to be multiplied by")
    given = {name: x for name, x in zip(DESCALE, descale, strict=True) if hasattr(x, "__dlpack__")}
    numbers = tuple(None if name in given else number(name, x) for name, x in zip(DESCALE, descale, strict=True))
    return ScoreOptions((*of.names, *given), *of[1:6], numbers, out_dtype, of.results), (*arrays, *given.values())


def _within_64_bits(seed: Any) -> int:
    """The same 64 bits as a signed number. Raises SpecError for what is no integer."""
    try:
        seed = index(seed)
    except TypeError:
        raise SpecError(f"seed={seed!r} must be an integer, or an int64 array of one element") from None
    return seed if -(2**63) <= seed < 2**63 else (seed + 2**63) % 2**64 - 2**63


def ragged(
    of: ScoreOptions, arrays: tuple[Any, ...], cu_seqlens: tuple[Any, Any], longest: tuple[int | None, int | None]
) -> tuple[ScoreOptions, tuple[Any, ...]]:
    """The same of a ragged batch. How long the longest sequence is counts where arrays are as long, and nowhere else:
    another number would be another plan. Raises SpecError for a number that is no integer >= 0."""
    if {"bias", "mask"} & {*of.names}:
        queries, keys = (
            n if n is None else integer(f"max_seqlen_{which}", n, 0) for which, n in zip("qk", longest, strict=True)
        )
        longest = queries, keys
    else:
        longest = None, None
    return ScoreOptions((*of.names, *CU_SEQLENS), *of[1:5], longest, *of[6:]), (*arrays, *cu_seqlens)


def paged(of: ScoreOptions, arrays: tuple[Any, ...], block_table: Any) -> tuple[ScoreOptions, tuple[Any, ...]]:
    """The same of keys that lie in pages."""
    return ScoreOptions((*of.names, PAGES), *of[1:]), (*arrays, block_table)


def for_backward(
    of: ScoreOptions, arrays: tuple[Any, ...], dlse: Any, results: tuple[str, ...]
) -> tuple[ScoreOptions, tuple[Any, ...]]:
    """The same for a backward that is given the gradient of LSE too, unless it is None, and asked for more results."""
    if dlse is not None:
        of, arrays = ScoreOptions(("dlse", *of.names), *of[1:]), (dlse, *arrays)
    return (ScoreOptions(*of[:-1], results) if results else of), arrays
