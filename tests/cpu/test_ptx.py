"""Functions of include/ptx.cuh, on the GPU and in the CPU implementation: fragments, conversions, asynchronous copies.

The fragment layouts are repeated here in NumPy from the PTX ISA, independent of both implementations.
"""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from sandbox.launch.dlpack import HOST, Device

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LANE = np.arange(32)
G, Q = LANE // 4, LANE % 4

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def defines(dtype: str) -> dict[str, int]:
    """The headers require the element type and HEAD_DIM."""
    return {f"DTYPE_{dtype}": 1, "HEAD_DIM": 16}


def integers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Small integers: products and sums are exact."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(DTYPES[dtype])


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16-bit elements in a register, the first in the low half."""
    return low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16


def fragment_a(a: np.ndarray) -> np.ndarray:
    """(16, 16) -> (32 lanes, 4 registers)."""
    corners = [(G, 2 * Q), (G + 8, 2 * Q), (G, 2 * Q + 8), (G + 8, 2 * Q + 8)]
    return np.stack([pairs(a[row, col], a[row, col + 1]) for row, col in corners], axis=1)


def fragment_b(b: np.ndarray) -> np.ndarray:
    """(16, 8) -> (32 lanes, 2 registers)."""
    return np.stack([pairs(b[row, G], b[row + 1, G]) for row in (2 * Q, 2 * Q + 8)], axis=1)


def fragment_c(c: np.ndarray) -> np.ndarray:
    """(16, 8) -> (32 lanes, 4 registers)."""
    return np.stack([c[G, 2 * Q], c[G, 2 * Q + 1], c[G + 8, 2 * Q], c[G + 8, 2 * Q + 1]], axis=1)


LDMATRIX = """
#include "ptx.cuh"
extern "C" __global__ void load(const unsigned* matrix, unsigned* plain, unsigned* transposed) {
    __shared__ __align__(16) unsigned tile[16 * 8];  // 16 x 16 elements
    for (int i = threadIdx.x; i < 128; i += 32) tile[i] = matrix[i];
    __syncthreads();  // the matrix is complete before it is read
    const SmemAddr row = smem_address(tile + threadIdx.x % 16 * 8 + threadIdx.x / 16 * 4);
    unsigned r[4];
    ldmatrix_x4(r, row);
    for (int i = 0; i < 4; ++i) plain[4 * threadIdx.x + i] = r[i];
    ldmatrix_x4_trans(r, row);
    for (int i = 0; i < 4; ++i) transposed[4 * threadIdx.x + i] = r[i];
}
"""


def test_ldmatrix(run_cuda, dtype: str) -> None:
    """16 x 16 elements: without transposition an A operand, transposed the B operands of two 16 x 8 halves."""
    matrix = np.arange(256, dtype=np.uint16).view(DTYPES[dtype]).reshape(16, 16)
    plain, transposed = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    run_cuda(LDMATRIX, "load", matrix.view(np.uint32).reshape(-1), plain, transposed, defines=defines(dtype))
    np.testing.assert_array_equal(plain, fragment_a(matrix))
    np.testing.assert_array_equal(transposed[:, :2], fragment_b(matrix[:, :8]))
    np.testing.assert_array_equal(transposed[:, 2:], fragment_b(matrix[:, 8:]))


MOVMATRIX = """
#include "ptx.cuh"
extern "C" __global__ void transpose(const unsigned* pairs, unsigned* transposed) {
    transposed[threadIdx.x] = movmatrix_trans(pairs[threadIdx.x]);
}
"""


def test_movmatrix(run_cuda, dtype: str) -> None:
    """An accumulator of 8 keys x 8 queries, packed, becomes a B operand of queries."""
    matrix = np.arange(64, dtype=np.uint16).view(DTYPES[dtype]).reshape(8, 8)
    rows, columns = (pairs(x[G, 2 * Q], x[G, 2 * Q + 1]) for x in (matrix, matrix.T))
    transposed = np.zeros(32, np.uint32)
    run_cuda(MOVMATRIX, "transpose", rows, transposed, defines=defines(dtype))
    np.testing.assert_array_equal(transposed, columns)


MMA = """
#include "ptx.cuh"
extern "C" __global__ void multiply(const unsigned* A, const unsigned* B, float* C) {
    unsigned a[4];
    float c[4];
    for (int i = 0; i < 4; ++i) a[i] = A[4 * threadIdx.x + i], c[i] = C[4 * threadIdx.x + i];
    mma_m16n8k16(c, a, B[2 * threadIdx.x], B[2 * threadIdx.x + 1]);
    for (int i = 0; i < 4; ++i) C[4 * threadIdx.x + i] = c[i];
}
"""


def test_mma(run_cuda, dtype: str) -> None:
    a, b = integers((16, 16), dtype), integers((16, 8), dtype, 1)
    c = np.random.default_rng(2).integers(-99, 99, (16, 8)).astype(np.float32)
    expected = c + a.astype(np.float32) @ b.astype(np.float32)
    registers = np.ascontiguousarray(fragment_c(c))
    run_cuda(MMA, "multiply", fragment_a(a), fragment_b(b), registers, defines=defines(dtype))
    np.testing.assert_array_equal(registers, fragment_c(expected))


def test_an_accumulator_is_an_a_operand(dtype: str) -> None:
    """Two neighbouring accumulators, packed, are an A operand: P needs no shuffle between Q K^T and P V."""
    p = integers((16, 16), dtype)
    left, right = fragment_c(p[:, :8]), fragment_c(p[:, 8:])
    packed = [pairs(half[:, i], half[:, i + 1]) for half in (left, right) for i in (0, 2)]
    np.testing.assert_array_equal(np.stack(packed, axis=1), fragment_a(p))


CONVERT = """
#include "ptx.cuh"
extern "C" __global__ void convert(const float* x, unsigned* packed, float* powers, int n) {
    for (int i = threadIdx.x; i < n; i += 32) packed[i] = pack(x[i], x[n - 1 - i]), powers[i] = ex2(x[i]);
}
"""


def test_pack_and_ex2(run_cuda, dtype: str) -> None:
    x = np.r_[np.random.default_rng(0).uniform(-100, 0, 1000), 0, 1, 8, -126, -np.inf].astype(np.float32)
    packed, powers = np.zeros(x.size, np.uint32), np.zeros(x.size, np.float32)
    run_cuda(CONVERT, "convert", x, packed, powers, ctypes.c_int(x.size), defines=defines(dtype))
    rounded = x.astype(DTYPES[dtype])
    np.testing.assert_array_equal(packed, pairs(rounded, rounded[::-1].copy()))
    np.testing.assert_allclose(powers, np.exp2(x.astype(np.float64)), rtol=2.0**-22)
    assert powers[-1] == 0.0


COPY = """
#include "ptx.cuh"
extern "C" __global__ void copy(const uint4* from, uint4* to) {
    __shared__ uint4 tile[2][32];
    const uint4 old = make_uint4(7, 7, 7, 7);
    tile[0][threadIdx.x] = tile[1][threadIdx.x] = old;
    for (int group = 0; group < 2; ++group) {
        cp_async_16(smem_address(&tile[group][threadIdx.x]), from + 32 * group + threadIdx.x, threadIdx.x % 3 != group);
        cp_async_commit();
    }
    cp_async_wait<1>();
    to[threadIdx.x] = tile[0][threadIdx.x];  // a thread sees its own copies without a barrier
    cp_async_wait<0>();
    to[32 + threadIdx.x] = tile[1][threadIdx.x];
}
"""


def test_cp_async(run_cuda, dtype: str) -> None:
    """Sixteen bytes per lane, or sixteen zero bytes. A group is complete if at most the groups after it are pending."""
    source = np.arange(1, 257, dtype=np.uint32).reshape(2, 32, 4)
    copied = np.zeros_like(source)
    run_cuda(COPY, "copy", source, copied, defines=defines(dtype))
    for group in range(2):
        source[group, group == LANE % 3] = 0
    np.testing.assert_array_equal(copied, source)


def test_a_copy_completes_no_sooner_than_its_wait(run_cuda, device: Device, dtype: str) -> None:
    """On the CPU backend a missing wait, or a wait for too few groups, gives a wrong result in every run."""
    if device != HOST:
        pytest.skip("the time of a copy is unspecified on a GPU")
    source = np.arange(1, 257, dtype=np.uint32).reshape(2, 32, 4)
    copied = np.zeros_like(source)
    early = COPY.replace("cp_async_wait<0>();", "")
    assert early != COPY
    run_cuda(early, "copy", source, copied, defines=defines(dtype))
    assert (copied[1] == 7).all()
    assert not (copied[0] == 7).all(axis=1).any()
