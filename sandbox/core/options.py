"""What kernels are compiled with, and given, of a problem's score: macros, and the fields of the argument `score`.

An option that is not asked for has neither macro nor field. Mirrored by `Score` of kernels_cu/include/score_mod.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

from .block_map import by_pair
from .problem import Problem
from .snippet import digest

_POINTER, _STRIDE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class ScoreTensor(NamedTuple):
    """A tensor in the argument `score`: its name, its shape, and the fields of its address and of its strides.

    It is given with as many dimensions as its shape has, or fewer, the last ones. Where there are fewer strides than
    dimensions, the last dimension's must be 1.
    """

    name: str
    shape: tuple[int, ...]
    pointer: str
    strides: tuple[str, ...]


def macros(problem: Problem) -> dict[str, int]:
    """The macros that the options of a problem's score set."""
    left, right = problem.window
    found = {
        "WINDOW": (left is not None) | (right is not None and not problem.causal) << 1,
        "SOFTCAP": int(problem.softcap > 0),
        "ALIBI": int(bool(problem.alibi)),
        "BIAS": _bias(problem) if problem.bias else 0,
        "MASK": 1 | _same_for_every_key(problem.mask) if problem.mask else 0,
        "SINK": int(problem.sink),
        "DROPOUT": int(problem.dropout > 0),
        "KEY_LENGTHS": int(problem.key_lengths),
        "RAGGED": int(bool(problem.ragged)),
        "PAGE_SIZE": problem.page_size,
        "BLOCK_MAP": (2 if by_pair(problem) else 1) if problem.block_map[3] else 0,
        "SCORE_SNIPPET": digest(problem.score) if problem.score else 0,
        # 8: float8 has a number for v; 1, 2, 4: a tensor of numbers for q, k, v
        "DESCALE": sum(bit for bit, one in zip((1, 2, 4), problem.descale, strict=False) if isinstance(one, tuple))
        + 8 * problem.float8,
    }
    asked = {name: value for name, value in found.items() if value}
    if asked:
        asked["SCORE_BYTES"] = ctypes.sizeof(score_structure(problem))
    if problem.Dv != problem.D:
        asked["HEAD_DIM_V"] = problem.Dv
    return asked


def _bias(problem: Problem) -> int:
    return (2 if problem.bias_dtype else 1) | _same_for_every_key(problem.bias) | 8 * problem.bias_tiles


def _same_for_every_key(shape: tuple[int, ...]) -> int:
    return 4 if shape[3] == 1 else 0


def score_tensors(problem: Problem) -> Iterator[ScoreTensor]:
    """The tensors that a problem's score reads, in the order of their fields."""
    every = (problem.B, problem.H, problem.Sq, problem.Sk)
    offsets = (problem.B + 1,) if problem.ragged else ()
    for name, shape, axes in (
        ("cu_seqlens_q", offsets, "b"),
        ("cu_seqlens_k", offsets, "b"),
        ("key_lengths", every[:1] if problem.key_lengths else (), "b"),
        ("block_table", (problem.B, problem.Sk // problem.page_size) if problem.page_size else (), "bi"),
        ("slopes", problem.alibi and (1, *problem.alibi)[-2:], "bh"),
        ("bias", problem.bias, "bhi"),
        ("mask", problem.mask, "bhi"),
        ("sink", every[1:2] if problem.sink else (), "h"),
        ("seed", (1,) if problem.dropout else (), ""),
        *((f"descale_{x}", n, "bh") for x, n in zip("qkv", problem.descale, strict=False) if isinstance(n, tuple)),
        ("block_map", problem.block_map if problem.block_map[3] else (), "bhi"),
    ):
        if shape:
            yield ScoreTensor(name, shape, name, tuple(f"{name}_stride_{axis}" for axis in axes))
    if problem.score:
        for name, like in problem.score.structure[2]:
            strides = tuple(f"score_{name}_stride_{i}" for i in range(len(like.shape)))
            yield ScoreTensor(f"score.{name}", like.shape, f"score_{name}", strides)


def score_structure(problem: Problem) -> type[ctypes.Structure]:
    """`Score` of include/score_mod.cuh, as it is compiled for this problem."""
    fields: list[tuple[str, type]] = [("Sq", _INT), ("Sk", _INT), ("diagonal", _INT), ("scale", ctypes.c_float)]
    if problem.window[0] is not None or (problem.window[1] is not None and not problem.causal):
        fields += [("left", _INT), ("right", _INT)]
    if problem.softcap:
        fields += [("softcap", ctypes.c_float)]
    if problem.dropout:
        fields += [("dropout_threshold", ctypes.c_uint32), ("dropout_factor", ctypes.c_float)]
    if problem.key_lengths or problem.ragged:
        fields += [("bottom_right", _INT)]
    if problem.ragged:
        fields += [("rows_q", _INT), ("rows_k", _INT), ("sequences", _INT)]
    if problem.page_size:
        fields += [("pages", _INT)]
    if problem.float8:
        fields += [("descale", ctypes.c_float), ("group", _INT)]
    for tensor in score_tensors(problem):
        fields += [(tensor.pointer, _POINTER), *((name, _STRIDE) for name in tensor.strides)]
    if problem.score and not problem.score.structure[2]:
        fields += [("snippet", _INT)]  # C++ has no empty member
    return type("Score", (ctypes.Structure,), {"_fields_": fields})
