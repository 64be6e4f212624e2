"""Test inputs for options, and test problems with each option."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import block_map as block_maps
from ..core.dtypes import FLOAT8, OF_16_BITS
from ..core.kernel import Kernel
from ..core.options import ARRAYS, BY_ARGUMENT, BY_NAME, SHOWN
from ..core.problem import Problem
from ..core.score import Score, TensorLike
from ..launch.dlpack import numpy_dtype
from ..launch.host import host_array
from ..reference import Part, ScoreOptions, Shape

Array = NDArray[Any]

_CASES = {name: case for option in SHOWN for name, case in option.cases.items()}
_DROPOUT = BY_NAME["dropout"].cases
OPTIONS: dict[str, Callable[[Problem], dict[str, Any]]] = {  # applied to a problem one after the other
    **{name: case for name, case in _CASES.items() if name not in _DROPOUT},
    "score": lambda p: {"score": documents(p)},
    "Dv": lambda p: {"Dv": max(8, p.D // 2)},
    **_DROPOUT,
}
TOGETHER = (
    ("left window", "softcap"),
    ("alibi", "key_lengths"),
    ("bias", "mask"),
    ("sink", "window"),
    ("score", "bias", "softcap"),
    ("padding", "Dv", "sink"),
    ("dropout", "softcap", "left window"),
    ("window", "row bias", "alibi", "sink", "key_lengths", "score", "dropout"),
    tuple(next(iter(option.cases)) for option in SHOWN if option.cases),
)


_OTHER = {"float8_e4m3": "float8_e5m2", "float8_e5m2": "float8_e4m3"}
OF_FLOAT8: tuple[Callable[[Problem], dict[str, Any]], ...] = (  # fields that only float8 has, with another option each
    lambda p: {"descale": ((p.B, p.H), 0.75, (p.B, p.Hk))},
    lambda p: {"descale": (1.5, (1, p.Hk), 0.5), "out_dtype": "float32", "softcap": 2.0},
    lambda p: {"v_dtype": _OTHER[p.dtype], "out_dtype": "float16", "window": (max(2, p.Sk // 5), None)},
    lambda p: {"v_dtype": _OTHER[p.dtype], "descale": ((p.B, 1), (p.B, p.Hk), 2.0), "alibi": (p.H,)},
)

OF_FLOAT8_KEYS: tuple[Callable[[Problem], dict[str, Any]], ...] = (  # with 16-bit queries
    lambda p: {"kv_dtype": "float8_e4m3", "descale": (1.0, (p.B, p.Hk), 0.5)},
    lambda p: {"kv_dtype": "float8_e5m2", "v_dtype": "float8_e4m3", "descale": (1.0, 0.75, (1, p.Hk)), "softcap": 2.0},
    lambda p: {"kv_dtype": "float8_e4m3", "v_dtype": "float8_e5m2", "sink": True, "window": (max(2, p.Sk // 5), None)},
    lambda p: {
        "kv_dtype": "float8_e5m2",
        "descale": ((p.B, p.H), (p.B, 1), 2.0),
        "dropout": 0.3,
        "mask": (p.B, 1, 1, p.Sk),
    },
)


def documents(p: Problem) -> Score:
    """A user's Score: it hides keys of other documents, and changes x by tables. It uses tensors of every kind, and
    every function except `where`."""
    return Score(
        "x + 0.25 * tanh(x) * gain(h) - 0.5 * log(1 + abs(i - j)) + min(x, 1) * max(0, near(i))",
        mask="doc(b, j) == doc(b, min(i, Sk - 1)) || every(j)",
        tensors={
            "gain": TensorLike((p.H,), "float32"), "near": TensorLike((p.Sq,), "float16"),
            "doc": TensorLike((p.B, p.Sk), "int32"), "every": TensorLike((p.Sk,), "bool"),
        },
    )  # fmt: skip


def option_cases(kernel: Kernel, problem: Callable[..., Problem]) -> Iterator[tuple[str, Problem]]:
    """(name, problem) for each option alone and for some combinations, with the dtypes of `kernel` and the causal masks
    in turn. `problem` makes the problem for a dtype and a mask; unsupported problems are skipped."""
    for n, names in enumerate((*((name,) for name in OPTIONS), *TOGETHER)):
        masks = ("bottom-right", False, "top-left")
        p = problem(dtype=kernel.dtypes[n % len(kernel.dtypes)], causal=masks[n % 3 if n % 2 else 0])
        for name in names:
            p = dataclasses.replace(p, **OPTIONS[name](p))
        if kernel.why_unsupported(p) is None:
            yield " + ".join(names), p
    for n, more in enumerate(OF_FLOAT8):
        for dtype in FLOAT8 if FLOAT8.keys() <= {*kernel.dtypes} else ():
            p = problem(dtype=dtype, causal=("bottom-right", False)[n % 2])
            p = dataclasses.replace(p, **more(p))
            if kernel.why_unsupported(p) is None:
                yield "float8", p
    for n, more in enumerate(OF_FLOAT8_KEYS if kernel.float8_keys else ()):
        p = problem(dtype=OF_16_BITS[n // 2], causal=("bottom-right", False)[n % 2])
        p = dataclasses.replace(p, **more(p))
        if kernel.why_unsupported(p) is None:
            yield "float8 keys", p


def score_inputs(p: Problem, seed: int = 0) -> dict[str, Array]:
    """The tensors of the problem's options, by their names in a spec's `args`.

    A mask hides some rows and keys completely. With several batch entries, one has key length 0. The tensors of a
    `Score` are its own; for a Score without data, they are random numbers that are valid as indices or booleans.
    """
    rng = np.random.default_rng(seed + 100)
    found: dict[str, Array] = {}
    for name, array in ARRAYS.items():
        if any(BY_NAME[name].tensors_of(p)):
            dtype = array.dtype or p.bias_dtype or p.dtype_of("O")
            found[BY_NAME[name].argument] = array.draw(rng, p).astype(numpy_dtype(dtype))
    for x, one in zip("qkv", p.descale, strict=False):
        if isinstance(one, tuple):
            found[f"descale_{x}"] = rng.uniform(0.5, 1.5, one).astype(np.float32)
    if p.score:
        for name, tensor in loaded(p.score, p).tensors.items():
            found[f"score.{name}"] = _drawn(tensor, rng) if isinstance(tensor, TensorLike) else host_array(tensor)
    return found


def loaded(score: Score, p: Problem) -> Score:
    """The Score with its tensor data. A Score from another process may lack it: its file is read again."""
    lacking = any(isinstance(tensor, TensorLike) for tensor in score.tensors.values())
    return Score.from_file(score.file, p) if lacking and score.file else score


def _drawn(like: TensorLike, rng: np.random.Generator) -> Array:
    if like.dtype == "bool":
        return rng.random(like.shape) < 0.2
    if like.dtype == "int32":
        return rng.integers(0, 3, like.shape).astype(np.int32)
    return (rng.standard_normal(like.shape) * 0.5).astype(numpy_dtype(like.dtype))


def option_values(p: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """causal, scale and the problem's options, as `sandbox.attention` and `sandbox.reference` take them. `tensors`: by
    their names in a spec's `args`."""
    found = {option.name: getattr(p, option.name) for option in SHOWN if option.check and option.name in p.options}
    found |= {name: tensors[BY_NAME[name].argument] for name in ARRAYS if BY_NAME[name].argument in tensors}
    if p.float8_keys:
        numbers = zip("qkv", p.descale or (1.0, 1.0, 1.0), strict=True)
        found["descale"] = tuple(tensors.get(f"descale_{x}", n) for x, n in numbers)
    if p.score:
        own, s = {name: tensors[f"score.{name}"] for name in p.score.tensors}, p.score
        found["score"] = Score(s.score, s.mask, own, s.file, s.blocks, s.made_for)
    return {"causal": p.causal, "scale": p.scale, **found}


def reference_options(p: Problem, inputs: Mapping[str, Array]) -> dict[str, Any]:
    """The options of `sandbox.reference` for a problem with these inputs."""
    found = option_values(p, inputs)
    found.pop("invariant", None)
    return found | ({"seed": int(found["seed"][0])} if "seed" in found else {})


def part_options(
    p: Problem, inputs: Mapping[str, Any], b: int, h: int, start: int, stop: int, number: int = 0
) -> dict[str, Any]:
    """`reference_options` for query rows [start, stop) of one head. `inputs` may be arrays of any library. `number`:
    index of the problem's first batch entry, for a sequence of a ragged batch."""
    at = {"b": slice(b, b + 1), "h": slice(h, h + 1), "i": slice(start, stop)}
    kv = {"b": at["b"], "h": slice(h // p.group, h // p.group + 1)}

    def cut(name: str, axes: str, at: Mapping[str, slice]) -> Array:
        x = inputs[name]
        own = (
            at.get(axis, slice(None)) if n > 1 else slice(None)
            for n, axis in zip(x.shape, axes[-x.ndim :], strict=True)
        )
        return host_array(x[tuple(own)])

    part = {name: cut(name, array.axes, at) for name, array in BY_ARGUMENT.items() if name in inputs and array.axes}
    part |= {
        f"descale_{x}": cut(f"descale_{x}", "bh", at if x == "q" else kv) for x in "qkv" if f"descale_{x}" in inputs
    }
    part |= {name: host_array(x) for name, x in inputs.items() if name.startswith("score.") or name == "seed"}
    return {**reference_options(p, part), "part": Part(number + b, h, start, p.Sq)}


def visible_keys(p: Problem, inputs: Mapping[str, Array]) -> Array:
    """The mask of visible keys, (B, H, Sq, Sk)."""
    score_options = ScoreOptions(Shape(p.B, p.H, p.Hk, p.Sq, p.Sk, p.D, p.Dv), **reference_options(p, inputs))
    Q, K, found = np.zeros((p.Sq, 1)), np.zeros((p.Sk, 1)), np.empty((p.B, p.H, p.Sq, p.Sk), np.bool_)
    for b, h in np.ndindex(p.B, p.H):
        found[b, h] = score_options.head(b, h).scores(Q, K).visible
    return found


def block_map(p: Problem, inputs: Mapping[str, Array]) -> Array:
    """The reference of "block_map" kernels; include/block_map.cuh has the format. A tile of 64 rows and 128 keys that
    is out of the rows' range, or beyond the key length, is marked as both hidden and fully visible. The element bits of
    tiles for which the kernel writes none are 1."""
    (B, H, rows, _), words = p.block_map, block_maps.words_for(p)
    hides = bool(p.score and p.score.hides)
    lengths = inputs["key_lengths"] if p.key_lengths and hides else np.full(p.B, p.Sk)
    alone = {name: x for name, x in inputs.items() if hides or name != "key_lengths"}
    left = visible_keys(
        dataclasses.replace(p, causal=False, window=(None, None), key_lengths=p.key_lengths and hides), alone
    )
    bits = np.zeros((B, H, rows, 2, 32 * words), np.bool_)
    bits[..., 1, :] = True
    of_row = (64, 512 * words) if block_maps.has_element_bits(p) else (0,)
    element_bits = np.zeros((B, H, rows, *of_row), np.bool_)
    first, last = p.bounds
    by_rows = rows > 1 and (hides or not p.key_lengths)
    for b, h, row in np.ndindex(B, H, rows):
        n, m0 = int(lengths[b]), 64 * row
        diagonal = n - p.Sq if p.key_lengths and p.causal != "top-left" else p.diagonal
        begin = 0 if first is None or not by_rows else max(0, m0 + diagonal - first)
        end = n if last is None or not by_rows else min(n, min(m0 + 64, p.Sq) + diagonal + last)
        for key in range(0, -(-n // 128) * 128, 16):  # keys beyond the last repeat the last
            if begin < key // 128 * 128 + 128 and key // 128 * 128 < end:
                pairs = left[b, h, m0 : m0 + 64, min(key, n - 1) : max(min(key, n - 1) + 1, min(key + 16, n))]
                bits[b, h, row, :, key // 16] = pairs.any(), pairs.all()
                if element_bits.size:
                    ends = (0, 64 - pairs.shape[0]), (0, 16 - pairs.shape[1])
                    element_bits[b, h, row, :, key : key + 16] = np.pad(pairs, ends, mode="edge")
    if element_bits.size:  # kernels read none of 512 keys that are fully visible, or hidden from a pair of rows
        some, holes = (x.reshape(B, H, rows, words, 32).any(-1) for x in (bits[..., 0, :], ~bits[..., 1, :]))
        either = np.repeat(np.logical_or.reduceat(some, range(0, rows, 2), axis=2), 2, axis=2)[:, :, :rows]
        unwritten = np.repeat(~(holes & either), 512, axis=-1)[..., None, :]
        element_bits |= unwritten  # the poison value of outputs
    both = np.concatenate([x.reshape(B, H, rows, math.prod(x.shape[3:])) for x in (bits, element_bits)], axis=-1)
    return np.packbits(both, axis=-1, bitorder="little").view("<i4").reshape(p.block_map)


def visible_pairs(p: Problem, inputs: Mapping[str, Any]) -> int | None:
    """The number of visible (query, key) pairs of all heads, if a mask or key_lengths (arrays of any library) hide
    some. None if the problem alone determines it, and for a ragged batch. The mask of a Score is ignored."""
    if p.ragged or not (p.mask or p.key_lengths):
        return None
    tensors: dict[str, Any] = {name: host_array(inputs[name]) for name in ("mask", "key_lengths") if name in inputs}
    shape = Shape(p.B, p.H, p.Hk, p.Sq, p.Sk, p.D, p.Dv)
    score_options = ScoreOptions(shape, p.causal, p.scale, window=p.window, **tensors)
    # Batch entries and heads with the same mask are counted once.
    B = min(1, p.B) if p.mask[:1] in ((), (1,)) and not p.key_lengths else p.B
    H = p.H if p.mask[1:2] == (p.H,) else min(1, p.H)
    strips = ((b, h, m0) for b in range(B) for h in range(H) for m0 in range(0, p.Sq, _STRIP))
    masks = (score_options.head(b, h).visible(m0, min(_STRIP, p.Sq - m0), 0, p.Sk) for b, h, m0 in strips)
    return p.B // B * (p.H // H) * sum(int(np.count_nonzero(mask)) for mask in masks) if B and H else 0


_STRIP = 256  # rows at a time


def fill_hidden_with_nan(p: Problem, inputs: dict[str, Array]) -> None:
    """Writes NaN to all elements that no query sees: of keys and values, and of a bias."""
    visible = visible_keys(p, inputs)
    by_key_head = np.asarray(visible.reshape(p.B, p.Hk, -1, p.Sk).any(2))  # (B, Hk, Sk)
    for name in ("K", "V"):
        inputs[name] = np.where(by_key_head[..., None], inputs[name], np.array(np.nan, inputs[name].dtype))
    if p.bias:
        along = tuple(axis for axis, n in enumerate(p.bias) if n == 1)
        read = np.asarray(visible.any(axis=along, keepdims=True))
        inputs["bias"] = np.where(read, inputs["bias"], np.array(np.nan, inputs["bias"].dtype))
