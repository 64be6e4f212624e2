"""Clusters: concurrent blocks that access each other's shared memory, on the CPU backend and a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sandbox.core.errors import LaunchError

CLUSTER = 4
SUMS = """
#include "cluster.cuh"
extern "C" __global__ void sums(int* out) {
    extern __shared__ int numbers[];
    __shared__ int iteration;
    for (int i = 0; i < 3; ++i) {
        if (threadIdx.x == 0) iteration = i;
        numbers[threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;
        cluster_sync();
        int sum = 0;
        for (unsigned m = 0; m < CLUSTER; ++m)
            sum += map_shared_rank(numbers, m)[31 - threadIdx.x] * *map_shared_rank(&iteration, m) * (m + 1);
        if (i == 0) out[blockIdx.x * 32 + threadIdx.x] = cluster_cta_rank();
        out[blockIdx.x * 32 + threadIdx.x] += sum;
        cluster_sync();
    }
}
"""
SENT = """
#include "cluster.cuh"
extern "C" __global__ void sent(int* out) {
    __shared__ int received[CLUSTER][32];
    cluster_arrive();
    const int from = cluster_cta_rank(), number = 1000 * blockIdx.x + threadIdx.x;
    cluster_wait();
    for (unsigned m = 0; m < CLUSTER; ++m) (*map_shared_rank(&received, m))[from][threadIdx.x] = number;
    cluster_sync();
    int sum = 0;
    for (int m = 0; m < CLUSTER; ++m) sum += received[m][31 - threadIdx.x] * (m + 1);
    out[blockIdx.x * 32 + threadIdx.x] = sum;
}
"""
LEFT = """
#include "cluster.cuh"
extern "C" __global__ void left() {
    if (cluster_cta_rank() != 2) cluster_sync();
}
"""
DEFINES = {"CLUSTER": CLUSTER, "DTYPE_float32": 1, "HEAD_DIM": 8, "CAUSAL": 0}


def test_a_cluster_reads_shared_memory_of_all_blocks(
    run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clusters, three iterations; also with fewer OS threads requested than blocks per cluster."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "2")
    out = np.zeros((3 * CLUSTER, 32), np.int32)
    run_cuda(SUMS, "sums", out, grid=3 * CLUSTER, smem=128, defines=DEFINES, cluster=CLUSTER)
    block, thread = np.mgrid[: 3 * CLUSTER, :32]
    first = block // CLUSTER * CLUSTER
    expected = sum((m + 1) * (1000 * (first + m) + 31 - thread) for m in range(CLUSTER))
    assert np.array_equal(out, block % CLUSTER + (0 + 1 + 2) * expected)


def test_a_cluster_writes_shared_memory_of_all_blocks(run_cuda: Callable[..., None]) -> None:
    """After cluster_wait, without a cluster_sync before the writes."""
    out = np.zeros((3 * CLUSTER, 32), np.int32)
    run_cuda(SENT, "sent", out, grid=3 * CLUSTER, defines=DEFINES, cluster=CLUSTER)
    block, thread = np.mgrid[: 3 * CLUSTER, :32]
    first = block // CLUSTER * CLUSTER
    assert np.array_equal(out, sum((m + 1) * (1000 * (first + m) + 31 - thread) for m in range(CLUSTER)))


@pytest.mark.parametrize("device", [("cpu", 0)])
def test_a_block_that_exits_before_its_cluster(run_cuda: Callable[..., None]) -> None:
    """An error instead of a deadlock."""
    with pytest.raises(
        LaunchError, match=r"cluster barrier .*left\.cu:4: block \([013],0,0\) waits for a block of its"
    ):
        run_cuda(LEFT, "left", grid=CLUSTER, defines=DEFINES, cluster=CLUSTER)


@pytest.mark.parametrize("device", [("cpu", 0)])
@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("cluster_wait();", "cluster_wait without cluster_arrive"),
        ("cluster_arrive(); cluster_arrive();", "cluster_arrive twice"),
        ("cluster_arrive(); cluster_sync();", "cluster_sync between cluster_arrive and cluster_wait"),
    ],
)
def test_halves_of_a_cluster_barrier_that_do_not_match(calls: str, message: str, run_cuda: Callable[..., None]) -> None:
    source = f'#include "cluster.cuh"\nextern "C" __global__ void halves() {{ {calls} }}'
    with pytest.raises(LaunchError, match=message):
        run_cuda(source, "halves", grid=CLUSTER, defines=DEFINES, cluster=CLUSTER)
