"""Attention over a sequence that is distributed over processes: PyTorch's context_parallel, on several kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sandbox

ROWS = 2  # the distributed dimension of (B, H, S, D)
BACKENDS = {
    "ours": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
ON_CPU = {"kernel": "fwd_minimal", "backward": "bwd_minimal"}  # the fastest on the CPU backend


@contextmanager
def kernels_of(name: str, device: str) -> Iterator[None]:
    """PyTorch's attention on the kernels of `name`, one of BACKENDS."""
    with sdpa_kernel(BACKENDS[name]):
        if name == "ours":
            with sandbox.use_in_torch(**(ON_CPU if device == "cpu" else {})):
                yield
        else:
            yield


@contextmanager
def ring(mesh: DeviceMesh, causal: bool, rotate: str, *whole: Tensor) -> Iterator[Sequence[Tensor]]:
    """This process's parts of the `whole` tensors; inside, scaled_dot_product_attention is PyTorch's ring.

    rotate: "allgather" (PyTorch's default, all keys at once) or "alltoall" (from neighbour to neighbour). With a causal
    mask process r of n has parts r and 2n - 1 - r of 2n, which balances the load. Without a mask load balancing is not
    supported and has to be switched off; process r has part r of n.
    """
    before = _cp_options.enable_load_balance
    _cp_options.enable_load_balance = causal
    set_rotate_method(rotate)
    parts = [x.detach().clone() for x in whole]
    try:
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[ROWS] * len(parts), no_restore_buffers={*parts}):
            yield parts
    finally:
        _cp_options.enable_load_balance = before


def attend(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """This process's part of out, inside `ring`."""
    if q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    # On the CPU PyTorch would call another operator, which its ring does not support; this is the one of a GPU.
    placed = [DTensor.from_local(x, mesh, [Shard(ROWS)], run_check=False) for x in (q, k, v)]
    return torch.ops.aten._scaled_dot_product_flash_attention(*placed, 0.0, causal)[0].to_local()


def out_and_gradients(call: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """[out, dq, dk, dv]."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def excess(found: Tensor, expected: Tensor, parts: int) -> float:
    """The largest difference in units of its bound. Each of the `parts` results of the ring, their sum and the result
    of one GPU are rounded once: parts + 2 units in the last place of the largest number. At most 1 is correct."""
    most = expected.abs().amax().double()
    unit = torch.finfo(expected.dtype).eps * 2.0 ** torch.floor(torch.log2(most))
    return float((found.double() - expected.double()).abs().amax() / ((parts + 2) * unit))
