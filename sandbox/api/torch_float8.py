"""Attention of float8 PyTorch tensors where PyTorch looks on: no gradient, and no operator. Imported on demand."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import UnsupportedProblem
from ..launch.dlpack import library_of
from .dispatch import run_forward
from .torch_op import Results


def attention(arrays: Results, options: tuple[Any, ...]) -> Results:
    """Of float8, for `run_forward`: it is no operator, so that the compiler goes around it. Raises UnsupportedProblem
    where a gradient is asked for, and for who wants to see an operator."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*arrays, options[1])):
        raise UnsupportedProblem(
            "attention of float8 has no gradient: pass detached tensors, or convert q, k and v to bfloat16"
        )
    if torch.compiler.is_compiling():
        from . import torch_graphs

        return torch_graphs.float8_attention(arrays, options)
    return no_dispatch_modes(arrays, options)


def no_dispatch_modes(arrays: Results, options: tuple[Any, ...]) -> Results:
    """The same of tensors that nobody looks into."""
    if library_of(arrays[0]).intercepts(*arrays):
        raise UnsupportedProblem(
            "attention of float8 is not an operator of PyTorch: subclasses, dispatch modes, torch.func and tracing "
            "need plain tensors of float16 or bfloat16"
        )
    return run_forward(arrays, options)
