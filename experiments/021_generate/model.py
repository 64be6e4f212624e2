"""A small transformer in plain PyTorch with a preallocated cache and the attention as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# q (B, H, n, D), the cache of k and v (B, room, Hk, D) each, lengths (B,), the new tokens among them -> (B, H, n, D)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    layers: int
    heads: int
    groups: int  # key/value heads
    width: int  # head width
    room: int  # tokens per text in the cache
    words: int
    dtype: torch.dtype = torch.bfloat16


class Layer(nn.Module):
    """Pre-norm attention and feed-forward layer with residual connections."""

    def __init__(self, c: Config):
        super().__init__()
        self.c, C, kv = c, c.heads * c.width, c.groups * c.width
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.project = nn.Linear(C, C + 2 * kv, bias=False), nn.Linear(C, C, bias=False)
        self.feed = nn.Sequential(nn.Linear(C, 4 * C, bias=False), nn.GELU(), nn.Linear(4 * C, C, bias=False))

    def forward(self, x: Tensor, cache: Tensor, places: Tensor, lengths: Tensor, attend: Attend) -> Tensor:
        """`cache`: (2, B, room, Hk, D); the new keys and values are written to `places`, (B, n)."""
        B, n, C = x.shape
        kv = self.c.groups * self.c.width
        q, k, v = self.qkv(self.norm1(x)).split((C, kv, kv), dim=-1)
        batch = torch.arange(B, device=x.device)[:, None]
        for own, new in zip(cache, (k, v), strict=True):
            own[batch, places] = new.view(B, n, self.c.groups, self.c.width)
        q = q.view(B, n, self.c.heads, self.c.width).transpose(1, 2)
        x = x + self.project(attend(q, cache[0], cache[1], lengths).transpose(1, 2).reshape(B, n, C))
        return x + self.feed(self.norm2(x))


class Generator(nn.Module):
    """B texts with a cache. `lengths`: the number of tokens of each text in the cache."""

    def __init__(self, c: Config, B: int, device: str):
        super().__init__()
        self.c, C = c, c.heads * c.width
        with torch.device(device):
            self.word, self.place = nn.Embedding(c.words, C), nn.Embedding(c.room, C)
            self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
            self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, c.words, bias=False)
            self.cache = torch.zeros(c.layers, 2, B, c.room, c.groups, c.width, dtype=c.dtype)
            self.lengths = torch.zeros(B, dtype=torch.int32)
        self.to(c.dtype)

    @torch.no_grad()
    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Tokens (B, n) that follow the cache -> logits of the next token, (B, words)."""
        places = self.lengths.long()[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.lengths += tokens.shape[1]
        x = self.word(tokens) + self.place(places)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            x = layer(x, cache, places, self.lengths, attend)
        return self.head(self.norm(x[:, -1]))
