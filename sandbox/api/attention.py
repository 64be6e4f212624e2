"""Attention as people call it: on anybody's arrays, differentiable where their library can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import UnsupportedProblem
from ..core.score import Score
from ..launch.dlpack import library_of
from .dispatch import known, run_forward
from .options import CU_SEQLENS, ScoreOptions, asked, ragged, with_float8

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
    dropout: float = 0.0,
    seed: Any = None,
    descale: tuple[Any, Any, Any] | None = None,
    out_dtype: Any = None,
    kernel: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q k^T, masked) v, exactly as `attention_forward`; returns out, or (out, lse) with `return_lse`.

    Differentiable once for PyTorch tensors, in q, k, v, bias, sink, and through lse; and an operator to torch.compile.
    Under torch.autocast q, k and v are cast as PyTorch's own attention casts them.
    `kernel` and `tile` are the forward's; the backward takes the highest rung, a deterministic one under
    torch.use_deterministic_algorithms(True). The other options are constants to autograd: a tensor that asks for a
    gradient is refused.

    PyTorch's jagged nested tensors, (B, H, j, D) with a length of its own for each batch entry, are a ragged batch, as
    `attention_varlen` has it; out and lse are nested then too.
    """
    what, arrays = asked(q, window, softcap, alibi, bias, mask, sink, key_lengths, score, dropout, seed)
    if descale is not None or out_dtype is not None:
        what, arrays = with_float8(what, arrays, descale, out_dtype)
    if getattr(q, "is_nested", False):
        from . import torch_nested

        out, lse = torch_nested.attention((q, k, v), arrays, what, causal, scale, kernel, tile, backend)
    else:
        out, lse = attend((q, k, v, *arrays), what, causal, scale, kernel, tile, backend, return_lse)
    return (out, lse) if return_lse else out


def attend(
    arrays: tuple[Any, ...], what: ScoreOptions, causal: Any, scale: Any, kernel: Any, tile: Any, backend: str | None,
    with_lse: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of q, k, v and the arrays that `what` names; unless `with_lse`, lse may be None."""
    library = library_of(arrays[0])
    options = causal, scale, kernel, tile, backend, False, what
    if found := known(library, "forward", options, arrays):
        plan, addresses, followed = found
        if followed is None or not library.grad_enabled():
            out, lse = plan(arrays, addresses)
            return out, lse
        if not what.descale:
            return followed(arrays, options, found, with_lse)
    arrays = *library.cast(*arrays[:3]), *arrays[3:]
    if library.needs_autograd(*arrays, scale):
        from . import torch_autograd, torch_float8

        if what.descale:
            return torch_float8.attention(arrays, options)
        out, lse = torch_autograd.attention(arrays, what, causal, scale, kernel, tile, backend, with_lse)
        return out, lse
    return run_forward(arrays, options)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
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
    dropout: float = 0.0,
    seed: Any = None,
    descale: tuple[Any, Any, Any] | None = None,
    out_dtype: Any = None,
    kernel: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """`attention` of sequences of different lengths, which lie one after the other: nothing is padded, and no sequence
    looks at another. No call waits for the GPU.

    q: (total_q, H, D); k: (total_k, Hk, D); v: (total_k, Hk, Dv); any strides with a unit stride in D. cu_seqlens_q:
    (B + 1,) int32, on the same device: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, so that it
    begins with 0 and never falls; cu_seqlens_k likewise of k and v, by default the same. A sequence may be empty, and
    have more queries than keys or fewer. Rows after the last sequence are not written, nor are their gradients.

    The options are those of `attention`, their i, j, Sq and Sk those within a sequence, and b its number. bias and mask
    broadcast to (B, H, max_seqlen_q, max_seqlen_k), by default the totals; a sequence reads the beginning of its part.
    Otherwise max_seqlen_* have no effect. With a bias or mask, a sequence longer than max_seqlen_* is an error on the
    CPU backend; on a GPU its queries from max_seqlen_q on have out, lse and gradients NaN, and its keys from
    max_seqlen_k on are not seen and have gradients NaN. SANDBOX_CHECKED=1 makes it an error there too.

    Returns out, (total_q, H, Dv), or (out, lse) with `return_lse`, lse (H, total_q) float32. Differentiable as
    `attention` is. cu_seqlens that make no sense are an error on the CPU backend; on a GPU results are then undefined,
    but nothing outside of the arrays is touched. Raises what `attention_forward` does.
    """
    offsets = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, x in zip(("q", "k", "v", *CU_SEQLENS), (q, k, v, *offsets), strict=True):
        if not hasattr(x, "dtype"):
            raise UnsupportedProblem(f"{name} is a {type(x).__name__}: pass a NumPy, CuPy or PyTorch array")
    what, arrays = asked(q, window, softcap, alibi, bias, mask, sink, key_lengths, score, dropout, seed)
    if descale is not None or out_dtype is not None:
        what, arrays = with_float8(what, arrays, descale, out_dtype)
    what, arrays = ragged(what, arrays, offsets, (max_seqlen_q, max_seqlen_k))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 3:
            raise UnsupportedProblem(f"{name} has shape {tuple(x.shape)}: it must be (rows, heads, D)")
    for name, x in zip(CU_SEQLENS, offsets, strict=True):
        if (dtype := str(x.dtype).rpartition(".")[2]) != "int32":
            raise UnsupportedProblem(f"{name} is {dtype}: it must be int32")
    heads_first = tuple(x.swapaxes(0, 1)[None] for x in (q, k, v))
    out, lse = attend((*heads_first, *arrays), what, causal, scale, kernel, tile, backend)
    out = out[0].swapaxes(0, 1)
    return (out, lse[0]) if return_lse else out
