"""Teams: blocks that run at one time and read and write each other's shared memory, on the CPU backend and a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sandbox.core.errors import LaunchError

TEAM = 4
SUMS = """
#include "team.cuh"
extern "C" __global__ void sums(int* out) {
    extern __shared__ int numbers[];
    __shared__ int round;
    for (int turn = 0; turn < 3; ++turn) {
        if (threadIdx.x == 0) round = turn;
        numbers[threadIdx.x] = 1000 * blockIdx.x + threadIdx.x;
        team_barrier();
        int sum = 0;
        for (unsigned m = 0; m < TEAM; ++m)
            sum += of_teammate(numbers, m)[31 - threadIdx.x] * *of_teammate(&round, m) * (m + 1);
        if (turn == 0) out[blockIdx.x * 32 + threadIdx.x] = team_member();
        out[blockIdx.x * 32 + threadIdx.x] += sum;
        team_barrier();
    }
}
"""
SENT = """
#include "team.cuh"
extern "C" __global__ void sent(int* out) {
    __shared__ int inbox[TEAM][32];
    team_begin();
    const int from = team_member(), number = 1000 * blockIdx.x + threadIdx.x;
    team_begun();
    for (unsigned m = 0; m < TEAM; ++m) (*of_teammate(&inbox, m))[from][threadIdx.x] = number;
    team_barrier();
    int sum = 0;
    for (int m = 0; m < TEAM; ++m) sum += inbox[m][31 - threadIdx.x] * (m + 1);
    out[blockIdx.x * 32 + threadIdx.x] = sum;
}
"""
LEFT = """
#include "team.cuh"
extern "C" __global__ void left() {
    if (team_member() != 2) team_barrier();
}
"""
DEFINES = {"TEAM": TEAM, "DTYPE_float32": 1, "HEAD_DIM": 8, "CAUSAL": 0}


def test_a_team_reads_each_others_shared_memory(run_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with fewer OS threads asked for than a team has blocks; three teams, three rounds."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "2")
    out = np.zeros((3 * TEAM, 32), np.int32)
    run_cuda(SUMS, "sums", out, grid=3 * TEAM, smem=128, defines=DEFINES, team=TEAM)
    block, thread = np.mgrid[: 3 * TEAM, :32]
    first = block // TEAM * TEAM
    wanted = sum((m + 1) * (1000 * (first + m) + 31 - thread) for m in range(TEAM))
    assert np.array_equal(out, block % TEAM + (0 + 1 + 2) * wanted)


def test_a_team_writes_each_others_shared_memory(run_cuda: Callable[..., None]) -> None:
    """As soon as all have begun, and nobody reads anybody else's."""
    out = np.zeros((3 * TEAM, 32), np.int32)
    run_cuda(SENT, "sent", out, grid=3 * TEAM, defines=DEFINES, team=TEAM)
    block, thread = np.mgrid[: 3 * TEAM, :32]
    first = block // TEAM * TEAM
    assert np.array_equal(out, sum((m + 1) * (1000 * (first + m) + 31 - thread) for m in range(TEAM)))


@pytest.mark.parametrize("device", [("cpu", 0)])
def test_a_block_that_leaves_its_team(run_cuda: Callable[..., None]) -> None:
    """Is reported, and nobody waits for ever."""
    with pytest.raises(LaunchError, match=r"team barrier .*left\.cu:4: block \([013],0,0\) waits for one of its"):
        run_cuda(LEFT, "left", grid=TEAM, defines=DEFINES, team=TEAM)
