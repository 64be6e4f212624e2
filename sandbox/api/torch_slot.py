"""PyTorch's own slot for somebody else's attention, with our kernels in it. Imported on demand.

`scaled_dot_product_attention` and what is built on it (nested tensors, `varlen_attn`, transformers, ring attention) end
in a few operators of PyTorch's, whose gradients it knows. In the slot these operators are ours: those of its flash
attention, and on the CPU the one that stands for them there too. What we do not take goes to PyTorch's own kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..core import log
from ..core.errors import SandboxError, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.tile import Tile
from .asked import NOTHING, Asked, asked, ragged
from .passes import Refusal, plan_forward, run_backward, run_forward

NAME = "sandbox"  # in PyTorch's registry
_active: list[Slot] = []  # the last of them is in force


def use_in_torch(
    kernel: str | Kernel | None = None,
    backward: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
) -> Slot:
    """A context in which PyTorch's own `scaled_dot_product_attention` runs on our kernels, forward and backward,
    dropout and all, on CUDA and on the CPU; and whatever else ends in PyTorch's flash operators, dense and ragged.

    kernel, tile: the forward's, by default those that `attention` chooses; backward: likewise. What they do not take
    goes to PyTorch's own kernel, and the log ("sandbox") says why. Leaving restores what was there before. Without
    `with`, `activate()` and `restore()` do the same; so do, of the latest object, PyTorch 2.11's own
    torch.nn.attention.activate_flash_attention_impl("sandbox") and restore_flash_attention_impl().

    It holds for all threads. PyTorch itself decides which calls end in those operators: on a GPU float16 and bfloat16
    without attn_mask, while torch.nn.attention.sdpa_kernel allows FLASH_ATTENTION; on the CPU what has no dropout.
    """
    slot = Slot(kernel, backward, tile)
    if registry := _registry():
        registry.register_flash_attention_impl(NAME, register_fn=slot.register)
    return slot


def _registry() -> Any:
    """torch.nn.attention, where it has a registry of implementations (2.11 and later)."""
    from torch.nn import attention

    return attention if hasattr(attention, "register_flash_attention_impl") else None


class Slot:
    """See `use_in_torch`."""

    def __init__(self, kernel: Any, backward: Any, tile: Any):
        self._forward, self._backward = (kernel, tile), (backward, None)
        self._library: Library | None = None
        self._before: str | None = None  # the implementation in PyTorch's registry that was active, if not one of ours

    def __enter__(self) -> Slot:
        self.activate()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def activate(self) -> None:
        """Our kernels from here on."""
        if self in _active:
            raise UnsupportedProblem("this use_in_torch is active already: restore it first, or make another")
        registry = _registry()
        if _active:
            _active[-1].remove()
        elif registry:
            self._before = registry.current_flash_attention_impl()
        self._enter(registry)
        _active.append(self)

    def restore(self) -> None:
        """PyTorch's kernels again, or what else was there before `activate`, unless somebody has taken over since."""
        if self not in _active:
            return
        registry, in_force = _registry(), _active[-1] is self
        in_force = in_force and (registry is None or registry.current_flash_attention_impl() == NAME)
        _active.remove(self)
        self.remove()
        if not in_force:
            return
        if registry:
            registry.restore_flash_attention_impl()
        if _active:
            _active[-1]._enter(registry)
        elif registry and self._before:
            registry.activate_flash_attention_impl(self._before)

    def _enter(self, registry: Any) -> None:
        if registry is None:
            self.register()
            return
        registry.register_flash_attention_impl(NAME, register_fn=self.register)
        registry.activate_flash_attention_impl(NAME)

    def register(self) -> Slot:
        """Puts our kernels in PyTorch's dispatcher; what PyTorch's registry calls."""
        self.remove()
        self._library = Library("aten", "IMPL")
        for device, operators in _OPERATORS.items():
            if device == "CUDA" and not torch.version.cuda:
                continue
            for name, ours in operators.items():
                if hasattr(torch.ops.aten, name):
                    self._take(name, device, partial(ours, self))
        return self

    def remove(self) -> None:
        """Takes them out of it."""
        self._library = None  # whose end it is

    def _take(self, name: str, device: str, ours: Callable[..., Any]) -> None:
        theirs = _theirs(name, device)
        said: set[str] = set()

        def call(keys: Any, *args: Any, **options: Any) -> Any:
            try:
                return ours(*args, **options)
            except UnsupportedProblem as refusal:
                if (reason := str(refusal)) not in said:
                    said.add(reason)
                    log.logger.log(log.CHOICES, "%s stays PyTorch's: %s", name, reason)
                if theirs is None:
                    raise
                return theirs.call_boxed(keys, *args, **options)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that it is overridden
            self._library.impl(name, call, device, with_keyset=True)  # type: ignore[union-attr]

    # ---- the operators, as PyTorch's schemas have them

    def attend(self, arrays: tuple[Any, ...], what: Asked, causal: Any, scale: float | None) -> tuple[Any, Any]:
        """(out, lse) of q, k, v and what else is asked for."""
        return run_forward(arrays, (causal, scale, *self._forward, None, False, what))

    def differentiate(
        self, arrays: tuple[Any, ...], what: Asked, causal: Any, scale: float | None
    ) -> tuple[Any, Any, Any]:
        """dq, dk, dv of dout, q, k, v, out, lse and what else was asked for.

        Dropout is undone by those who did it: what PyTorch dropped is PyTorch's to differentiate, and what we dropped
        nobody else's. Raises SandboxError for that.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = causal, scale, *self._backward, None, deterministic, what
        if not what.dropout:
            return run_backward(arrays, options)
        forward = plan_forward((*arrays[1:4], *arrays[6:]), (causal, scale, *self._forward, None, False, what))[0]
        if isinstance(forward, Refusal):
            raise UnsupportedProblem(forward.reason)
        try:
            return run_backward(arrays, options)
        except UnsupportedProblem as refusal:
            raise SandboxError(f"what our forward has dropped, no backward of ours differentiates: {refusal}") from None


def _theirs(name: str, device: str) -> Any:
    """PyTorch's kernel for the operator, or what has its place; None where it has none, as of flash attention on the
    CPU, and before 2.9, which does not give its kernels away."""
    with suppress(AttributeError, RuntimeError):
        return torch.library.get_kernel(f"aten::{name}", device)
    return None


def _asked(q: Tensor, dropout: float, state: Tensor | None, **options: Any) -> tuple[Asked, tuple[Any, ...]]:
    every = dict.fromkeys(("window", "alibi", "bias", "mask", "sink", "key_lengths", "score")) | options
    seed = None if state is None else state.view(torch.int64)[:1]
    return asked(q, softcap=0.0, dropout=dropout, seed=seed, **every)


def _state(q: Tensor, dropout: float) -> Tensor:
    """PyTorch's rng_state, two 64-bit numbers, of which the first is our seed."""
    if not dropout:
        return q.new_empty(2, dtype=torch.uint64)
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device).view(torch.uint64)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    bounds = tuple(None if n is None or n < 0 else n for n in (left, right))
    return None if bounds == (None, None) else bounds  # type: ignore[return-value]


def _auxiliary(q: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused, debug_attn_mask."""
    return state, q.new_empty((), dtype=torch.uint64), q.new_empty(0)


def _not_built(name: str, given: object) -> None:
    if given:
        raise UnsupportedProblem(f"{name} of PyTorch's flash attention is not built")


def _dense_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of (B, heads, S, D); causal is bottom-right."""
    _not_built("return_debug_mask", return_debug_mask)
    state = _state(q, dropout_p)
    what, more = _asked(q, dropout_p, state) if dropout_p else (NOTHING, ())
    out, lse = slot.attend((q, k, v, *more), what, is_causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], *_auxiliary(q, state)


def _dense_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: None,
    cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Any, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    what, more = _asked(q, dropout_p, rng_state) if dropout_p else (NOTHING, ())
    return slot.differentiate((dout, q, k, v, out, lse, *more), what, is_causal, scale)


def _flash_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Of (B, S, heads, D), or of sequences that lie one after the other, (rows, heads, D); causal is bottom-right."""
    _not_built("return_debug_mask", return_debug_mask)
    _not_built("block_table", block_table is not None)
    window, state = _window(window_size_left, window_size_right), _state(q, dropout_p)
    what, more = _asked(q, dropout_p, state, window=window, key_lengths=seqused_k, alibi=alibi_slopes)
    if cum_seq_q is None:
        out, lse = slot.attend((*_heads_first(q, k, v), *more), what, is_causal, scale)
        return out.transpose(1, 2), lse, *_auxiliary(q, state)
    what, more = ragged(what, more, (cum_seq_q, cum_seq_k), (max_q, max_k))
    out, lse = slot.attend((*_one_batch(q, k, v), *more), what, is_causal, scale)
    return out[0].transpose(0, 1), lse[0], *_auxiliary(q, state)


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
        return _heads_first(*slot.differentiate(arrays, what, is_causal, scale))
    what, more = ragged(what, more, (cum_seq_q, cum_seq_k), (max_q, max_k))
    arrays = *_one_batch(dout, q, k, v, out), lse[None], *more
    return tuple(x[0].transpose(0, 1) for x in slot.differentiate(arrays, what, is_causal, scale))


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
    what, more = _asked(q, dropout_p, None, bias=attn_mask)
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
_OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "CUDA": _FLASH,
    "CPU": {
        **_FLASH,  # which ring attention calls, for one; PyTorch has none of them there
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
    },
}
