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

// The maximum, or sum, of x over a block of `threads` threads, a multiple of 32. All threads call it, and get the
// result. `partial`: 32 floats of shared memory.
template <int threads>
__device__ __forceinline__ float block_max(float x, float* partial) {
    static_assert(threads % 32 == 0, "a block has whole warps");
    const int lane = threadIdx.x % 32;
    x = row_max<32>(x);
    __syncthreads();  // the previous reduction has been read
    if (lane == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();  // every warp has written its part
    return row_max<32>(lane < threads / 32 ? partial[lane] : -INF);
}
template <int threads>
__device__ __forceinline__ float block_sum(float x, float* partial) {
    static_assert(threads % 32 == 0, "a block has whole warps");
    const int lane = threadIdx.x % 32;
    x = row_sum<32>(x);
    __syncthreads();  // the previous reduction has been read
    if (lane == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();  // every warp has written its part
    return row_sum<32>(lane < threads / 32 ? partial[lane] : 0.0f);
}
