"""Attention as PyTorch knows operations: differentiable, and opaque to torch.compile. Imported on demand.

The operators "sandbox::attention_forward" and "sandbox::attention_backward" have fake implementations, which say shapes
and strides without computing, and a gradient each: the backward's own is a refusal. Eager code takes the same two
functions through a torch.autograd.Function, which costs a third of the dispatcher's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedProblem
from ..core.kernel import Kernel
from ..core.problem import normalise_causal
from ..engine.pipeline import as_tile
from ..launch.dlpack import dense_strides
from .passes import attention_backward, attention_forward


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: float | None, kernel: Any, tile: Any, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `sandbox.attention`, recorded for autograd or for the compiler."""
    if not torch.compiler.is_compiling():
        return _Attention.apply(q, k, v, causal, scale, kernel, tile, backend)
    name = kernel.name if isinstance(kernel, Kernel) else kernel
    return _forward(q, k, v, normalise_causal(causal) or "", scale, name, str(as_tile(tile) or ""), backend)


def _run(
    q: Tensor, k: Tensor, v: Tensor, causal: Any, scale: float | None, kernel: Any, tile: Any, backend: str | None
) -> tuple[Tensor, Tensor]:
    return attention_forward(q, k, v, causal=causal, scale=scale, kernel=kernel, tile=tile, backend=backend)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal, ctx.scale, _, _, ctx.backend = inputs
    ctx.causal = normalise_causal(causal or False) or ""
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    return _wanted(ctx, _backward(dout, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.backend))


def _gradients_eagerly(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """As `_gradients`, past the dispatcher, unless the gradients may be differentiated: the operator refuses that."""
    if torch.is_grad_enabled():
        return _gradients(ctx, dout, dlse)
    q, k, v, out, lse = ctx.saved_tensors
    return _wanted(ctx, _run_backward(dout, q, k, v, out, lse, ctx.causal, ctx.scale, ctx.backend))


def _wanted(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return (*(gradient if needed else None for gradient, needed in wanted), None, None, None, None, None)


class _Attention(torch.autograd.Function):
    """Without setup_context, for which PyTorch would look into the signature of `forward` at each call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _run(*inputs)
        _remember(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients_eagerly)


# An operator's arguments are of few types: causal is "" where nothing is masked, kernel a name, tile a text.


@torch.library.custom_op("sandbox::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None, kernel: str | None, tile: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _run(q, k, v, causal or False, scale, kernel, tile or None, backend)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: str, scale: float | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    deterministic = torch.are_deterministic_algorithms_enabled()
    return attention_backward(
        dout, q, k, v, out, lse, causal=causal or False, scale=scale, backend=backend, deterministic=deterministic
    )


_backward = torch.library.custom_op("sandbox::attention_backward", _run_backward, mutates_args=())


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedProblem(
        "attention cannot be differentiated twice: no kernel computes the derivatives of its gradients "
        "(torch.nn.functional.scaled_dot_product_attention can, under torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
    )


_forward.register_autograd(_gradients, setup_context=_remember)
_backward.register_autograd(_refuse)
