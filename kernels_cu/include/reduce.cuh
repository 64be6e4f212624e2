// Reductions over the lanes of a warp and over the threads of a block.
#pragma once
#include "element.cuh"

// The maximum, or sum, of x over the `width` adjacent lanes (a power of two) that share a row. All lanes get the
// result.
template <int width>
__device__ __forceinline__ float row_max(float x) {
    for (int lanes = width / 2; lanes; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}
template <int width>
__device__ __forceinline__ int row_max(int x) {
    for (int lanes = width / 2; lanes; lanes /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}
template <int width>
__device__ __forceinline__ float row_sum(float x) {
    for (int lanes = width / 2; lanes; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// The same over the eight lanes at a distance of 4 that share a column of an accumulator (ptx.cuh).
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// Reduces x over a block of `threads` threads, a multiple of 32, with `reduce`, which does so over the lanes of a warp.
// partial: 32 floats of shared memory. identity: of the reduction.
template <int threads, class Reduce>
__device__ __forceinline__ float block_reduce(float x, float identity, float* partial, const Reduce& reduce) {
    static_assert(threads % 32 == 0, "a block has whole warps");
    const int lane = threadIdx.x % 32;
    x = reduce(x);
    __syncthreads();  // the previous reduction has been read
    if (lane == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();  // every warp has written its part
    return reduce(lane < threads / 32 ? partial[lane] : identity);
}

// The maximum, or sum, of x over a block. All threads call it, and get the result.
template <int threads>
__device__ __forceinline__ float block_max(float x, float* partial) {
    return block_reduce<threads>(x, -INF, partial, [](float y) { return row_max<32>(y); });
}
template <int threads>
__device__ __forceinline__ float block_sum(float x, float* partial) {
    return block_reduce<threads>(x, 0.0f, partial, [](float y) { return row_sum<32>(y); });
}
