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
from torch.library import Library

from ..core import log
from ..core.errors import SandboxError, UnsupportedProblem
from ..core.kernel import Kernel
from ..core.tile import Tile
from . import torch_exit as torch_exit  # which registers itself
from .dispatch import Rejection, plan_forward, run_backward, run_forward
from .options import ScoreOptions
from .plan import named
from .torch_flash import OPERATORS

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

    Raises UnknownKernel, and UnsupportedProblem for a kernel that computes something else.

    It holds for all threads. PyTorch itself decides which calls end in those operators: on a GPU float16 and bfloat16
    without attn_mask, while torch.nn.attention.sdpa_kernel allows FLASH_ATTENTION; on the CPU what has no dropout.
    """
    for asked, computes in ((kernel, "forward"), (backward, "backward")):
        named(asked, computes)  # a mistake in a name is no reason to go to PyTorch's
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
        for device, operators in OPERATORS.items():
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

    def attend(self, arrays: tuple[Any, ...], what: ScoreOptions, causal: Any, scale: float | None) -> tuple[Any, Any]:
        """(out, lse) of q, k, v and what else is asked for."""
        return run_forward(arrays, (causal, scale, *self._forward, None, False, what))

    def differentiate(
        self, arrays: tuple[Any, ...], what: ScoreOptions, causal: Any, scale: float | None
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
        if isinstance(forward, Rejection):
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
