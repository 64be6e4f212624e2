"""The block map of a score's own mask, made once for many calls."""

from __future__ import annotations

from typing import Any

from ..core.block_map import remember
from ..core.errors import SpecError, UnsupportedProblem
from ..core.problem import Problem
from ..core.score import Score
from ..launch.dlpack import HOST, dense_strides, library_of


def block_map(score: Score, problem: Problem, *, like: Any = None) -> Any:
    """Which tiles of S the mask of `score` hides, shows in part, or shows in full (FlexAttention's BlockMask,
    arXiv:2412.05496).

    Pass the map to `score.with_blocks(...)`. Without it every launch computes its own map, so the tensors of the score
    may change between calls; with it, tiles that were hidden or fully visible when the map was made stay so. One map
    serves the forward and the backward of all problems with the same B, H, Sq and Sk and any option except `mask=`,
    and except key_lengths if the mask names Sk. B, H and Sq may differ if the mask does not name them (as b, h, i
    or Sq). Other sizes raise UnsupportedProblem. The sizes of a copy of a map are unknown: only its shape is compared.

    Returns an int32 array (B, H, rows, words); B, H and rows are 1 where the mask does not vary along them. A row
    stands for 64 queries, a bit for 16 keys. Each row has ceil(Sk / 512) words, rounded up to a multiple of 4, for
    "some key is visible", and as many for "all keys are visible". The array has the library and device of the tensors
    that `score` reads; if it reads none, those of `like` (pass q); without `like` it is a NumPy array.

    Raises SpecError for a score without a mask, UnsupportedProblem for tensors of several libraries or devices, and
    what `attention_forward` does.
    """
    from ..engine import choose, pipeline

    if not isinstance(score, Score) or not score.hides:
        raise SpecError(f"score={score!s} hides no keys: a block map needs a sandbox.Score with a mask")
    bare = Problem(problem.B, problem.H, problem.Sq, problem.Sk, 64, dtype="float16", score=score.described)
    arrays = tuple(score.tensors.values()) or (_host() if like is None else like,)
    library = library_of(arrays[0])
    if any(library_of(array) is not library for array in arrays):
        raise UnsupportedProblem("the tensors of score are arrays of several libraries: convert them to one")
    arrays = library.materialise(*arrays)
    views = dict(zip((f"score.{name}" for name in score.tensors), map(library.view, arrays), strict=False))
    device = library.view(arrays[0]).device
    if any(view.device != device for view in views.values()):
        raise UnsupportedProblem("the tensors of score are on several devices: copy them to one")
    made = library.allocator(arrays[0], bare.block_map, dense_strides(bare.block_map), "int32")()
    tensors = {**views, "block_map": library.view(made)}
    kernel = choose.choose_kernel(bare, "block_map", pipeline.arch_of(device))
    prepared = pipeline.prepare(kernel, pipeline.tile_on(device, kernel, bare), bare, tensors, device)
    prepared.launch(prepared.pointers(tensors), library.stream(device[1])() if device != HOST else 0)
    to_caller = library.to_caller(arrays[0])
    blocks = to_caller(made) if to_caller else made
    remember(blocks, (problem.B, problem.H, problem.Sq, problem.Sk))
    return blocks


def _host() -> Any:
    import numpy as np

    return np.empty(0, np.float32)
