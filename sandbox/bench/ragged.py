"""Ragged batches to time, and PyTorch's varlen_attn as a peer."""

from __future__ import annotations

import inspect
from typing import Any

from ..core.errors import UnsupportedProblem
from ..core.problem import Problem

# Uniform from 64 to 4096: numpy.random.default_rng(14).integers(64, 4097, 16).
DRAWN = (670, 3415, 2698, 1519, 421, 2898, 1467, 3532, 1428, 2650, 801, 2275, 359, 3138, 440, 2952)
# Typical of documents, most of them short: default_rng(14).lognormal(log(400), 1, 20).
DOCUMENTS = (801, 150, 82, 21, 280, 1392, 413, 667, 1112, 165, 5674, 166, 581, 6192, 356, 448, 239, 558, 47, 209)
EQUAL = (2048,) * 16  # could also be a dense batch


def problems(dtype: str) -> list[Problem]:
    """The batch of 16 lengths with and without a mask, with two head dimensions, and with grouped heads; short
    documents; and equal lengths, both as a ragged and as a dense batch."""
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


def prepare_varlen_attn(problem: Problem, q: Any, k: Any, v: Any, option_tensors: Any) -> Any:
    """A launch of PyTorch's varlen_attn (FlashAttention-2) on tensors (1, heads, rows, D). Raises
    UnsupportedProblem."""
    from torch.nn.attention.varlen import varlen_attn

    p = problem
    if not p.ragged or not p.options <= {"ragged", "window"} or p.Dv != p.D:
        raise UnsupportedProblem(
            "varlen_attn: not supported: it takes ragged batches with causal, window and scale only"
        )
    if p.causal == "top-left":
        raise UnsupportedProblem("varlen_attn: a top-left mask is not supported: its causal mask is bottom-right")
    left, right = (-1 if bound is None else bound for bound in p.bounds)
    rows_first = tuple(x[0].transpose(0, 1) for x in (q, k, v))
    offsets = option_tensors["cu_seqlens_q"], option_tensors["cu_seqlens_k"], p.Sq, p.Sk
    options = {"scale": p.scale, "window_size": (left, right)}
    if p.Hk != p.H and "enable_gqa" in inspect.signature(varlen_attn).parameters:  # PyTorch 2.11 needs no option
        options["enable_gqa"] = True

    def launch() -> tuple[Any, None]:
        return varlen_attn(*rows_first, *offsets, **options).transpose(0, 1)[None], None

    return launch
