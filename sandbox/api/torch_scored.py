"""Attention whose scores are more than scale and causal, as PyTorch knows operations.

"sandbox::scored_attention_forward" and "sandbox::scored_attention_backward" have an argument for each option that is a
tensor, a list for those of a user's own score and a ragged batch's cu_seqlens, and a text for the rest. Otherwise they
are as those of `torch_op`, but for torch.func.vmap, which they refuse.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedProblem
from ..core.score import BLOCK_MAP, Score, TensorLike, like_of
from .dispatch import run_forward
from .options import ARRAYS, CU_SEQLENS, PAGES, ScoreOptions
from .torch_op import (
    Results,
    batched,
    chosen_kernel,
    empty_like,
    function_of,
    gradients,
    or_zeros,
    refuse,
    results_like,
    watched,
)


def forward(arrays: Results, what: ScoreOptions, how: tuple[Any, ...]) -> Results:
    """(out, lse) of q, k, v and the arrays that `what` names; `how`: causal to backend, as the operator has them."""
    q, k, v, *more = arrays
    return watched(_forward, _Watched, q, k, v, *_spread(what, more), *how)


def backward(
    arrays: Results,
    dlse: Tensor | None,
    what: ScoreOptions,
    more: Results,
    how: tuple[Any, ...],
    wanted: tuple[str, ...],
) -> Results:
    """dq, dk, dv and the `wanted` of dbias and dsink, of dout, q, k, v, out, lse, and the arrays that `what` names."""
    found = _differentiated(*arrays, dlse, *_spread(what, more), *how, " ".join(wanted))
    return (*found[:3], *(found[i] for i, name in ((3, "dbias"), (4, "dsink")) if name in wanted))


# ---- what is asked for as an operator's arguments, and back


def _spread(what: ScoreOptions, arrays: Sequence[Tensor]) -> tuple[Any, ...]:
    given = dict(zip(what.names, arrays, strict=True))
    tensors = [array for name, array in given.items() if name not in ARRAYS]
    read = [name.removeprefix("score.") for name in given if name.startswith("score.")]
    score = None if what.score is None else (what.score.score, what.score.mask, what.score.made_for)
    said = what.window, what.softcap, what.dropout, score, read, what.longest, PAGES in given
    options = [given.get(name) for name in ARRAYS]
    if torch.compiler.is_compiling():
        from . import torch_graphs

        return *options, tensors, torch_graphs.text_of_options(*said)
    return *options, tensors, text_of_options(*said)


def text_of_options(
    window: Any, softcap: float, dropout: float, score: tuple[Any, ...] | None, read: list[str], longest: Any,
    paged: bool,
) -> str:  # fmt: skip
    """`score`: its texts, not the object, which PyTorch 2.11 takes for no constant and later ones know by its id."""
    said = {"window": window, "softcap": softcap, "dropout": dropout, "longest": longest, "paged": paged}
    if score is not None:
        said["score"] = [*score, read]
    return json.dumps(said)


def _gathered(options: tuple[Tensor | None, ...], tensors: Sequence[Tensor], text: str) -> tuple[ScoreOptions, Results]:
    given = {name: option for name, option in zip(ARRAYS, options, strict=True) if option is not None}
    what = _asked(text, tuple(given), tuple(like_of(tensor) for tensor in tensors))
    return what, (*given.values(), *tensors)


@lru_cache(maxsize=256)
def _asked(text: str, names: tuple[str, ...], likes: tuple[TensorLike, ...]) -> ScoreOptions:
    said = json.loads(text)
    score = None
    if "score" in said:
        expression, mask, made_for, read = said["score"]
        given = dict(zip((f"score.{name}" for name in read), likes, strict=False))
        tensors = {name.removeprefix("score."): like for name, like in given.items() if name != BLOCK_MAP}
        score = Score(expression, mask, tensors, made_for=made_for and tuple(made_for))
        names = (*names, *(f"score.{name}" for name in read))
    window, longest = (x if x is None else tuple(x) for x in (said["window"], said["longest"]))
    if longest:
        names = (*names, *CU_SEQLENS)
    if said["paged"]:
        names = (*names, PAGES)
    return ScoreOptions(names, window, said["softcap"], score, said["dropout"], longest)


# ---- the operators


@torch.library.custom_op("sandbox::scored_attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi: Tensor | None,
    sink: Tensor | None, key_lengths: Tensor | None, seed: Tensor | None, tensors: list[Tensor], asked: str,
    causal: str, scale: float | None, kernel: str | None, tile: str, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    what, more = _gathered((bias, mask, alibi, sink, key_lengths, seed), tensors, asked)
    options = causal or False, scale, chosen_kernel(kernel), tile or None, backend, False, what
    return run_forward((q, k, v, *more), options)


_forward.register_fake(results_like)


@torch.library.custom_op("sandbox::scored_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, alibi: Tensor | None, sink: Tensor | None, key_lengths: Tensor | None, seed: Tensor | None,
    tensors: list[Tensor], asked: str, causal: str, scale: float | None, kernel: str | None, tile: str,
    backend: str | None, deterministic: bool, wanted: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dbias, dsink: of the last two those that `wanted` names; the others are empty."""
    what, more = _gathered((bias, mask, alibi, sink, key_lengths, seed), tensors, asked)
    options = causal or False, scale, chosen_kernel(kernel), tile or None, backend, deterministic
    results = tuple(wanted.split())
    dq, dk, dv, *others = gradients((dout, q, k, v, out, lse), dlse, what, more, options, results)
    extra = dict(zip(results, others, strict=True))
    return dq, dk, dv, extra.get("dbias", q.new_empty(0)), extra.get("dsink", q.new_empty(0))


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, bias: Any, mask: Any,
    alibi: Any, sink: Any, *rest: Any,
) -> Results:  # fmt: skip
    wanted = rest[-1].split()
    dbias = empty_like(bias) if "dbias" in wanted else q.new_empty(0)
    return empty_like(q), empty_like(k), empty_like(v), dbias, empty_like(sink) if "dsink" in wanted else q.new_empty(0)


def _no_vmap(info: Any, dims: Any, *inputs: Any) -> None:
    raise UnsupportedProblem(
        "torch.func.vmap of attention knows no options but causal and scale: make the mapped dimension part of B"
    )


_forward.register_vmap(_no_vmap)
_backward.register_vmap(_no_vmap)


# ---- their gradients


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *arrays, tensors, ctx.asked, ctx.causal, ctx.scale, _, _, ctx.backend = inputs
    ctx.save_for_backward(*arrays, *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiated(dout: Tensor, *inputs: Any) -> Results:
    """The backward operator's results. Raises UnsupportedProblem for many gradients at once: PyTorch has no fallback
    for an operator with a list of tensors."""
    dlse = inputs[5]
    if batched(dout) or batched(dlse):
        raise UnsupportedProblem(
            "is_grads_batched=True (jacobian with vectorize=True) is not supported with options other than causal and "
            "scale: call torch.autograd.grad once for each gradient"
        )
    return watched(_backward, _WatchedBackward, dout, *inputs)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, *options, out, lse = ctx.saved_tensors[:11]
    tensors, needed = list(ctx.saved_tensors[11:]), ctx.needs_input_grad
    wanted = " ".join(name for name, need in (("dbias", needed[3]), ("dsink", needed[6])) if need)
    how = ctx.causal, ctx.scale, None, "", ctx.backend, torch.are_deterministic_algorithms_enabled(), wanted
    inputs = or_zeros(dout, out), q, k, v, out, lse, dlse, *options, tensors, ctx.asked, *how
    dq, dk, dv, dbias, dsink = _differentiated(*inputs)
    of = zip((dq, dk, dv, dbias, None, None, dsink, None, None), needed, strict=False)
    return *(gradient if need else None for gradient, need in of), *(None,) * 7


def _gradients_of_lists(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    """As the operator has them: one for each tensor of its list."""
    found = list(_gradients(ctx, *gradients))
    found[9] = [None] * (len(ctx.saved_tensors) - 11)
    return tuple(found)


_Watched = function_of(_forward, _remember, _gradients)
_WatchedBackward = function_of(_backward, lambda ctx, inputs, output: None, refuse)


_forward.register_autograd(_gradients_of_lists, setup_context=_remember)
_backward.register_autograd(refuse)
