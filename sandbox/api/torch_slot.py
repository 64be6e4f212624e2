"""PyTorch's flash attention operators, replaced by our kernels. Imported on demand.

`scaled_dot_product_attention` and what is built on it (nested tensors, `varlen_attn`, transformers, ring attention)
call a few operators of PyTorch, and PyTorch registers their gradients. A `Slot` overrides these operators in PyTorch's
dispatcher: those of its flash attention, and on the CPU also the operator that PyTorch uses there instead. Calls that
we do not support go to PyTorch's own kernel; where there is none to call, they raise UnsupportedProblem.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..core import log
from ..core.errors import SandboxError, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.normalise import cdiv
from ..core.tile import Tile
from . import torch_exit as torch_exit  # the import registers a function with atexit
from .dispatch import MAX_PLANS, Rejection, plan_forward, run_backward, run_forward
from .options import Options, check_int32, collect, plain_options, ragged, replace
from .plan import named

NAME = "sandbox"  # in PyTorch's registry
_active: list[Slot] = []  # the last one is in effect
_before: str | None = None  # the implementation in PyTorch's registry that was active before the first of them


def use_in_torch(
    kernel: str | Kernel | None = None,
    backward: str | Kernel | None = None,
    tile: Tile | str | Mapping[str, int] | None = None,
    *,
    invariant: bool = False,
) -> Slot:
    """A context in which PyTorch's own `scaled_dot_product_attention` runs on our kernels, forward and backward, on
    CUDA (with dropout, too) and on the CPU; and everything else that calls PyTorch's flash operators, dense and ragged.

    kernel, tile: of the forward, by default those that `attention` selects; backward: the kernel of the backward.
    invariant: as in `attention_forward`. Unsupported problems go to PyTorch's own kernel, and the logger "sandbox"
    reports the reason. They raise UnsupportedProblem where PyTorch has no kernel (its flash operators for GPUs, called
    on the CPU), and before PyTorch 2.9, where an override cannot call PyTorch's kernel. Leaving the context restores
    what was active before. Without `with`, `activate()` and `restore()` do the same. In PyTorch 2.11 and later so do
    torch.nn.attention.activate_flash_attention_impl("sandbox") and restore_flash_attention_impl(), for the context
    that was created or activated last.

    Raises UnknownKernel, and UnsupportedProblem for a kernel that computes something else.

    The context applies to all threads. PyTorch itself decides which calls reach the operators: on a GPU float16 and
    bfloat16 without attn_mask, if torch.nn.attention.sdpa_kernel allows FLASH_ATTENTION; on the CPU calls without
    dropout.
    """
    for name, computes in ((kernel, "forward"), (backward, "backward")):
        named(name, computes)  # raises here: in a call, UnsupportedProblem would mean that PyTorch's own kernel runs
    slot = Slot(kernel, backward, tile, invariant)
    if registry := _registry():
        registry.register_flash_attention_impl(NAME, register_fn=slot.register)
    return slot


def _registry() -> Any:
    """torch.nn.attention, where it has a registry of implementations (2.11 and later)."""
    from torch.nn import attention

    return attention if hasattr(attention, "register_flash_attention_impl") else None


class Slot:
    """See `use_in_torch`."""

    def __init__(self, kernel: Any, backward: Any, tile: Any, invariant: bool = False):
        self._forward, self._backward = (kernel, tile, invariant), (backward, None, invariant)
        self._library: Library | None = None

    def __enter__(self) -> Slot:
        self.activate()
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def activate(self) -> None:
        """Replaces PyTorch's kernels by ours."""
        global _before  # noqa: PLW0603
        if self in _active:
            raise UnsupportedProblem(
                "this use_in_torch() is already active: call its restore() first, or create another one"
            )
        registry = _registry()
        if _active:
            _active[-1].remove()
        else:
            _before = registry.current_flash_attention_impl() if registry else None
        self._enter(registry)
        _active.append(self)

    def restore(self) -> None:
        """Restores PyTorch's kernels, or what was active before `activate`. If another Slot, or another implementation
        in PyTorch's registry, was activated since, that one stays active, and only this Slot is removed."""
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
        elif registry and _before:
            registry.activate_flash_attention_impl(_before)

    def _enter(self, registry: Any) -> None:
        if registry is None:
            self.register()
            return
        registry.register_flash_attention_impl(NAME, register_fn=self.register)
        registry.activate_flash_attention_impl(NAME)

    def register(self) -> Slot:
        """Puts our kernels in PyTorch's dispatcher. PyTorch's registry of implementations calls this."""
        self.remove()
        self._library = Library("aten", "IMPL")
        for device, operators in OPERATORS.items():
            if device == "CUDA" and not torch.version.cuda:
                continue
            for name, ours in operators.items():
                if hasattr(torch.ops.aten, name):
                    self._take(name, device, partial(ours, self))
        return self

    def remove(self) -> None:
        """Takes our kernels out of PyTorch's dispatcher."""
        self._library = None  # unregisters

    def _take(self, name: str, device: str, ours: Callable[..., Any]) -> None:
        theirs = _theirs(name, device)

        @lru_cache(MAX_PLANS)  # logs a reason once; reasons contain shapes, of which there may be many
        def log_once(reason: str) -> None:
            log.logger.log(log.CHOICES, "%s runs on PyTorch's own kernel: %s", name, reason)

        def call(keys: Any, *args: Any, **options: Any) -> Any:
            try:
                return ours(*args, **options)
            except UnsupportedProblem as refusal:
                if theirs is None:
                    raise
                log_once(str(refusal))
                return theirs.call_boxed(keys, *args, **options)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # about the override
            self._library.impl(name, call, device, with_keyset=True)  # type: ignore[union-attr]

    def attend(self, arrays: tuple[Any, ...], options: Options) -> tuple[Any, Any]:
        """(out, lse) of q, k, v and the arrays that `options.array_names` names."""
        return run_forward(arrays, self._as_forward(options))

    def differentiate(self, arrays: tuple[Any, ...], options: Options) -> tuple[Any, Any, Any]:
        """dq, dk, dv of dout, q, k, v, out, lse and the arrays that `options.array_names` names.

        With dropout, forward and backward must both be ours or both PyTorch's: our kernels and PyTorch's drop different
        elements. Raises UnsupportedProblem if PyTorch computed the forward, SandboxError if our forward supports the
        problem, but no backward of ours.
        """
        kernel, tile, invariant = self._backward
        deterministic = torch.are_deterministic_algorithms_enabled()
        if deterministic and torch.is_deterministic_algorithms_warn_only_enabled():  # as PyTorch's operator
            deterministic = False
            warnings.warn(
                "Flash Attention defaults to a non-deterministic algorithm. A deterministic backward of sandbox is "
                "selected by torch.use_deterministic_algorithms(True), without warn_only=True",
                stacklevel=2,
            )
        backward = replace(options, kernel=kernel, tile=tile, deterministic=deterministic, invariant=invariant)
        if not options.dropout:
            return run_backward(arrays, backward)
        forward = plan_forward((*arrays[1:4], *arrays[6:]), self._as_forward(options))[0]
        if isinstance(forward, Rejection):
            raise UnsupportedProblem(forward.reason)
        try:
            return run_backward(arrays, backward)
        except UnsupportedProblem as error:
            raise SandboxError(
                f"with dropout, sandbox computed the forward, and no backward kernel of sandbox supports it: {error}"
            ) from None

    def _as_forward(self, options: Options) -> Options:
        if self._forward == (None, None, False):
            return options
        kernel, tile, invariant = self._forward
        return replace(options, kernel=kernel, tile=tile, invariant=invariant)


def _theirs(name: str, device: str) -> Any:
    """PyTorch's kernel for the operator, or its present override. None if PyTorch has none (flash attention on the
    CPU), and in PyTorch before 2.9, which has no `get_kernel`."""
    with suppress(AttributeError, RuntimeError):
        return torch.library.get_kernel(f"aten::{name}", device)
    return None


# ---- PyTorch's flash operators, with the arguments of its schemas


def _options(
    q: Tensor, causal: Any, scale: float | None, dropout: float = 0.0, state: Tensor | None = None, **more: Any
) -> tuple[Options, tuple[Any, ...]]:
    if not dropout and not more:
        return plain_options(causal, scale), ()
    seed = None if state is None else state.view(torch.int64)[:1]
    return collect("use_in_torch", q, causal, scale, {"dropout": dropout, "seed": seed} | more)


def _state(q: Tensor) -> Tensor:
    """PyTorch's rng_state, two 64-bit numbers, of which the first is our seed."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device).view(torch.uint64)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    bounds = tuple(None if n is None or n < 0 else n for n in (left, right))
    return None if bounds == (None, None) else bounds  # type: ignore[return-value]


_unused: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}  # by device and dtype


def _auxiliary(q: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused, debug_attn_mask. Without dropout nothing reads them, and they are cached: allocating them
    took a quarter of a call's host time (4 of 16 µs, without a launch)."""
    found = _unused.get(key := (q.get_device(), q.dtype))
    if found is None:
        with torch.inference_mode(False):  # a tensor of that mode could not be saved for a backward
            numbers = torch.zeros(2, dtype=torch.uint64, device=q.device)
            found = _unused[key] = numbers, numbers[0].clone(), torch.empty(0, dtype=q.dtype, device=q.device)
    return found if state is None else (state, *found[1:])


def _debug_mask(slot: Slot, arrays: tuple[Tensor, ...], options: Options) -> Tensor:
    """PyTorch's debug_attn_mask, (B, H, Sq, Sk), Sq and Sk rounded up to multiples of 128, of q's dtype: 1 where
    dropout keeps an element, -1 where it drops it or the mask hides it, 0 beyond Sq and Sk.

    Computed with the forward: which elements are dropped depends only on the seed and on their indices. With q = k = 0
    and without ALiBi all visible elements of a row of P are equal, and with columns of the identity as V, out is P
    after dropout, for Dv keys at a time.
    """
    q, k, v, *others = arrays
    given = {name: x for name, x in zip(options.array_names, others, strict=True) if name != "alibi"}
    more, options = given.values(), replace(options, array_names=tuple(given))
    (B, H, Sq, _), Sk, Dv = q.shape, k.size(2), v.size(3)
    mask = q.new_zeros(B, H, cdiv(Sq, 128) * 128, cdiv(Sk, 128) * 128)
    for first in range(0, Sk, Dv):
        count = min(Dv, Sk - first)
        columns = torch.zeros_like(v)
        columns.diagonal(-first, 2, 3).fill_(1)  # no index tensor: a CUDA graph may be capturing
        kept, _ = slot.attend((torch.zeros_like(q), torch.zeros_like(k), columns, *more), replace(options, scale=1.0))
        mask[:, :, :Sq, first : first + count] = torch.where(kept[..., :count] > 0, 1.0, -1.0)
    return mask


def _reject(name: str, given: object) -> None:
    if given:
        raise UnsupportedProblem(f"{name}, an argument of PyTorch's flash attention, is not supported")


def _dense_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Tensors are (B, heads, S, D); causal is bottom-right."""
    state = _state(q) if dropout_p else None
    options, more = _options(q, is_causal, scale, dropout_p, state)
    out, lse = slot.attend((q, k, v, *more), options)
    auxiliary = _auxiliary(q, state)
    if return_debug_mask and dropout_p:
        auxiliary = *auxiliary[:2], _debug_mask(slot, (q, k, v, *more), options)
    if not q.is_contiguous():
        out = _dense_like(q, out)
    return out, lse, None, None, q.size(2), k.size(2), *auxiliary


def _dense_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: None,
    cum_seq_k: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Any, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    options, more = _options(q, is_causal, scale, dropout_p, rng_state if dropout_p else None)
    found = slot.differentiate((dout, q, k, v, out, lse, *more), options)
    return tuple(map(_dense_like, (q, k, v), found))


def _ragged(
    options: Options, more: tuple[Tensor, ...], cum_seq: tuple[Any, Any], longest: tuple[int | None, int | None]
) -> tuple[Options, tuple[Any, ...]]:
    """`ragged` with the arguments of PyTorch's schemas. Raises UnsupportedProblem for offsets that are not int32."""
    for name, x in zip(("cum_seq_q", "cum_seq_k"), cum_seq, strict=True):
        check_int32(name, x)
    return ragged(options, more, cum_seq, longest)


def _flash_forward(
    slot: Slot, q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Tensors are (B, S, heads, D), or (rows, heads, D) for a ragged batch; causal is bottom-right."""
    _reject("block_table", block_table is not None)
    window, state = _window(window_size_left, window_size_right), _state(q) if dropout_p else None
    options, more = _options(
        q, is_causal, scale, dropout_p, state, window=window, key_lengths=seqused_k, alibi=alibi_slopes
    )
    auxiliary = _auxiliary(q, state)
    if cum_seq_q is None:
        arrays = *_heads_first(q, k, v), *more
        out, lse = slot.attend(arrays, options)
        if return_debug_mask and dropout_p:
            auxiliary = *auxiliary[:2], _debug_mask(slot, arrays, options)
        return _dense_like(q, out.transpose(1, 2)), lse, *auxiliary
    if return_debug_mask and dropout_p:  # no fallback: PyTorch's forward drops other elements than our backward
        raise SandboxError(
            "return_debug_mask of a ragged batch with dropout is not supported in use_in_torch: no kernel writes the "
            "mask; call the operator outside of use_in_torch, or omit return_debug_mask"
        )
    options, more = _ragged(options, more, (cum_seq_q, cum_seq_k), (max_q, max_k))
    out, lse = slot.attend((*_one_batch(q, k, v), *more), options)
    return _dense_like(q, out[0].transpose(0, 1)), lse[0], *auxiliary


def _flash_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
    unused: Any, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    state = rng_state if dropout_p else None
    options, more = _options(q, is_causal, scale, dropout_p, state, window=_window(window_size_left, window_size_right))
    if cum_seq_q is None:
        arrays = *_heads_first(dout, q, k, v, out), lse, *more
        found = _heads_first(*slot.differentiate(arrays, options))
        return tuple(map(_dense_like, (q, k, v), found))
    options, more = _ragged(options, more, (cum_seq_q, cum_seq_k), (max_q, max_k))
    arrays = *_one_batch(dout, q, k, v, out), lse[None], *more
    rows = (x[0].transpose(0, 1) for x in slot.differentiate(arrays, options))
    return tuple(map(_dense_like, (q, k, v), rows))


def _dense_like(given: Tensor, result: Tensor) -> Tensor:
    """`result` in the strides that PyTorch's operator gives it: those of torch.empty_like(given), with the last size of
    `result`. Ours are the same unless `given` is broadcast. PyTorch flattens results of nested tensors with `view`, and
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
    """Tensors are (B, heads, S, D); causal is top-left, and the memory order of lse is (B, S, heads)."""
    _reject("dropout", dropout_p)  # this operator has no argument for the seed
    options, more = _options(q, is_causal and "top-left", scale, bias=attn_mask)
    out, lse = slot.attend((q, k, v, *more), options)
    return out, _heads_last(lse)


def _cpu_backward(
    slot: Slot, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _reject("dropout", dropout_p)
    options, more = _options(q, is_causal and "top-left", scale, bias=attn_mask)
    arrays = dout, q, k, v, out, lse.contiguous(), *more
    return tuple(map(_heads_last, slot.differentiate(arrays, options)))


def _heads_last(x: Tensor) -> Tensor:
    """The same in (B, S, heads, D) memory order, as PyTorch's operator returns it: the compiler asserts the strides."""
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
        **_FLASH,  # PyTorch has no CPU kernels for these; ring attention, for example, calls them
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
    },
}
