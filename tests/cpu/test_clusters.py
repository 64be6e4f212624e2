"""Teams: blocks that run at one time and read and write each other's shared memory, on the CPU backend and a GPU."""

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
    __shared__ int round;
    for (int turn = 0; turn < 3; ++turn) {
        if (threadIdx.x == 0) round = turn;
        numbers[threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;
        cluster_sync();
        int sum = 0;
        for (unsigned m = 0; m < CLUSTER; ++m)
            sum += map_shared_rank(numbers, m)[31 - threadIdx.x] * *map_shared_rank(&round, m) * (m + 1);
        if (turn == 0) out[blockIdx.x * 32 + threadIdx.x] = cluster_cta_rank();
        out[blockIdx.x * 32 + threadIdx.x] += sum;
        cluster_sync();
    }
}
"""
SENT = """
#include "cluster.cuh"
extern "C" __global__ void sent(int* out) {
    __shared__ int inbox[CLUSTER][32];
    cluster_arrive();
    const int from = cluster_cta_rank(), number = 1000 * blockIdx.x + threadIdx.x;
    cluster_wait();
    for (unsigned m = 0; m < CLUSTER; ++m) (*map_shared_rank(&inbox, m))[from][threadIdx.x] = number;
    cluster_sync();
    int sum = 0;
    for (int m = 0; m < CLUSTER; ++m) sum += inbox[m][31 - threadIdx.x] * (m + 1);
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


def test_a_team_reads_each_others_shared_memory(run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fewer OS threads asked for than a team has blocks; three teams, three rounds."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "2")
    out = np.zeros((3 * CLUSTER, 32), np.int32)
    run_cuda(SUMS, "sums", out, grid=3 * CLUSTER, smem=128, defines=DEFINES, team=CLUSTER)
    block, thread = np.mgrid[: 3 * CLUSTER, :32]
    first = block // CLUSTER * CLUSTER
    wanted = sum((m + 1) * (1000 * (first + m) + 31 - thread) for m in range(CLUSTER))
    assert np.array_equal(out, block % CLUSTER + (0 + 1 + 2) * wanted)


def test_a_team_writes_each_others_shared_memory(run_cuda: Callable[..., None]) -> None:
    """As soon as all have begun, and nobody reads anybody else's."""
    out = np.zeros((3 * CLUSTER, 32), np.int32)
    run_cuda(SENT, "sent", out, grid=3 * CLUSTER, defines=DEFINES, team=CLUSTER)
    block, thread = np.mgrid[: 3 * CLUSTER, :32]
    first = block // CLUSTER * CLUSTER
    assert np.array_equal(out, sum((m + 1) * (1000 * (first + m) + 31 - thread) for m in range(CLUSTER)))


@pytest.mark.parametrize("device", [("cpu", 0)])
def test_a_block_that_leaves_its_team(run_cuda: Callable[..., None]) -> None:
    """Is reported, and nobody waits for ever."""
    with pytest.raises(LaunchError, match=r"team barrier .*left\.cu:4: block \([013],0,0\) waits for one of its"):
        run_cuda(LEFT, "left", grid=CLUSTER, defines=DEFINES, team=CLUSTER)
