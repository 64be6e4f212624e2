"""Ragged batches to time, and how PyTorch is asked for one."""

from __future__ import annotations

import inspect
from typing import Any

from ..core.errors import UnsupportedProblem
from ..core.problem import Problem

# 64 to 4096, drawn once: numpy.random.default_rng(14).integers(64, 4097, 16).
DRAWN = (670, 3415, 2698, 1519, 421, 2898, 1467, 3532, 1428, 2650, 801, 2275, 359, 3138, 440, 2952)
# As documents are, most of them short, drawn once: default_rng(14).lognormal(log(400), 1, 20).
DOCUMENTS = (801, 150, 82, 21, 280, 1392, 413, 667, 1112, 165, 5674, 166, 581, 6192, 356, 448, 239, 558, 47, 209)
EQUAL = (2048,) * 16  # a dense batch, too


def problems(dtype: str) -> list[Problem]:
    """The batch of 16 lengths with and without a mask, at two widths, with grouped heads; short documents; and one that
    could as well be dense, beside that."""
    causal: dict[str, Any] = {"dtype": dtype, "causal": "bottom-right"}
    return [
        of_lengths(DRAWN, 16, 128, **causal),
        of_lengths(DRAWN, 16, 128, dtype=dtype),
        of_lengths(DRAWN, 32, 64, **causal),
        of_lengths(DRAWN, 32, 128, Hk=8, **causal),
        of_lengths(DOCUMENTS, 16, 128, **causal),
        of_lengths(EQUAL, 16, 128, **causal),
        Problem(len(EQUAL), 16, EQUAL[0], EQUAL[0], 128, **causal),
    ]


def of_lengths(lengths: tuple[int, ...], H: int, D: int, **fields: Any) -> Problem:
    return Problem(0, H, 0, 0, D, lengths=tuple((n, n) for n in lengths), **fields)


def ask_varlen_attn(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any) -> Any:
    """A launch of PyTorch's varlen_attn, FlashAttention-2 inside, on (1, heads, rows, D). Raises UnsupportedProblem."""
    from torch.nn.attention.varlen import varlen_attn

    p = problem
    others = (p.softcap, p.alibi, p.bias, p.mask, p.sink, p.key_lengths, p.score, p.dropout, p.Dv != p.D)
    if not p.ragged or any(others):
        raise UnsupportedProblem("varlen_attn: it takes ragged batches, with causal, window and scale alone")
    if p.causal == "top-left":
        raise UnsupportedProblem("varlen_attn: its causal mask is bottom-right")
    left, right = (-1 if bound is None else bound for bound in p.bounds)
    rows_first = tuple(x[0].transpose(0, 1) for x in (q, k, v))
    offsets = option_tensors["cu_seqlens_q"], option_tensors["cu_seqlens_k"], p.Sq, p.Sk
    options = {"scale": p.scale, "window_size": (left, right)}
    if p.Hk != p.H and "enable_gqa" in inspect.signature(varlen_attn).parameters:  # PyTorch 2.11 takes groups unasked
        options["enable_gqa"] = True

    def launch() -> tuple[Any, None]:
        return varlen_attn(*rows_first, *offsets, **options).transpose(0, 1)[None], None

    return launch
