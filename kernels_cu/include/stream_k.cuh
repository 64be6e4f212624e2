// Stream-K: the key tiles of work tiles that do not fill a wave are divided evenly over all blocks. A block has a range
// of them, from one work tile or several, and processes the last one first. The last block of a work tile finalizes it;
// by then the other blocks have usually stored their partial O.
#pragma once
#include <hopper.cuh>
#include "partial_O.cuh"

// Calls f(i, key tiles, first, continued) for the block's ranges of key tiles, of `keys` for each of `count` work
// tiles. i: the work tile; first: the first block that has key tiles of it; continued: whether the next block has some.
template <class F>
__device__ __forceinline__ void for_each_stream_k_range(unsigned count, unsigned keys, F f) {
    const unsigned split_tiles = count * keys, begin = blockIdx.x * split_tiles / gridDim.x;
#pragma unroll 1
    for (unsigned end = (blockIdx.x + 1) * split_tiles / gridDim.x; end > begin;) {
        const unsigned i = (end - 1) / keys, tile_begin = i * keys, from = max(begin, tile_begin);
        f(i, Range{static_cast<int>(from - tile_begin), static_cast<int>(end - tile_begin)},
          ((tile_begin + 1) * gridDim.x - 1) / split_tiles, end - tile_begin < keys);
        end = from;
    }
}

// The partial O of blocks that share a work tile: slot gridDim.x + block of `partials`, and one counter for each of at
// most four consumer warpgroups. STATE: its O, m and l, and rescale_to.
template <class State, int THREADS>
struct StreamKExchange {
    using Slot = PartialO<sizeof(State::O) / sizeof(float), THREADS>;
    float* const partials;
    const unsigned consumer;

    __device__ __forceinline__ Slot slot(unsigned block) const { return {partials, gridDim.x + block}; }
    __device__ __forceinline__ unsigned* counter(unsigned block) const {
        return reinterpret_cast<unsigned*>(partials) + 4 * block + consumer;
    }
    // Stores the partial O of a consumer warpgroup. `barrier`: a named barrier of its threads.
    __device__ __forceinline__ void publish(const State& softmax, unsigned barrier, bool leader) const {
        slot(blockIdx.x).store(softmax.O, softmax.m, softmax.l[0], softmax.l[1]);
        named_barrier_sync(barrier, 128);  // all 128 threads have stored their part
        if (leader) counter_arrive(counter(blockIdx.x));
    }
    // Adds the partial O of blocks first .. blockIdx.x - 1.
    __device__ __forceinline__ void merge(State& softmax, unsigned first, float exponent) const {
        float m_new[2] = {softmax.m[0], softmax.m[1]};
#pragma unroll 1
        for (unsigned block = first; block < blockIdx.x; ++block) {
            counter_wait(counter(block), 1);
            const float4 stored = slot(block).row_stats();
            m_new[0] = fmaxf(m_new[0], stored.x), m_new[1] = fmaxf(m_new[1], stored.y);
        }
        softmax.rescale_to(m_new, exponent);
#pragma unroll 1
        for (unsigned block = first; block < blockIdx.x; ++block)
            slot(block).add_to(softmax.O, softmax.m, softmax.l, exponent);
    }
};
