"""Gradients of `sandbox.call` for PyTorch: the backward is the kernel that the Operation names."""

from __future__ import annotations

from typing import Any

import torch

from ..core import registry
from ..core.errors import SpecError, UnsupportedProblem
from ..core.kernel import Kernel
from .call_plan import operation_of, run


def differentiable(name: str, inputs: tuple[Any, ...], tile: Any, backend: str | None) -> tuple[Any, ...]:
    """The outputs of `run`, recorded for gradients. Raises UnsupportedProblem if the operation has no gradient."""
    kernel = registry.get(name)
    backward = gradient_of(kernel)
    return _Call.apply(kernel, backward, tile, backend, *inputs)


def gradient_of(kernel: Kernel) -> Kernel:
    """The kernel of the backward. Its inputs are gradients of outputs ("dy"), inputs ("x") and outputs ("y"); its
    outputs are gradients of inputs ("dx"). Raises UnsupportedProblem without one, SpecError for other names."""
    operation = operation_of(kernel)
    if not operation.gradient:
        raise UnsupportedProblem(
            f"{kernel.name} has no backward: name its kernel in the Operation (gradient=), or pass x.detach()"
        )
    backward = registry.get(operation.gradient)
    theirs = operation_of(backward)
    given = {*(f"d{name}" for name in operation.outputs), *operation.inputs, *operation.outputs}
    wanted = {f"d{name}" for name in operation.inputs}
    for what, names, allowed in (("input", theirs.inputs, given), ("output", theirs.outputs, wanted)):
        if unknown := [name for name in names if name not in allowed]:
            raise SpecError(
                f"{backward.name}: as the gradient of {kernel.name}, its {what} {unknown[0]} must be one of "
                f"{', '.join(sorted(allowed))}"
            )
    return backward


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, backward: Kernel, tile: Any, backend: str | None, *inputs: Any) -> Any:
        outputs = run(kernel.name, inputs, tile, backend)
        operation, needed = operation_of(kernel), operation_of(backward).inputs
        tensors = dict(zip((*operation.inputs, *operation.outputs), (*inputs, *outputs), strict=True))
        kept = [name for name in tensors if name in needed]
        ctx.save_for_backward(*(tensors[name] for name in kept))
        ctx.kept, ctx.kernel, ctx.backward_kernel, ctx.backend = kept, kernel, backward, backend
        ctx.mark_non_differentiable(*(y for y in outputs if not y.is_floating_point()))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        operation, theirs = operation_of(ctx.kernel), operation_of(ctx.backward_kernel)
        tensors = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        tensors |= {f"d{name}": dy for name, dy in zip(operation.outputs, gradients, strict=True)}
        given = tuple(tensors[name].contiguous() for name in theirs.inputs)
        found = dict(zip(theirs.outputs, run(ctx.backward_kernel.name, given, None, ctx.backend), strict=True))
        own = (found.get(f"d{name}") for name in operation.inputs)
        return None, None, None, None, *own
