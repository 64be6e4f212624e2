"""The problems of attention's kernels that commands run by default, and the outputs of these kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..core.dtypes import FLOAT8
from ..core.errors import UnsupportedProblem
from ..core.kernel import COMPUTATIONS, Arch, Kernel
from ..core.normalise import Causal
from ..core.problem import Problem
from ..core.tile import Tile
from ..engine.choose import choose_tile, why_tile_unsupported
from ..launch.dlpack import HOST, Device
from .cases import Case

_SANITIZED_WIDTHS = (16, 32, 64, 128, 256)
_SHIPPED_WIDTHS = (64, 128, 256)
_QUICK_WIDTHS = (64, 128, 32, 16, 256)

_SHAPES: dict[str, Callable[[Problem], tuple[int, ...]]] = {
    "O": lambda p: (p.batches, p.H, p.rows[0], p.Dv),
    "dQ": lambda p: (p.batches, p.H, p.rows[0], p.D),
    "dK": lambda p: (p.batches, p.Hk, p.rows[1], p.D),
    "dV": lambda p: (p.batches, p.Hk, p.rows[1], p.Dv),
    **dict.fromkeys(("LSE", "delta"), lambda p: (p.batches, p.H, p.rows[0])),
    "dbias": lambda p: p.bias,
    "dsink": lambda p: (p.H,),
    "block_map": lambda p: p.block_map,
}


def outputs_of(computes: str, problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype)} of the outputs of one of attention's computations: tensors in the problem's dtype, LSE and
    delta in fp32; for a backward also the gradients of bias and sink, if the problem has these."""
    optional = {"dbias": problem.bias, "dsink": problem.sink} if computes == "backward" else {}
    names = (*COMPUTATIONS[computes].writes, *(name for name, present in optional.items() if present))
    dtypes = {
        "O": problem.dtype_of("O"),
        "dbias": problem.bias_dtype or problem.dtype,
        "block_map": "int32",
        **dict.fromkeys(("LSE", "delta", "dsink"), "float32"),
    }
    return {name: (_SHAPES[name](problem), dtypes.get(name, problem.dtype)) for name in names}


# ---- problems of `sanitize`


def usual_dtypes(kernel: Kernel) -> Sequence[str]:
    """The dtypes of the default problems: 8-bit ones only if the kernel supports no wider dtype."""
    return [dtype for dtype in kernel.dtypes if dtype not in FLOAT8] or kernel.dtypes


def small_problems(kernel: Kernel, tile: Tile) -> list[Problem]:
    """A causal problem with partial tiles and grouped heads, and one with whole tiles; several blocks each."""
    M, N, dtypes = tile.get("BLOCK_M", 64), tile.get("BLOCK_N", 64), usual_dtypes(kernel)

    def taken(**fields: Any) -> Iterator[Problem]:
        if kernel.computes == "block_map":  # a block map needs a mask
            fields["mask"] = (1, 1, fields["Sq"], fields["Sk"])
        for problem in (kernel.adapted(Problem(D=D, **fields)) for D in _SANITIZED_WIDTHS):
            if not (kernel.why_unsupported(problem) or why_tile_unsupported(kernel, problem, tile, None)):
                yield problem
                return

    return [
        *taken(B=1, H=2, Hk=1, Sq=2 * M + 3, Sk=2 * N + 5, dtype=dtypes[-1], causal="bottom-right"),
        *taken(B=2, H=1, Sq=M, Sk=2 * N, dtype=dtypes[0]),
    ]


def shipped_tiles(kernel: Kernel, arch: Arch | None) -> list[tuple[Tile, Problem]]:
    """The tiles that are selected for large problems, causal and not. Each has a problem with partial tiles, at the
    first head dimension that selects the tile."""
    found: dict[Tile, Problem] = {}
    masks: tuple[Causal, ...] = ("bottom-right", False)
    for causal, D in itertools.product(masks, _SHIPPED_WIDTHS):
        whole = kernel.adapted(Problem(1, 2, 4096, 4096, D, Hk=1, dtype=usual_dtypes(kernel)[-1], causal=causal))
        try:
            tile = choose_tile(kernel, whole, arch)
        except UnsupportedProblem:
            continue
        M, N = tile.get("BLOCK_M", 64), tile.get("BLOCK_N", 64)
        keys = max(2 * tile.get("STAGES", 0), 1) * N + 5  # every stage is filled again, the first one twice
        for Sq in (M + 3, M - 3):  # the second one where the tile needs an even number of row tiles
            problem = replace(whole, Sq=Sq, Sk=keys)
            if not why_tile_unsupported(kernel, problem, tile, arch):
                found.setdefault(tile, problem)
                break
    return [*found.items()]


# ---- cases of `watch`


def quick_cases(kernel: Kernel, device: Device) -> list[Case]:
    """One case to time, and small ones with partial tiles, groups, strides, large scores. They need two compiles."""

    def of(*sizes: int, **fields: Any) -> Problem:
        return _taken(kernel, *sizes, **fields)

    H, S = (2, 192) if device == HOST else (12, 1024)
    M, N = kernel.tiles[0].get("BLOCK_M", 64), kernel.tiles[0].get("BLOCK_N", 64)
    return [
        Case("plain", of(1, H, S, S)),
        Case("causal", of(1, H, S, S, causal="bottom-right")),
        Case("edges", of(1, 1, M + 1, 2 * N - 1)),
        Case("grouped", of(2, 4, 77, 97, Hk=2, causal="bottom-right"), layout="bshd"),
        Case("large", of(1, 2, 97, 77, causal="bottom-right"), inputs="large"),
        Case("raised", of(1, 1, 33, 65), inputs="raised"),
    ]


def tile_case(kernel: Kernel, tile: Tile) -> Case:
    """A small causal case for `tile`, with two query tiles, the second one partial."""
    M, N = tile.get("BLOCK_M", 64), tile.get("BLOCK_N", 64)
    return Case("new tile", _taken(kernel, 1, 1, M + 1, 2 * N - 1, causal="bottom-right"))


def _taken(kernel: Kernel, B: int, H: int, Sq: int, Sk: int, **fields: Any) -> Problem:
    """The problem with the first head dimension that the kernel supports."""
    dtype = "float16" if "float16" in kernel.dtypes else kernel.dtypes[0]
    problems = [kernel.adapted(Problem(B, H, Sq, Sk, D, dtype=dtype, **fields)) for D in _QUICK_WIDTHS]
    return next((p for p in problems if not kernel.why_unsupported(p)), problems[0])
