"""PyTorch's jagged nested tensors as ragged batches: their offsets are cu_seqlens. Imported on demand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedProblem
from .options import Options, ragged


def packed(
    qkv: tuple[Tensor, Tensor, Tensor], arrays: tuple[Any, ...], options: Options
) -> tuple[tuple[Any, ...], Options]:
    """(arrays, options) of the ragged batch in nested tensors (B, heads, j, D), j being the ragged dimension. They must
    be transposes of (B, j, heads, D) without gaps between sequences. Raises UnsupportedProblem for others."""
    q, k, v = (_packed(name, x) for name, x in zip("qkv", qkv, strict=True))
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


def _packed(name: str, x: Tensor) -> Tensor:
    if not (isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged and x.dim() == 4):
        raise UnsupportedProblem(f"{name} must be a nested tensor like q, (B, heads, j, D), with layout torch.jagged")
    packed = x.transpose(1, 2)
    if packed._ragged_idx != 1 or packed.lengths() is not None:
        raise UnsupportedProblem(
            f"{name} has gaps, or another ragged dimension: pass the transpose(1, 2) of a nested (B, j, heads, D)"
        )
    return packed
