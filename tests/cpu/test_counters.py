"""Blocks that wait for counters of other blocks, on the CPU backend: chains, and deadlocks, which are reported."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import numpy as np
import pytest

from sandbox.core.errors import LaunchError

pytestmark = pytest.mark.parametrize("device", [("cpu", 0)])
DEFINES = {"DTYPE_float32": 1, "HEAD_DIM": 8, "CAUSAL": 0}
# Block i waits for the counter WAITS_FOR, and then increments counter i.
WAITING = """
#include "hopper.cuh"
extern "C" __global__ void waiting(unsigned* counters, int blocks) {
    const int i = blockIdx.x, waits_for = WAITS_FOR;
    if (threadIdx.x == 0 && 0 <= waits_for && waits_for < blocks)
        counter_wait(counters + waits_for, 1);
    __syncthreads();
    if (threadIdx.x == 31) counter_arrive(counters + i, 1 + i);
}
"""

# Two blocks take turns: after each of its turns, a block increments the counter of the other one.
TURNS = """
#include "hopper.cuh"
extern "C" __global__ void turns(unsigned* counters) {
    for (unsigned turn = 1; turn <= 200; ++turn) {
        counter_wait(counters + blockIdx.x, turn);
        counter_arrive(counters + 1 - blockIdx.x);
    }
}
"""
# Each block stores a number by TMA when the one before has done so.
STORES = """
#include "hopper.cuh"
extern "C" __global__ void stores(unsigned* counters, float* out) {
    extern __shared__ __align__(16) float number[];
    const unsigned i = blockIdx.x;
    if (threadIdx.x) return;
    number[0] = number[1] = number[2] = number[3] = i;
    fence_proxy_async();
    if (i) counter_wait(counters + i - 1, 1);
    bulk_store(out + 4 * i, smem_address(number), 16);
    tma_store_commit();
    tma_store_wait_complete();
    counter_arrive(counters + i);
}
"""


def run(run_cuda: Callable[..., None], waits_for: str, blocks: int) -> np.ndarray:
    counters = np.zeros(blocks, np.uint32)
    arguments, defines = (counters, ctypes.c_int(blocks)), {**DEFINES, "WAITS_FOR": waits_for}
    run_cuda(WAITING, "waiting", *arguments, grid=blocks, defines=defines)
    return counters


@pytest.mark.parametrize("waits_for", ["i-1", "i+1", "i/2*2-1"])
@pytest.mark.parametrize("workers", [1, 2, 12])
def test_chains(waits_for: str, workers: int, run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block waits for another one. If that one starts later, each block needs an OS thread: with fewer, it is a
    deadlock."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", str(workers))
    blocks = 12 if waits_for == "i+1" else 200
    if waits_for == "i+1" and workers < blocks:
        with pytest.raises(LaunchError, match=f"deadlock: the {workers} blocks? that runs? waits? for others"):
            run(run_cuda, waits_for, blocks)
        return
    for _ in range(5):
        assert run(run_cuda, waits_for, blocks).tolist() == [*range(1, blocks + 1)]


@pytest.mark.parametrize("workers", [2, 6])
def test_blocks_that_wait_for_each_other(
    workers: int, run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks; the other four end."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", str(workers))
    line = WAITING.splitlines().index("        counter_wait(counters + waits_for, 1);") + 1
    with pytest.raises(LaunchError) as raised:
        run(run_cuda, "i<2?1-i:-1", 6)
    said = str(raised.value)
    assert "deadlock: the 2 blocks that run wait for others, in block (" in said
    assert re.search(rf"thread 0 waits for another block .*waiting\.cu:{line}\n", said)
    assert "threads 1..31 wait at __syncthreads()" in said


def test_a_counter_that_no_block_increments(run_cuda: Callable[..., None]) -> None:
    with pytest.raises(LaunchError, match=r"deadlock: the 1 block that runs waits for others, in block \(3,0,0\)"):
        run(run_cuda, "i==3?3:-1", 6)


def test_blocks_that_take_turns_are_no_deadlock(run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits twice in a step has made progress in between."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "2")
    for _ in range(50):
        counters = np.array([1, 0], np.uint32)
        run_cuda(TURNS, "turns", counters, grid=2, block=1, defines=DEFINES)
        assert counters.tolist() == [201, 200]


@pytest.mark.parametrize("blocks", [2, 20])
def test_a_block_that_stores_after_it_has_waited(
    blocks: int, run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wait ends and its bulk store begins in one step of the scheduler: the launch ends."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "2")
    for _ in range(20):
        counters, out = np.zeros(blocks, np.uint32), np.zeros((blocks, 4), np.float32)
        run_cuda(STORES, "stores", counters, out, grid=blocks, smem=16, defines=DEFINES)
        assert np.array_equal(out, np.broadcast_to(np.arange(blocks)[:, None], out.shape))
