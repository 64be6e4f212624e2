"""Paged keys and values: converts inputs to pages and back, and generates problems with pages."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.kernel import Kernel
from ..core.problem import Problem
from ..reference import gather_pages
from .scores import option_cases

Array = NDArray[Any]


def in_pages(p: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """K and V as shuffled pages, (pages, Hk, page_size, D), and their block_table. Rows beyond a sequence's length are
    NaN, and table entries of unused pages are invalid."""
    most = p.Sk // p.page_size
    rng = np.random.default_rng(200)
    shared = p.pages < p.B * most
    numbers = rng.integers(0, p.pages, p.B * most) if shared else rng.permutation(p.pages)[: p.B * most]
    table = numbers.reshape(p.B, most).astype(np.int32)
    found: dict[str, Array] = {}
    for name in ("K", "V"):
        x = inputs[name]
        pages = np.full((p.pages, p.page_size, p.Hk, x.shape[3]), np.nan, x.dtype)
        for b, n in np.ndindex(p.B, most):
            rows = slice(n * p.page_size, min((n + 1) * p.page_size, int(inputs["key_lengths"][b])))
            part = x[b, :, rows].swapaxes(0, 1)
            pages[table[b, n], : len(part)] = part
        found[name] = pages.swapaxes(1, 2)
    for b, length in enumerate(inputs["key_lengths"]):
        table[b, -(-int(length) // p.page_size) :] = (-1, 2**31 - 1)[b % 2]
    return {**found, "block_table": table}


def gathered(p: Problem, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs with K and V gathered from their pages, and without the block_table."""
    table, lengths = inputs["block_table"], inputs["key_lengths"]
    keys = {name: gather_pages(inputs[name].swapaxes(1, 2), table, lengths) for name in ("K", "V")}
    return {**{name: x for name, x in inputs.items() if name != "block_table"}, **keys}


_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"page_size": 16, "Sq": 1, "Sk": 144},
    {"page_size": 32, "lengths": ((1, 130), (70, 95), (0, 33))},
    {"page_size": 48, "Sq": 3, "Sk": 192},
    {"page_size": 1, "lengths": ((5, 7), (1, 0), (33, 40))},
    {"page_size": 256, "Sq": 2, "Sk": 256},
    {"page_size": 16, "lengths": ((150, 150), (2, 1), (1, 300))},
    {"page_size": 32, "Sq": 70, "Sk": 96},
    {"page_size": 16, "Sq": 5, "Sk": 0},
    {"page_size": 128, "lengths": ((0, 4), (129, 250), (3, 128))},
    {"page_size": 1, "Sq": 4, "Sk": 37},
)


def paged_problems(kernel: Kernel, seed: Any = 0, options: int = 8) -> Iterator[tuple[str, Problem]]:
    """(name, problem) for problems with pages that `kernel` supports: few and many queries, ragged ones, several page
    sizes, without options and with a random sample of `options` option cases."""
    layouts, widths = itertools.cycle(_LAYOUTS), itertools.cycle((64, 128, 48))
    heads = itertools.cycle(((4, 2), (6, 1), (2, 2), (8, 2)))

    def problem_of(**fields: Any) -> Problem:
        H, Hk = next(heads)
        sizes = {"B": 3, "H": H, "Sq": 0, "Sk": 0, "D": min(next(widths), kernel.max_D), "Hk": Hk, **next(layouts)}
        problem = kernel.adapted(Problem(**sizes, **fields))
        return dataclasses.replace(problem, pages=problem.pages + 2)

    if not kernel.paged:
        return
    for dtype, causal in itertools.product(kernel.dtypes, (False, "bottom-right", "top-left")):
        for problem in (problem_of(dtype=dtype, causal=causal) for _ in range(2)):
            if kernel.why_unsupported(problem) is None:
                yield str(problem), problem
    every = [*option_cases(kernel, problem_of)]
    for name, problem in random.Random(f"{seed} {kernel.name} pages").sample(every, min(options, len(every))):
        yield f"{name}: {problem}", problem
