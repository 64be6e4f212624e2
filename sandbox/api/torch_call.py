"""Gradients of `sandbox.call` for PyTorch: the backward is the kernel that the Operation names. Imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.operation import Operation

_Run = Callable[[tuple[Any, ...]], tuple[Any, ...]]  # from inputs to outputs


def recorded(
    run: _Run, run_backward: _Run, operation: Operation, gradient: Operation, inputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The outputs of `run`, which computes `operation`, recorded by autograd. `run_backward` computes `gradient`."""
    return _Call.apply(run, run_backward, operation, gradient, *inputs)


class _Call(torch.autograd.Function):
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        tensors = dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
        tensors |= {f"d{name}": dy for name, dy in zip(ctx.operation.outputs, gradients, strict=True)}
        given = tuple(tensors[name].contiguous() for name in ctx.gradient.inputs)
        found = dict(zip(ctx.gradient.outputs, ctx.run_backward(given), strict=True))
        own = (found.get(f"d{name}") for name in ctx.operation.inputs)
        return None, None, None, None, *own
