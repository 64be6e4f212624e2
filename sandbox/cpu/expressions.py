"""Evaluates the expressions of a `Score` on the host in double precision, as the reference for its kernels."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import SpecError
from ..core.options import macros
from ..core.problem import Problem
from ..core.score import Score, TensorLike
from ..launch.arguments import PackedArguments
from ..launch.host import host_array
from ..toolchain import cache, snippets
from . import build
from .launch import CpuFunction

Array = NDArray[Any]
_SOURCE = Path(__file__).resolve().parent / "expressions.cu"
_ENTRY = "expressions"


def evaluate(
    score: Score, x: Array, b: int, h: int, i: Array, j: Array, Sq: int, Sk: int
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(new score, its derivative, mask) for scores x (M, N), query rows i (M) and keys j (N).

    Arrays (M, N) of float64, float64 and bool; the mask is True if visible. Literals are rounded to single
    precision, as in the kernels. Raises CompileError for an invalid expression, SpecError for a tensor without data.
    """
    value = np.array(x, np.float64)
    derivative, visible = np.ones_like(value), np.ones(value.shape, np.bool_)
    if not value.size:
        return value, derivative, visible
    rows, keys = (np.ascontiguousarray(np.broadcast_to(n.ravel(), size), np.int32) for n, size in
                  ((i, value.shape[0]), (j, value.shape[1])))  # fmt: skip
    tensors = {name: _data(name, tensor) for name, tensor in score.tensors.items()}
    arrays = [ctypes.c_void_p(array.ctypes.data) for array in (value, derivative, visible, rows, keys)]
    integers = [ctypes.c_int32(n) for n in (value.shape[1], b, h, Sq, Sk)]
    arguments = PackedArguments([_snippet(tensors), *arrays, *integers])
    _function(score.described).launcher((len(value), 1, 1), (1, 1, 1), 0, arguments)(())
    return value, derivative, visible


def _data(name: str, tensor: Any) -> Array:
    if isinstance(tensor, TensorLike):
        raise SpecError(f"Score: tensor {name} has no data: it was loaded from a file that stores only its shape")
    return host_array(tensor)


def _snippet(tensors: dict[str, Array]) -> ctypes.Structure:
    """`Snippet` of the generated header: address and element strides of each tensor; one word if there are none."""
    fields: list[tuple[str, Any]] = []
    for name, array in tensors.items():
        fields += [(name, ctypes.c_void_p), (f"{name}_strides", ctypes.c_int64 * max(array.ndim, 1))]
    value = type("Snippet", (ctypes.Structure,), {"_fields_": fields or [("none", ctypes.c_int32)]})()
    for name, array in tensors.items():
        setattr(value, name, array.ctypes.data)
        for axis, stride in enumerate(array.strides):
            getattr(value, f"{name}_strides")[axis] = stride // array.itemsize
    return value


@lru_cache(maxsize=64)
@snippets.explaining
def _function(score: Score) -> CpuFunction:
    problem = Problem(1, 1, 1, 1, 1, score=score)
    like = {name: np.empty(tensor.shape, np.bool_) for name, tensor in score.tensors.items()}
    size = ctypes.sizeof(_snippet(like))
    defines = {**macros(problem), "DTYPE_float32": 1, "HEAD_DIM": 1, "CAUSAL": 0, "SNIPPET_BYTES": size}
    with cache.in_use():  # the loader reads a cached file
        built = build.library(_SOURCE, [_ENTRY], defines, snippets.folders(problem))
        return CpuFunction(built.path, _ENTRY)
