"""Attention of plain PyTorch tensors for autograd, without PyTorch's dispatcher: through it, a call takes three times
as long. Calls that PyTorch has to intercept (tensor subclasses, dispatch modes, torch.func, tracing) go to the
operators of `torch_ops`. Also nested tensors, and the gradients of `sandbox.call`. Imported on demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedProblem
from ..core.limits import GRADIENT_D
from ..core.operation import Operation
from ..launch.dlpack import NESTED, library_of
from .dispatch import ALIGNED, Found, known, run_backward, run_forward
from .options import (
    DIFFERENTIABLE,
    Options,
    backward_options,
    constant,
    constants,
    for_backward,
    no_derivative,
    ragged,
    replace,
)
from .torch_ops import Tensors, backward, batched, forward, or_zeros


def attention(arrays: Tensors, options: Options, with_lse: bool = True) -> tuple[Tensor, Any]:
    """(out, lse) of `sandbox.attention`, recorded by autograd or by a tracer. `arrays` are q, k, v and those that
    `options.array_names` names; unless `with_lse`, lse may be None."""
    _check_not_nested(arrays)
    if isinstance(options.scale, Tensor):
        options = replace(options, scale=constant("scale", options.scale))
    library = library_of(arrays[0])
    if arrays[0].shape[-1] > GRADIENT_D and library.requires_grad(*arrays[:3]):
        raise UnsupportedProblem(
            f"q has D={arrays[0].shape[-1]}: attention has a gradient for D <= {GRADIENT_D} (latent attention is "
            "forward only): call it under torch.no_grad(), or pass detached tensors"
        )
    for name, array in constants(options, arrays):
        if isinstance(array, Tensor) and library.differentiates(array):
            raise UnsupportedProblem(no_derivative(name))
    if not library.intercepts(*arrays):
        results = _Attention.apply((options, None, with_lse), *arrays)
        return results if with_lse else (results, None)
    out, lse = forward(arrays, options)
    return out, lse


def record(arrays: Tensors, options: Options, found: Found, with_lse: bool) -> tuple[Tensor, Any]:
    """(out, lse) recorded by autograd, of tensors that PyTorch does not have to intercept; `found`: the result of
    `dispatch.known`. Unless `with_lse`, lse is None: one result less for autograd."""
    results = _apply((options, found, with_lse), *arrays)
    return results if with_lse else (results, None)


def unrecorded(arrays: Tensors, options: Options) -> Tensors:
    """(out, lse) of `sandbox.attention_forward` where PyTorch has to intercept the call."""
    with torch.no_grad():
        return attention(arrays, options)


def paged_forward(arrays: Tensors, options: Options) -> Tensors:
    """`unrecorded`, of keys in pages. Raises UnsupportedProblem where a gradient is required."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*arrays, options.scale)):
        raise UnsupportedProblem(
            "attention_paged has no gradient: call it under torch.no_grad(), or gather the pages and use attention"
        )
    return unrecorded(arrays, options)


def gradients(arrays: Tensors, options: Options) -> Tensors:
    """dq, dk, dv of `sandbox.attention_backward` where PyTorch has to intercept the call."""
    _check_not_nested(arrays)
    with torch.no_grad():
        return backward(arrays, options)[:3]


_PYTORCH = library_of(torch.empty(0))


class _Attention(torch.autograd.Function):
    """Has no setup_context on purpose: with one, PyTorch would inspect the signature of `forward` at each call."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Options, Found | None, bool], *arrays: Any) -> Any:
        """`call`: the options, the result of `dispatch.known`, and whether LSE is a result."""
        ctx.options, found, with_lse = call
        output = found[0](arrays, found[1]) if found else run_forward(arrays, ctx.options)
        ctx.save_for_backward(*arrays[:3], *output, *arrays[3:])
        ctx.set_materialize_grads(False)
        return output if with_lse else output[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Bypasses the dispatcher, unless PyTorch has to intercept the call or the gradients may be differentiated."""
        saved, names = ctx.saved_tensors, ctx.options.array_names
        arrays = (or_zeros(dout, saved[3]), *saved)
        plain = options = backward_options(ctx.options, torch.are_deterministic_algorithms_enabled())
        wanted: tuple[str, ...] = ()
        if names or dlse is not None:
            needed = zip(names, ctx.needs_input_grad[4:], strict=True)
            wanted = tuple([f"d{name}" for name, need in needed if need and name in DIFFERENTIABLE])
            options, others = for_backward(plain, saved[5:], dlse, wanted)
            arrays = *arrays[:6], *others
        twice = torch.is_grad_enabled()  # create_graph=True
        if not twice and (found := known(_PYTORCH, "backward", options, arrays)):
            gradients = found[0](arrays, found[1])
        elif twice or _PYTORCH.intercepts(*arrays) or batched(dout) or batched(dlse):
            gradients = backward((*arrays[:6], *saved[5:]), plain, dlse, wanted)
        else:
            # A gradient may be lazily negated (is_neg), for example if out was the imaginary part of a complex z and
            # z.conj() was used. Saved tensors are not: the forward raises an error for such a tensor.
            resolved = arrays[0].resolve_neg(), *arrays[1:6], *(x.resolve_neg() for x in arrays[6:])
            gradients = run_backward(resolved, options)
        if not names:
            return None, *gradients
        named = dict(zip(wanted, gradients[3:], strict=True))
        return None, *gradients[:3], *(named.get(f"d{name}") for name in names)


# Skips the checks of torch.autograd.Function for torch.func, which take a quarter of the time of recording a call. It
# is used only if `dispatch.known` finds a plan, which it does not under torch.func.
_apply: Any = super(torch.autograd.Function, _Attention).apply


# ---- jagged nested tensors, whose offsets are cu_seqlens


def ragged_of_nested(
    qkv: tuple[Tensor, Tensor, Tensor], arrays: tuple[Any, ...], options: Options
) -> tuple[tuple[Any, ...], Options]:
    """(arrays, options) of the ragged batch in nested tensors (B, heads, j, D), j being the ragged dimension. They must
    be transposes of (B, j, heads, D) without gaps between sequences. Raises UnsupportedProblem for others."""
    q, k, v = (_rows_first(name, x) for name, x in zip("qkv", qkv, strict=True))
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise UnsupportedProblem(
            "k and v are nested tensors of different lengths: they must be the same in each batch entry"
        )
    offsets = q.offsets().to(torch.int32), k.offsets().to(torch.int32)
    options, arrays = ragged(options, arrays, offsets, (None, None))
    return (*(x.values().transpose(0, 1)[None] for x in (q, k, v)), *arrays), options


def nested_as(q: Tensor, x: Tensor) -> Tensor:
    """out or lse, (1, heads, rows, …), nested as q is."""
    offsets = q.transpose(1, 2).offsets()
    return torch.nested.nested_tensor_from_jagged(x[0].transpose(0, 1), offsets=offsets).transpose(1, 2)


def _check_not_nested(arrays: Tensors) -> None:
    """Raises UnsupportedProblem for nested tensors that `ragged_of_nested` did not convert."""
    if any(getattr(x, "is_nested", False) for x in arrays):
        raise UnsupportedProblem(NESTED)


def _rows_first(name: str, x: Tensor) -> Tensor:
    """A nested (B, heads, j, D) as (B, j, heads, D). Raises UnsupportedProblem if its rows have gaps."""
    if not getattr(x, "is_nested", False):
        raise UnsupportedProblem(f"{name} is not a nested tensor, and q is: it must be (B, heads, j, D), nested")
    if x.layout != torch.jagged:
        raise UnsupportedProblem(f"{name} is a nested tensor with layout {x.layout}: make it with layout=torch.jagged")
    if x.dim() != 4:
        raise UnsupportedProblem(f"{name} is a nested tensor of {x.dim()} dimensions: it must be (B, heads, j, D)")
    rows_first = x.transpose(1, 2)
    if rows_first._ragged_idx != 1 or rows_first.lengths() is not None:
        raise UnsupportedProblem(
            f"{name} has gaps, or another ragged dimension: pass the transpose(1, 2) of a nested (B, j, heads, D)"
        )
    return rows_first


# ---- sandbox.call

_Run = Callable[[tuple[Any, ...]], tuple[Any, ...]]  # from inputs to outputs


def recorded_call(
    run: _Run, run_backward: _Run, operation: Operation, gradient: Operation, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The outputs of `run`, which computes `operation`, recorded by autograd. `run_backward` computes `gradient`."""
    return _Call.apply(run, run_backward, operation, gradient, *inputs)


class _Call(torch.autograd.Function):
    """The backward is the kernel that the Operation names."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, run_backward: _Run, operation: Operation, gradient: Operation, *inputs: Any
    ) -> tuple[Any, ...]:
        outputs = run(inputs)
        tensors = dict(zip((*operation.inputs, *operation.outputs), (*inputs, *outputs), strict=True))
        kept = [name for name in tensors if name in gradient.inputs]
        ctx.save_for_backward(*(tensors[name] for name in kept))
        ctx.kept, ctx.operation, ctx.gradient, ctx.run_backward = kept, operation, gradient, run_backward
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        tensors = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        tensors |= {f"d{name}": dy for name, dy in zip(ctx.operation.outputs, gradients, strict=True)}
        with torch.no_grad():
            given = tuple(_readable(tensors[name]) for name in ctx.gradient.inputs)
            results = ctx.run_backward(given)
        if torch.is_grad_enabled():  # create_graph=True
            results = _Gradients.apply(ctx.operation.name, len(results), *results, *tensors.values())
        found = dict(zip(ctx.gradient.outputs, results, strict=True))
        own = (found.get(f"d{name}") for name in ctx.operation.inputs)
        return None, None, None, None, *own


class _Gradients(torch.autograd.Function):
    """Returns the first `count` of `tensors`: gradients that depend on the other tensors. Differentiating them raises
    an error. (With PyTorch's once_differentiable they would be constants if no incoming gradient requires a gradient.)
    """

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise UnsupportedProblem(
            f"{ctx.name} cannot be differentiated twice: no kernel computes the derivatives of its gradients "
            "(differentiate once, without create_graph=True)"
        )


def _readable(x: Tensor) -> Tensor:
    """`x` as kernels read it, contiguous and aligned: a gradient may be lazily negated, or a part of another tensor."""
    x = x.resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % ALIGNED else x
