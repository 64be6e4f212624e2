"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864). In PyTorch: sandbox has no kernel for them, so the
tests check only what is computed from the rotated arrays."""

from __future__ import annotations

from typing import Any

import torch


def apply_rotary_emb(x: Any, cos: Any, sin: Any, interleaved: bool = False, seqlen_offsets: Any = 0) -> Any:
    """x: (B, S, H, D), of which the first 2 * cos.shape[1] columns are rotated; cos, sin: (positions, pairs);
    seqlen_offsets: the position of the first row, an int or (B,). interleaved: pairs are adjacent columns."""
    B, S = x.shape[:2]
    first = torch.as_tensor(seqlen_offsets, device=x.device).long().expand(B)
    rows = (first[:, None] + torch.arange(S, device=x.device)).clamp(max=len(cos) - 1)
    c, s = (table.float()[rows][:, :, None] for table in (cos, sin))  # (B, S, 1, pairs)
    pairs = cos.shape[1]
    rotated, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    a, b = rotated.unflatten(-1, (pairs, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    both = a * c - b * s, a * s + b * c
    result = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat((result.to(x.dtype), rest), -1)
