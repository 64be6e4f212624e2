"""Named grids of problems to time, from papers, tutorials and typical workloads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.options import SHOWN
from ..core.problem import Problem
from ..core.score import Score
from . import decode, latent, ragged, serving

_MASKS = (False, "bottom-right")


def _paper(dtype: str) -> list[Problem]:
    """The grid of the FlashAttention-2 and -3 papers: 16k tokens, hidden size 2048."""
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for D, causal, S in itertools.product((64, 128, 256), _MASKS, (512, 1024, 2048, 4096, 8192, 16384))
    ]


def _gpt2(dtype: str) -> list[Problem]:
    """Training of GPT-2 small: 12 heads, D = 64, causal, 8 sequences up to the full context."""
    return [Problem(8, 12, S, S, 64, dtype=dtype, causal="bottom-right") for S in (128, 256, 512, 1024)]


def _tutorial(dtype: str) -> list[Problem]:
    """The problems of Triton's fused-attention tutorial."""
    return [
        Problem(4, 32, S, S, 64, dtype=dtype, causal=causal)  # type: ignore[arg-type]
        for causal, S in itertools.product(_MASKS, (1024, 2048, 4096, 8192, 16384))
    ]


def _scores(dtype: str) -> list[Problem]:
    """Score options, one at a time, on one problem: B2 H16 S8192 D128."""
    plain = Problem(2, 16, 8192, 8192, 128, dtype=dtype)
    options = [fields for option in SHOWN for fields in option.timed(plain)]
    found = [replace(plain, **fields) for fields in ({}, {"causal": "bottom-right"}, *options, {"Dv": 64})]
    return [*found, replace(plain, score=Score.from_file(DOCUMENTS, plain))]


def _dropout(dtype: str) -> list[Problem]:
    """Training with dropout 0.1 and without, on 16k tokens of hidden size 2048."""
    return [
        Problem(16384 // S, 2048 // D, S, S, D, dtype=dtype, causal=causal, dropout=p)  # type: ignore[arg-type]
        for D, causal, S, p in itertools.product((64, 128), _MASKS, (1024, 4096, 8192), (0.0, 0.1))
    ]


def _real(dtype: str) -> list[Problem]:
    """Layers of published models: language models in training and in prefill by chunks, encoders of text and images,
    cross-attention of image generation."""
    causal: dict[str, Any] = {"dtype": dtype, "causal": "bottom-right"}
    return [
        Problem(2, 32, 8192, 8192, 128, Hk=8, **causal),  # Llama 3 8B
        Problem(4, 28, 4096, 4096, 128, Hk=4, **causal),  # Qwen 2.5 7B
        Problem(4, 32, 4096, 4096, 96, **causal),  # Phi 3 mini
        Problem(2, 8, 8192, 8192, 256, Hk=4, **causal),  # Gemma 2 2B
        Problem(8, 25, 1024, 1024, 64, **causal),  # GPT-2 XL
        Problem(1, 64, 2048, 18432, 128, Hk=8, **causal),  # Llama 3 70B, a chunk of a long prompt
        Problem(32, 16, 512, 512, 64, dtype=dtype),  # BERT large
        Problem(32, 16, 577, 577, 64, dtype=dtype),  # ViT-L/16, 384 x 384 pixels
        Problem(2, 24, 4250, 4250, 128, dtype=dtype),  # Flux: text and 1024 x 1024 pixels
        Problem(2, 10, 4096, 77, 64, dtype=dtype),  # Stable Diffusion XL, image to text
    ]


GRIDS: dict[str, Callable[[str], list[Problem]]] = {
    "paper": _paper, "gpt2": _gpt2, "tutorial": _tutorial, "scores": _scores, "dropout": _dropout,
    "ragged": ragged.problems,
    "decode": decode.problems,
    "real": _real,
    "latent": latent.problems,
    "serving": serving.problems,
}  # fmt: skip
DOCUMENTS = Path(__file__).with_name("documents.py")
