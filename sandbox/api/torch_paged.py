"""Attention to keys in pages where PyTorch looks on. Imported on demand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedProblem
from . import torch_autograd
from .options import ScoreOptions


def attention(arrays: tuple[Tensor, ...], what: ScoreOptions, *how: Any) -> tuple[Tensor, ...]:
    """(out, lse), by the operator that compiled graphs take. Raises UnsupportedProblem for a gradient."""
    _, scale, *_ = how
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*arrays, scale)):
        raise UnsupportedProblem(
            "attention_paged has no gradient: call it under torch.no_grad(), or gather the pages and use attention"
        )
    return torch_autograd.forward(arrays, what, *how)
