"""Sampled shapes of some grids: a kernel tuned for fixed shapes may be slow on others.

Heads, groups, head dimensions and lengths are drawn independently; lengths are seldom multiples of a tile. The same
seed gives the same problems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.normalise import Causal, cdiv
from ..core.problem import Problem
from . import serving
from .ragged import of_lengths

DEFAULT_COUNT = 20
_D = (64, 96, 128, 256)
_MOST_ELEMENTS = 2**26  # maximum number of elements of Q, for more than one sequence. Inputs are drawn in fp32: 256 MiB
_MOST_KEYS = 2**29  # maximum number of elements of K: 2 GiB in fp32
_CAUSAL = 0.75  # share of causal problems


def sampled(grid: str, count: int, seed: int, dtype: str) -> list[Problem]:
    """`count` problems of one of the grids in SAMPLED."""
    rng = np.random.default_rng(seed)
    return [SAMPLED[grid](rng, dtype) for _ in range(count)]


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer from low to high; each power of two is as probable as the next."""
    return min(high, int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))


def _heads(rng: np.random.Generator) -> dict[str, Any]:
    """8 to 64 query heads in groups of 1 to 8, and the head dimension."""
    group = int(rng.integers(1, 9))
    Hk = _log_uniform(rng, cdiv(8, group), 64 // group)
    return {"H": Hk * group, "Hk": Hk, "D": int(rng.choice(_D))}


def _causal(rng: np.random.Generator) -> Causal:
    return "bottom-right" if rng.random() < _CAUSAL else False


def _log_uniform_lengths(rng: np.random.Generator) -> list[int]:
    return [_log_uniform(rng, 64, 4096) for _ in range(_log_uniform(rng, 4, 64))]


def _one_long(rng: np.random.Generator) -> list[int]:
    short = [_log_uniform(rng, 16, 256) for _ in range(_log_uniform(rng, 15, 63))]
    return [*short, _log_uniform(rng, 4096, 16384)]


def _zipf(rng: np.random.Generator) -> list[int]:
    """The n-th longest sequence has 1 / n of the longest one's length."""
    longest = _log_uniform(rng, 2048, 16384)
    return [cdiv(longest, rank) for rank in range(1, _log_uniform(rng, 8, 64) + 1)]


def _equal(rng: np.random.Generator) -> list[int]:
    return [_log_uniform(rng, 256, 4096)] * _log_uniform(rng, 4, 32)


_LENGTHS = (_log_uniform_lengths, _one_long, _zipf, _equal)


def _ragged(rng: np.random.Generator, dtype: str) -> Problem:
    """A batch in one of four distributions of lengths, in random order."""
    heads, lengths = _heads(rng), _LENGTHS[rng.integers(len(_LENGTHS))](rng)
    rng.shuffle(lengths)
    excess = max(1.0, sum(lengths) * heads["H"] * heads["D"] / _MOST_ELEMENTS)
    lengths = [max(1, int(n / excess)) for n in lengths]
    return of_lengths(tuple(lengths), **heads, dtype=dtype, causal=_causal(rng))


def _decode(rng: np.random.Generator, dtype: str) -> Problem:
    """One query or a few, and so many keys that reading them takes the time; some with a number of keys per entry."""
    heads = _heads(rng)
    Sq = 1 if rng.random() < 0.5 else int(rng.integers(2, 17))
    Sk = _log_uniform(rng, max(512, 32 * Sq * heads["H"] // heads["Hk"]), 131072)
    most = _MOST_KEYS // (heads["Hk"] * Sk * heads["D"])
    B = _log_uniform(rng, 1, max(1, min(128, most)))
    shortened = bool(rng.random() < 0.25)
    causal: Causal = "bottom-right" if Sq > 1 else False
    return Problem(B, Sq=Sq, Sk=Sk, **heads, dtype=dtype, causal=causal, key_lengths=shortened)


def _serving(rng: np.random.Generator, dtype: str) -> Problem:
    """A step of an inference server: up to four chunks of prompts, and sequences that decode one token, in random
    order; as many sequences as _MOST_KEYS allows."""
    H, Hk, D = serving.HEADS[rng.integers(len(serving.HEADS))]
    count, chunks, lengths = _log_uniform(rng, 1, 256), int(rng.integers(0, 5)), list[tuple[int, int]]()
    for n in range(count):
        keys = _log_uniform(rng, 128, 32768)
        lengths.append((min(keys, _log_uniform(rng, 512, 8192)) if n < chunks else 1, keys))
    while sum(keys for _, keys in lengths) * Hk * D > _MOST_KEYS:
        lengths.pop()
    order = rng.permutation(len(lengths))
    page_size = int(rng.choice(serving.PAGE_SIZES))
    return serving.of_lengths((lengths[i] for i in order), H, Hk, D, page_size, dtype=dtype)


def _training(rng: np.random.Generator) -> dict[str, Any]:
    """Training or prefill: whole sequences, about 16k tokens."""
    S = _log_uniform(rng, 256, 16384)
    return {"B": cdiv(16384, S), "Sq": S, "Sk": S, "causal": _causal(rng)}


def _images(rng: np.random.Generator) -> dict[str, Any]:
    """Encoders of images: short sequences without a mask."""
    S = _log_uniform(rng, 64, 4096)
    return {"B": _log_uniform(rng, 1, cdiv(32768, S)), "Sq": S, "Sk": S}


def _chunk(rng: np.random.Generator) -> dict[str, Any]:
    """Prefill in chunks: queries that follow earlier keys."""
    Sq = _log_uniform(rng, 64, 4096)
    return {"B": _log_uniform(rng, 1, 4), "Sq": Sq, "Sk": Sq + _log_uniform(rng, 256, 32768), "causal": "bottom-right"}


def _cross(rng: np.random.Generator) -> dict[str, Any]:
    """Cross-attention of images to a text."""
    return {"B": _log_uniform(rng, 1, 8), "Sq": _log_uniform(rng, 256, 16384), "Sk": _log_uniform(rng, 16, 512)}


_USES = (_training, _images, _chunk, _cross)


def _real(rng: np.random.Generator, dtype: str) -> Problem:
    """One of four uses of attention."""
    heads, sizes = _heads(rng), _USES[rng.integers(len(_USES))](rng)
    most = _MOST_ELEMENTS // (heads["H"] * heads["D"] * sizes["Sq"])
    return Problem(**{**sizes, "B": max(1, min(sizes["B"], most))}, **heads, dtype=dtype)


SAMPLED: dict[str, Callable[[np.random.Generator, str], Problem]] = {
    "ragged": _ragged,
    "decode": _decode,
    "real": _real,
    "serving": _serving,
}
