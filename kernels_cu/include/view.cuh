// Strided tensor views.
#pragma once

// A (B, H, S, D) tensor with unit stride in D. Strides are in elements, 64-bit: a tensor may have more than 2^31
// elements. View in sandbox/launch/arguments.py has the same layout. PagedView of paged_keys.cuh has the same functions
// for keys in pages.
template <typename T>
struct View {
    T* data;
    long long stride_b, stride_h, stride_s;

    __device__ __forceinline__ T* row(int b, int h, long long s) const {
        return data + b * stride_b + h * stride_h + s * stride_s;
    }
    // advance(at, step(…)): an address in row s becomes that of the same column `rows` rows later.
    __device__ __forceinline__ long long step(int b, int h, int s, int rows) const { return rows * stride_s; }
    static __device__ __forceinline__ void advance(T*& at, long long step) { at += step; }
    // Whether every row of head (b, h) begins at a multiple of `bytes`.
    __device__ __forceinline__ bool aligned(int b, int h, unsigned bytes) const {
        const unsigned long long head = reinterpret_cast<unsigned long long>(row(b, h, 0));
        return (head | stride_s * sizeof(T)) % bytes == 0;
    }
};
static_assert(sizeof(View<float>) == 32, "View and sandbox/launch/arguments.py disagree");
