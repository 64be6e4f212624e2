// S^T = K Q^T as wgmma leaves it, 64 keys by queries for a warpgroup, and what a backward makes of it: P^T, dS^T.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

// The lane's elements of S^T of a query tile: element k belongs to a query and a key.
struct Place {
    int row, key;  // of element 0
    __device__ __forceinline__ Place(int first_query, int first_key) {
        const unsigned thread = thread_index_x() % 128;
        row = first_query + thread % 4 * 2, key = first_key + thread / 32 * 16 + thread / 4 % 8;
    }
    __device__ __forceinline__ ScoreIndex at(int k) const { return {row, key, k / 4 * 8 + k % 2, k / 2 % 2 * 8}; }
};

// Calls `hide` with those of the lane's elements of S^T, 2 N keys, whose query does not see their key.
template <int N, class Hide>
__device__ __forceinline__ void mask_fragment(const Head& head, const Place& place, const Hide& hide) {
    int begin[2], end[2];  // of the queries that see the lane's keys, from its first on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Range rows = head.visible_queries(place.key + 8 * half);
        begin[half] = rows.begin - place.row, end[half] = rows.end - place.row;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int row = k / 4 * 8 + k % 2, half = k / 2 % 2;
        if ((Head::LAST && row < begin[half]) || row >= end[half]) hide(k);
    }
}

// P^T or dS^T of a warp (16 keys, from chunk `chunk` on, times 16 * STEPS queries) to rows of queries in shared memory.
template <class Pairs, int STEPS>
__device__ __forceinline__ void store_transposed(SmemAddr rows, unsigned chunk, const unsigned (&pairs)[STEPS][4]) {
    const unsigned lane = thread_index_x() % 32;  // asked again: registers are few
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const unsigned (&x)[4] = pairs[step];
        const SmemAddr to = rows + Pairs::chunk(16 * step + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
        stmatrix_x4_trans(to, x[0], x[1], x[2], x[3]);
    }
}

template <int N>
__device__ __forceinline__ bool finite(const float (&sums)[N]) {
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) zero = fmaf(sums[i], 0.0f, zero);
    return zero == 0.0f;
}
