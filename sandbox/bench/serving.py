"""Batches of an inference server to time: chunks of prompts and single tokens, over one pool of pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..core.normalise import cdiv
from ..core.problem import Problem
from .ragged import DRAWN

HEADS = ((32, 8, 128), (64, 8, 128), (32, 2, 256))  # H, Hk, D
PAGE_SIZES = (16, 64, 128, 256)


def problems(dtype: str) -> list[Problem]:
    """Tokens alone, chunks alone, and both, with each choice of heads."""
    tokens, chunks = tuple((1, 8 * n) for n in DRAWN), ((2048, 8192), (512, 4096), (1024, 1024))
    return [
        of_lengths(lengths, *heads, dtype=dtype, page_size=64)
        for heads in HEADS
        for lengths in (tokens, chunks, (*tokens, *chunks))
    ]


def of_lengths(lengths: Iterable[tuple[int, int]], H: int, Hk: int, D: int, page_size: int, **fields: Any) -> Problem:
    """The batch with these numbers of queries and keys, whose pages hold no other keys."""
    lengths = tuple(lengths)
    pages = sum(cdiv(keys, page_size) for _, keys in lengths)
    return Problem(
        0, H, 0, 0, D, Hk=Hk, lengths=lengths, page_size=page_size, pages=pages, causal="bottom-right", **fields
    )


def gathered(problem: Problem) -> Problem:
    """The same batch with keys and values in consecutive rows (total keys, Hk, D), as of a varlen function."""
    return replace(problem, page_size=0, pages=0, key_lengths=False, ragged=())


def offsets_of_keys(problem: Problem, device: Any) -> Any:
    """cu_seqlens_k of the gathered batch, a PyTorch tensor."""
    import torch

    ends = [*accumulate((keys for _, keys in problem.lengths), initial=0)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def make_pages(problem: Problem, k: Any, v: Any) -> Mapping[str, Any]:
    """Keys and values of the gathered batch, PyTorch tensors (1, Hk, total keys, D), as shuffled pages, and their
    block_table; its other entries are -1."""
    import torch

    p, size, device = problem, problem.page_size, k.device
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randperm(p.pages, generator=generator, device=device).to(torch.int32)
    table = torch.full((p.B, p.Sk // size), -1, dtype=torch.int32, device=device)
    pages_of, first = [cdiv(keys, size) for _, keys in p.lengths], 0
    rows = []  # of the pool, of each key
    for b, (count, (_, keys)) in enumerate(zip(pages_of, p.lengths, strict=True)):
        table[b, :count] = numbers[first : first + count]
        key = torch.arange(keys, device=device)
        rows.append(table[b, key // size].long() * size + key % size)
        first += count
    at, found = torch.cat(rows), {"block_table": table}
    for name, x in (("K", k), ("V", v)):
        bits = x.view(torch.uint8 if x.element_size() == 1 else x.dtype)  # PyTorch cannot index-assign float8
        pool = bits.new_zeros(p.pages * size, p.Hk, x.shape[3])
        pool[at] = bits[0].transpose(0, 1)
        found[name] = pool.view(x.dtype).view(p.pages, size, p.Hk, x.shape[3]).transpose(1, 2)
    return found
