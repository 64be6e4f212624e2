"""PyTorch's context_parallel in two processes: inside `use_in_torch` its ring runs on these kernels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from project import ROOT

pytest.importorskip("torch")

# On the CPU PyTorch's ring has no operator to replace. The flash operator is the one that it calls on a GPU.
PROCESS = """
import sys
from datetime import timedelta
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
import sandbox
from project import leave_process_group

def with_gradients(call, q, k, v, dout):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

def distributed(q, k, v):
    parts = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v)]
    return torch.ops.aten._scaled_dot_product_flash_attention(*parts, 0.0, causal)[0].to_local()

def excess(found, expected):
    "Largest difference in units of its bound: each of the ring's two partial results, their sum and the expected one\\
 are rounded once to bfloat16."
    unit = torch.finfo(expected.dtype).eps * 2.0 ** torch.floor(torch.log2(expected.abs().amax().double()))
    return float((found.double() - expected.double()).abs().amax() / (4 * unit))

torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(0)
whole = [torch.randn(1, 2, 32, 16, generator=generator, dtype=torch.bfloat16) for _ in range(4)]
with sandbox.use_in_torch(kernel="fwd_minimal", backward="bwd_minimal"):
    for causal in (True, False):
        attention = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        expected = with_gradients(attention, *whole)
        for rotate in ("alltoall", "allgather"):
            _cp_options.enable_load_balance = causal
            set_rotate_method(rotate)
            parts = [x.clone() for x in (*whole, *expected)]
            buffers = dict(buffers=parts, buffer_seq_dims=[2] * len(parts), no_restore_buffers={*parts})
            with context_parallel(mesh, **buffers):
                found = with_gradients(distributed, *parts[:4])
                assert found[0].shape == (1, 2, 16, 16)
                errors = [excess(x, y) for x, y in zip(found, parts[4:], strict=True)]
                assert all(error <= 1 for error in errors), (causal, rotate, errors)
leave_process_group()
print("right")
"""


def test_a_ring_of_two_processes() -> None:
    """Output and gradients agree with one process, causal and not, with both ways to exchange keys."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            assert out == "right\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
