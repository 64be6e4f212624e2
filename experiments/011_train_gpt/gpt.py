"""A small GPT in plain PyTorch with the attention as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

# q, k, v -> out, (B, H, S, D) each, causal; with the ends of documents, as cu_seqlens of all B * S tokens, or None.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Config:
    """The model and its training; the layers compute in `dtype`, the weights are float32."""

    layers: int
    heads: int
    width: int
    length: int  # characters per sequence
    batch: int
    steps: int
    rate: float  # peak learning rate
    dtype: str = "bfloat16"


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer with residual connections."""

    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        C, self.heads, self.attend = config.width, config.heads, attend
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.project = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.feed = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: Tensor, ends: Tensor | None) -> Tensor:
        B, S, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # views, not copies
        x = x + self.project(self.attend(q, k, v, ends).transpose(1, 2).reshape(B, S, C))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Characters (B, S) -> logits of the next one, (B, S, characters)."""

    def __init__(self, config: Config, characters: int, attend: Attend):
        super().__init__()
        self.token, self.place = nn.Embedding(characters, config.width), nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, characters)
        for weight in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, ends: Tensor | None = None) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, ends)
        return self.head(self.norm(x))
