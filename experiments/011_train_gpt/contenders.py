"""The attention functions that train the model: (B, H, S, D), causal; within documents if their ends are passed."""

from __future__ import annotations

import torch
from gpt import Attend
from rounded import Attention, Roundings
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sandbox

DROPOUT = 0.1


def ours(dropout: float) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
        if ends is None:
            return sandbox.attention(q, k, v, causal=True, dropout=dropout)
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = sandbox.attention_varlen(*rows, ends, causal=True, dropout=dropout)
        return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)

    return attend


def varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
    """PyTorch's FlashAttention on ragged batches."""
    from torch.nn.attention.varlen import varlen_attn

    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(*rows, ends, ends, q.shape[2], q.shape[2], window_size=(-1, 0))
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def sdpa(backend: SDPBackend, dropout: float) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
        mask = None if ends is None else visible(q, ends)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None)

    return attend


def plain(dropout: float) -> Attend:
    """Textbook attention: scores and probabilities are rounded to the dtype too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor | None) -> Tensor:
        scores = (q @ k.mT) * q.shape[3] ** -0.5
        P = scores.masked_fill(~visible(q, ends), float("-inf")).softmax(dim=-1).to(v.dtype)
        return F.dropout(P, dropout) @ v

    return attend


def emulated(how: Roundings) -> Attend:
    return lambda q, k, v, ends: Attention.apply(q, k, v, visible(q, ends), how)


WRONG = {
    "right": Roundings(P_once=True),
    "dS cut off": Roundings(P_once=True, truncated=True),
    "6 bits": Roundings(bits=6, P_once=True),
    "5 bits": Roundings(bits=5, P_once=True),
    "scores 1% too large": Roundings(P_once=True, scale=1.01),
    "scores 5% too large": Roundings(P_once=True, scale=1.05),
    "dK 1% too small": Roundings(P_once=True, dK=0.99),
}


def visible(q: Tensor, ends: Tensor | None) -> Tensor:
    """Visible keys of each query, (1, 1, S, S), or (B, 1, S, S) with documents."""
    B, _, S, _ = q.shape
    causal = torch.ones(1, 1, S, S, dtype=torch.bool, device=q.device).tril()
    if ends is None:
        return causal
    document = torch.searchsorted(ends, torch.arange(B * S, device=q.device), right=True).view(B, 1, S)
    return causal & (document[..., :, None] == document[..., None, :])


def contenders_for(task: str, device: str, compiled: bool, wrong: bool = False) -> dict[str, Attend]:
    """Our attention, or wrong variants of it, and PyTorch's implementations that support the task on the device."""
    dropout = DROPOUT * (task == "dropout")
    found = {f"ours, {name}": emulated(how) for name, how in WRONG.items()} if wrong else {"ours": ours(dropout)}
    if compiled:
        found["ours, compiled"] = ours(dropout)
    if task == "packed" and device == "cuda":
        found["varlen"] = varlen
    elif task == "causal" or device == "cuda":
        found["sdpa-flash"] = sdpa(SDPBackend.FLASH_ATTENTION, dropout)
        if device == "cuda":
            found["sdpa-cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION, dropout)
    found["sdpa-math"] = sdpa(SDPBackend.MATH, dropout)
    if device == "cuda":
        found["sdpa-efficient"] = sdpa(SDPBackend.EFFICIENT_ATTENTION, dropout)
    found["plain"] = plain(dropout)
    if dropout:
        found["plain, reseeded"] = found["plain"]
    if compiled and "sdpa-flash" in found:
        found["sdpa-flash, compiled"] = found["sdpa-flash"]
    return found
