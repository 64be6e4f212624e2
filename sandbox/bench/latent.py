"""Latent decoding (DeepSeek's MLA) to time, and FlashMLA's kernel for Hopper as a peer."""

from __future__ import annotations

import importlib
from typing import Any

from ..core.errors import UnsupportedProblem
from ..core.problem import Problem

PAGE_SIZE, D, DV = 64, 576, 512  # what FlashMLA supports
# B, H, Sq, Sk, with one key/value head.
SHAPES = (
    (128, 128, 1, 4096), (128, 128, 2, 4096), (128, 128, 1, 8192), (64, 128, 1, 16384), (128, 64, 1, 4096),
    (128, 16, 1, 4096), (32, 16, 1, 16384), (1, 128, 1, 32768), (1, 16, 1, 131072),
)  # fmt: skip


def problems(dtype: str) -> list[Problem]:
    """Every shape, with pages; all sequences have Sk keys."""
    return [
        Problem(B, H, Sq, Sk, D, Hk=1, Dv=DV, dtype=dtype, page_size=PAGE_SIZE, latent=True) for B, H, Sq, Sk in SHAPES
    ]


def prepare_flash_mla(problem: Problem, q: Any, option_tensors: Any) -> Any:
    """A launch of `flash_mla_with_kvcache` (package sgl_flash_mla). Raises UnsupportedProblem."""
    p, name = problem, "flash-mla"
    if (
        not p.latent
        or (p.D, p.Dv, p.page_size, p.Hk) != (D, DV, PAGE_SIZE, 1)
        or p.options != {"key_lengths", "page_size"}
    ):
        raise UnsupportedProblem(
            f"{name}: {p} is not supported: it takes latent attention with D={D}, Dv={DV}, one key/value head and "
            f"pages of {PAGE_SIZE}"
        )
    try:
        package = importlib.import_module("flash_mla")
    except ImportError as error:
        raise UnsupportedProblem(
            f"{name}: flash_mla cannot be imported ({error}): pip install --no-deps sgl_flash_mla"
        ) from error
    queries, pages = q.transpose(1, 2).contiguous(), option_tensors["K"].transpose(1, 2)
    table, lengths, schedule = (
        option_tensors["block_table"],
        option_tensors["key_lengths"],
        package.get_mla_metadata()[0],
    )
    options = {"softmax_scale": p.scale, "causal": bool(p.causal), "use_legacy": True}

    def launch() -> tuple[Any, None]:
        result = package.flash_mla_with_kvcache(queries, pages, table, lengths, DV, schedule, **options)
        return result[0].transpose(1, 2), None

    return launch
