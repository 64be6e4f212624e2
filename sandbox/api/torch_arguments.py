"""`Options` as arguments of a PyTorch operator, which have few types, and back. Imported on demand."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..core import registry
from ..core.kernel import Kernel
from ..core.score import BLOCK_MAP, Score, TensorLike, like_of
from ..core.tile import Tile
from .options import DIFFERENTIABLE, Options

_kernels: dict[str, Kernel] = {}


def text_of_kernel_at(address: int) -> str:
    """The name of the kernel with this id(); for a kernel that is not in the registry, a text that identifies the
    object in this process. It takes the id, an int, because before PyTorch 2.13 the compiler does not accept an object
    as a constant."""
    kernel = ctypes.cast(address, ctypes.py_object).value
    if registry.kernels().get(kernel.name) == kernel:
        return kernel.name
    text = f"{kernel.name} ({kernel.source}, {id(kernel):#x})"
    _kernels[text] = kernel  # keeps it alive, so that the id stays its own
    return text


def kernel_of(text: str | None) -> str | Kernel | None:
    """The kernel that `text_of_kernel_at` returned a text for."""
    return _kernels.get(text, text) if text else None


def text_of_tile(tile: Tile | str | Mapping[str, int] | None) -> str:
    """The tile as text, "" for None. Constructs no Tile: PyTorch's compiler would have to trace it."""
    if tile is None or isinstance(tile, str):
        return tile or ""
    return ",".join(f"{n}={int(tile[n])}" for n in tile)


def text_of_options(fields: Mapping[str, Any], score: tuple[Any, ...] | None, names: Sequence[str]) -> str:
    """Fields of `Options` that are neither tensors nor arguments of the operator, and the names of tensors without a
    gradient, as JSON. `fields`: these fields, except `score`. `score`: its expressions and `made_for` (the sizes of its
    block map), not the object, which the compiler of PyTorch 2.11 does not accept as a constant."""
    return json.dumps({**fields, "score": score, "arrays": names})


def options_of(differentiable: Sequence[Any], others: Sequence[Any], text: str) -> tuple[Options, tuple[Any, ...]]:
    """The options, and their arrays. `differentiable`: a tensor or None for each name in `DIFFERENTIABLE`; `others`:
    all other tensors."""
    named = {name: tensor for name, tensor in zip(DIFFERENTIABLE, differentiable, strict=True) if tensor is not None}
    options = _parsed(text, tuple(named), tuple(like_of(tensor) for tensor in others))
    return options, (*named.values(), *others)


@lru_cache(maxsize=256)
def _parsed(text: str, names: tuple[str, ...], likes: tuple[TensorLike, ...]) -> Options:
    """`names`: the names of the tensors with a gradient. `likes`: shapes and dtypes of the others."""
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()}
    others, score = fields.pop("arrays"), fields.pop("score")
    if score:
        expression, mask, made_for = score
        tensors = {
            name.removeprefix("score."): like
            for name, like in zip(others, likes, strict=True)
            if name.startswith("score.") and name != BLOCK_MAP
        }
        score = Score(expression, mask, tensors, made_for=made_for and tuple(made_for))
    return Options(**fields, score=score, array_names=(*names, *others))
