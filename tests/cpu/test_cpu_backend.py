"""CUDA C++ on the CPU backend. Results are tested on both backends, error reports on the CPU backend only."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from project import ROOT

from sandbox import CompileError, LaunchError, ToolchainMissing
from sandbox.core import registry
from sandbox.cpu import build, compiler
from sandbox.cpu.launch import CpuFunction
from sandbox.engine import pipeline
from sandbox.launch.dlpack import HOST
from sandbox.spec import Problem
from sandbox.toolchain import cache

Run = Callable[..., None]
on_cpu = pytest.mark.parametrize("device", [HOST], ids=["cpu"])
LANES = np.arange(32)


@pytest.fixture(autouse=True)
def several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run concurrently, also on a machine with one core."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "4")


# ---- threads, blocks, shared memory


def test_indices(run_cuda: Run) -> None:
    """Indices in a 3-D grid of 3-D blocks whose last warp is partial."""
    text = """
    extern "C" __global__ void where(int* out) {
        const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        int* mine = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 6;
        mine[0] = threadIdx.x; mine[1] = threadIdx.y; mine[2] = threadIdx.z;
        mine[3] = blockIdx.x; mine[4] = blockIdx.y; mine[5] = blockIdx.z;
    }"""
    out = np.full((4 * 3 * 2, 7 * 5 * 3, 6), -1, np.int32)
    run_cuda(text, "where", out, grid=(4, 3, 2), block=(7, 5, 3))
    for columns, extent in ((out[0, :, :3], (3, 5, 7)), (out[:, 0, 3:], (2, 3, 4))):
        z, y, x = np.indices(extent).reshape(3, -1)
        assert np.array_equal(columns, np.stack([x, y, z], 1))
    assert (out[:, :, :3] == out[:1, :, :3]).all()
    assert (out[:, :, 3:] == out[:, :1, 3:]).all()


FORKS = """
import os, sys, threading, time
import numpy as np
from sandbox.core import registry
from sandbox.engine import pipeline
from sandbox.launch import dlpack
from sandbox.spec import Problem
kernel = registry.get("fwd_minimal")
problem = Problem(1, 1, 2000, 2000, 32, dtype="float16")
arrays = {name: np.zeros((1, 1, 2000, 32), np.float16) for name in "QKVO"}
views = {name: dlpack.view(a) for name, a in {**arrays, "LSE": np.zeros((1, 1, 2000), np.float32)}.items()}
prepared = pipeline.prepare(kernel, kernel.tiles[0], problem, views, dlpack.HOST)
launch = lambda: prepared.launch(prepared.pointers(views))
other = threading.Thread(target=launch)
other.start()
time.sleep(0.05)
assert other.is_alive(), "the launch is too short for the test"
child = os.fork()
if not child:
    launch()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_during_a_launch_of_another_thread() -> None:
    """The child launches too: it does not wait for a thread of the parent."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, check=True)  # fmt: skip
    assert done.stdout == "7\n"


def test_a_cache_cleared_during_compilation(own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache is cleared before each compilation and before the library is loaded."""
    clearing: list[threading.Thread] = []
    compiled, loaded = compiler.run, CpuFunction.__init__

    def clear() -> None:
        clearing.append(threading.Thread(target=cache.clear))
        clearing[-1].start()
        clearing[-1].join(0.3)

    def compiling(*arguments: Any) -> None:
        clear()
        compiled(*arguments)

    def loading(self: CpuFunction, *arguments: Any) -> None:
        clear()
        loaded(self, *arguments)

    monkeypatch.setattr(build.host, "run", compiling)
    monkeypatch.setattr(CpuFunction, "__init__", loading)
    kernel = registry.get("fwd_minimal")
    pipeline.forget()
    assert pipeline.load(kernel, kernel.tiles[0], Problem(1, 1, 8, 8, 24), HOST).functions
    pipeline.forget()
    for thread in clearing:
        thread.join()
    assert len(clearing) == 3
    assert list(cache.entries()) == []


def test_thousands_of_blocks(run_cuda: Run) -> None:
    text = (
        'extern "C" __global__ void each(int* out) { out[blockIdx.x * 32 + threadIdx.x] = blockIdx.x + threadIdx.x; }'
    )
    out = np.zeros((5000, 32), np.int32)
    run_cuda(text, "each", out, grid=5000)
    assert np.array_equal(out, np.arange(5000)[:, None] + LANES)


@pytest.mark.parametrize("threads", [1, 32, 48, 97, 1024])
def test_barrier_in_a_loop(run_cuda: Run, threads: int) -> None:
    """Each iteration reads what a thread of another warp wrote in the previous one."""
    text = """
    extern "C" __global__ void rotate(int* out, int rounds) {
        __shared__ int a[1024];
        const int t = threadIdx.x, n = blockDim.x;
        a[t] = t;
        for (int i = 0; i < rounds; ++i) {
            __syncthreads();  // written before it is read
            const int next = a[(t + 33) % n];
            __syncthreads();  // read before it is overwritten
            a[t] = next;
        }
        out[blockIdx.x * n + t] = a[t];
    }"""
    out = np.zeros((9, threads), np.int32)
    run_cuda(text, "rotate", out, ctypes.c_int(20), grid=9, block=threads)
    assert (out == (np.arange(threads) + 20 * 33) % threads).all()


def test_static_and_dynamic_shared_memory(run_cuda: Run) -> None:
    """Static arrays are separate; all `extern` arrays are one buffer, for any name, type and order of specifiers."""
    text = """
    template <class T> __device__ T* everything() {
        extern __shared__ __align__(1024) unsigned char pool[];
        return reinterpret_cast<T*>(pool);
    }
    // extern __shared__ float not_this[];
    struct __align__(16) Pair { double a, b; };
    template <class T, int N> struct Array { T data[N]; };
    extern "C" __global__ void shared(int* out) {
        extern __shared__ __align__(1024) float floats[];
        extern __shared__ /* (of 16 bytes */ __align__(16) Pair pairs [ ] ;
        extern __align__(16) __shared__ int4 vectors[];
        extern __shared__ Array<float, 2> arrays[];
        __shared__ alignas(128) int first[64];
        static __shared__ __align__(64) int second[64];
        const int t = threadIdx.x;
        floats[t] = 1.5f * t;
        first[t] = t;
        second[t] = 100 + t;
        __syncthreads();
        const int other = 63 - t;
        out[t] = everything<int>()[other] == __float_as_int(1.5f * other);
        out[64 + t] = first[other] == other && second[other] == 100 + other;
        out[128 + t] = (void*)pairs == (void*)floats && (void*)vectors == (void*)arrays;
        const unsigned long long a = (unsigned long long)everything<int>(), b = (unsigned long long)first;
        out[192 + t] = a % 1024 == 0 && b % 128 == 0 && (unsigned long long)second % 64 == 0;
    }"""
    out = np.zeros((4, 64), np.int32)
    run_cuda(text, "shared", out, block=64, smem=4096)
    assert (out == 1).all(axis=1).tolist() == [True] * 4


@on_cpu
def test_static_shared_memory_of_inline_functions_is_per_kernel(run_cuda: Run) -> None:
    """Arrays of the same function, of different sizes in two libraries of one process."""
    text = """
    __device__ __forceinline__ void reverse(int* out) {
        __shared__ int before[4], values[COUNT], after[4];
        if (threadIdx.x < 4) before[threadIdx.x] = after[threadIdx.x] = 7;
        __syncthreads();
        values[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = values[COUNT - 1 - threadIdx.x] + 1000 * (before[threadIdx.x % 4] + after[threadIdx.x % 4]);
    }
    extern "C" __global__ void reversed(int* out) { reverse(out); }"""
    for count in (32, 1024):  # the smaller one is loaded first
        out = np.zeros(count, np.int32)
        run_cuda(text, "reversed", out, block=count, defines={"COUNT": count})
        assert (out == 14000 + np.arange(count)[::-1]).all()


@on_cpu
def test_shared_memory_is_poisoned_for_each_block(run_cuda: Run) -> None:
    """Unwritten shared memory contains NaN in one block and large values in the next."""
    text = """
    extern "C" __global__ void stale(unsigned* out) {
        __shared__ unsigned fixed[32];
        extern __shared__ unsigned dynamic[];
        out[blockIdx.x * 64 + threadIdx.x] = fixed[threadIdx.x];
        out[blockIdx.x * 64 + 32 + threadIdx.x] = dynamic[1000 + threadIdx.x];
        fixed[threadIdx.x] = dynamic[1000 + threadIdx.x] = 7;
    }"""
    out = np.zeros((100, 64), np.uint32)
    run_cuda(text, "stale", out, grid=100, smem=5000)
    assert (out[::2] == 0xFFFFFFFF).all()
    assert np.isnan(out[::2].view(np.float32)).all()
    assert (out[1::2] == 0x4B4B4B4B).all()
    assert (out[1::2].view(np.float32) > 1e7).all()


def test_locals_are_aligned(run_cuda: Run) -> None:
    """The stack of a fiber is aligned as the ABI requires: 16-byte vectors in local memory are aligned."""
    text = """
    __device__ __noinline__ int misaligned(volatile float4* at) { return (unsigned long long)at % 16; }
    extern "C" __global__ void align(int* out) {
        volatile float4 local[2];
        local[threadIdx.x % 2].x = 1.0f;
        out[threadIdx.x] = misaligned(local);
    }"""
    out = np.full(64, -1, np.int32)
    run_cuda(text, "align", out, block=64)
    assert (out == 0).all()


class Params(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("n", ctypes.c_int32), ("scale", ctypes.c_float), ("big", ctypes.c_int64))


class Float4(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in "xyzw")


class Aligned(ctypes.Structure):
    _fields_ = (("values", ctypes.c_int32 * 32),)


def test_arguments_by_value(run_cuda: Run) -> None:
    """Scalars and structures, also over-aligned ones such as tensor maps, are passed by value to each thread."""
    text = """
    struct Params { float* data; int n; float scale; long long big; };
    struct __align__(64) Aligned { int values[32]; };
    extern "C" __global__ void pass(double* out, Params p, int i, float f, long long l, float4 v,
                                    const __grid_constant__ Aligned a) {
        p.n += threadIdx.x;
        double* mine = out + threadIdx.x * 9;
        mine[0] = p.n; mine[1] = p.scale; mine[2] = p.big; mine[3] = i; mine[4] = f; mine[5] = l;
        mine[6] = v.x + 10 * v.y + 100 * v.z + 1000 * v.w;
        mine[7] = a.values[threadIdx.x];
        mine[8] = p.data == nullptr;
    }"""
    out = np.zeros((32, 9))
    arguments = (
        Params(None, 5, 0.25, 1 << 40), ctypes.c_int(-3), ctypes.c_float(1.5), ctypes.c_int64(-(1 << 50)),
        Float4(1, 2, 3, 4), Aligned((ctypes.c_int32 * 32)(*range(100, 132))),
    )  # fmt: skip
    run_cuda(text, "pass", out, *arguments)
    expected = [[5 + t, 0.25, 2**40, -3, 1.5, -(2**50), 4321, 100 + t, 1] for t in range(32)]
    assert np.array_equal(out, expected)


# ---- warps


SHUFFLES = """
extern "C" __global__ void shuffles(int* out, float* reals) {
    const int t = threadIdx.x, v = 100 + t;
    int* row = out + t;
#define GROUP(W) \\
    *row = __shfl_sync(~0u, v, 3, W); row += 32; \\
    *row = __shfl_sync(~0u, v, t + 5, W); row += 32; \\
    *row = __shfl_up_sync(~0u, v, 3, W); row += 32; \\
    *row = __shfl_down_sync(~0u, v, 3, W); row += 32; \\
    *row = __shfl_xor_sync(~0u, v, 5, W); row += 32; \\
    *row = __shfl_xor_sync(~0u, v, 9, W); row += 32; \\
    *row = __shfl_xor_sync(~0u, v, 16, W); row += 32;
    GROUP(32) GROUP(16) GROUP(8)
    reals[t] = __shfl_xor_sync(~0u, 0.5f * t, 1);
    reals[32 + t] = __shfl_down_sync(~0u, 0.5 * t, 1);
    reals[64 + t] = __shfl_up_sync(~0u, (long long)t << 40, 1) >> 40;
}"""


def test_shuffles(run_cuda: Run) -> None:
    """As PTX defines shfl.sync: idx wraps within a group, up and down stay in it, bfly may read earlier groups."""
    out, reals = np.zeros((21, 32), np.int32), np.zeros((3, 32), np.float32)
    run_cuda(SHUFFLES, "shuffles", out, reals)
    expected = []
    for width in (32, 16, 8):
        first = LANES // width * width
        last = first + width - 1
        keep = lambda source, ok: np.where(ok, source, LANES)  # noqa: E731
        xor = [keep(LANES ^ bits, last >= LANES ^ bits) for bits in (5, 9, 16)]
        expected += [first + 3 % width, first + (LANES + 5) % width, keep(LANES - 3, first <= LANES - 3),
                     keep(LANES + 3, last >= LANES + 3), *xor]  # fmt: skip
    assert np.array_equal(out, 100 + np.array(expected))
    assert np.array_equal(reals, [(LANES ^ 1) * 0.5, np.minimum(LANES + 1, 31) * 0.5, np.maximum(LANES - 1, 0)])


def test_votes_matches_and_reductions(run_cuda: Run) -> None:
    text = """
    extern "C" __global__ void vote(unsigned* out) {
        const int t = threadIdx.x;
        unsigned* row = out + t;
        *row = __ballot_sync(~0u, t % 3 == 0); row += 32;
        *row = __any_sync(~0u, t == 7); row += 32;
        *row = __any_sync(~0u, t == 77); row += 32;
        *row = __all_sync(~0u, t < 32); row += 32;
        *row = __all_sync(~0u, t < 31); row += 32;
        *row = __match_any_sync(~0u, t % 5); row += 32;
        *row = __match_any_sync(~0u, 1.5f * (t / 8)); row += 32;
        *row = __reduce_add_sync(~0u, t - 40); row += 32;
        *row = __reduce_max_sync(~0u, t - 40); row += 32;
        *row = __reduce_min_sync(~0u, t - 40); row += 32;
        *row = __reduce_max_sync(~0u, unsigned(t - 16)); row += 32;
        *row = __reduce_and_sync(~0u, unsigned(t | 64)); row += 32;
        *row = __reduce_or_sync(~0u, unsigned(t & 6)); row += 32;
    }"""
    out = np.zeros((13, 32), np.uint32)
    run_cuda(text, "vote", out)
    bits = lambda chosen: int(sum(1 << int(lane) for lane in np.flatnonzero(chosen)))  # noqa: E731
    each = lambda key: [bits(key == one) for one in key]  # noqa: E731
    signed = lambda n: n % 2**32  # noqa: E731
    rows = [bits(LANES % 3 == 0), 1, 0, 1, 0, each(LANES % 5), each(LANES // 8), signed(496 - 40 * 32), signed(-9),
            signed(-40), 2**32 - 1, 64, 6]  # fmt: skip
    assert np.array_equal(out, np.array([np.broadcast_to(row, 32) for row in rows]))


def test_parts_of_a_warp_diverge(run_cuda: Run) -> None:
    """Halves and single lanes call different collectives, then all lanes call one."""
    text = """
    extern "C" __global__ void parts(int* out) {
        const int t = threadIdx.x, half = t / 16;
        const unsigned mine = half ? 0xffff0000u : 0x0000ffffu;
        int v = t;
        if (half == 0)
            for (int i = 0; i < 3; ++i) v = __shfl_xor_sync(mine, v, 1 << i);
        else
            v = __reduce_add_sync(mine, v);
        if (t == 5) v += __shfl_sync(1u << 5, v, 5);
        __syncwarp();
        out[t] = __shfl_xor_sync(~0u, v, 16);
        out[32 + t] = __ballot_sync(mine, t % 2) >> 16 * half;
        // lane 1 synchronises with lane 2, then with lane 0, which waits from the start
        int w = 0;
        if (t == 0) w = __shfl_sync(0x3u, t + 10, 1);
        if (t == 2) w = __shfl_sync(0x6u, t + 10, 1);
        if (t == 1) w = __shfl_sync(0x6u, t + 10, 2), w = w * 100 + __shfl_sync(0x3u, t + 20, 0);
        out[64 + t] = w;
    }"""
    out = np.zeros((3, 32), np.int32)
    run_cuda(text, "parts", out)
    low, high = np.arange(16) ^ 7, np.full(16, sum(range(16, 32)))
    low[5] *= 2
    assert np.array_equal(out[0], np.concatenate([high, low]))
    assert (out[1] == 0xAAAA).all()
    assert out[2, :4].tolist() == [21, 1210, 11, 0]


def test_syncwarp_orders_shared_memory(run_cuda: Run) -> None:
    text = """
    extern "C" __global__ void scan(int* out) {
        __shared__ int a[64];
        const int t = threadIdx.x, lane = t % 32;
        a[t] = t;
        for (int step = 1; step < 32; step *= 2) {
            __syncwarp();
            const int other = lane >= step ? a[t - step] : 0;
            __syncwarp();
            a[t] += other;
        }
        out[t] = a[t];
    }"""
    out = np.zeros((2, 32), np.int32)
    run_cuda(text, "scan", out, block=64)
    assert np.array_equal(out, np.cumsum(np.arange(64).reshape(2, 32), axis=1))


def test_a_partial_warp_need_not_change_its_mask(run_cuda: Run) -> None:
    """48 threads: the last warp has 16 lanes. Lanes that do not exist are neither waited for nor counted."""
    text = """
    extern "C" __global__ void partial(int* out) {
        const int t = threadIdx.x;
        __syncwarp();
        out[t] = __shfl_xor_sync(~0u, t, 1);
        out[48 + t] = __popc(__ballot_sync(~0u, 1));
        out[96 + t] = __all_sync(~0u, 1);
    }"""
    out = np.zeros((3, 48), np.int32)
    run_cuda(text, "partial", out, block=48)
    assert np.array_equal(out, [np.arange(48) ^ 1, [32] * 32 + [16] * 16, [1] * 48])


# ---- atomics


def test_atomics_across_blocks(run_cuda: Run) -> None:
    text = """
    extern "C" __global__ void count(int* i, unsigned* u, float* f, double* d, unsigned long long* ull) {
        const int n = blockIdx.x * blockDim.x + threadIdx.x;
        atomicAdd(&i[0], 1);
        atomicSub(&i[1], 2);
        atomicMax(&i[2], n - 1000);
        atomicMin(&i[3], 1000 - n);
        for (int old = i[4], seen; (seen = atomicCAS(&i[4], old, old + 3)) != old;) old = seen;
        atomicAdd(&u[0], 1u);
        atomicOr(&u[1], 1u << n % 32);
        atomicAnd(&u[2], ~(1u << n % 31));
        atomicXor(&u[3], unsigned(n));
        atomicMax(&u[4], unsigned(n));
        u[5 + n] = atomicExch(&u[4 + gridDim.x * blockDim.x + 1], unsigned(n));
        atomicAdd(&f[0], 0.5f);
        atomicAdd(&d[0], 0.25);
        atomicAdd(&ull[0], 1ull << 33);
        __threadfence();
    }"""
    blocks, threads = 200, 64
    n = blocks * threads
    i, u = np.zeros(5, np.int32), np.zeros(n + 6, np.uint32)
    f, d, ull = np.zeros(1, np.float32), np.zeros(1), np.zeros(1, np.uint64)
    i[3], u[2], u[n + 5] = 5, 0xFFFFFFFF, n
    run_cuda(text, "count", i, u, f, d, ull, grid=blocks, block=threads)
    assert i.tolist() == [n, -2 * n, n - 1001, 1001 - n, 3 * n]
    assert u[:5].tolist() == [n, 0xFFFFFFFF, 1 << 31, np.bitwise_xor.reduce(np.arange(n)), n - 1]
    assert sorted([*u[5 : n + 5], u[n + 5]]) == list(range(n + 1))  # every value was exchanged once or is the last
    assert (f[0], d[0], ull[0]) == (n / 2, n / 4, n << 33)


# ---- vectors, mathematics, bits


def test_vector_types(run_cuda: Run) -> None:
    text = """
    static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(float2) == 8 && alignof(float3) == 4, "");
    static_assert(sizeof(double4) == 32 && alignof(double2) == 16 && alignof(uint4) == 16 && alignof(uchar4) == 4, "");
    static_assert(sizeof(short4) == 8 && alignof(short4) == 8 && alignof(uint2) == 8 && alignof(longlong2) == 16, "");
    extern "C" __global__ void vectors(const float* in, float* out) {
        const int t = threadIdx.x;
        const float4 v = reinterpret_cast<const float4*>(in)[t];
        const float2 w = __ldg(reinterpret_cast<const float2*>(in) + t);
        reinterpret_cast<float4*>(out)[t] = make_float4(v.w, v.z + w.x, v.y * w.y, v.x);
    }"""
    values = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    out = np.zeros_like(values)
    run_cuda(text, "vectors", values, out)
    x, y, z, w = values.T
    pairs = values.reshape(-1, 2)[:32]
    assert np.array_equal(out, np.stack([w, z + pairs[:, 0], y * pairs[:, 1], x], 1))


FUNCTIONS = {
    "expf(x)": lambda x, a: np.exp(x), "__expf(x)": lambda x, a: np.exp(x), "exp2f(x)": lambda x, a: 2**x,
    "exp10f(x)": lambda x, a: 10**x, "logf(a)": lambda x, a: np.log(a), "__logf(a)": lambda x, a: np.log(a),
    "log2f(a)": lambda x, a: np.log2(a), "__log2f(a)": lambda x, a: np.log2(a), "log1pf(a)": lambda x, a: np.log1p(a),
    "sqrtf(a)": lambda x, a: a**0.5, "rsqrtf(a)": lambda x, a: a**-0.5, "__fsqrt_rn(a)": lambda x, a: a**0.5,
    "sinf(x)": lambda x, a: np.sin(x), "cosf(x)": lambda x, a: np.cos(x), "tanhf(x)": lambda x, a: np.tanh(x),
    "erff(x)": lambda x, a: np.vectorize(math.erf)(x), "__powf(a, 1.5f)": lambda x, a: a**1.5,
    "powf(a, x)": lambda x, a: a**x, "fabsf(x)": lambda x, a: a, "fmaf(x, x, 1.0f)": lambda x, a: x * x + 1,
    "fmaxf(x, 0.5f)": lambda x, a: np.maximum(x, 0.5), "fminf(x, NAN32)": lambda x, a: x,
    "max(NAN32, x)": lambda x, a: x, "floorf(x)": lambda x, a: np.floor(x), "rintf(x)": lambda x, a: np.rint(x),
    "truncf(x)": lambda x, a: np.trunc(x), "__fdividef(1.0f, a)": lambda x, a: 1 / a,
    "__frcp_rn(a)": lambda x, a: 1 / a, "__saturatef(x)": lambda x, a: np.clip(x, 0, 1),
    "float(__float2int_rn(x))": lambda x, a: np.rint(x), "copysignf(a, x)": lambda x, a: x,
    "max(x, 1.0f) - min(x, 1.0f)": lambda x, a: np.abs(x - 1),
    "float(min(threadIdx.x + 3, n - 9))": lambda x, a: np.minimum(np.arange(256) + 3.0, 247),
    "exp(x)": lambda x, a: np.exp(x), "float(exp(double(x)))": lambda x, a: np.exp(x), "abs(x)": lambda x, a: a,
    "pow(a, 2)": lambda x, a: a**2, "fmax(x, 0.5f)": lambda x, a: np.maximum(x, 0.5),
    "fma(x, a, x)": lambda x, a: x * a + x,
    "float(abs(t - 99))": lambda x, a: abs(np.arange(256.0) - 99),
    "float(sizeof(exp(x)) + sizeof(abs(x)) + sizeof(exp(1.0)))": lambda x, a: np.full(256, 16.0),
    "float(isnan(x + NAN32) + 2 * isnan(x) + 4 * isinf(a * INF32) + 8 * isfinite(x))": lambda x, a: np.full(256, 13.0),
    "float(signbit(x))": lambda x, a: x < 0,
}  # fmt: skip


def test_mathematics(run_cuda: Run) -> None:
    """Against float64; the error of a GPU's fast intrinsics is about 2e-6 here."""
    body = "\n".join(f"out[{i} * n + t] = {name};" for i, name in enumerate(FUNCTIONS))
    text = f"""
    #define NAN32 __int_as_float(0x7fffffff)
    #define INF32 __int_as_float(0x7f800000)
    extern "C" __global__ void maths(const float* in, float* out, int n) {{
        const int t = threadIdx.x;
        const float x = in[t], a = fabsf(x);
        {body}
    }}"""
    x = (np.random.default_rng(1).uniform(0.05, 3, 256) * np.where(np.arange(256) % 2, 1, -1)).astype(np.float32)
    out = np.full((len(FUNCTIONS), 256), np.nan, np.float32)
    run_cuda(text, "maths", x, out, ctypes.c_int(256), block=256)
    wide = x.astype(np.float64)
    for row, (name, function) in zip(out, FUNCTIONS.items(), strict=True):
        assert np.allclose(row, function(wide, np.abs(wide)), rtol=4e-6, atol=4e-6), name


def test_rounded_arithmetic_is_not_fused(run_cuda: Run) -> None:
    """__fmul_rn and similar functions round each operation; a plain a * b + c may become one fma."""
    text = """
    extern "C" __global__ void rounded(const float* in, float* out) {
        const float a = in[threadIdx.x], b = in[256 + threadIdx.x];
        out[threadIdx.x] = __fadd_rn(__fmul_rn(a, b), -__fmul_rn(b, a));
        out[256 + threadIdx.x] = __fmul_rn(a, b) + a;
        out[512 + threadIdx.x] = __fsub_rn(__fadd_rn(a, b), b);
    }"""
    a, b = values = np.random.default_rng(2).standard_normal((2, 256)).astype(np.float32)
    out = np.full((3, 256), np.nan, np.float32)
    run_cuda(text, "rounded", values, out, block=256)
    assert np.array_equal(out, [np.zeros(256), a * b + a, (a + b) - b])


def test_bits(run_cuda: Run) -> None:
    text = """
    extern "C" __global__ void bits(const unsigned* in, unsigned* out, int n) {
        const int t = threadIdx.x;
        const unsigned x = in[t];
        out[t] = __popc(x);
        out[n + t] = __clz(int(x));
        out[2 * n + t] = __ffs(int(x));
        out[3 * n + t] = __brev(x);
        out[4 * n + t] = __popcll((unsigned long long)x << 32 | 1);
        out[5 * n + t] = __float_as_uint(__uint_as_float(x));
    }"""
    random = np.random.default_rng(3).integers(0, 2**32, 58, dtype=np.uint32)
    x = np.concatenate([np.array([0, 1, 2, 2**31, 2**32 - 1, 0x10000], np.uint32), random])
    out = np.zeros((6, 64), np.uint32)
    run_cuda(text, "bits", x, out, ctypes.c_int(64), block=64)
    binary = [f"{v:032b}" for v in x]
    assert out[0].tolist() == [b.count("1") for b in binary]
    assert out[1].tolist() == [(b + "1").index("1") for b in binary]
    assert out[2].tolist() == [len(b) - b.rindex("1") if "1" in b else 0 for b in binary]
    assert out[3].tolist() == [int(b[::-1], 2) for b in binary]
    assert out[4].tolist() == [b.count("1") + 1 for b in binary]
    assert np.array_equal(out[5], x)


# ---- __half and __nv_bfloat16

HALF = {"header": "cuda_fp16.h", "T": "__half", "T2": "__half2", "load": "__ushort_as_half",
        "store": "__half_as_ushort", "widen": "__half2float", "narrow": "__float2half"}  # fmt: skip
BFLOAT16 = {"header": "cuda_bf16.h", "T": "__nv_bfloat16", "T2": "__nv_bfloat162", "load": "__ushort_as_bfloat16",
            "store": "__bfloat16_as_ushort", "widen": "__bfloat162float", "narrow": "__float2bfloat16"}  # fmt: skip
halves = pytest.mark.parametrize(
    ("names", "dtype"), [(HALF, np.float16), (BFLOAT16, ml_dtypes.bfloat16)], ids=["half", "bfloat16"]
)
EVERY = np.arange(65536, dtype=np.uint16)


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Bit-equal; all NaNs are equal."""
    got, expected = got.astype(np.float32), expected.astype(np.float32)
    equal = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    return bool(equal.all())


@halves
def test_every_half_to_float(run_cuda: Run, names: dict, dtype: type) -> None:
    text = """
    #include <{header}>
    extern "C" __global__ void widen(const unsigned short* in, float* out) {{
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        out[i] = {widen}({load}(in[i]));
    }}""".format(**names)
    out = np.zeros(65536, np.float32)
    run_cuda(text, "widen", EVERY, out, grid=256, block=256)
    assert same(out, EVERY.view(dtype))


@halves
def test_every_rounding_to_half(run_cuda: Run, names: dict, dtype: type) -> None:
    """Every representable value, every tie between two, their neighbours in fp32, and random patterns."""
    text = """
    #include <{header}>
    extern "C" __global__ void narrow(const float* in, unsigned short* out, unsigned short* constructed) {{
        const long long i = blockIdx.x * 256ll + threadIdx.x;
        out[i] = {store}({narrow}(in[i]));
        constructed[i] = {store}({T}(in[i]));
    }}""".format(**names)
    exact = EVERY.view(dtype).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    overflow = (2.0 * finite[-1].astype(np.float64) - finite[-2]).astype(np.float64)  # the value after the largest
    edges = np.array([(finite[-1] + overflow) / 2, 3.4e38, np.inf, 1e-45, 0.0], np.float32)
    middle = np.concatenate([exact, ties, edges, -edges])
    bits = middle.view(np.uint32)
    neighbours = np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(np.float32)
    random = np.random.default_rng(4).integers(0, 2**32, 70000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([neighbours, random])
    values = np.resize(values, -(-len(values) // 256) * 256)
    out, constructed = np.zeros((2, len(values)), np.uint16)
    run_cuda(text, "narrow", values, out, constructed, grid=len(values) // 256, block=256)
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
    assert same(out.view(dtype), expected)
    assert np.array_equal(out, constructed)
    assert (out[np.isnan(values)] == 0x7FFF).all()  # the canonical NaN of GPUs


@halves
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # ml_dtypes: NaN in a cast
def test_half_arithmetic_is_exact(run_cuda: Run, names: dict, dtype: type) -> None:
    """Each operation rounds the exact result once. Products below fp32's range are excluded."""
    text = """
    #include <{header}>
    extern "C" __global__ void arithmetic(const unsigned short* in, unsigned short* out, int* less, int n) {{
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        const {T} a = {load}(in[i]), b = {load}(in[n + i]);
        out[i] = {store}(a + b);
        out[n + i] = {store}(a - b);
        out[2 * n + i] = {store}(a * b);
        out[3 * n + i] = {store}(a / b);
        out[4 * n + i] = {store}(__hfma(a, b, {T}(0.0f)));
        {T} sum = a;
        sum += b;
        out[5 * n + i] = {store}(sum);
        const {T2} pair = __hadd2({T2}{{a, b}}, {T2}{{b, b}});
        out[6 * n + i] = {store}(pair.x);
        out[7 * n + i] = {store}(pair.y);
        less[i] = (a < b) | (a <= b) << 1 | (a == b) << 2 | (a != b) << 3 | __hisnan(a) << 4;
    }}""".format(**names)
    rng = np.random.default_rng(5)
    patterns = rng.integers(0, 65536, (2, 65536), dtype=np.uint16)
    close = rng.standard_normal((2, 65536)).astype(dtype).view(np.uint16)
    a, b = inputs = np.ascontiguousarray(np.concatenate([patterns, close], 1).view(dtype))
    n = a.size
    out, less = np.zeros((8, n), np.uint16), np.zeros(n, np.int32)
    run_cuda(text, "arithmetic", inputs, out, less, ctypes.c_int(n), grid=n // 256, block=256)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        small = np.abs(x * y) < 2.0**-126
        rows = [x + y, x - y, x * y, x / y, x * y + 0, x + y, x + y, y + y]
        for i, (row, exact) in enumerate(zip(out, rows, strict=True)):
            counts = ~small if i in (2, 4) else slice(None)
            # float64 to bfloat16 rounds twice, via float; the result is the same because 24 digits >= 2 * 8 + 2
            assert same(row.view(dtype)[counts], exact.astype(dtype)[counts]), i
        order = (x < y) | (x <= y) * 2 | (x == y) * 4 | (x != y) * 8 | np.isnan(x) * 16
    assert np.array_equal(less, order)


# ---- errors and their messages


def failing(run_cuda: Run, body: str, *, block: int = 32, smem: int = 0) -> str:
    """The message of the LaunchError that a kernel with this body raises. Checks that the next launch succeeds.

    Line 1 of body is line 2 of broken.cu.
    """
    text = f'extern "C" __global__ void broken(int* out) {{ const int t = threadIdx.x;\n{body}\n}}'
    out = np.zeros(1024, np.int32)
    with pytest.raises(LaunchError) as caught:
        run_cuda(text, "broken", out, grid=5, block=block, smem=smem)
    run_cuda(
        'extern "C" __global__ void fine(int* out) { __syncthreads(); out[threadIdx.x] = 1; }', "fine", out, block=64
    )
    assert out[:64].all()
    assert "broken" in str(caught.value)
    return str(caught.value)


@on_cpu
@pytest.mark.timeout(60)
class TestErrors:
    def test_returned_above_a_barrier(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t >= 40) return;\n__syncthreads();", block=64)
        assert "barrier not reached by every thread" in message
        assert "threads 0..39 wait at __syncthreads()" in message
        assert "broken.cu:3" in message
        assert "threads 40..63 returned" in message

    def test_two_barriers(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t == 7)\n__syncthreads();\nelse\n__syncthreads();")
        assert "thread 7 waits at __syncthreads()" in message
        assert "broken.cu:3" in message
        assert "threads 8..31" in message
        assert "broken.cu:5" in message

    def test_a_barrier_against_a_collective(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t < 16)\n__syncwarp();\nelse\n__syncthreads();")
        assert "warp collective not reached by every lane of its mask" in message
        assert "threads 0..15 wait in __syncwarp(mask 0xffffffff)" in message
        assert "broken.cu:3" in message
        assert "threads 16..31 wait at __syncthreads()" in message

    def test_mismatched_collectives(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t % 2)\nout[t] = __shfl_sync(~0u, t, 0);\nelse\nout[t] = __any_sync(~0u, t);")
        assert "thread 0 waits in __any_sync(mask 0xffffffff)" in message
        assert "broken.cu:5" in message
        assert "thread 1 waits in __shfl_sync" in message
        assert "broken.cu:3" in message

    def test_mismatched_masks(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "__syncwarp(t < 16 ? 0xffffffffu : 0xffff0000u);\nif (t < 16) __syncwarp();")
        assert "threads 0..15 wait in __syncwarp(mask 0xffffffff)" in message
        assert "broken.cu:2" in message

    def test_lanes_that_returned(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t < 3) return;\nout[t] = __reduce_add_sync(~0u, t);")
        assert "threads 0..2 returned" in message
        assert "threads 3..31 wait in __reduce_sync(mask 0xffffffff)" in message
        assert "broken.cu:3" in message

    def test_lane_not_in_its_mask(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "\nout[t] = __shfl_xor_sync(0xffff, t, 1);", block=64)
        assert "lane 16 (thread 16)" in message
        assert "not in its mask" in message
        assert "broken.cu:3" in message

    def test_shuffle_from_outside_the_mask(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t < 16)\nout[t] = __shfl_sync(0xffff, t, 20);")
        assert "lane 0 shuffles from lane 20" in message
        assert "broken.cu:3" in message

    def test_shuffle_from_a_lane_that_is_not_there(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "out[t] = __shfl_sync(~0u, t, 20);", block=48)
        assert "lane 0 shuffles from lane 20" in message
        assert "thread (32,0,0)" in message

    def test_trap_and_assert(self, run_cuda: Run) -> None:
        message = failing(run_cuda, "if (t == 9)\n__trap();")
        assert "__trap()" in message
        assert "broken.cu:3" in message
        assert "thread (9,0,0)" in message
        message = failing(run_cuda, "\n\nassert(t != 9);")
        assert "assert(t != 9)" in message
        assert "broken.cu:4" in message
        assert "thread (9,0,0)" in message

    def test_impossible_launches(self, run_cuda: Run) -> None:
        text = 'extern "C" __global__ void any(int* out) { out[0] = 1; }'  # calls no function of the runtime
        out = np.zeros(2, np.int32)
        run_cuda(text, "any", out)
        assert out[0] == 1
        for wrong in ({"block": 1025}, {"block": (32, 33, 1)}, {"block": 0}, {"grid": 0}, {"smem": 300000}):
            with pytest.raises(ValueError, match="any"):
                run_cuda(text, "any", np.zeros(2, np.int32), **wrong)


@on_cpu
def test_compile_error(run_cuda: Run) -> None:
    text = 'extern "C" __global__ void wrong(int* out) {\n    int x = 1;\n    out[0] = x + undefined_name;\n}\n'
    with pytest.raises(CompileError) as caught:
        run_cuda(text, "wrong", np.zeros(2, np.int32))
    message = str(caught.value)
    assert "wrong.cu:3" in message
    assert "out[0] = x + undefined_name;" in message
    assert "^" in message
    assert caught.value.source.endswith("wrong.cu")
    assert "undefined_name" in caught.value.log


@on_cpu
def test_an_entry_point_that_the_source_lacks(run_cuda: Run) -> None:
    """The compiler's message names only the macros of this backend. Another error comes first."""
    text = 'extern "C" __global__ void other(int* out) { out[0] = 1; }'
    with pytest.raises(CompileError, match=r"k\.cu has no entry point k; its entry points are: other \(is it extern"):
        run_cuda(text, "k", np.zeros(2, np.int32))
    with pytest.raises(CompileError, match="undefined_name"):
        run_cuda(text.replace("1", "undefined_name"), "k", np.zeros(2, np.int32))


@on_cpu
def test_an_undefined_function(run_cuda: Run) -> None:
    text = '__device__ int absent(int);\nextern "C" __global__ void k(int* out) { out[0] = absent(1); }'
    with pytest.raises(CompileError, match="absent"):
        run_cuda(text, "k", np.zeros(2, np.int32))


class TestCompilers:
    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ToolchainMissing, match=r"apt-get install g\+\+"):
            compiler.find()

    def test_the_wheel_comes_last(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing here"))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(compiler, "_identity", lambda command: "zig")
        assert compiler.find().command == (sys.executable, "-m", "ziglang", "c++")

    def test_not_a_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler -O3")
        with pytest.raises(ToolchainMissing, match="CXX=no-such-compiler"):
            compiler.find()

    def test_a_program_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(ToolchainMissing, match="false --version fails"):
            compiler.find()

    def test_options_in_cxx_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        name = compiler.find().command
        monkeypatch.setenv("CXX", " ".join([*name, "-DEXTRA"]))
        assert compiler.find().command == (*name, "-DEXTRA")
        other = compiler.find().identity
        monkeypatch.setenv("CXX", " ")  # same as unset
        assert compiler.find().identity != other


# ---- other compilers, switches and threads

# A kernel that uses most features, for other compilers and other implementations of fibers.
CORE = """
#include <cuda_fp16.h>
extern "C" __global__ void core(const __half* in, float* out, int rounds) {
    extern __shared__ __align__(1024) float pool[];
    __shared__ float tile[96];
    const int t = threadIdx.x;
    float v = __half2float(in[t]);
    for (int i = 0; i < rounds; ++i) {
        tile[t] = v + pool[0] * 0.0f;
        __syncthreads();
        v = 0.5f * (tile[95 - t] + __shfl_xor_sync(~0u, v, 1));
        __syncthreads();
    }
    if (t == 5) __syncwarp(1u << 5);
    atomicAdd(&out[96], 1.0f);
    out[t] = v;
}""".replace("    float v", "    pool[t] = 1.0f;\n    __syncthreads();\n    float v")


def core_passes(run_cuda: Run) -> None:
    values = np.random.default_rng(6).standard_normal(96).astype(np.float16)
    out = np.zeros(97, np.float32)
    run_cuda(CORE, "core", values, out, ctypes.c_int(7), grid=20, block=96, smem=1024)
    v = values.astype(np.float32)
    for _ in range(7):
        v = np.float32(0.5) * (v[::-1] + v[np.arange(96) ^ 1])
    assert np.array_equal(out[:96], v)
    assert out[96] == 96 * 20


def test_core(run_cuda: Run) -> None:
    core_passes(run_cuda)


@on_cpu
def test_portable_fibers(run_cuda: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """$SANDBOX_PORTABLE_FIBERS=1 switches with ucontext, as on processors for which fiber.h has no assembly."""
    usual = build._runtime_text()
    monkeypatch.setenv("SANDBOX_PORTABLE_FIBERS", "1")
    assert build._runtime_text() != usual  # part of the cache key
    core_passes(run_cuda)
    assert "returned" in failing(run_cuda, "if (t) return;\n__syncthreads();")


def test_copies_of_the_project_share_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k() {}')
    build.library(source, ["k"], {})
    copy = shutil.copytree(build.HERE, tmp_path / "cpu")
    monkeypatch.setattr(build, "HERE", copy)
    monkeypatch.setattr(build, "CPU_HEADERS", copy / "include")
    run, compiled = compiler.run, []
    monkeypatch.setattr(compiler, "run", lambda *args: (compiled.append(args[3].name), run(*args)))
    build.library(source, ["k"], {})
    assert compiled == ["k.cu"]
    (copy / "launch.h").write_text((copy / "launch.h").read_text() + f"namespace {{ int more{time.time_ns()}; }}\n")
    build.library(source, ["k"], {})
    assert compiled == ["k.cu", "runtime.cpp", "k.cu"]


@on_cpu
@pytest.mark.parametrize("cxx", ["clang++", f"{sys.executable} -m ziglang c++"], ids=["clang", "zig"])
def test_other_compilers(run_cuda: Run, cxx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which("clang++") if cxx == "clang++" else importlib.util.find_spec("ziglang")
    if not found:
        pytest.skip(f"{cxx} is not installed")
    monkeypatch.setenv("CXX", cxx)
    core_passes(run_cuda)
    assert "returned" in failing(run_cuda, "if (t) return;\n__syncthreads();")


def test_sanitizers_need_a_compiler_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zig = compiler.HostCompiler((sys.executable, "-m", "ziglang", "c++"), "zig")
    monkeypatch.setattr(compiler, "find", lambda: zig)
    with pytest.raises(ToolchainMissing, match=r"apt-get install g\+\+"):
        build.program(tmp_path / "k.cu", "k", {}, "thread")


@pytest.mark.parametrize("options", [[], ["-DSANDBOX_PORTABLE_FIBERS"]], ids=["assembler", "ucontext"])
def test_switching_on_aarch64(tmp_path: Path, options: list[str]) -> None:
    """Registers, including a floating-point register, keep their values over 1000 switches; emulated."""
    cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if not (cross and emulator):
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
    text = f"""
    #include "{build.HERE / "fiber.h"}"
    #include <stdlib.h>
    cpu::Context here, there;
    volatile double step = 0.5;
    double total;
    void other() {{
        alignas(16) volatile char local[16];
        if (reinterpret_cast<uintptr_t>(local) % 16) exit(1);
        for (double kept = 0;; kept += step) {{ total = kept; cpu::switch_context(&there, &here); }}
    }}
    int main() {{
        double kept = 0;
        cpu::prepare(&there, static_cast<char*>(aligned_alloc(4096, 65536)), 65536, other);
        for (int i = 0; i < 1000; ++i, kept += step) cpu::switch_context(&here, &there);
        return kept == 500 && total == 499.5 ? 0 : 2;
    }}"""
    program = tmp_path / "switch"
    subprocess.run(
        [cross, "-O2", "-static", *options, "-x", "c++", "-", "-o", program], input=text, text=True, check=True
    )
    subprocess.run([emulator, program], check=True, timeout=60)


COUNT = """
extern "C" __global__ void count(unsigned* out, int rounds) {
    __shared__ unsigned a[64];
    unsigned v = threadIdx.x + blockIdx.x;
    for (int i = 0; i < rounds; ++i) {
        a[threadIdx.x] = v;
        __syncthreads();
        v = a[63 - threadIdx.x] * 3 + 1;
        __syncthreads();
    }
    out[blockIdx.x * 64 + threadIdx.x] = v;
}"""


def counted(blocks: int, rounds: int) -> np.ndarray:
    v = (np.arange(64) + np.arange(blocks)[:, None]).astype(np.uint32)
    for _ in range(rounds):
        v = v[:, ::-1] * np.uint32(3) + np.uint32(1)
    return v


@on_cpu
def test_other_python_threads_run_during_a_launch(run_cuda: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "1")
    out, ticks, done = np.zeros((1, 64), np.uint32), [], threading.Event()
    run_cuda(COUNT, "count", out, ctypes.c_int(1), block=64)  # compiled

    def tick() -> None:
        while not done.wait(0.002):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    run_cuda(COUNT, "count", out, ctypes.c_int(200_000), block=64)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert end - start > 0.05
    assert sum(start < at < end for at in ticks) > 5


def test_the_entries_of_a_source_are_built_once(tmp_path: Path) -> None:
    """One library for all entries."""
    from sandbox.launch.arguments import PackedArguments

    source, out = tmp_path / "k.cu", np.zeros(1, np.float32)
    text = 'extern "C" __global__ void {0}(float* out) {{ extern __shared__ float {0}_smem[]; *out += {1}; }}\n'
    source.write_text(text.format("first", 1) + text.format("second", 10))
    built = build.library(source, ["first", "second"], {})
    arguments = PackedArguments([ctypes.c_void_p(out.ctypes.data)])
    for entry in ("first", "second", "second"):
        CpuFunction(built.path, entry).launcher((1, 1, 1), (1, 1, 1), 0, arguments)(())
    assert out == 21


@pytest.mark.parametrize("edited", ["include/cuda_cpu.h", "include/ptx.cuh", "runtime.h", "k.cu", "include/own.cuh"])
def test_an_edit_of_an_input_of_a_library_is_built(
    edited: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel, its headers, and cuda_cpu.h, which the translation unit includes."""
    here, source = tmp_path / "cpu", tmp_path / "cpu" / "k.cu"
    shutil.copytree(build.HERE, here, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    monkeypatch.setattr(build, "HERE", here)
    monkeypatch.setattr(build, "CPU_HEADERS", here / "include")
    (here / "include" / "own.cuh").write_text("#include <ptx.cuh>\n")
    source.write_text('#define DTYPE_float16 1\n#define HEAD_DIM 8\n#define CAUSAL 0\n#include "own.cuh"\n'
                      'extern "C" __global__ void k(int* out) { *out = 1; }\n')  # fmt: skip
    found = compiler.find()

    def made() -> build.Built:
        return build._kernel(found, source, ("k",), build._kernel_options(found, source, {}))

    assert not made().cached
    assert made().cached
    with (here / edited).open("a") as file:
        file.write("// edited\n")
    assert not made().cached
    assert made().cached


@pytest.mark.parametrize("by", ["CPATH", "CPLUS_INCLUDE_PATH", "CXX", "folders"])
def test_an_edit_of_a_header_in_a_folder_that_the_environment_names_is_built(
    by: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each way to add a folder to the include path of the host compiler."""
    folder, source = tmp_path / "headers", tmp_path / "k.cu"
    folder.mkdir()
    source.write_text('#include <elsewhere.h>\nextern "C" __global__ void k(int* out) { *out = VALUE; }\n')
    if by == "CXX":
        monkeypatch.setenv("CXX", f"g++ -isystem {folder}")
    elif by != "folders":
        monkeypatch.setenv(by, f"{tmp_path / 'none'}:{folder}")
    folders = [folder] if by == "folders" else []
    found = compiler.find()
    options = build._kernel_options(found, source, {}, folders)

    def cached(value: int) -> bool:
        (folder / "elsewhere.h").write_text(f"#define VALUE {value}\n")
        return build._kernel(found, source, ("k",), options, folders=folders).cached

    assert [cached(value) for value in (1, 1, 2, 1)] == [False, True, False, True]


def test_folders_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -Ia -I b -isystem c -O2 -iquoted -idirafter e")
    monkeypatch.setenv("CPATH", ":f")
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", "g:a")
    assert compiler.extra_folders() == tuple(map(Path, ("a", "b", "c", "d", "e", ".", "f", "g")))


def program(folder: Path, name: str, text: str) -> Path:
    """A shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_which_compiler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CXX with its options, else g++, else clang++, else the ziglang package."""
    for name, version in (("other", "other 1.2"), ("clang++", "clang 3"), ("g++", "Free Software Foundation")):
        program(tmp_path, name, f"echo '{version}'")
    monkeypatch.setattr(compiler, "_processor", lambda: "a processor")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "other -O3 ")
    assert compiler.find() == compiler.HostCompiler(("other", "-O3"), "other -O3: other 1.2 on a processor")
    assert not compiler.find().is_gcc
    monkeypatch.delenv("CXX")
    assert compiler.find().command == ("g++",)
    assert compiler.find().is_gcc
    compiler._find.cache_clear()
    (tmp_path / "g++").unlink()
    assert compiler.find().identity == "clang++: clang 3 on a processor"
    compiler._find.cache_clear()
    (tmp_path / "clang++").unlink()
    with pytest.raises(ToolchainMissing, match=r"^no host C\+\+ compiler found.*: apt-get install g\+\+, or pip"):
        compiler.find()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "ziglang" or None)
    monkeypatch.setattr(sys, "executable", str(program(tmp_path, "python", 'echo "$@"')))
    assert compiler.find().identity.endswith("ziglang c++: -m ziglang c++ --version on a processor")
    monkeypatch.setenv("CXX", "none")
    with pytest.raises(ToolchainMissing, match=r"^CXX=none is not a program on the PATH"):
        compiler.find()


def test_a_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 500 characters of its message."""
    broken = program(tmp_path, "broken", f"echo ' {'x' * 600}' >&2; exit 3")
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(ToolchainMissing) as caught:
        compiler.find()
    assert str(caught.value) == f"{broken} --version fails: {'x' * 500}"


def test_compilers_of_processors_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached library may use instructions that another processor lacks: -march=native."""
    lines = "processor : 0\nmodel name : a\nflags : fpu avx\ncache size : 1\nmodel name : a\nflags : fpu avx\n"
    monkeypatch.setattr(Path, "read_text", lambda path: lines)
    assert compiler._processor.__wrapped__() == "model name : a flags : fpu avx"

    def unreadable(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert compiler._processor.__wrapped__() == f"{platform.machine()} {platform.processor()}"


def test_options_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """$SANDBOX_CPU_FLAGS comes after the own options, which it overrides, and before those of a sanitizer."""
    monkeypatch.setenv("SANDBOX_CPU_FLAGS", "-O0 '-DTEXT=a b'")
    options = build._kernel_options(compiler.find(), Path("k.cu"), {"N": 3})
    assert options.index("-Og") < options.index("-O0") < options.index("-DTEXT=a b") < options.index("-DN=3")


def test_a_library_is_linked_with_the_current_runtime(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link step names the file of the runtime: another runtime gives another library."""
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(int* out) { __syncthreads(); *out = 1; }\n')
    runtimes = []
    for portable in ("0", "1"):
        monkeypatch.setenv("SANDBOX_PORTABLE_FIBERS", portable)
        built = build.library(source, ["k"], {})
        assert not built.cached
        (runtime,) = set(re.findall(rb"[^\0]*/runtime\.so", built.path.read_bytes()))
        runtimes.append(runtime)
    assert len(set(runtimes)) == 2


@pytest.mark.parametrize("damaged", ["k.so", "runtime.so"])
def test_a_library_whose_record_lacks_its_seconds_is_rebuilt(damaged: str, tmp_path: Path, own_cache: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(int* out) { *out = 1; }\n')
    build.library(source, ["k"], {})
    for entry in cache.entries():
        file = own_cache / entry.key / "entry.json"
        recorded = json.loads(file.read_text())
        if recorded["meta"]["name"] == f"{damaged} cpu":
            del recorded["meta"]["seconds"]
            file.write_text(json.dumps(recorded))
    assert build.library(source, ["k"], {}).cached == (damaged != "k.so")
    assert build.library(source, ["k"], {}).cached


@pytest.mark.parametrize("name", ['a"b', "a\\b"])
def test_a_source_whose_path_cannot_be_quoted(name: str, tmp_path: Path) -> None:
    source = tmp_path / name / "k.cu"
    source.parent.mkdir()
    source.write_text('extern "C" __global__ void k(int* out) { *out = 1; }\n')
    with pytest.raises(CompileError, match=r"the host compiler cannot include .*, which PTX cannot quote; move it to"):
        build.library(source, ["k"], {})


def test_launches_from_several_threads(tmp_path: Path) -> None:
    """Two libraries, each launched concurrently by three threads; some launches fail."""
    libraries = []
    for name, text in (
        ("count", COUNT),
        ("stuck", 'extern "C" __global__ void stuck() { if (threadIdx.x) __syncthreads(); }'),
    ):
        (tmp_path / f"{name}.cu").write_text(text)
        libraries.append(CpuFunction(build.library(tmp_path / f"{name}.cu", [name], {}).path, name))
    from sandbox.launch.arguments import PackedArguments

    wrong: list[object] = []

    def count(rounds: int) -> None:
        out = np.zeros((13, 64), np.uint32)
        arguments = PackedArguments([ctypes.c_void_p(out.ctypes.data), ctypes.c_int(rounds)])
        launch = libraries[0].launcher((13, 1, 1), (64, 1, 1), 0, arguments)
        for _ in range(5):
            out[...] = 0
            launch(())
            if not np.array_equal(out, counted(13, rounds)):
                wrong.append(rounds)

    def stuck(_: int) -> None:
        launch = libraries[1].launcher((3, 1, 1), (33, 1, 1), 0, PackedArguments([]))
        for _ in range(20):
            try:
                launch(())
                wrong.append("no error")
            except LaunchError as error:
                if "thread 0 returned" not in str(error):
                    wrong.append(error)

    threads = [threading.Thread(target=f, args=(n,)) for n in (10, 20, 30) for f in (count, stuck)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_cpu
def test_more_workers_than_stacks_fit(run_cuda: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of mappings per process limits the stacks: fewer than 200 workers run."""
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "200")
    out = np.zeros((200, 1024), np.int32)
    text = 'extern "C" __global__ void wide(int* out) { __syncthreads(); out[blockIdx.x * 1024 + threadIdx.x] = 1; }'
    run_cuda(text, "wide", out, grid=200, block=1024)
    assert out.all()


def test_a_computed_include_is_never_stale(run_cuda, tmp_path: Path) -> None:
    """An include whose name is a macro needs a preprocessor to resolve: the cache is not used."""
    text = '#define H "value.h"\n#include H\nextern "C" __global__ void put(int* x) { *x = VALUE; }'
    for value in (1, 2):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        x = np.zeros(1, np.int32)
        run_cuda(text, "put", x, block=1)
        assert x[0] == value
