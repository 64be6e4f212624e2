"""Decoding, few queries and many keys: problems to time, paged keys, and the bytes of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedProblem
from ..core.problem import Problem

# B, H, Hk, Sq, Sk of text generation: one user, many users, long documents, speculative decoding of several tokens.
SHAPES = (
    (1, 32, 8, 1, 2048), (128, 32, 8, 1, 2048), (32, 32, 8, 1, 4096), (4, 16, 16, 1, 8192), (64, 64, 8, 4, 8192),
    (8, 32, 8, 1, 32768), (1, 64, 8, 1, 131072),
)  # fmt: skip
PAGE_SIZES = (0, 16, 256)
LATENT_ROWS = 64  # latent keys: 2 (D + Dv) operations per row for 2 D bytes


def problems(dtype: str) -> list[Problem]:
    """Every shape with D = 128, and one with a different number of keys per batch entry, without and with pages."""
    found = [
        Problem(B, H, Sq, Sk, 128, Hk=Hk, dtype=dtype, causal="bottom-right" if Sq > 1 else False)
        for B, H, Hk, Sq, Sk in SHAPES
    ]
    shortened = Problem(32, 32, 1, 4096, 128, Hk=8, dtype=dtype, key_lengths=True)
    return [*found, *(replace(shortened, page_size=size) for size in PAGE_SIZES)]


def is_memory_bound(problem: Problem, computes: str) -> bool:
    """Whether the time is bound by the bandwidth of reading keys and values: a forward with few rows per key head and
    many keys, or latent keys and too few rows for the tensor cores."""
    if problem.latent and computes == "forward":
        return problem.Sq * problem.group <= LATENT_ROWS
    return computes == "forward" and not problem.ragged and 0 < 32 * problem.Sq * problem.group <= problem.Sk


def kv_bytes(problem: Problem, pairs: int | None) -> int:
    """Bytes of the valid keys and values; `pairs`: visible (query, key) pairs, as in a row."""
    p = problem
    keys = p.B * p.Sk if pairs is None else pairs // (p.H * p.Sq)
    return keys * p.Hk * (p.D if p.latent else p.D + p.Dv) * p.key_itemsize


def make_pages(problem: Problem, k: Any, v: Any) -> Mapping[str, Any]:
    """K and V, PyTorch tensors (B, Hk, Sk, D), as shuffled pages, and their block_table."""
    import torch

    p, most = problem, problem.Sk // problem.page_size
    if p.pages < p.B * most:
        raise UnsupportedProblem(
            f"pages={p.pages} is not supported for {p}: bench does not share pages and needs {p.B * most}"
        )
    generator = torch.Generator(k.device).manual_seed(0)
    table = torch.randperm(p.pages, generator=generator, device=k.device)[: p.B * most].view(p.B, most)
    found = {"block_table": table.to(torch.int32)}
    for name, x in (("K", k), ("V", v))[: 1 if p.latent else 2]:
        bits = x.view(torch.uint8 if x.element_size() == 1 else x.dtype)  # PyTorch cannot index-assign float8
        pages = bits.new_empty(p.pages, p.page_size, p.Hk, x.shape[3])
        pages[table] = bits.view(p.B, p.Hk, most, p.page_size, x.shape[3]).permute(0, 2, 3, 1, 4)
        found[name] = pages.view(x.dtype).transpose(1, 2)
    if p.latent:
        found["V"] = found["K"][..., : p.Dv]
    return found
