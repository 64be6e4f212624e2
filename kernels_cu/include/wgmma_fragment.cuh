// Fragments of wgmma accumulators: the transposed store.
#pragma once
#include <hopper.cuh>

// Stores a warp's P^T or dS^T (16 keys, 16 * STEPS queries) to shared memory, transposed: a row per query. `chunk` is
// the index of the first of its two 16-byte chunks (8 keys each) in a row.
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
