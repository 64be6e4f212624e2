"""Unit tests of Hopper's instructions: TMA boxes, swizzle, descriptors, wgmma, mbarriers. Results are tested on both
backends, error reports on the CPU backend only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sandbox import DriverError, LaunchError, UnsupportedProblem
from sandbox.core.registry import get
from sandbox.launch import driver
from sandbox.launch.arguments import ArgumentBlock
from sandbox.launch.dlpack import HOST, Device, view
from sandbox.launch.tensor_maps import Box, TensorMap, box_of, encode_for_host, new_map
from sandbox.spec import Problem

Run = Callable[..., None]
on_cpu = pytest.mark.parametrize("device", [HOST], ids=["cpu"])
TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
HEADER = """
#define HEAD_DIM 64
#include "swizzle.cuh"
"""


@pytest.fixture(autouse=True)
def hopper_only(device: Device) -> None:
    if device != HOST and driver.device(device[1]).arch != (9, 0):
        pytest.skip("these instructions require compute capability 9.0")


@pytest.fixture
def run_hopper(run_cuda: Run) -> Run:
    """`run_cuda` of a text that may use hopper.cuh."""

    def run(
        text: str, entry: str, *args: object, dtype: str = "float16", left: int = 24, ragged: int = 0, **geometry: Any
    ) -> None:
        defines = {f"DTYPE_{dtype}": 1, "LEFT": left, "RAGGED": ragged}
        run_cuda(HEADER + text, entry, *args, defines=defines, **geometry)

    return run


def boxes_of(
    position: int, array: np.ndarray, rows: int, ragged: Problem | None = None
) -> Callable[[dict[int, int], Device], TensorMap]:
    """A tensor map over the (B, H, S, D) array that is the kernel argument `position`, or over a ragged Q."""

    def encoded(addresses: dict[int, int], device: Device) -> TensorMap:
        made = new_map()
        strides = [*reversed(array.strides[:3])]
        box = Box.of(addresses[position], [*reversed(array.shape)], strides, rows, array.itemsize)
        if ragged:
            box = box_of("Q", ragged, view(array), rows)
            box.data = addresses[position]
        encode = encode_for_host if device == HOST else driver.encode_tensor_map
        encode(ctypes.addressof(made), box, array.dtype.name)
        return made

    return encoded


def swizzled(rows: np.ndarray) -> np.ndarray:
    """(n, 64) 16-bit elements in the layout of shared memory."""
    chunks = rows.reshape(len(rows), 8, 8)
    place = np.arange(8)[None] ^ (np.arange(len(rows)) % 8)[:, None]
    return np.take_along_axis(chunks, place[:, :, None], axis=1).reshape(rows.shape)


# ---- boxes


FETCH = """
    extern "C" __global__ void fetch(const unsigned short* unused, unsigned* out, const __grid_constant__ TensorMap map,
                                     int d, int s, int h, int b) {
        extern __shared__ __align__(1024) char smem[];
        const SmemAddr barrier = smem_address(smem + 2048);
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_proxy_async();
            mbarrier_arrive_expect_tx(barrier, 2048);
            tma_load(smem_address(smem), map, d, s, h, b, barrier);
        }
        __syncthreads();  // the mbarrier is initialised
        mbarrier_wait(barrier, 0);
        for (int i = threadIdx.x; i < 512; i += blockDim.x) out[i] = reinterpret_cast<unsigned*>(smem)[i];
    }"""


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (64, 8, 1, 1), (0, 5, 2, 1), (64, 19, 0, 0), (0, 40, 1, 0)])
def test_a_box_is_loaded_swizzled_with_zeros_outside_of_the_tensor(run_hopper: Run, at: tuple[int, ...]) -> None:
    tensor = np.arange(2 * 3 * 20 * 72, dtype=np.uint16).astype(np.float16).reshape(2, 3, 20, 72)
    out = np.full((16, 64), 7, np.float16)
    numbers = map(ctypes.c_int, at)
    run_hopper(FETCH, "fetch", tensor, out, boxes_of(0, tensor, 16), *numbers, smem=4096)
    d, s, h, b = at
    expected = np.zeros((16, 64), np.float16)
    part = tensor[b, h, s : s + 16, d : d + 64]
    expected[: part.shape[0], : part.shape[1]] = part
    assert np.array_equal(out, swizzled(expected))


PUT = """
    extern "C" __global__ void put(unsigned short* unused, const __grid_constant__ TensorMap map, int d, int s, int h,
                                   int b) {
        extern __shared__ __align__(1024) char smem[];
        const unsigned lane = threadIdx.x, g = lane / 4, q = lane % 4;
        for (unsigned j = 0; j < 8; j += 2) {
            unsigned pair[4];
            for (unsigned k = 0; k < 4; ++k) {
                const unsigned row = g + k % 2 * 8, column = (j + k / 2) * 8 + 2 * q;
                pair[k] = pack(row * 64 + column, row * 64 + column + 1);
            }
            const unsigned place = Swizzled<16, 64>::chunk(lane % 16, j + lane / 16);
            stmatrix_x4(smem_address(smem) + place, pair[0], pair[1], pair[2], pair[3]);
        }
        fence_proxy_async();
        __syncwarp();  // all lanes have written before the store
        if (elect()) {
            tma_store(map, d, s, h, b, smem_address(smem));
            tma_store_commit();
            tma_store_wait_read();
        }
    }"""


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (64, 8, 1, 1), (0, 15, 2, 0)])
def test_a_box_is_stored_and_clipped(run_hopper: Run, at: tuple[int, ...]) -> None:
    """The source is written by stmatrix: 16 x 64 elements, numbered."""
    tensor = np.full((2, 3, 20, 72), -1, np.float16)
    numbers = map(ctypes.c_int, at)
    run_hopper(PUT, "put", tensor, boxes_of(0, tensor, 16), *numbers, smem=4096)
    d, s, h, b = at
    expected = np.full_like(tensor, -1)
    part = expected[b, h, s : s + 16, d : d + 64]
    part[:] = np.arange(16 * 64).reshape(16, 64)[: part.shape[0], : part.shape[1]]
    assert np.array_equal(tensor, expected)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    ("first", "n", "i"), [(0, 5, 0), (5, 20, 0), (5, 20, 16), (5, 20, 32), (39, 1, 0), (24, 16, 0)]
)
@pytest.mark.sampled(3)
def test_a_ragged_box_ends_with_its_sequence(run_hopper: Run, first: int, n: int, i: int, heads_first: bool) -> None:
    """Box at row i of a sequence of n rows: loads zeros past its end, and does not store into the next sequence."""
    problem = Problem(2, 3, 20, 20, 72, dtype="float16", ragged=(40, 40))
    shape = (1, 3, 40, 72) if heads_first else (1, 40, 3, 72)
    tensor = np.arange(3 * 40 * 72, dtype=np.uint16).astype(np.float16).reshape(shape)
    seen = tensor if heads_first else tensor.swapaxes(1, 2)
    out = np.full((16, 64), 7, np.float16)
    at = 64, i - n, 1, first + n
    run_hopper(FETCH, "fetch", tensor, out, boxes_of(0, seen, 16, problem), *map(ctypes.c_int, at), smem=4096, ragged=1)
    expected = np.zeros((16, 64), np.float16)
    part = seen[0, 1, first + i : min(first + n, first + i + 16), 64:]
    expected[: len(part), :8] = part
    assert np.array_equal(out, swizzled(expected))

    after = tensor.copy()
    run_hopper(PUT, "put", after, boxes_of(0, seen, 16, problem), *map(ctypes.c_int, at), smem=4096, ragged=1)
    part[:] = np.arange(16 * 64).reshape(16, 64)[: len(part), :8]  # of `tensor`
    assert np.array_equal(after, tensor)


def test_sums_are_added_in_memory(run_hopper: Run) -> None:
    """Four warps add to the same floats, from sources written by store_floats."""
    text = """
    extern "C" __global__ void add(float* sums) {
        extern __shared__ __align__(1024) char smem[];
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const SmemAddr from = smem_address(smem) + warp * 512;
        store_floats(from + lane * 16, 4 * lane, 4 * lane + 1, 4 * lane + 2, 1 << warp);
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (elect()) {
            tma_reduce_add(sums, from, 512);
            tma_store_commit();
            tma_store_wait_read();
        }
    }"""
    sums = np.full((32, 4), 0.5, np.float32)
    run_hopper(text, "add", sums, block=128, smem=2048)
    expected = np.arange(128, dtype=np.float32).reshape(32, 4) * 4
    expected[:, 3] = 15
    assert np.array_equal(sums, expected + 0.5)


ORDERED = """
    extern "C" __global__ void ordered(float* sums, unsigned* counter) {
        extern __shared__ __align__(16) char smem[];
        if (threadIdx.x) return;
        const SmemAddr from = smem_address(smem);
        store_floats(from, 1, 2, 3, 4);
        fence_proxy_async();
        const bool first = counter_fetch_add(counter) == 0;
        if (first) bulk_store(sums, from, 16);
        else {
            counter_wait(counter, 1 << 16);  // the others
            tma_reduce_add(sums, from, 16);
        }
        tma_store_commit();
        tma_store_wait_read();
        if (first) {
            tma_store_wait_complete();  // the first
            counter_arrive(counter, 1 << 16);
        }
    }"""


def ordered_sums(run_hopper: Run, text: str) -> np.ndarray:
    """Three blocks: the first one stores, the others add. The sums are NaN before."""
    sums = np.full(4, np.nan, np.float32)
    run_hopper(text, "ordered", sums, np.zeros(1, np.uint32), grid=3, smem=16)
    return sums


def test_the_first_block_stores_and_others_add(run_hopper: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "3")
    assert np.array_equal(ordered_sums(run_hopper, ORDERED), [3, 6, 9, 12])


@on_cpu
@pytest.mark.parametrize(
    "wait", ["counter_wait(counter, 1 << 16);  // the others", "tma_store_wait_complete();  // the first"]
)
def test_stores_without_a_wait_complete_last(run_hopper: Run, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_CPU_WORKERS", "3")
    assert np.array_equal(ordered_sums(run_hopper, ORDERED.replace(wait, "")), [1, 2, 3, 4])


GROUPS = """
    extern "C" __global__ void groups(float* out) {
        extern __shared__ __align__(16) char smem[];
        if (threadIdx.x) return;
        const SmemAddr from = smem_address(smem);
        for (int i = 0; i < 2; ++i) {
            store_floats(from + 16 * i, i, i, i, i);
            fence_proxy_async();
            bulk_store(out + 4 * i, from + 16 * i, 16);
            tma_store_commit();
        }
        tma_store_wait_read<1>();  // the older group
        store_floats(from, 9, 9, 9, 9);
        tma_store_wait_read();
    }"""


def test_wait_read_completes_older_groups(run_hopper: Run) -> None:
    out = np.full((2, 4), -1, np.float32)
    run_hopper(GROUPS, "groups", out, block=32, smem=32)
    assert np.array_equal(out, [[0] * 4, [1] * 4])


@on_cpu
@pytest.mark.parametrize("pending", [1, 2])
def test_newer_groups_are_read_at_their_wait(run_hopper: Run, pending: int) -> None:
    """The source is overwritten before the wait, so the newest group, or both, store the new values."""
    out = np.full((2, 4), -1, np.float32)
    text = GROUPS.replace("read<1>", f"read<{pending}>").replace("(from, 9", f"(from + {16 * (pending == 1)}, 9")
    run_hopper(text, "groups", out, block=32, smem=32)
    assert np.array_equal(out, [[0] * 4, [9] * 4] if pending == 1 else [[9] * 4, [1] * 4])


def test_matrices_are_stored_transposed(run_hopper: Run) -> None:
    """Each lane provides the elements (g; 2q, 2q+1) of four matrices; rows become columns."""
    text = """
    extern "C" __global__ void transpose(unsigned* out) {
        extern __shared__ __align__(1024) char smem[];
        const unsigned lane = threadIdx.x, g = lane / 4, q = lane % 4;
        unsigned pair[4];
        for (unsigned k = 0; k < 4; ++k) pair[k] = pack(64 * k + 8 * g + 2 * q, 64 * k + 8 * g + 2 * q + 1);
        stmatrix_x4_trans(smem_address(smem) + lane * 16, pair[0], pair[1], pair[2], pair[3]);
        __syncthreads();  // all lanes have written
        for (unsigned i = lane; i < 128; i += 32) out[i] = reinterpret_cast<unsigned*>(smem)[i];
    }"""
    out = np.full((4, 8, 8), -1, np.float16)
    run_hopper(text, "transpose", out, block=32, smem=1024)
    assert np.array_equal(out, np.arange(256).reshape(4, 8, 8).swapaxes(1, 2))


# ---- wgmma

MULTIPLY = """
// A (64 x 64) times B, K-major from (N x 64) or MN-major from (64 x N), A from registers or from shared memory, also as
// A^T (64 x 64), which is stored after A.
template <int N, int VARIANT>
__device__ void multiply(float* out, SmemAddr A_tile, SmemAddr B_tile, const TensorMap& B_map,
                         const TensorMap& Bt_map, SmemAddr barrier, unsigned& phase) {
    using A = Swizzled<64, 64>;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier, VARIANT / 2 % 2 ? (N + 63) / 64 * 8192 : N * 128);
        if (VARIANT / 2 % 2 == 0)  // rows of B^T, 16 a box
            for (int n = 0; n < N; n += 16) tma_load(B_tile + n * 128, Bt_map, 0, n, 0, 0, barrier);
        else
            for (int n = 0; n < N; n += 64) tma_load(B_tile + n / 64 * 8192, B_map, n, 0, 0, 0, barrier);
    }
    mbarrier_wait(barrier, phase++ % 2);
    float d[N / 2] = {};
    unsigned a[4][4];
    for (int step = 0; step < 4; ++step)
        ldmatrix_x4(a[step], A_tile + A::chunk(warp * 16 + lane % 16, 2 * step + lane / 16));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const Descriptor A_desc = A::k_major(A_tile) + A::k_step(step);
        const Descriptor K = Swizzled<N, 64>::k_major(B_tile) + Swizzled<N, 64>::k_step(step);
        const Descriptor MN = Swizzled<64, N>::mn_major(B_tile) + Swizzled<64, N>::mn_step(step);
        if (VARIANT == 0) wgmma<Order::K_MAJOR>(d, A_desc, K, step > 0);
        if (VARIANT == 1) wgmma<Order::K_MAJOR>(d, a[step], K, step > 0);
        if (VARIANT == 2) wgmma<Order::MN_MAJOR>(d, A_desc, MN, step > 0);
        if (VARIANT == 3) wgmma<Order::MN_MAJOR>(d, a[step], MN, step > 0);
        const Descriptor At_desc = A::mn_major(A_tile + 8192) + A::mn_step(step);
        if (VARIANT == 4) wgmma<Order::K_MAJOR, Order::MN_MAJOR>(d, At_desc, K, step > 0);
        if (VARIANT == 6) wgmma<Order::MN_MAJOR, Order::MN_MAJOR>(d, At_desc, MN, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(d);
    for (int i = 0; i < N / 2; ++i)
        out[(warp * 16 + i / 2 % 2 * 8 + g) * N + i / 4 * 8 + 2 * q + i % 2] = d[i];
    __syncthreads();  // all warps have used B before the next load
}
template <int N>
__device__ void multiply_all(float*& out, SmemAddr A_tile, SmemAddr B_tile, const TensorMap& B_map,
                             const TensorMap& Bt_map, SmemAddr barrier, unsigned& phase) {
    multiply<N, 0>(out, A_tile, B_tile, B_map, Bt_map, barrier, phase);
    multiply<N, 1>(out + 64 * N, A_tile, B_tile, B_map, Bt_map, barrier, phase);
    multiply<N, 2>(out + 2 * 64 * N, A_tile, B_tile, B_map, Bt_map, barrier, phase);
    multiply<N, 3>(out + 3 * 64 * N, A_tile, B_tile, B_map, Bt_map, barrier, phase);
    multiply<N, 4>(out + 4 * 64 * N, A_tile, B_tile, B_map, Bt_map, barrier, phase);
    multiply<N, 6>(out + 5 * 64 * N, A_tile, B_tile, B_map, Bt_map, barrier, phase);
    out += 6 * 64 * N;
}
extern "C" __global__ __launch_bounds__(128, 1) void products(
    const unsigned short* A, const unsigned short* At, const unsigned short* B, const unsigned short* Bt, float* out,
    const __grid_constant__ TensorMap A_map, const __grid_constant__ TensorMap At_map,
    const __grid_constant__ TensorMap B_map, const __grid_constant__ TensorMap Bt_map) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr A_tile = smem_address(smem), B_tile = A_tile + 2 * 8192, barrier = B_tile + 4 * 8192;
    unsigned phase = 0;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_proxy_async();
        mbarrier_arrive_expect_tx(barrier, 2 * 8192);
        tma_load(A_tile, A_map, 0, 0, 0, 0, barrier);
        tma_load(A_tile + 8192, At_map, 0, 0, 0, 0, barrier);
    }
    __syncthreads();  // the mbarrier is initialised
    mbarrier_wait(barrier, phase++ % 2);
    WIDTHS
}"""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("widths", [(16, 32, 64, 80, 96), (48, 112, 128, 144), (160, 176, 192), (208, 224), (240, 256)])
@pytest.mark.sampled(3)
def test_products(run_hopper: Run, dtype: str, widths: tuple[int, ...]) -> None:
    """Every width, both major orders of both operands, A also from registers. Small integers, so products are exact."""
    rng = np.random.default_rng(0)
    A = rng.integers(-3, 4, (1, 1, 64, 64)).astype(TYPES[dtype])
    B = rng.integers(-3, 4, (1, 1, 64, 256)).astype(TYPES[dtype])
    At, Bt = (np.ascontiguousarray(x.swapaxes(2, 3)) for x in (A, B))
    out = np.full(6 * 64 * sum(widths), np.nan, np.float32)
    text = MULTIPLY.replace(
        "WIDTHS",
        "\n    ".join(f"multiply_all<{N}>(out, A_tile, B_tile, B_map, Bt_map, barrier, phase);" for N in widths),
    )
    maps = boxes_of(0, A, 64), boxes_of(1, At, 64), boxes_of(2, B, 64), boxes_of(3, Bt, 16)
    run_hopper(text, "products", A, At, B, Bt, out, *maps, block=128, smem=6 * 8192 + 64, dtype=dtype)
    exact, at = A[0, 0].astype(np.float32) @ B[0, 0].astype(np.float32), 0
    for N in widths:
        for variant in ("K SS", "K RS", "MN SS", "MN RS", "K SS, A^T", "MN SS, A^T"):
            got = out[at : at + 64 * N].reshape(64, N)
            at += 64 * N
            assert np.array_equal(got, exact[:, :N]), f"N={N} {variant} {dtype}"


# ---- barriers


def test_a_ring_of_stages(run_hopper: Run) -> None:
    """A producer at most two stages ahead; many phases; named barriers between the consumers."""
    text = """
    extern "C" __global__ void ring(int* out, int rounds) {
        extern __shared__ __align__(1024) char smem[];
        volatile int* slots = reinterpret_cast<int*>(smem);
        const SmemAddr full = smem_address(smem + 64), empty = full + 16;
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < 2; ++stage) {
                mbarrier_init(full + 8 * stage, 1);
                mbarrier_init(empty + 8 * stage, 64);
            }
        }
        __syncthreads();  // the mbarriers are initialised
        if (threadIdx.x < 32) {
            for (int i = 0; i < rounds; ++i) {
                mbarrier_wait(empty + i % 2 * 8, i / 2 % 2 ^ 1);
                if (elect()) {
                    slots[i % 2] = i * i;
                    mbarrier_arrive(full + i % 2 * 8);
                }
                __syncwarp();  // converged
            }
            return;
        }
        int sum = 0;
        for (int i = 0; i < rounds; ++i) {
            mbarrier_wait(full + i % 2 * 8, i / 2 % 2);
            sum += slots[i % 2];
            mbarrier_arrive(empty + i % 2 * 8);
        }
        const bool any = named_barrier_or(3, 64, threadIdx.x == 50);
        const bool none = named_barrier_or(3, 64, false);
        out[threadIdx.x - 32] = any && !none ? sum : -1;
    }"""
    out = np.zeros(64, np.int32)
    run_hopper(text, "ring", out, ctypes.c_int(21), block=96, smem=1024)
    assert (out == sum(i * i for i in range(21))).all()


def test_named_barriers_order_warps(run_hopper: Run) -> None:
    """Ping-pong order: three warps append to a list one after the other, several times."""
    text = """
    extern "C" __global__ void order(int* out, int rounds) {
        const int warp = threadIdx.x / 32;
        if (warp == 2) named_barrier_arrive(4, 64);
        for (int i = 0; i < rounds; ++i) {
            named_barrier_sync(4 + warp, 64);
            if (elect()) {
                out[1 + out[0]] = warp;
                out[0] += 1;
                __threadfence_block();
            }
            __syncwarp();  // written before the next warp continues
            named_barrier_arrive(4 + (warp + 1) % 3, 64);
        }
    }"""
    out = np.zeros(40, np.int32)
    run_hopper(text, "order", out, ctypes.c_int(7), block=96)
    assert out[0] == 21
    assert out[1:22].tolist() == [0, 1, 2] * 7


# ---- errors and their locations

FRAME = """
extern "C" __global__ void wrong(const unsigned short* A, float* out, const __grid_constant__ TensorMap map) {
    extern __shared__ __align__(1024) char smem[];
    using A_tile = Swizzled<64, 64>;
    const SmemAddr tile = smem_address(smem), barrier = tile + 8192;
    float d[32];
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_proxy_async();  // for TMA
    }
    __syncthreads();  // the mbarrier is initialised
    const auto request = [&] { if (threadIdx.x == 0) A_tile::load(tile, map, 0, 0, 0, barrier); };
    const auto multiply = [&] { wgmma<Order::K_MAJOR>(d, A_tile::k_major(tile), A_tile::k_major(tile), false); };
    BODY
}"""
GOOD = (
    "request(); mbarrier_wait(barrier, 0); wgmma_fence(); multiply(); wgmma_commit(); wgmma_wait<0>(); "
    "warpgroup_fence_operand(d);"
)


def run_wrong(run_hopper: Run, body: str, frame: str = FRAME) -> np.ndarray:
    A = np.ones((1, 1, 64, 64), np.float16)
    out = np.zeros(128, np.float32)
    text = frame.replace("BODY", body + " out[threadIdx.x] = d[0];")
    run_hopper(text, "wrong", A, out, boxes_of(0, A, 64), block=128, smem=8192 + 64)
    return out


@on_cpu
def test_nothing_wrong(run_hopper: Run) -> None:
    assert (run_wrong(run_hopper, GOOD) == 16).all()


def without(what: str, instead: str = "") -> str:
    assert what in GOOD
    return GOOD.replace(what, instead)


MISSING_ARRIVAL = (
    r"threads 0..127 wait at mbarrier_wait\(shared memory \+ 8192\) .*wrong.cu:\d+ for the phase of parity 0: "
    r"1 arrivals and 0 bytes are pending; it is initialised at .*wrong.cu:\d+"
)


@on_cpu
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without("request();"), MISSING_ARRIVAL),
        (without("barrier, 0)", "barrier, 1)"), "before the TMA load"),
        (without("mbarrier_wait(barrier, 0);", "for (int i = 0; i < 20; ++i) __syncthreads();"), "before the TMA load"),
        (without("wgmma_fence();"), "wgmma without wgmma_fence"),
        (without("wgmma_wait<0>();"), "used before the wait"),
        (without("wgmma_wait<0>();", "wgmma_wait<1>();"), "used before the wait"),
        (without("wgmma_commit();"), "used before the wait"),
        (without("wgmma_wait<0>(); warpgroup_fence_operand(d);"), "ends before the wgmma"),
        (without("wgmma_wait", "if (threadIdx.x == 5) smem[0] = 1; wgmma_wait"), "changed before the wait"),
        (without("multiply", "if (threadIdx.x < 32) multiply"), "warps 0 and 1 of one warpgroup"),
        (GOOD + "uniform(threadIdx.x);", "a value that differs between the lanes"),
        (GOOD + "setmaxnreg_dec<20>();", "a multiple of 8 from 24 to 256"),
        (GOOD + "if (threadIdx.x < 64) named_barrier_sync(2, 128);",
         r"threads 0..63 wait at named barrier 2 .*64 of 128 threads"),
        (GOOD + "named_barrier_sync(2, threadIdx.x < 64 ? 128 : 64);", "used a count of 128"),
        (GOOD + "named_barrier_sync(0, 128);", "named barrier 0: it must be 1 to 15"),
        (GOOD + "request();", "before the TMA load"),
        (GOOD + "if (threadIdx.x == 0) { tma_store(map, 0, 0, 0, 0, tile); tma_store_commit(); }",
         "has read shared memory"),
        (GOOD + "stmatrix_x4(tile + threadIdx.x % 32 * 128, 0, 0, 0, 0); __syncthreads();"
                "if (threadIdx.x == 0) A_tile::store(map, 0, 0, 0, tile);", "did not call fence_proxy_async"),
        (GOOD + "if (threadIdx.x == 0) { tma_reduce_add(out, tile, 512); tma_store_commit(); }",
         "has read shared memory"),
        (GOOD + "store_floats(tile + threadIdx.x * 16, 0, 0, 0, 0);"
                "if (threadIdx.x == 0) tma_reduce_add(out, tile, 16);",
         "did not call fence_proxy_async"),
        (GOOD + "if (threadIdx.x == 0) tma_reduce_add(out + 1, tile, 16);", "bulk store of 16 bytes"),
        (GOOD + "if (threadIdx.x < 2) mbarrier_arrive(barrier);",
         r"two phases of the mbarrier that is initialised at .*wrong.cu:\d+ have ended without a wait"),
        (GOOD + "mbarrier_wait(barrier + 8, 0);", r"no mbarrier was initialised at shared memory \+ 8200"),
        (GOOD + "if (threadIdx.x == 0) tma_load(tile + 128, map, 0, 0, 0, 0, barrier);",
         r"out of bounds: 8192 bytes at byte 128 of dynamic shared memory"),
    ],
)  # fmt: skip
def test_errors_are_reported(run_hopper: Run, body: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run_wrong(run_hopper, body)


# Each thread writes 16 bytes. After a barrier warp 3 stores what warp 0 wrote, or a warpgroup multiplies it.
WRITE = "store_floats(tile + threadIdx.x * 16, 2, 2, 2, 2);"
COPY = "cp_async_16(tile + threadIdx.x * 16, A + threadIdx.x * 8, true); cp_async_commit(); cp_async_wait<0>();"
FENCE = "fence_proxy_async();"
BARRIERS = {
    "__syncthreads": "__syncthreads();",
    "a named barrier": "if (threadIdx.x < 96) named_barrier_arrive(1, 128); else named_barrier_sync(1, 128);",
    "an mbarrier": "if (threadIdx.x < 32) mbarrier_arrive(barrier + 8); else mbarrier_wait(barrier + 8, 0);",
}
SEND = (
    "if (threadIdx.x == 96) { tma_reduce_add(out, tile, 512); tma_store_commit(); tma_store_wait_read(); } "
    "__syncthreads();"
)
PRODUCT = "__syncthreads(); wgmma_fence(); multiply(); wgmma_commit(); wgmma_wait<0>(); warpgroup_fence_operand(d);"
TWO_BARRIERS = FRAME.replace("mbarrier_init(barrier, 1);", "mbarrier_init(barrier, 1); mbarrier_init(barrier + 8, 32);")
LATE = "and called fence_proxy_async only after the barrier that orders the accesses"


@on_cpu
def test_the_failure_of_a_block_ends_those_that_wait_for_it(run_hopper: Run) -> None:
    text = """
    extern "C" __global__ void fails(unsigned* flag) {
        if (blockIdx.x == 0) {
            counter_wait(flag, 1);
        } else {
            named_barrier_sync(0, 32);
            counter_arrive(flag);
        }
    }"""
    with pytest.raises(LaunchError, match="named barrier 0: it must be 1 to 15"):
        run_hopper(text, "fails", np.zeros(1, np.uint32), grid=2)


@on_cpu
@pytest.mark.parametrize("barrier", BARRIERS)
def test_stores_are_fenced_before_the_barrier(barrier: str, run_hopper: Run) -> None:
    between = BARRIERS[barrier]
    run_wrong(run_hopper, GOOD + "__syncthreads();" + WRITE + FENCE + between + SEND, TWO_BARRIERS)
    with pytest.raises(
        LaunchError, match="thread 0 wrote data that a bulk store reads and did not call fence_proxy_async"
    ):
        run_wrong(run_hopper, GOOD + "__syncthreads();" + WRITE + between + SEND + FENCE, TWO_BARRIERS)
    with pytest.raises(LaunchError, match=f"warp 0 wrote data that a bulk store reads {LATE}"):
        run_wrong(run_hopper, GOOD + "__syncthreads();" + WRITE + between + FENCE + SEND, TWO_BARRIERS)


@on_cpu
@pytest.mark.parametrize("write", [WRITE, COPY])
def test_wgmma_operands_are_fenced_before_the_barrier(write: str, run_hopper: Run) -> None:
    between = "wgmma_fence();" + PRODUCT
    run_wrong(run_hopper, GOOD + "__syncthreads();" + write + FENCE + between)
    with pytest.raises(LaunchError, match=r"wrote data that wgmma reads and did not .* at .*wrong.cu:\d+"):
        run_wrong(run_hopper, GOOD + "__syncthreads();" + write + between)
    with pytest.raises(LaunchError, match="wrote data that wgmma reads and "):
        run_wrong(run_hopper, GOOD + "__syncthreads();" + write + "__syncthreads();" + FENCE + PRODUCT[16:])


@on_cpu
def test_an_mbarrier_is_fenced_before_tma_uses_it(run_hopper: Run) -> None:
    with pytest.raises(LaunchError, match=r"thread 0 wrote data that TMA accesses \(an mbarrier\) and did not call"):
        run_wrong(run_hopper, GOOD, FRAME.replace(FENCE, ""))


@on_cpu
def test_a_box_over_other_writes_needs_a_fence(run_hopper: Run) -> None:
    """A TMA load overwrites data of the generic proxy: the order of two writes needs the fence, too (PTX ISA, memory
    consistency model: proxy-preserved base causality order)."""
    again = "if (threadIdx.x == 0) A_tile::load(tile, map, 0, 0, 0, barrier); mbarrier_wait(barrier, 1);"
    body = GOOD + "__syncthreads();" + WRITE + FENCE + "__syncthreads();" + again + PRODUCT
    assert (run_wrong(run_hopper, body) == 16).all()
    with pytest.raises(LaunchError, match=r"thread 0 wrote data that a TMA load overwrites and did not call fence_"):
        run_wrong(run_hopper, body.replace(FENCE, ""))


@on_cpu
def test_a_wgmma_before_its_operand_is_loaded(run_hopper: Run) -> None:
    """The wait for the TMA load follows the wgmma, so an operand changes while the wgmma is pending."""
    body = without("mbarrier_wait(barrier, 0);").replace("wgmma_wait", "mbarrier_wait(barrier, 0); wgmma_wait")
    with pytest.raises(LaunchError, match=r"changed before the wait for it at line \d+ at .*wrong.cu:\d+"):
        run_wrong(run_hopper, body)


@on_cpu
def test_registers_must_be_freed_before_they_are_requested(run_hopper: Run) -> None:
    """512 threads have 128 registers each."""
    text = """
    extern "C" __global__ void budget() {
        if (threadIdx.x < 128) setmaxnreg_dec<LEFT>();
        else setmaxnreg_inc<160>();
    }"""
    run_hopper(text, "budget", block=512, left=32)
    with pytest.raises(LaunchError, match=r"threads \d+..511 wait for registers .*budget.cu:\d+: \d+ are free"):
        run_hopper(text, "budget", block=512, left=40)


# ---- tensor maps as arguments


def as_an_unknown_driver(address: int, box: Box, dtype: str) -> None:
    """Encodes the address twice: changing only the first word gives an invalid map."""
    encode_for_host(address, box, dtype)
    ctypes.c_void_p.from_address(address + 120).value = box.data


def as_a_strict_driver(address: int, box: Box, dtype: str) -> None:
    """Rejects addresses that were not allocated."""
    if (box.data or 0) >> 46:
        raise DriverError("cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE", code=1, name="CUDA_ERROR_INVALID_VALUE")
    encode_for_host(address, box, dtype)


@on_cpu
@pytest.mark.parametrize("encode", [encode_for_host, as_an_unknown_driver, as_a_strict_driver])
def test_a_map_follows_its_tensor(encode, device: Device) -> None:
    """For any encoding by the driver: a launch with another address uses the map of that address; a launch with an
    earlier address reuses its map without encoding it again."""
    kernel, problem = get("fwd_wgmma"), Problem(2, 3, 40, 50, 64, dtype="float16")
    arrays = {name: np.zeros((2, 3, S, 64), np.float16) for name, S in (("Q", 40), ("K", 50), ("V", 50), ("O", 40))}
    views = {name: view(array) for name, array in {**arrays, "LSE": np.zeros((2, 3, 40), np.float32)}.items()}
    for i, each in enumerate(views.values()):
        each.pointer = 0x7000 + 0x1000 * i
    made: list[int] = []

    def counted(address: int, box: Box, dtype: str) -> None:
        assert address % 64 == 0
        encode(address, box, dtype)
        made.append(box.data)

    block = ArgumentBlock(kernel, problem, kernel.tiles[0], views, counted)
    place = block.values[kernel.args.index("K_map")]
    box = Box.from_buffer_copy(place)
    assert ([*box.size[:4]], [*box.stride[:3]]) == ([64, 50, 3, 2], [128, 50 * 128, 150 * 128])
    assert ([*box.box], box.rank) == ([64, kernel.tiles[0].BLOCK_N, 1, 1, 1], 4)
    made.clear()
    for pointer in (views["K"].pointer, 0x1000, views["K"].pointer, 0x1000):
        for name, slot in zip(block.tensor_names, block.slots, strict=True):
            if name == "K":
                slot.value = pointer
        box.data, expected = pointer, new_map()
        encode(ctypes.addressof(expected), box, problem.dtype)
        assert [*place.words] == [*expected.words]
        assert block.values[kernel.args.index("K")].data == pointer
    assert made == ([] if encode is encode_for_host else [0x1000])


@on_cpu
def test_strides_that_a_tensor_map_cannot_have_are_rejected(device: Device) -> None:
    kernel, problem = get("fwd_wgmma"), Problem(1, 1, 40, 40, 64, dtype="float16")
    q = np.zeros((1, 1, 40, 64), np.float16)
    lse = np.zeros((1, 1, 40), np.float32)
    for k in (q[:, :, ::-1], np.broadcast_to(q[:, :, :1], q.shape)):
        views = {name: view(array) for name, array in {"Q": q, "K": k, "V": q, "O": q, "LSE": lse}.items()}
        with pytest.raises(UnsupportedProblem, match=r"K with a stride of (-64|0) elements in S"):
            ArgumentBlock(kernel, problem, kernel.tiles[0], views)


# ---- clusters


def test_descriptors_in_a_cluster(run_cuda: Run) -> None:
    """The rank of a block, which its addresses of shared memory contain, does not change a descriptor."""
    text = """
    extern "C" __global__ __launch_bounds__(128) void columns(const unsigned short* B, float* out) {
        extern __shared__ __align__(1024) char smem[];
        using Tile = Swizzled<16, 128>;  // two slabs: columns 64 .. are `leading` bytes away
        for (int i = threadIdx.x; i < 16 * 128; i += 128)
            *reinterpret_cast<unsigned short*>(smem + Tile::chunk(i / 128, i % 128 / 8) + i % 8 * 2) = B[i];
        fence_proxy_async();
        __syncthreads();  // B is complete
        const unsigned ones[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
        float d[64];
        wgmma_fence();
        wgmma<Order::MN_MAJOR>(d, ones, Tile::mn_major(smem_address(smem)), false);
        wgmma_commit();
        wgmma_wait<0>();
        warpgroup_fence_operand(d);
        if (threadIdx.x < 4)  // row 0
            for (int i = 0; i < 32; ++i)
                out[128 * blockIdx.x + i / 2 * 8 + 2 * threadIdx.x + i % 2] = d[i / 2 * 4 + i % 2];
    }"""
    B = np.tile(np.arange(128, dtype=np.float16), (16, 1)).view(np.uint16)
    out = np.zeros((4, 128), np.float32)
    defines = {"DTYPE_float16": 1, "LEFT": 24, "RAGGED": 0, "CLUSTER": 2}
    run_cuda(HEADER + text, "columns", B, out, grid=4, block=128, smem=4096, cluster=2, defines=defines)
    assert (out == 16 * np.arange(128)).all()


RELAY = """
    #define CLUSTER 2
    #define STAGES 2
    #include "pipeline.cuh"
    #include <cluster.cuh>
    constexpr unsigned BYTES = 1040, TO = STAGES * BYTES, BARRIERS = 2 * TO;
    using Received = Pipeline<BARRIERS>;
    using Loaded = BarrierArray<Received::END, 1>;
    extern "C" __global__ void relay(const char* tensor, unsigned* out, int tiles) {
        extern __shared__ __align__(1024) char smem[];
        const SmemAddr base = smem_address(smem);
        const unsigned peer = 1 - cluster_cta_rank();
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(Received::full(base, stage), 1);
                mbarrier_init(Received::empty(base, stage), 1);  // the other block has read the tile
            }
            mbarrier_init(Loaded::at(base, 0), 1);
            fence_mbarrier_init();
            FENCE;
        }
        cluster_arrive();
        cluster_wait();  // the mbarriers of both blocks are initialised
        if (threadIdx.x == 0) {
            for (int i = 0; i < tiles; ++i) {
                Received::acquire(base, i);
                const SmemAddr from = SOURCE, full = Received::full(base, stage_of(i));
                mbarrier_arrive_expect_tx(Loaded::at(base, 0), BYTES);
                bulk_load(from, tensor + (blockIdx.x * tiles + i) * BYTES, BYTES, Loaded::at(base, 0));
                mbarrier_wait(Loaded::at(base, 0), i % 2);
                mbarrier_arrive_expect_tx_at_rank(full, BYTES, peer);
                bulk_copy_to_rank(base + TO + stage_of(i) * BYTES, from, BYTES, full, COPY_TO);
            }
        }
        __syncwarp();
        if (threadIdx.x >= 32) {
            for (int i = 0; i < tiles; ++i) {
                Received::wait(base, i);
                const unsigned* const from = reinterpret_cast<unsigned*>(smem + TO + stage_of(i) * BYTES);
                unsigned* const to = out + (blockIdx.x * tiles + i) * (BYTES / 4);
                for (unsigned word = threadIdx.x % 32; word < BYTES / 4; word += 32) to[word] = from[word];
                __syncwarp();  // all lanes have read the tile
                if (threadIdx.x % 32 == 0 && i + STAGES < tiles) { RELEASE; }
                __syncwarp();
            }
        }
        cluster_sync();
    }"""
RELAYED = {
    "FENCE": "fence_proxy_async()",
    "SOURCE": "base + stage_of(i) * BYTES",
    "COPY_TO": "peer",
    "RELEASE": "mbarrier_arrive_at_rank(Received::empty(base, stage_of(i)), peer)",
}


def relayed(run_hopper: Run, tiles: int = 7, **changed: str) -> None:
    """Each block loads tiles and copies them to the other block of its cluster, which stores them."""
    tensor = np.arange(6 * tiles * 260, dtype=np.uint32).reshape(3, 2, tiles, 260)
    out = np.zeros_like(tensor)
    text = RELAY
    for name, code in (RELAYED | changed).items():
        text = text.replace(name, code)
    run_hopper(text, "relay", tensor, out, ctypes.c_int(tiles), grid=6, block=64, smem=5 * 1024, cluster=2)
    assert (out == tensor[:, ::-1]).all()


def test_blocks_of_a_cluster_copy_tiles_to_each_other(run_hopper: Run) -> None:
    relayed(run_hopper)


@on_cpu
def test_a_stage_that_the_other_block_has_not_released(run_hopper: Run) -> None:
    """Blocks that wait for each other are a deadlock, also if they are in different OS threads."""
    with pytest.raises(LaunchError, match=r"(?s)thread 0 waits at mbarrier_wait.* parity 0: 1 arrivals and 0 bytes"):
        relayed(run_hopper, RELEASE="")


@on_cpu
def test_the_source_of_a_copy_is_overwritten(run_hopper: Run) -> None:
    """A copy reads its source when it completes: the sender must wait until the other block has received it."""
    with pytest.raises(AssertionError):
        relayed(run_hopper, SOURCE="base")


PAIR = """
#define CLUSTER 2
#define STAGES 2
#include "pipeline.cuh"
#include <cluster.cuh>
extern "C" __global__ void pair(unsigned* out) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr barrier = smem_address(smem);
    reinterpret_cast<unsigned*>(smem + 512)[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) mbarrier_init(barrier, 1);
    fence_proxy_async();
    cluster_arrive();
    cluster_wait();  // the mbarriers of both blocks are initialised
    CODE
}"""


def pair_of_blocks(run_hopper: Run, code: str) -> None:
    """The two blocks of a cluster, of a warp each: `code` has an mbarrier with one arrival, 32 numbers at smem + 512,
    and `out`, 32 zeros."""
    text = PAIR.replace("CODE", code)
    run_hopper(text, "pair", np.zeros(32, np.uint32), grid=2, block=32, smem=1024, cluster=2)


@on_cpu
def test_a_block_that_ends_before_its_copy_has_been_read(run_hopper: Run) -> None:
    code = """
        if (threadIdx.x == 0 && cluster_cta_rank() == 1) {
            mbarrier_arrive_expect_tx_at_rank(barrier, 128, 0);
            bulk_copy_to_rank(barrier + 256, barrier + 512, 128, barrier, 0);
        }
        if (cluster_cta_rank() == 1) return;
        mbarrier_wait(barrier, 0);
        out[threadIdx.x] = reinterpret_cast<unsigned*>(smem + 256)[threadIdx.x];"""
    with pytest.raises(LaunchError, match=r"ends before its copy at .*pair\.cu:\d+ to another block of the cluster"):
        pair_of_blocks(run_hopper, code)


@on_cpu
def test_an_arrival_at_a_block_that_has_ended(run_hopper: Run) -> None:
    code = """
        if (threadIdx.x == 0 && cluster_cta_rank() == 0) counter_arrive(out);
        if (cluster_cta_rank() == 0) return;
        if (threadIdx.x == 0) counter_wait(out, 1);
        for (int i = 0; i < 3000; ++i) __syncwarp();  // the other block has time to end
        if (threadIdx.x == 0) mbarrier_arrive_at_rank(barrier, 0);"""
    with pytest.raises(LaunchError, match=r"which has ended"):
        pair_of_blocks(run_hopper, code)


@on_cpu
def test_a_block_waits_for_its_peer_which_waits_for_a_counter(run_hopper: Run) -> None:
    code = """
        if (threadIdx.x == 0 && cluster_cta_rank() == 1) counter_wait(out, 1);  // no block increments it
        if (threadIdx.x == 0 && cluster_cta_rank() == 1) mbarrier_arrive_at_rank(barrier, 0);
        if (cluster_cta_rank() == 0) mbarrier_wait(barrier, 0);"""
    with pytest.raises(LaunchError, match=r"(?s)deadlock.*waits"):
        pair_of_blocks(run_hopper, code)


@on_cpu
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RELEASE": "mbarrier_arrive_at_rank(Received::empty(base, 0), 2)"}, "block 2 of a cluster of 2 blocks"),
        ({"RELEASE": "mbarrier_arrive_at_rank(base, peer)"}, r"no mbarrier was initialised at shared memory \+ 0"),
        ({"COPY_TO": "peer); mbarrier_arrive_at_rank(full, peer"}, "too many arrivals at the mbarrier"),
        ({"COPY_TO": "1 - peer"}, "copy to block . of a cluster of 2 blocks, from block ."),
        ({"FENCE": ""}, "fence_proxy_async"),
    ],
)
def test_wrong_exchanges_in_a_cluster(run_hopper: Run, changed: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        relayed(run_hopper, **changed)
