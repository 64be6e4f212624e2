"""Attention as PyTorch knows operations: differentiable, and opaque to torch.compile. Imported on demand.

The operators "sandbox::attention_forward" and "sandbox::attention_backward" have fake implementations, which say shapes
and strides without computing; rules for torch.func.vmap, which make one batch of two; and a gradient each: the
backward's own is a refusal. Two ways lead there, and past them `torch_autograd`:

- what PyTorch has to see (subclasses, dispatch modes, torch.func, forward-mode), `_Watched`, around the operators;
- torch.compile, torch.jit.trace and torch.func.functionalize, which take the operators themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core import registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import Kernel
from ..core.normalise import normalise_causal
from ..core.tile import Tile
from ..launch.dlpack import dense_strides
from . import torch_exit as torch_exit  # which registers itself
from .dispatch import number, run_backward, run_forward
from .options import NOTHING, ScoreOptions, for_backward

Results = tuple[Tensor, ...]


def forward_seen(
    arrays: Results, what: ScoreOptions, causal: Any, scale: Any, kernel: Any, tile: Any, backend: str | None
) -> Results:
    """(out, lse) by the operators. `arrays` are q, k, v and those that `what` names."""
    how = normalise_causal(causal) or "", scale, _kernel_text(kernel), _tile_text(tile), backend
    if what is NOTHING:
        return watched(_forward, _Watched, *arrays, *how)
    from . import torch_scored

    return torch_scored.forward(arrays, what, how)


def backward(arrays: Results, options: tuple[Any, ...]) -> Results:
    """`sandbox.attention_backward` where PyTorch has to see it; the arguments of `run_backward`."""
    causal, scale, kernel, tile, backend, deterministic, what = options
    scale = scale if scale is None else number(scale)
    how = normalise_causal(causal) or "", scale, _kernel_text(kernel), _tile_text(tile), backend, deterministic
    with torch.no_grad():
        return backward_seen(arrays[:6], None, what, arrays[6:], how, ())[:3]


def backward_seen(
    arrays: Results,
    dlse: Tensor | None,
    what: ScoreOptions,
    more: Results,
    how: tuple[Any, ...],
    wanted: tuple[str, ...],
) -> Results:
    """dq, dk, dv and the `wanted` of dbias and dsink, by the operators."""
    if what is NOTHING:
        return watched(_backward, _WatchedBackward, *arrays, *how, dlse)
    from . import torch_scored

    return torch_scored.backward(arrays, dlse, what, more, how, wanted)


# ---- options as an operator's arguments, which are of few types: causal is "" where nothing is masked


_texts: dict[str, Kernel] = {}


def _kernel_text(kernel: str | Kernel | None) -> str | None:
    """A kernel's name; of one that is not the registry's, a text that stands for this very object in this process."""
    if not isinstance(kernel, Kernel):
        return kernel
    if torch.compiler.is_compiling():
        from . import torch_graphs

        return torch_graphs.text_of_kernel_at(id(kernel))
    return text_of_kernel_at(id(kernel))


def text_of_kernel_at(address: int) -> str:
    """Of a kernel by its id, which the compiler guards: an object is no constant to it before PyTorch 2.13."""
    kernel = ctypes.cast(address, ctypes.py_object).value
    if registry.kernels().get(kernel.name) == kernel:
        return kernel.name
    text = f"{kernel.name} ({kernel.source}, {id(kernel):#x})"
    _texts[text] = kernel  # which keeps it alive, and the number its own
    return text


def chosen_kernel(text: str | None) -> str | Kernel | None:
    """What `_kernel_text` made the text of."""
    return _texts.get(text, text) if text else None


def _tile_text(tile: Tile | str | Mapping[str, int] | None) -> str:
    """Without making a Tile, which the compiler would have to follow; "" for none."""
    if tile is None or isinstance(tile, str):
        return tile or ""
    return ",".join(f"{n}={int(tile[n])}" for n in tile)


# ---- the operators


@torch.library.custom_op("sandbox::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None, kernel: str | None, tile: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chosen = chosen_kernel(kernel)
    return run_forward((q, k, v), (causal or False, scale, chosen, tile or None, backend, False, NOTHING))


@_forward.register_fake
def results_like(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Results:
    """out and lse, not computed."""
    out = (*q.shape[:3], v.shape[3])
    strides = dense_strides(out, q.stride())
    return q.new_empty_strided(out, strides), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sandbox::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: str, scale: float | None,
    kernel: str | None, tile: str, backend: str | None, deterministic: bool, dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = causal or False, scale, chosen_kernel(kernel), tile or None, backend, deterministic
    dq, dk, dv = gradients((dout, q, k, v, out, lse), dlse, NOTHING, (), options)
    return dq, dk, dv


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Results:
    return empty_like(q), empty_like(k), empty_like(v)


def gradients(
    arrays: Results, dlse: Tensor | None, what: ScoreOptions, more: Results, options: tuple[Any, ...],
    wanted: tuple[str, ...] = (),
) -> tuple[Any, ...]:  # fmt: skip
    asks, more = for_backward(what, more, dlse, wanted)
    return run_backward((*arrays, *more), (*options, asks))


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)


def _vmapped(operator: Any) -> None:
    """Registers what torch.func.vmap does with `operator`: the mapped dimension becomes part of B."""

    def rule(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Results, tuple[int, ...]]:
        n = info.batch_size
        folded = [_folded(x, n, dim) if isinstance(x, Tensor) else x for x, dim in zip(inputs, dims, strict=True)]
        results = operator(*folded)
        return tuple(x.unflatten(0, (n, x.shape[0] // n if n else 0)) for x in results), (0,) * len(results)

    operator.register_vmap(rule)


def _folded(x: Tensor, n: int, dim: int | None) -> Tensor:
    mapped = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.flatten(0, 1)


_vmapped(_forward)
_vmapped(_backward)


# ---- their gradients


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, ctx.causal, ctx.scale, _, _, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # that of lse is None where nobody uses it


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    options = ctx.causal, ctx.scale, None, "", ctx.backend, torch.are_deterministic_algorithms_enabled(), dlse
    found = watched(_backward, _WatchedBackward, or_zeros(dout, out), q, k, v, out, lse, *options)
    needed = zip(found, ctx.needs_input_grad, strict=False)
    return (*(gradient if need else None for gradient, need in needed), None, None, None, None, None)


def or_zeros(dout: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of an output that nobody may have used."""
    return torch.zeros_like(out) if dout is None else dout


def batched(gradient: Tensor | None) -> bool:
    """Whether it is many, of torch.autograd.grad(is_grads_batched=True)."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)


def refuse(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedProblem(
        "attention cannot be differentiated twice: no kernel computes the derivatives of its gradients "
        "(torch.nn.functional.scaled_dot_product_attention can, under torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
    )


def refuse_forward_mode(ctx: Any, *tangents: Tensor) -> None:
    raise UnsupportedProblem(
        "attention has no forward-mode derivative: differentiate in reverse (backward, torch.func.grad, vjp or jacrev) "
        "or use torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


_forward.register_autograd(_gradients, setup_context=_remember)
_backward.register_autograd(refuse)


def function_of(operator: Any, remember: Any, gradients: Any) -> type[torch.autograd.Function]:
    """The operator as torch.func and forward-mode differentiation take it."""

    class Watched(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(operator)
        setup_context = staticmethod(remember)
        backward = staticmethod(gradients)
        jvp = staticmethod(refuse_forward_mode)

    return Watched


_Watched = function_of(_forward, _remember, _gradients)
_WatchedBackward = function_of(_backward, lambda ctx, inputs, output: None, refuse)


# Subclasses that have a rule of their own for each operator that they know: of ours they have none.
_REMEDIES = {
    "DTensor": "pass each device's own part, .to_local()",
    "MaskedTensor": "pass its numbers, .get_data(), and what it hides as mask=",
}


def watched(operator: Any, function: Any, *inputs: Any) -> Results:
    """`operator` in its `function`, except for those that cannot look into one, and take the operator as it is."""
    compiling = torch.compiler.is_compiling()
    if forward_ad._current_level >= 0:
        if compiling:
            from . import torch_graphs

            return torch_graphs.apply(function, *inputs)
        return function.apply(*inputs)
    if compiling or torch.jit.is_tracing():
        return operator(*inputs)
    for kind in {type(x).__name__ for x in inputs} & {*_REMEDIES}:
        raise UnsupportedProblem(f"attention does not take a {kind}: {_REMEDIES[kind]}")
    stack = torch._C._functorch.peek_interpreter_stack()
    functionalizing = stack is not None and stack.key() == torch._C._functorch.TransformType.Functionalize
    return operator(*inputs) if functionalizing else function.apply(*inputs)
