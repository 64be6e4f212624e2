// What every kernel shares: the element type, views of tensors, and loads that are right at the edges.
#pragma once

// The spec passes -DDTYPE_float16=1 and so on; `dtype` is an element of Q, K, V and O. Arithmetic is in fp32.
#if defined(DTYPE_float32)
using dtype = float;
__device__ __forceinline__ float to_float(float x) { return x; }
#elif defined(DTYPE_float16)
#include <cuda_fp16.h>
using dtype = __half;
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
#elif defined(DTYPE_bfloat16)
#include <cuda_bf16.h>
using dtype = __nv_bfloat16;
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#else
#error "the spec defines DTYPE_float32, DTYPE_float16 or DTYPE_bfloat16"
#endif

#define INF __int_as_float(0x7f800000)  // NVRTC has no INFINITY

// A (B, H, S, D) tensor with unit stride in D; strides in elements, 64-bit: one tensor may hold more than 2^31.
// Mirrored by View in sandbox/arguments.py.
template <typename T>
struct View {
    T* data;
    long long stride_b, stride_h, stride_s;

    __device__ __forceinline__ T* row(int b, int h, long long s) const {
        return data + b * stride_b + h * stride_h + s * stride_s;
    }
};
static_assert(sizeof(View<float>) == 32, "View differs from sandbox/arguments.py");

// Rows n0 .. n0 + ROWS of head (b, h) into tile[ROWS][HEAD_DIM] as fp32, by all THREADS threads of the block, neighbours
// on neighbouring columns. Rows from S on become zeros, so that no lane has to be masked while computing.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(float* tile, View<const dtype> tensor, int b, int h, int n0, int S, int thread) {
    for (int i = thread; i < ROWS * HEAD_DIM; i += THREADS) {
        const int row = n0 + i / HEAD_DIM;
        tile[i] = row < S ? to_float(tensor.row(b, h, row)[i % HEAD_DIM]) : 0.0f;
    }
}
