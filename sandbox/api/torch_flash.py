"""PyTorch's flash operators, by its schemas, on our kernels: what a `Slot` puts in their place. Imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import SandboxError, UnsupportedProblem
from ..core.integers import cdiv
from .options import NOTHING, ScoreOptions, asked, ragged

if TYPE_CHECKING:
    from .torch_slot import Slot


def _asked(q: Tensor, dropout: float, state: Tensor | None, **options: Any) -> tuple[ScoreOptions, tuple[Any, ...]]:
    every = dict.fromkeys(("window", "alibi", "bias", "mask", "sink", "key_lengths", "score")) | options
    seed = None if state is None else state.view(torch.int64)[:1]
    return asked(q, softcap=0.0, dropout=dropout, seed=seed, **every)


def _state(q: Tensor) -> Tensor:
    """PyTorch's rng_state, two 64-bit numbers, of which the first is our seed."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device).view(torch.uint64)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    bounds = tuple(None if n is None or n < 0 else n for n in (left, right))
    return None if bounds == (None, None) else bounds  # type: ignore[return-value]


_unread: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}  # by device and dtype


def _auxiliary(q: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused, debug_attn_mask. Where nobody reads them they are the same at each call: making three took a
    quarter of a call's host time (4 of 16 µs, without a launch)."""
    found = _unread.get(key := (q.get_device(), q.dtype))
    if found is None:
        with torch.inference_mode(False):  # a tensor of that mode could not be saved for a backward
            numbers = torch.zeros(2, dtype=torch.uint64, device=q.device)
            found = _unread[key] = numbers, numbers[0].clone(), torch.empty(0, dtype=q.dtype, device=q.device)
    return found if state is None else (state, *found[1:])


def _debug_mask(slot: Slot, arrays: tuple[Tensor, ...], what: ScoreOptions, causal: bool) -> Tensor:
    """PyTorch's debug_attn_mask, (B, H, Sq, Sk), both lengths rounded up to 128, of q's dtype: 1 where dropout keeps an
    element, -1 where it drops it or where it is not seen, 0 beyond the lengths.

    By the forward itself: which elements are dropped depends on the seed and their places alone. With q = k = 0 a row
    of P is 1 / n, and with columns of the identity as V out is P after dropout, as many keys at a time as V is wide.
    """
    q, k, v, *more = arrays
    (B, H, Sq, _), Sk, Dv = q.shape, k.size(2), v.size(3)
    mask = q.new_zeros(B, H, cdiv(Sq, 128) * 128, cdiv(Sk, 128) * 128)
    for first in range(0, Sk, Dv):
        count = min(Dv, Sk - first)
        columns = torch.zeros_like(v)
        columns.diagonal(-first, 2, 3).fill_(1)  # no index tensor: a CUDA graph may be capturing
        kept, _ = slot.attend((torch.zeros_like(q), torch.zeros_like(k), columns, *more), what, causal, 1.0)
        mask[:, :, :Sq, first : first + count] = torch.where(kept[..., :count] > 0, 1.0, -1.0)
    return mask


def _not_built(name: str, given: object) -> None:
    if given:
        raise UnsupportedProblem(f"{name} of PyTorch's flash attention is not built")


def _dense_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of (B, heads, S, D); causal is bottom-right."""
    state, what, more = None, NOTHING, ()
    if dropout_p:
        state = _state(q)
        what, more = _asked(q, dropout_p, state)
    out, lse = slot.attend((q, k, v, *more), what, is_causal, scale)
    numbers = _auxiliary(q, state)
    if return_debug_mask and dropout_p:
        numbers = *numbers[:2], _debug_mask(slot, (q, k, v, *more), what, is_causal)
    if not q.is_contiguous():
        out = _dense_like(q, out)
    return out, lse, None, None, q.size(2), k.size(2), *numbers


def _dense_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: None,
    cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Any, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    what, more = _asked(q, dropout_p, rng_state) if dropout_p else (NOTHING, ())
    found = slot.differentiate((dout, q, k, v, out, lse, *more), what, is_causal, scale)
    return tuple(map(_dense_like, (q, k, v), found))


def _flash_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of (B, S, heads, D), or of sequences that lie one after the other, (rows, heads, D); causal is bottom-right."""
    _not_built("block_table", block_table is not None)
    window, state = _window(window_size_left, window_size_right), _state(q) if dropout_p else None
    what, more = _asked(q, dropout_p, state, window=window, key_lengths=seqused_k, alibi=alibi_slopes)
    numbers = _auxiliary(q, state)
    if cum_seq_q is None:
        arrays = *_heads_first(q, k, v), *more
        out, lse = slot.attend(arrays, what, is_causal, scale)
        if return_debug_mask and dropout_p:
            numbers = *numbers[:2], _debug_mask(slot, arrays, what, is_causal)
        return _dense_like(q, out.transpose(1, 2)), lse, *numbers
    if return_debug_mask and dropout_p:  # not UnsupportedProblem: PyTorch's forward, our backward would drop others
        raise SandboxError(
            "return_debug_mask of a ragged batch with dropout is not supported in use_in_torch: no kernel writes the "
            "mask; call the operator outside of it, or leave out return_debug_mask"
        )
    what, more = ragged(what, more, (cum_seq_q, cum_seq_k), (max_q, max_k))
    out, lse = slot.attend((*_one_batch(q, k, v), *more), what, is_causal, scale)
    return _dense_like(q, out[0].transpose(0, 1)), lse[0], *numbers


def _flash_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
    unused: Any, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    state = rng_state if dropout_p else None
    what, more = _asked(q, dropout_p, state, window=_window(window_size_left, window_size_right))
    if cum_seq_q is None:
        arrays = *_heads_first(dout, q, k, v, out), lse, *more
        found = _heads_first(*slot.differentiate(arrays, what, is_causal, scale))
        return tuple(map(_dense_like, (q, k, v), found))
    what, more = ragged(what, more, (cum_seq_q, cum_seq_k), (max_q, max_k))
    arrays = *_one_batch(dout, q, k, v, out), lse[None], *more
    rows = (x[0].transpose(0, 1) for x in slot.differentiate(arrays, what, is_causal, scale))
    return tuple(map(_dense_like, (q, k, v), rows))


def _dense_like(given: Tensor, result: Tensor) -> Tensor:
    """`result` in the strides that PyTorch's operator gives it: those of torch.empty_like(given), but for the width.
    Ours are the same unless `given` is broadcast. PyTorch views results of nested tensors as one row of numbers, and
    its compiler asserts the strides."""
    if 0 not in given.stride():
        return result
    return torch.empty_like(given[..., :1].expand(result.shape), memory_format=torch.preserve_format).copy_(result)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1)[None] for x in tensors)


def _flash_inplace(slot: Slot, out: Tensor, *args: Any, **options: Any) -> Tensor:
    found, lse, *_ = _flash_forward(slot, *args, **options)
    out.copy_(found)
    return lse


def _cpu_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of (B, heads, S, D); causal is top-left, and lse lies as (B, S, heads)."""
    _not_built("dropout", dropout_p)  # whose seed this operator has no place for
    what, more = (NOTHING, ()) if attn_mask is None else _asked(q, dropout_p, None, bias=attn_mask)
    out, lse = slot.attend((q, k, v, *more), what, is_causal and "top-left", scale)
    return out, _heads_last(lse)


def _cpu_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _not_built("dropout", dropout_p)
    what, more = _asked(q, dropout_p, None, bias=attn_mask)
    arrays = dout, q, k, v, out, lse.contiguous(), *more
    return tuple(map(_heads_last, slot.differentiate(arrays, what, is_causal and "top-left", scale)))


def _heads_last(x: Tensor) -> Tensor:
    """The same, the heads innermost but for D: so lie the results of PyTorch's operator, as its compiler expects."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


_FLASH: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _dense_forward,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_inplace,
    "_flash_attention_backward": _flash_backward,
}
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": _FLASH,
    "CPU": {
        **_FLASH,  # which ring attention calls, for one; PyTorch has none of them there
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
    },
}
