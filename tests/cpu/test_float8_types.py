"""FP8 types in kernels: every value and every rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sandbox.reference import round_to

EVERY = np.arange(256, dtype=np.uint8)
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


@pytest.mark.parametrize("name", TYPES)
def test_every_float8_to_float(run_cuda, name: str) -> None:
    text = f"""
    #include <cuda_fp8.h>
    extern "C" __global__ void widen(const __nv_fp8_{name}* in, float* out) {{
        out[threadIdx.x] = static_cast<float>(in[threadIdx.x]);
    }}"""
    out = np.zeros(256, np.float32)
    run_cuda(text, "widen", EVERY, out, block=256)
    expected = EVERY.view(TYPES[name]).astype(np.float32)
    assert np.array_equal(out, expected, equal_nan=True)
    assert np.array_equal(np.signbit(out[out == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("name", TYPES)
def test_every_rounding_to_float8(run_cuda, name: str) -> None:
    """Every value, every tie, their neighbours in fp32, overflow, and random patterns."""
    text = f"""
    #include <cuda_fp8.h>
    extern "C" __global__ void narrow(const float* in, __nv_fp8_{name}* out) {{
        const long long i = blockIdx.x * 256ll + threadIdx.x;
        out[i] = __nv_fp8_{name}(in[i]);
    }}"""
    exact = EVERY.view(TYPES[name]).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    edges = np.array([finite[-1] * 1.01, finite[-1] * 1.0625, 1e6, 3.4e38, np.inf, 1e-45, 0.0], np.float32)
    bits = np.concatenate([exact, (finite[1:] + finite[:-1]) / 2, edges, -edges]).view(np.uint32)
    near = np.concatenate([bits, bits + np.uint32(1), bits - np.uint32(1)]).view(np.float32)
    random = np.random.default_rng(4).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([near, random, np.random.default_rng(5).standard_normal(5000, np.float32)])
    values = np.resize(values, -(-len(values) // 256) * 256)
    out = np.zeros(len(values), np.uint8)
    run_cuda(text, "narrow", values, out, grid=len(values) // 256, block=256)
    got = out.view(TYPES[name]).astype(np.float32)
    assert np.array_equal(got, round_to(values, f"float8_{name}"), equal_nan=True)
    assert (out[np.isnan(values)] & 0x7F == 0x7F).all()
    assert (abs(got[np.isinf(values)]) == finite[-1]).all(), "saturates"
