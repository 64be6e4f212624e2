"""Attention for autograd, of plain tensors that nobody else watches: past PyTorch's dispatcher, which takes three times
as long. What PyTorch has to see goes to the operators of `torch_op`. Imported on demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.errors import UnsupportedProblem
from ..core.normalise import normalise_causal
from ..launch.dlpack import library_of
from .dispatch import known, number, run_backward, run_forward
from .options import DIFFERENTIABLE, NOTHING, ScoreOptions, constant, for_backward, no_derivative
from .torch_op import Results, backward_seen, batched, forward_seen, or_zeros


def attention(
    arrays: Results, what: ScoreOptions, causal: Any, scale: Any, kernel: Any, tile: Any, backend: str | None,
    with_lse: bool = True,
) -> tuple[Tensor, Any]:  # fmt: skip
    """(out, lse) of `sandbox.attention`, recorded for autograd, for the compiler, or for whoever watches. `arrays` are
    q, k, v and those that `what` names; unless `with_lse`, lse may be None."""
    if isinstance(scale, Tensor):
        scale = constant("scale", scale)
    for name, array in constants(what, arrays):
        if differentiated(array):
            raise UnsupportedProblem(no_derivative(name))
    if not library_of(arrays[0]).intercepts(*arrays):
        return followed(arrays, (causal, scale, kernel, tile, backend, False, what), None, with_lse)
    return forward_seen(arrays, what, causal, scale, kernel, tile, backend)


def followed(arrays: Results, options: tuple[Any, ...], found: Any, with_lse: bool) -> tuple[Tensor, Any]:
    """(out, lse) for autograd, of tensors that nobody else watches; `found`: what `passes.known` says of them. Unless
    `with_lse`, lse is None: a result less for autograd to follow."""
    apply = _apply if found else _Attention.apply
    results = apply((options, found, with_lse), *arrays)
    return results if with_lse else (results, None)


def forward(*inputs: Any) -> Results:
    """`sandbox.attention_forward` where PyTorch has to see it; the arguments of `attention`."""
    with torch.no_grad():
        return attention(*inputs)


def constants(what: ScoreOptions, arrays: Results) -> list[tuple[str, Tensor]]:
    """Of q, k, v and the arrays that `what` names, those by which attention has no derivative."""
    more = zip(what.names, arrays[3:], strict=True)
    return [(name, x) for name, x in more if name not in DIFFERENTIABLE and isinstance(x, Tensor)]


def differentiated(x: Tensor) -> bool:
    """Whether somebody asks for the derivative by `x` just now, in reverse or forward mode."""
    dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
    return dual or (x.requires_grad and torch.is_grad_enabled())


_PYTORCH = library_of(torch.empty(0))


class _Attention(torch.autograd.Function):
    """Without setup_context, for which PyTorch would look into the signature of `forward` at each call."""

    @staticmethod
    def forward(ctx: Any, how: tuple[Any, Any, bool], *arrays: Any) -> Any:
        """`how`: options in the order of `plan.Options`, what is known of a plan, and whether LSE is a result."""
        ctx.options, found, with_lse = how
        output = found[0](arrays, found[1]) if found else run_forward(arrays, ctx.options)
        ctx.save_for_backward(*arrays[:3], *output, *arrays[3:])
        ctx.set_materialize_grads(False)
        return output if with_lse else output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Past the dispatcher, unless PyTorch has to see it or the gradients may be differentiated."""
        causal, scale, _, _, backend, _, what = ctx.options
        saved = ctx.saved_tensors
        every, asks = (or_zeros(dout, saved[3]), *saved), what
        wanted: tuple[str, ...] = ()
        if what is not NOTHING or dlse is not None:
            wanted = _wanted(ctx.needs_input_grad[4:], what.names)
            asks, others = for_backward(what, saved[5:], dlse, wanted)
            every = *every[:6], *others
        options = causal, scale, None, None, backend, torch.are_deterministic_algorithms_enabled(), asks
        twice = torch.is_grad_enabled()
        if not twice and (way := known(_PYTORCH, "backward", options, every)):
            found = way[0](every, way[1])
        elif twice or _PYTORCH.intercepts(*every) or batched(dout) or batched(dlse):
            how = normalise_causal(causal) or "", None if scale is None else number(scale), None, "", *options[4:6]
            found = backward_seen(every[:6], dlse, what, saved[5:], how, wanted)
        else:
            # Gradients may come lazily negated, as of z.conj() where out is a part of z; saved tensors are not.
            given = every[0].resolve_neg(), *every[1:6], *(x.resolve_neg() for x in every[6:])
            found = run_backward(given, options)
        if what is NOTHING:
            return None, *found
        named = dict(zip(wanted, found[3:], strict=True))
        return None, *found[:3], *(named.get(f"d{name}") for name in what.names)


# Without what torch.autograd.Function asks about torch.func, which a route has answered: a quarter of the time that
# recording a call takes.
_apply: Any = super(torch.autograd.Function, _Attention).apply


def _wanted(needed: Sequence[bool], names: Sequence[str]) -> tuple[str, ...]:
    """The gradients that are asked for beside those of q, k and v."""
    return tuple(f"d{n}" for n, need in zip(names, needed, strict=True) if need and n in DIFFERENTIABLE)
