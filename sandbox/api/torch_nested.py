"""PyTorch's jagged nested tensors as ragged batches: their offsets are cu_seqlens. Imported on demand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedProblem
from .attention import attend
from .options import ScoreOptions, ragged


def attention(
    qkv: tuple[Tensor, Tensor, Tensor], arrays: tuple[Any, ...], what: ScoreOptions, *how: Any
) -> tuple[Any, Any]:
    """(out, lse), nested as q is, of nested tensors (B, heads, j, D): transposes of (B, j, heads, D), which lie one
    sequence after the other. Raises UnsupportedProblem for others."""
    q, k, v = (_packed(name, x) for name, x in zip("qkv", qkv, strict=True))
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise UnsupportedProblem("k and v are nested tensors of different lengths: a key has one value")
    offsets = q.offsets().to(torch.int32), k.offsets().to(torch.int32)
    what, arrays = ragged(what, arrays, offsets, (None, None))
    heads_first = tuple(x.values().transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attend((*heads_first, *arrays), what, *how)
    as_q = q.offsets()
    nested = torch.nested.nested_tensor_from_jagged(out[0].transpose(0, 1), offsets=as_q).transpose(1, 2)
    return nested, torch.nested.nested_tensor_from_jagged(lse[0].transpose(0, 1), offsets=as_q).transpose(1, 2)


def _packed(name: str, x: Tensor) -> Tensor:
    if not (isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged and x.dim() == 4):
        raise UnsupportedProblem(f"{name} must be a nested tensor as q is, (B, heads, j, D), of layout torch.jagged")
    packed = x.transpose(1, 2)
    if packed._ragged_idx != 1 or packed.lengths() is not None:
        raise UnsupportedProblem(
            f"{name} has gaps, or is ragged elsewhere: pass the transpose(1, 2) of a nested (B, j, heads, D)"
        )
    return packed
