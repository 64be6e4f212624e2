"""Attention as people call it: on anybody's arrays, differentiable where their library can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.score import Score
from ..launch.dlpack import library_of
from .asked import asked
from .passes import run_forward

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from ..core.tile import Tile


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi: Any = None,
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    key_lengths: Any = None,
    score: Score | None = None,
    kernel: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q k^T, masked) v, exactly as `attention_forward`; returns out, or (out, lse) with `return_lse`.

    Differentiable once for PyTorch tensors, in q, k, v, bias, sink, and through lse; and an operator to torch.compile.
    `kernel` and `tile` are the forward's; the backward takes the highest rung, a deterministic one under
    torch.use_deterministic_algorithms(True). The other options are constants to autograd.
    """
    what, arrays = asked(window, softcap, alibi, bias, mask, sink, key_lengths, score)
    if library_of(q).records(q, k, v, scale, *arrays):
        from . import torch_op

        out, lse = torch_op.attention((q, k, v, *arrays), what, causal, scale, kernel, tile, backend)
    else:
        out, lse = run_forward((q, k, v, *arrays), (causal, scale, kernel, tile, backend, False, what))
    return (out, lse) if return_lse else out
