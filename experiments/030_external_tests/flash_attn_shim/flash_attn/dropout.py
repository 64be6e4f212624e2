"""The tests compare P before dropout, and need to know which elements were dropped: FlashAttention's S_dmask."""

from __future__ import annotations

from typing import Any

import torch

from sandbox.reference.dropout import ROUNDS

MULTIPLIERS, INCREMENTS, LOW = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """The high and the low word of x * factor, 32-bit words in int64."""
    low, high = x * (factor & 0xFFFF), x * (factor >> 16)  # at most 2^48
    low = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (low >> 32), low & LOW


def dropout_keep(seed: int, B: int, H: int, Sq: int, Sk: int, p: float, device: Any) -> Any:
    """`sandbox.reference.dropout_keep` on a GPU: the elements that dropout keeps, (B, H, Sq, Sk) bool."""
    M, N = -(-Sq // 16), -(-Sk // 16)
    sizes = B, H, M, 8, N, 4  # batch entry, head, i // 16, i % 8, j // 16, j % 8 // 2
    b, h, m, g, n, pair = (
        torch.arange(size, device=device).view(*(-1 if at == axis else 1 for at in range(6)))
        for axis, size in enumerate(sizes)
    )
    words = [x.expand(sizes) for x in (32 * m + 4 * g + pair, n, h, b)]
    key = [seed & LOW, seed >> 32 & LOW]
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(words[0], MULTIPLIERS[0]), _product(words[2], MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(k + w) & LOW for k, w in zip(key, INCREMENTS, strict=True)]
    threshold = round(p * 65536)
    halves = torch.stack([half >= threshold for w in words for half in (w & 0xFFFF, w >> 16)], -1)
    halves = halves.unflatten(-1, (2, 2, 2))  # j // 8 % 2, i // 8 % 2, j % 2
    kept = halves.permute(0, 1, 2, 7, 3, 4, 6, 5, 8).reshape(B, H, 16 * M, 16 * N)
    return kept[:, :, :Sq, :Sk]


@torch.no_grad()
def softmax_with_signs(
    q: Any, k: Any, lse: Any, *, causal: bool, scale: float | None, window: Any, dropout: float, seed: int,
    softcap: float = 0.0, alibi: Any = None, lengths_q: Any = None, lengths_k: Any = None,
) -> Any:  # fmt: skip
    """exp(score - maximum of its row), (B, H, Sq, Sk), of q's dtype, negative where dropout drops it. So scaled, that
    the tests, which normalise with an LSE of their own, find exp(score - lse) with the `lse` of the kernel.

    q: (B, H, Sq, D); k: (B, Hk, Sk, D); lse: (B, H, Sq)."""
    B, H, Sq, D = q.shape
    Sk = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], 1)
    x = (q.float() * (D**-0.5 if scale is None else scale)) @ k.float().transpose(2, 3)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
    rows, keys = (torch.full((B,), n, device=q.device) for n in (Sq, Sk))
    rows, keys = rows if lengths_q is None else lengths_q, keys if lengths_k is None else lengths_k
    i, j = torch.arange(Sq, device=q.device)[:, None], torch.arange(Sk, device=q.device)
    diagonal = i + (keys - rows).view(B, 1, 1, 1)
    if alibi is not None:
        x -= alibi.expand(B, H)[..., None, None] * (diagonal - j).abs()
    left, right = window or (None, None)
    seen = (j < keys.view(B, 1, 1, 1)) & (i < rows.view(B, 1, 1, 1))
    seen = seen & (j <= diagonal) if causal else seen
    seen = seen & (j >= diagonal - left) if left is not None else seen
    seen = seen & (j <= diagonal + right) if right is not None else seen
    x = x.masked_fill_(~seen, float("-inf"))
    most = x.amax(-1, keepdim=True)
    factor = torch.logsumexp(x, -1, keepdim=True) - most - lse[..., None].float()
    result = torch.exp(x + factor).nan_to_num_(0.0).to(q.dtype)
    del x
    return torch.where(dropout_keep(seed, B, H, Sq, Sk, dropout, q.device), result, -result)
