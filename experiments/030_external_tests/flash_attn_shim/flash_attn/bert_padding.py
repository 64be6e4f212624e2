"""Batches with and without padding. Indexing is differentiable, so autograd needs nothing else."""

from __future__ import annotations

from typing import Any

import torch


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """(rows, indices, cu_seqlens, max_seqlen, lengths) of hidden_states (B, S, …) where attention_mask (B, S), or
    unused_mask, is True; `lengths` counts attention_mask only."""
    present = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    indices = present.flatten().nonzero()[:, 0]
    lengths = present.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """(batch, seqlen, …) with hidden_states (rows, …) at `indices`, and 0 elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))
