// The wgmma accumulator fragment of S^T = K Q^T (64 keys per warpgroup); P^T and dS^T have the same layout.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

// Query and key of each element of the lane's fragment of S^T.
struct FragmentCoords {
    int row, key;  // query and key of element 0
    __device__ __forceinline__ FragmentCoords(int first_query, int first_key) {
        const unsigned thread = thread_index_x() % 128;
        row = first_query + thread % 4 * 2, key = first_key + thread / 32 * 16 + thread / 4 % 8;
    }
    __device__ __forceinline__ ScoreIndex at(int k) const { return {row, key, k / 4 * 8 + k % 2, k / 2 % 2 * 8}; }
};

// Calls mask_element(k) for those of the lane's N elements of S^T that causality, window or sequence lengths hide.
template <int N, class MaskElement>
__device__ __forceinline__ void mask_fragment(const Head& head, const FragmentCoords& coords, const MaskElement& mask_element) {
    int begin[2], end[2];  // visible queries of each of the lane's two keys, relative to its first query
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Range rows = head.visible_queries(coords.key + 8 * half);
        begin[half] = rows.begin - coords.row, end[half] = rows.end - coords.row;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int row = k / 4 * 8 + k % 2, half = k / 2 % 2;
        if ((Head::LAST && row < begin[half]) || row >= end[half]) mask_element(k);
    }
}

// Stores a warp's P^T or dS^T (16 keys, 16 * STEPS queries) to shared memory, transposed: a row per query. `chunk` is the index of
// the first of its two 16-byte chunks (8 keys each) in a row.
template <class SmemLayout, int STEPS>
__device__ __forceinline__ void store_transposed(SmemAddr rows, unsigned chunk, const unsigned (&fragments)[STEPS][4]) {
    const unsigned lane = thread_index_x() % 32;  // recomputed to save a register
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const unsigned (&x)[4] = fragments[step];
        const SmemAddr to = rows + SmemLayout::chunk(16 * step + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
        stmatrix_x4_trans(to, x[0], x[1], x[2], x[3]);
    }
}

// Whether all elements are finite: 0 * inf and 0 * NaN are NaN.
template <int N>
__device__ __forceinline__ bool finite(const float (&accum)[N]) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) zero = fmaf(accum[i], 0.0f, zero);
    return zero == 0.0f;
}

// By a half-warp: copies LSE, as -LSE * log2(e), or delta of ROWS query rows to shared memory, every 16th row per lane. `rows`: valid
// rows from the lane's first row on. A large LSE becomes NaN, so that non_finite.cuh computes the gradients of its row.
template <int ROWS>
__device__ __forceinline__ void load_LSE_or_delta(float* to, const float* from, int rows, bool is_LSE) {
    float x[ROWS / 16];  // all loads are issued before the first store
#pragma unroll
    for (int t = 0; t < ROWS; t += 16) x[t / 16] = t < rows ? from[t] : is_LSE ? -INF : 0.0f;
#pragma unroll
    for (int t = 0; t < ROWS; t += 16)
        to[t] = !is_LSE || x[t / 16] == -INF ? x[t / 16] : -x[t / 16] * Head::LOG2E;  // no visible key: P is 0
    bool large = false;
#pragma unroll
    for (int t = 0; t < ROWS; t += 16) large |= fabsf(x[t / 16]) > Head::LARGE_LSE;
    if (large && is_LSE) {  // some LSE of the lane is large, or -INF
#pragma unroll
        for (int t = 0; t < ROWS; t += 16)
            if (Head::is_large(x[t / 16])) to[t] = NOT_A_NUMBER;
    }
}
