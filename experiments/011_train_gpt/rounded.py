"""Attention with emulated roundings of a kernel, correct or wrong: tests the sensitivity of the measures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Roundings:
    """FlashAttention-2's roundings in bfloat16, everything else in float32; and faults."""

    bits: int = 8  # of a factor: bfloat16 has 8
    P_once: bool = False  # dS is computed from the rounded P, as in bwd_mma and bwd_wgmma
    truncated: bool = False  # dS is truncated instead of rounded
    scale: float = 1.0  # factor on the scores
    dK: float = 1.0  # factor on dK


def rounded(x: Tensor, bits: int, truncated: bool = False) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    steps = mantissa * 2**bits
    return torch.ldexp((steps.trunc() if truncated else steps.round()) / 2**bits, exponent)


class Attention(torch.autograd.Function):
    """q, k, v (B, H, S, D), visible (B or 1, 1, S, S), Roundings -> out (B, H, S, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, how: Roundings) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            ctx.how, ctx.unit, dtype = how, q.shape[3] ** -0.5, q.dtype
            q, k, v = q.float(), k.float(), v.float()
            x = (q @ k.mT * (ctx.unit * how.scale)).masked_fill(~visible, -math.inf)
            P = (x - x.amax(-1, keepdim=True)).exp()
            out = (rounded(P, how.bits) @ v / P.sum(-1, keepdim=True)).to(dtype)
            ctx.save_for_backward(q, k, v, out, x - x.logsumexp(-1, keepdim=True))
            return out

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dO.device.type, enabled=False):
            (q, k, v, out, x), how, dtype = ctx.saved_tensors, ctx.how, dO.dtype
            P, dO = x.exp(), dO.float()
            multiplied = rounded(P, how.bits)
            dS = (multiplied if how.P_once else P) * (dO @ v.mT - (dO * out.float()).sum(-1, keepdim=True))
            dS = rounded(dS, how.bits, how.truncated)
            dQ, dK, dV = dS @ k * ctx.unit, dS.mT @ q * (ctx.unit * how.dK), multiplied.mT @ dO
            return dQ.to(dtype), dK.to(dtype), dV.to(dtype), None, None
