"""Attention as PyTorch knows operations: differentiable, and opaque to torch.compile. Imported on demand.

The operators "sandbox::attention_forward" and "sandbox::attention_backward" have fake implementations, which say shapes
and strides without computing; rules for torch.func.vmap, which make one batch of two; and a gradient each: the
backward's own is a refusal. Three ways lead there:

- eager code on plain tensors, `_Attention`: past the dispatcher, which takes three times as long;
- what else PyTorch has to see (subclasses, dispatch modes, torch.func, forward-mode), `_Watched`, around the operators;
- torch.compile, torch.jit.trace and torch.func.functionalize, which take the operators themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core import registry
from ..core.errors import UnsupportedProblem
from ..core.kernel import Kernel
from ..core.problem import normalise_causal
from ..core.tile import Tile
from ..launch.dlpack import dense_strides, library_of
from .asked import Asked
from .passes import number, run_forward
from .torch_arguments import gathered, gradients, spread

Results = tuple[Tensor, ...]


def attention(
    arrays: Results, what: Asked, causal: Any, scale: Any, kernel: Any, tile: Any, backend: str | None
) -> Results:
    """(out, lse) of `sandbox.attention`, recorded for autograd, for the compiler, or for whoever watches. `arrays` are
    q, k, v and those that `what` names."""
    if isinstance(scale, Tensor):
        scale = _constant(scale)
    if not library_of(arrays[0]).intercepts(*arrays):
        out, lse = _Attention.apply(what, causal, scale, kernel, tile, backend, *arrays)
        return out, lse
    mask = normalise_causal(causal) or ""
    how = mask, scale, _kernel_text(kernel), _tile_text(tile), backend
    return _watched(_forward, _Watched, *arrays[:3], *spread(what, arrays[3:]), *how)


def forward(*inputs: Any) -> Results:
    """`sandbox.attention_forward` where PyTorch has to see it; the arguments of `attention`."""
    with torch.no_grad():
        return attention(*inputs)


def backward(arrays: Results, options: tuple[Any, ...]) -> Results:
    """`sandbox.attention_backward` where PyTorch has to see it; the arguments of `run_backward`."""
    causal, scale, kernel, tile, backend, deterministic, what = options
    scale = scale if scale is None else number(scale)
    how = _kernel_text(kernel), _tile_text(tile), backend, deterministic, ""
    given = (*arrays[:6], None, *spread(what, arrays[6:]), normalise_causal(causal) or "", scale, *how)
    with torch.no_grad():
        return _watched(_backward, _WatchedBackward, *given)[:3]


# ---- options as an operator's arguments, which are of few types: causal is "" where nothing is masked


def _constant(scale: Tensor) -> float:
    """The value of a scale that is a tensor. Raises UnsupportedProblem where its derivative would be lost."""
    dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(scale).tangent is not None
    if dual or (scale.requires_grad and torch.is_grad_enabled()):
        raise UnsupportedProblem(
            "scale is a tensor to differentiate by, and attention has no derivative by its scale: "
            "pass scale.detach(), or multiply q by it and pass scale=1.0"
        )
    return number(scale)


_texts: dict[str, Kernel] = {}


@torch.compiler.assume_constant_result
def _kernel_text(kernel: str | Kernel | None) -> str | None:
    """A kernel's name; of one that is not the registry's, a text that stands for this very object in this process."""
    if not isinstance(kernel, Kernel):
        return kernel
    if registry.kernels().get(kernel.name) == kernel:
        return kernel.name
    text = f"{kernel.name} ({kernel.source}, {id(kernel):#x})"
    _texts[text] = kernel  # which keeps it alive, and the number its own
    return text


@torch.compiler.assume_constant_result
def _whole_tile_text(tile: Tile) -> str:
    return str(tile)


def _tile_text(tile: Tile | str | Mapping[str, int] | None) -> str:
    """Without making a Tile, which the compiler would have to follow; "" for none."""
    if tile is None or isinstance(tile, str):
        return tile or ""
    return _whole_tile_text(tile) if isinstance(tile, Tile) else ",".join(f"{n}={int(tile[n])}" for n in tile)


# ---- the operators


@torch.library.custom_op("sandbox::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi: Tensor | None,
    sink: Tensor | None, key_lengths: Tensor | None, tensors: list[Tensor], asked: str, causal: str,
    scale: float | None, kernel: str | None, tile: str, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chosen = _texts.get(kernel, kernel) if kernel else None
    what, more = gathered((bias, mask, alibi, sink, key_lengths), tensors, asked)
    return run_forward((q, k, v, *more), (causal or False, scale, chosen, tile or None, backend, False, what))


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Results:
    out = (*q.shape[:3], v.shape[3])
    return q.new_empty_strided(out, dense_strides(out, q.stride())), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sandbox::attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, alibi: Tensor | None, sink: Tensor | None, key_lengths: Tensor | None,
    tensors: list[Tensor], asked: str, causal: str, scale: float | None, kernel: str | None, tile: str,
    backend: str | None, deterministic: bool, wanted: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, and of those that are `wanted`, "bias" or "sink", the gradients too; empty if they are not."""
    chosen = _texts.get(kernel, kernel) if kernel else None
    what, more = gathered((bias, mask, alibi, sink, key_lengths), tensors, asked)
    options = causal or False, scale, chosen, tile or None, backend, deterministic
    found = gradients((dout, q, k, v, out, lse), dlse, what, more, options, wanted.split())
    dq, dk, dv = (found[name] for name in "qkv")
    return dq, dk, dv, found.get("bias", q.new_empty(0)), found.get("sink", q.new_empty(0))


@_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Any, bias: Any, mask: Any,
      alibi: Any, sink: Any, *rest: Any) -> Results:  # fmt: skip
    wanted = rest[-1].split()
    dbias = _empty_like(bias) if "bias" in wanted else q.new_empty(0)
    dsink = torch.empty_like(sink) if "sink" in wanted else q.new_empty(0)
    return _empty_like(q), _empty_like(k), _empty_like(v), dbias, dsink


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, dense_strides(x.shape, x.stride()), dtype=x.dtype, device=x.device)


def _vmapped(operator: Any, options: int) -> None:
    """Registers what torch.func.vmap does with `operator`: the mapped dimension becomes part of B. `options`: where
    among its arguments those stand that only some scores have."""

    def rule(info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Results, tuple[int, ...]]:
        n = info.batch_size
        if any(isinstance(x, Tensor) for x in inputs[options:]) or inputs[options + 6]:
            raise UnsupportedProblem(
                "torch.func.vmap of attention knows no options but causal and scale: make the mapped dimension part of B"
            )
        folded = [_folded(x, n, dim) if isinstance(x, Tensor) else x for x, dim in zip(inputs, dims, strict=True)]
        results = operator(*folded)
        return tuple(x.unflatten(0, (n, x.shape[0] // n if n else 0)) for x in results), (0,) * len(results)

    operator.register_vmap(rule)


def _folded(x: Tensor, n: int, dim: int | None) -> Tensor:
    mapped = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.flatten(0, 1)


_vmapped(_forward, 3)
_vmapped(_backward, 7)


# ---- their gradients


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, bias, mask, alibi, sink, key_lengths, tensors, ctx.asked, ctx.causal, ctx.scale, _, _, ctx.backend = inputs
    ctx.tensors = len(tensors)
    ctx.save_for_backward(q, k, v, *output, bias, mask, alibi, sink, key_lengths, *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    q, k, v, out, lse, *more = saved[:10]
    needed = ctx.needs_input_grad
    wanted = [name for name, i in (("bias", 3), ("sink", 6)) if needed[i]]
    deterministic = torch.are_deterministic_algorithms_enabled()
    dout = torch.zeros_like(out) if dout is None else dout
    inputs = (dout, q, k, v, out, lse, dlse, *more, list(saved[10:]), ctx.asked, ctx.causal, ctx.scale, None, "")
    found = _watched(_backward, _WatchedBackward, *inputs, ctx.backend, deterministic, " ".join(wanted))
    dq, dk, dv = (x if need else None for x, need in zip(found[:3], needed[:3], strict=True))
    dbias, dsink = (found[i] if name in wanted else None for i, name in ((3, "bias"), (4, "sink")))
    return dq, dk, dv, dbias, None, None, dsink, None, [None] * ctx.tensors or None, *(None,) * 6


def _gradients_eagerly(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """Past the dispatcher, unless PyTorch has to see it or the gradients may be differentiated."""
    q, k, v, out, lse, *more = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    deterministic = torch.are_deterministic_algorithms_enabled()
    names = ("q", "k", "v", *ctx.what.names)
    needed = [name for name, need in zip(names, ctx.needs_input_grad[6:], strict=True) if need]
    wanted = [name for name in ("bias", "sink") if name in needed]
    given = [x for x in (dout, dlse) if x is not None]
    batched = any(torch._C._functorch.is_legacy_batchedtensor(x) for x in given)  # by is_grads_batched
    if torch.is_grad_enabled() or batched or library_of(dout).intercepts(*given):
        inputs = (dout, q, k, v, out, lse, dlse, *spread(ctx.what, tuple(more)), ctx.causal, ctx.scale, None, "")
        results = _watched(_backward, _WatchedBackward, *inputs, ctx.backend, deterministic, " ".join(wanted))
        found = dict(zip(("q", "k", "v", "bias", "sink"), results, strict=True))
    else:
        options = ctx.causal or False, ctx.scale, None, None, ctx.backend, deterministic
        found = gradients((dout, q, k, v, out, lse), dlse, ctx.what, tuple(more), options, wanted)
    return *(None,) * 6, *(found[name] if name in needed else None for name in names)


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise UnsupportedProblem(
        "attention cannot be differentiated twice: no kernel computes the derivatives of its gradients "
        "(torch.nn.functional.scaled_dot_product_attention can, under torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
    )


def _refuse_forward_mode(ctx: Any, *tangents: Tensor) -> None:
    raise UnsupportedProblem(
        "attention has no forward-mode derivative: differentiate in reverse (backward, torch.func.grad, vjp or jacrev) "
        "or use torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
    )


_forward.register_autograd(_gradients, setup_context=_remember)
_backward.register_autograd(_refuse)


class _Attention(torch.autograd.Function):
    """Without setup_context, for which PyTorch would look into the signature of `forward` at each call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Results:
        what, causal, scale, kernel, tile, backend, *arrays = inputs
        output = run_forward(tuple(arrays), (causal, scale, kernel, tile, backend, False, what))
        ctx.what, ctx.causal, ctx.scale, ctx.backend = what, normalise_causal(causal or False) or "", scale, backend
        ctx.save_for_backward(*arrays[:3], *output, *arrays[3:])
        ctx.set_materialize_grads(False)
        return output

    backward = staticmethod(_gradients_eagerly)


class _Watched(torch.autograd.Function):
    """The operator as torch.func and forward-mode differentiation take it."""

    generate_vmap_rule = True
    forward = staticmethod(_forward)
    setup_context = staticmethod(_remember)
    backward = staticmethod(_gradients)
    jvp = staticmethod(_refuse_forward_mode)


class _WatchedBackward(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(_backward)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_refuse)
    jvp = staticmethod(_refuse_forward_mode)


def _watched(operator: Any, function: Any, *inputs: Any) -> Results:
    """`operator` in its `function`, except for those that cannot look into one, and take the operator as it is."""
    if forward_ad._current_level >= 0:
        return _uncompiled(function, *inputs)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return operator(*inputs)
    stack = torch._C._functorch.peek_interpreter_stack()
    functionalizing = stack is not None and stack.key() == torch._C._functorch.TransformType.Functionalize
    return operator(*inputs) if functionalizing else function.apply(*inputs)


@torch.compiler.disable
def _uncompiled(function: Any, *inputs: Any) -> Results:
    """Where there may be tangents, which a compiled graph would lose in silence."""
    return function.apply(*inputs)
