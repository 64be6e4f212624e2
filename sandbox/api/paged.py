"""Attention to keys that lie in pages, as servers of language models keep them. Forward only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import UnsupportedProblem
from ..core.score import Score
from ..launch.dlpack import library_of
from .dispatch import run_forward
from .options import asked, paged, with_float8

if TYPE_CHECKING:
    from ..core.kernel import Kernel
    from ..core.tile import Tile


def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    key_lengths: Any,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi: Any = None,
    bias: Any = None,
    mask: Any = None,
    sink: Any = None,
    score: Score | None = None,
    dropout: float = 0.0,
    seed: Any = None,
    descale: Any = None,
    out_dtype: Any = None,
    kernel: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """`attention` to the first key_lengths[b] keys of each batch entry, which lie in pages anywhere (PagedAttention,
    Kwon et al. 2023, arXiv:2309.06180). Nothing is gathered, and no call waits for the GPU: table and lengths are
    read when the kernel runs, so that a CUDA graph may be replayed with others.

    q: (B, H, Sq, D), float16, bfloat16 or, with `descale`, float8. k_pages: (pages, page_size, Hk, D); v_pages: (pages,
    page_size, Hk, Dv); page_size a multiple of 16; any strides with a unit stride in D. block_table: (B, most pages)
    int32: key j of batch entry b is row j % page_size of page block_table[b, j // page_size]; pages may be shared.
    key_lengths: (B,) int32, most pages * page_size at most. All on q's device. What a table says of keys that do not
    count is not looked at.

    The options are those of `attention`, their Sk the key_lengths of a batch entry ("bottom-right": the last query sees
    the last key that counts); bias and mask broadcast to (B, H, Sq, most pages * page_size).

    Returns out, (B, H, Sq, Dv), or (out, lse) with `return_lse`, lse (B, H, Sq) float32. It has no gradient. A page
    that there is not is an error on the CPU backend and under `sanitize`; on a GPU another page is read in its place.
    Raises what `attention_forward` does.
    """
    what, arrays = asked(q, window, softcap, alibi, bias, mask, sink, key_lengths, score, dropout, seed)
    if descale is not None or out_dtype is not None:
        what, arrays = with_float8(what, arrays, descale, out_dtype)
    what, arrays = paged(what, arrays, block_table)
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        if len(x.shape) != 4:
            raise UnsupportedProblem(f"{name} has shape {tuple(x.shape)}: it must be (pages, page_size, Hk, D)")
    heads_first = q, k_pages.swapaxes(1, 2), v_pages.swapaxes(1, 2), *arrays
    if library_of(q).needs_autograd(*heads_first, scale):
        from . import torch_float8, torch_paged

        if what.descale:
            out, lse = torch_float8.attention(heads_first, (causal, scale, kernel, tile, backend, False, what))
        else:
            out, lse = torch_paged.attention(heads_first, what, causal, scale, kernel, tile, backend)
    else:
        out, lse = run_forward(heads_first, (causal, scale, kernel, tile, backend, False, what))
    return (out, lse) if return_lse else out
