"""Attention as PyTorch operators: differentiable, and opaque to torch.compile. Imported on demand.

"sandbox::attention_forward" and "sandbox::attention_backward" take causal, scale, kernel, tile and backend, but no
options. The backward also takes deterministic and dlse.
The scored operators, "sandbox::scored_attention_forward" and "sandbox::scored_attention_backward", have in addition an
argument for each option with a gradient, a list of all other tensors, and a JSON string with their names and with all
other options; the backward also has `wanted`, a string with the names of the options' gradients to compute, such as
"dbias dsink".

All have gradients; that of a backward raises UnsupportedProblem. All have fake implementations, which return tensors
with the right shapes and strides without computing. The first two have rules for torch.func.vmap, which merge the
mapped dimension into B; the others reject it. `call_operator` decides how a call reaches them:

- subclasses, dispatch modes, torch.func and forward mode: by an autograd.Function around the operator;
- torch.compile, torch.jit.trace and torch.func.functionalize: the operator itself.

Plain tensors need the operators only in a backward with create_graph=True or batched gradients: see `torch_autograd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.errors import UnsupportedProblem
from ..core.kernel import Kernel
from ..core.normalise import normalise_causal
from ..launch.dlpack import dense_strides, library_of
from . import torch_exit as torch_exit  # the import registers a function with atexit
from .dispatch import run_backward, run_forward, scale_number
from .options import DIFFERENTIABLE, Options, for_backward, replace
from .torch_arguments import kernel_of, options_of, text_of_kernel_at, text_of_options, text_of_tile

Tensors = tuple[Tensor, ...]
# causal, scale, kernel, tile, backend of an operator
OperatorArguments = tuple[str, float | None, str | None, str, str | None]


def forward(arrays: Tensors, options: Options) -> Tensors:
    """(out, lse) by the operators, of q, k, v and the arrays that `options.array_names` names."""
    if not options.has_more:
        return call_operator(_forward, _Forward, *arrays, *_operator_arguments(options, options.scale))
    q, k, v, *more = arrays
    spread = spread_options(options, more)
    return call_operator(
        _scored_forward, _ScoredForward, q, k, v, *spread, *_operator_arguments(options, options.scale)
    )


def backward(arrays: Tensors, options: Options, dlse: Tensor | None = None, gradients: tuple[str, ...] = ()) -> Tensors:
    """dq, dk, dv, and dbias and dsink if `gradients` names them, by the operators. `arrays`: dout, q, k, v, out,
    lse and the arrays that `options.array_names` names."""
    scale = options.scale if options.scale is None else scale_number(options.scale)
    last = *_operator_arguments(options, scale), options.deterministic
    if not options.has_more:
        return call_operator(_backward, _Backward, *arrays, *last, dlse)
    spread = spread_options(options, arrays[6:])
    found = _call_scored_backward(*arrays[:6], dlse, *spread, *last, " ".join(gradients))
    return (*found[:3], *(found[i] for i, name in ((3, "dbias"), (4, "dsink")) if name in gradients))


def float8_forward(arrays: Tensors, options: Options) -> Tensors:
    """(out, lse) of float8 tensors. There is no operator: torch.compile breaks the graph here. Raises
    UnsupportedProblem where a gradient is required, and where PyTorch has to intercept the call."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*arrays, options.scale)):
        raise UnsupportedProblem(
            "attention of float8 has no gradient: pass detached tensors, or convert q, k and v to bfloat16"
        )
    if torch.compiler.is_compiling():
        from . import torch_graphs

        return torch_graphs.run_outside(arrays, options)
    if library_of(arrays[0]).intercepts(*arrays):
        raise UnsupportedProblem(
            "attention of float8 is not a PyTorch operator and does not support tensor subclasses, dispatch modes, "
            "torch.func or tracing: pass plain tensors, or convert q, k and v to bfloat16"
        )
    return run_forward(arrays, options)


# ---- options as arguments of an operator


def _operator_arguments(options: Options, scale: Any) -> OperatorArguments:
    """The arguments of an operator from causal to backend; causal is "" for False."""
    causal = normalise_causal(options.causal) or ""
    return causal, scale, _kernel_text(options.kernel), text_of_tile(options.tile), options.backend


def _options_of(
    causal: str, scale: float | None, kernel: str | None, tile: str, backend: str | None, deterministic: bool = False
) -> dict[str, Any]:
    """The inverse of `_operator_arguments`, as fields of `Options`."""
    launch = {"kernel": kernel_of(kernel), "tile": tile or None, "backend": backend, "deterministic": deterministic}
    return {"causal": causal or False, "scale": scale, **launch}


def _kernel_text(kernel: str | Kernel | None) -> str | None:
    if not isinstance(kernel, Kernel):
        return kernel
    if torch.compiler.is_compiling():
        from . import torch_graphs

        return torch_graphs.text_of_kernel_at(id(kernel))
    return text_of_kernel_at(id(kernel))


def spread_options(options: Options, arrays: Sequence[Tensor]) -> tuple[Any, ...]:
    """The arguments of a scored operator from bias on: each of `DIFFERENTIABLE`, the list of other tensors, the JSON
    string."""
    named = dict(zip(options.array_names, arrays, strict=True))
    others = [name for name in named if name not in DIFFERENTIABLE]
    score = None if options.score is None else (options.score.score, options.score.mask, options.score.made_for)
    values = {name: getattr(options, name) for name in _AS_TEXT}
    if torch.compiler.is_compiling():
        from . import torch_graphs

        text = torch_graphs.text_of_options(values, score, others)
    else:
        text = text_of_options(values, score, others)
    return *(named.get(name) for name in DIFFERENTIABLE), [named[name] for name in others], text


# The fields after `deterministic`, except those that are passed otherwise.
_AS_TEXT = tuple(name for name in Options._fields[6:] if name not in ("score", "array_names", "gradients"))


# ---- the operators and their vmap rules


@torch.library.custom_op("sandbox::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None, kernel: str | None, tile: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return run_forward((q, k, v), Options(**_options_of(causal, scale, kernel, tile, backend)))


@_forward.register_fake
def results_like(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensors:
    """Uninitialised tensors with the shapes, strides and dtypes of out and lse."""
    out = (*q.shape[:3], v.shape[3])
    strides = dense_strides(out, q.stride())
    return q.new_empty_strided(out, strides), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sandbox::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: str, scale: float | None,
    kernel: str | None, tile: str, backend: str | None, deterministic: bool, dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = Options(**_options_of(causal, scale, kernel, tile, backend, deterministic))
    dq, dk, dv = _run_backward((dout, q, k, v, out, lse), dlse, options, ())
    return dq, dk, dv


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensors:
    return empty_like(q), empty_like(k), empty_like(v)


def _run_backward(
    arrays: Tensors, dlse: Tensor | None, options: Options, more: Tensors, gradients: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    options, more = for_backward(options, more, dlse, gradients)
    return run_backward((*arrays, *more), options)


def empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)


def _vmapped(operator: Any) -> None:
    """Registers the rule of `operator` for torch.func.vmap: the mapped dimension is merged into B."""

    def rule(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
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


@torch.library.custom_op("sandbox::scored_attention_forward", mutates_args=())
def _scored_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, tensors: list[Tensor], text: str,
    causal: str, scale: float | None, kernel: str | None, tile: str, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options, more = options_of((bias, sink), tensors, text)
    return run_forward((q, k, v, *more), replace(options, **_options_of(causal, scale, kernel, tile, backend)))


_scored_forward.register_fake(results_like)


@torch.library.custom_op("sandbox::scored_attention_backward", mutates_args=())
def _scored_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, bias: Tensor | None,
    sink: Tensor | None, tensors: list[Tensor], text: str, causal: str, scale: float | None, kernel: str | None,
    tile: str, backend: str | None, deterministic: bool, wanted: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dbias, dsink; dbias and dsink are empty tensors unless `wanted` names them."""
    options, more = options_of((bias, sink), tensors, text)
    options = replace(options, **_options_of(causal, scale, kernel, tile, backend, deterministic))
    results = tuple(wanted.split())
    dq, dk, dv, *others = _run_backward((dout, q, k, v, out, lse), dlse, options, more, results)
    extra = dict(zip(results, others, strict=True))
    return dq, dk, dv, extra.get("dbias", q.new_empty(0)), extra.get("dsink", q.new_empty(0))


@_scored_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, bias: Any, sink: Any,
    *rest: Any,
) -> Tensors:  # fmt: skip
    wanted = rest[-1].split()
    dbias = empty_like(bias) if "dbias" in wanted else q.new_empty(0)
    return empty_like(q), empty_like(k), empty_like(v), dbias, empty_like(sink) if "dsink" in wanted else q.new_empty(0)


def _no_vmap(info: Any, dims: Any, *inputs: Any) -> None:
    raise UnsupportedProblem(
        "torch.func.vmap of attention supports only causal and scale: make the mapped dimension part of B"
    )


_scored_forward.register_vmap(_no_vmap)
_scored_backward.register_vmap(_no_vmap)


# ---- their gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    q, k, v, ctx.causal, ctx.scale, _, _, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # the gradient of lse is None if lse is not used


def _backward_formula(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    options = ctx.causal, ctx.scale, None, "", ctx.backend, torch.are_deterministic_algorithms_enabled(), dlse
    found = call_operator(_backward, _Backward, or_zeros(dout, out), q, k, v, out, lse, *options)
    needed = zip(found, ctx.needs_input_grad, strict=False)
    return (*(gradient if need else None for gradient, need in needed), None, None, None, None, None)


def or_zeros(dout: Tensor | None, out: Tensor) -> Tensor:
    """The gradient of `out`: zeros if `out` was not used."""
    return torch.zeros_like(out) if dout is None else dout


def batched(gradient: Tensor | None) -> bool:
    """Whether it is a batch of gradients, from torch.autograd.grad(is_grads_batched=True)."""
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


_forward.register_autograd(_backward_formula, setup_context=_setup_context)
_backward.register_autograd(refuse)


def function_of(operator: Any, setup: Any, formula: Any) -> type[torch.autograd.Function]:
    """An autograd.Function that calls the operator; `call_operator` uses it unless a tracer needs the operator."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(operator)
        setup_context = staticmethod(setup)
        backward = staticmethod(formula)
        jvp = staticmethod(refuse_forward_mode)

    return Function


_Forward = function_of(_forward, _setup_context, _backward_formula)
_Backward = function_of(_backward, lambda ctx, inputs, output: None, refuse)


# Tensor subclasses that need a rule for each operator and have none for these, and what to do instead.
_REMEDIES = {
    "DTensor": "pass each device's own part, .to_local()",
    "MaskedTensor": "pass .get_data(), and hide keys with mask=",
}


def call_operator(operator: Any, function: Any, *inputs: Any) -> Tensors:
    """The results of `operator`, through its autograd.Function `function` unless a tracer needs the operator itself."""
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


# ---- the gradients of the scored operators


def _setup_scored_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *arrays, tensors, ctx.text, ctx.causal, ctx.scale, _, _, ctx.backend = inputs
    ctx.save_for_backward(*arrays, *output, *tensors)
    ctx.set_materialize_grads(False)


def _call_scored_backward(dout: Tensor, *inputs: Any) -> Tensors:
    """The results of the backward operator. Raises UnsupportedProblem for batched gradients: PyTorch has no fallback
    for an operator with a list of tensors."""
    dlse = inputs[5]
    if batched(dout) or batched(dlse):
        raise UnsupportedProblem(
            "is_grads_batched=True (jacobian with vectorize=True) is only supported with causal and scale: "
            "call torch.autograd.grad once for each gradient"
        )
    return call_operator(_scored_backward, _ScoredBackward, dout, *inputs)


def _scored_backward_formula(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, bias, sink, out, lse, *tensors = ctx.saved_tensors
    needed = ctx.needs_input_grad
    wanted = " ".join(name for name, need in (("dbias", needed[3]), ("dsink", needed[4])) if need)
    last = ctx.causal, ctx.scale, None, "", ctx.backend, torch.are_deterministic_algorithms_enabled(), wanted
    inputs = or_zeros(dout, out), q, k, v, out, lse, dlse, bias, sink, tensors, ctx.text, *last
    of = zip(_call_scored_backward(*inputs), needed, strict=False)
    return *(gradient if need else None for gradient, need in of), *(None,) * 7


def _scored_backward_formula_of_lists(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    """`_scored_backward_formula` for the operator: its argument `tensors` is a list, so its gradient must be one,
    too."""
    found = list(_scored_backward_formula(ctx, *gradients))
    found[5] = [None] * (len(ctx.saved_tensors) - 7)
    return tuple(found)


_ScoredForward = function_of(_scored_forward, _setup_scored_context, _scored_backward_formula)
_ScoredBackward = function_of(_scored_backward, lambda ctx, inputs, output: None, refuse)


_scored_forward.register_autograd(_scored_backward_formula_of_lists, setup_context=_setup_scored_context)
_scored_backward.register_autograd(refuse)
