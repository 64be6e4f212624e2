// Element types, strided tensor views, reductions over the lanes of a row, and tile loads with bounds checks.
#pragma once
#include "timeline.cuh"

// Element types: `dtype` of Q and K, `dtype_v` of V, `dtype_o` of O. They differ only if Q, K and V are float8. The compiler
// options (sandbox/engine) define DTYPE_float16 and so on. Arithmetic is in fp32.
__device__ __forceinline__ float to_float(float x) { return x; }
#if defined(DTYPE_float8_e4m3) || defined(DTYPE_float8_e5m2)
#define FLOAT8 1
#include <cuda_fp8.h>
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return static_cast<float>(x); }
#else
#define FLOAT8 0
#endif
#if defined(DTYPE_float16) || defined(DTYPE_O_float16)
#include <cuda_fp16.h>
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
#elif defined(DTYPE_bfloat16) || defined(DTYPE_O_bfloat16)
#include <cuda_bf16.h>
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#endif

#if defined(DTYPE_float32)
using dtype = float;
#elif defined(DTYPE_float16)
using dtype = __half;
#elif defined(DTYPE_bfloat16)
using dtype = __nv_bfloat16;
#elif defined(DTYPE_float8_e4m3)
using dtype = __nv_fp8_e4m3;
#elif defined(DTYPE_float8_e5m2)
using dtype = __nv_fp8_e5m2;
#else
#error "the spec defines DTYPE_float32, DTYPE_float16, DTYPE_bfloat16, DTYPE_float8_e4m3 or DTYPE_float8_e5m2"
#endif
#if !FLOAT8
using dtype_v = dtype;
using dtype_o = dtype;
#else
#if defined(DTYPE_V_float8_e4m3)
using dtype_v = __nv_fp8_e4m3;
#else
using dtype_v = __nv_fp8_e5m2;
#endif
#if defined(DTYPE_O_float32)
using dtype_o = float;
#elif defined(DTYPE_O_float16)
using dtype_o = __half;
#else
using dtype_o = __nv_bfloat16;
#endif
#endif

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM  // head dimension of V, O, dO and dV
#endif

#define INF __int_as_float(0x7f800000)  // NVRTC has no INFINITY
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// A (B, H, S, D) tensor with unit stride in D. Strides are in elements, 64-bit: a tensor may have more than 2^31 elements.
// View in sandbox/launch/arguments.py has the same layout.
template <typename T>
struct View {
    T* data;
    long long stride_b, stride_h, stride_s;

    __device__ __forceinline__ T* row(int b, int h, long long s) const {
        return data + b * stride_b + h * stride_h + s * stride_s;
    }
};
static_assert(sizeof(View<float>) == 32, "View and sandbox/launch/arguments.py disagree");

// Loads rows n0 .. n0 + ROWS - 1 of head (b, h) into tile[ROWS][WIDTH] as fp32, with all THREADS threads of the block; adjacent
// threads load adjacent columns. Rows >= S are filled with zeros, so that the compute loops need no bounds checks.
template <int ROWS, int THREADS, int WIDTH = HEAD_DIM, class T>
__device__ __forceinline__ void load_tile(float* tile, View<const T> tensor, int b, int h, int n0, int S, int thread) {
    for (int i = thread; i < ROWS * WIDTH; i += THREADS) {
        const int row = n0 + i / WIDTH;
        tile[i] = row < S ? to_float(tensor.row(b, h, row)[i % WIDTH]) : 0.0f;
    }
}

// The maximum, or sum, of x over the WIDTH adjacent lanes (a power of two) that share a row. All lanes get the result.
template <int WIDTH>
__device__ __forceinline__ float row_max(float x) {
    for (int lanes = WIDTH / 2; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}
template <int WIDTH>
__device__ __forceinline__ int row_max(int x) {
    for (int lanes = WIDTH / 2; lanes; lanes /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}
template <int WIDTH>
__device__ __forceinline__ float row_sum(float x) {
    for (int lanes = WIDTH / 2; lanes; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// Four adjacent elements as one aligned load.
template <class T>
struct __align__(4 * sizeof(T)) Four {
    unsigned words[sizeof(T)];
};
using dtype4 = Four<dtype>;
template <class T>
__device__ __forceinline__ float4 to_float4(Four<T> x) {
    const T* e = reinterpret_cast<const T*>(x.words);
    return make_float4(to_float(e[0]), to_float(e[1]), to_float(e[2]), to_float(e[3]));
}

// Whether every row of head (b, h) is aligned for Four. Uniform across a block that has one head.
template <class T>
__device__ __forceinline__ bool aligned_for_dtype4(View<const T> tensor, int b, int h) {
    const unsigned long long head = reinterpret_cast<unsigned long long>(tensor.row(b, h, 0));
    return (head | tensor.stride_s * sizeof(T)) % sizeof(Four<T>) == 0;
}

// Loads rows row0 .. row0 + ROWS - 1 and columns col0 .. col0 + COLS - 1 of head (b, h) into tile[ROWS][PITCH] as fp32, with a block of
// X * Y threads. If the tensor is aligned, a load has four elements, and a thread issues all its loads before it uses the first.
// Rows >= S and columns >= WIDTH are filled with zeros.
template <int ROWS, int COLS, int PITCH, int X, int Y, int WIDTH = HEAD_DIM, class T>
__device__ __forceinline__ void load_tile4(float* tile, View<const T> tensor, int b, int h, int row0, int S,
                                           int col0) {
    static_assert(ROWS % Y == 0 && COLS % (4 * X) == 0 && PITCH % 4 == 0, "every thread loads the same number of elements");
    constexpr int R = ROWS / Y, C = COLS / (4 * X);
    const int row = row0 + threadIdx.y, col = col0 + 4 * threadIdx.x;
    const T* from = tensor.row(b, h, row) + col;
    const long long step = Y * tensor.stride_s;
    tile += threadIdx.y * PITCH + 4 * threadIdx.x;
    if (WIDTH % 4 == 0 && aligned_for_dtype4(tensor, b, h)) {
        Four<T> values[R][C];
#pragma unroll
        for (int r = 0; r < R; ++r, from += step)
#pragma unroll
            for (int c = 0; c < C; ++c) {
                values[r][c] = Four<T>{};
                if (row + r * Y < S && col + c * 4 * X < WIDTH)
                    values[r][c] = *reinterpret_cast<const Four<T>*>(from + c * 4 * X);
            }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c)
                *reinterpret_cast<float4*>(tile + r * Y * PITCH + c * 4 * X) = to_float4(values[r][c]);
    } else {
#pragma unroll 1
        for (int r = 0; r < R; ++r, from += step, tile += Y * PITCH)
#pragma unroll 1
            for (int c = 0; c < C * 4 * X; c += 4 * X)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    tile[c + e] = row + r * Y < S && col + c + e < WIDTH ? to_float(from[c + e]) : 0.0f;
    }
}
