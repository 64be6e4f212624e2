// Stream-K: the key tiles of work tiles that do not fill a wave are divided evenly over all blocks. A block has a range
// of them, from one work tile or several, and processes the last one first. The last block of a work tile finalizes it;
// by then the other blocks have usually stored their partial O. The ranges are numbered. A block draws the number of
// its range, a ticket, at the latest when it begins the range: it then waits only for blocks that run, in whatever
// order the GPU starts them.
#pragma once
#include <hopper.cuh>
#include "partial_O.cuh"

// Calls f(i, range, first) for the ranges of key tiles of block `block` (its ticket); each of the `count` work tiles
// has `key_tiles` of them. i: the work tile; first: the first block that has key tiles of it.
template <class F>
__device__ __forceinline__ void for_each_stream_k_range(unsigned block, unsigned count, unsigned key_tiles, F f) {
    const unsigned all_key_tiles = count * key_tiles, begin = block * all_key_tiles / gridDim.x;
#pragma unroll 1
    for (unsigned end = (block + 1) * all_key_tiles / gridDim.x; end > begin;) {
        const unsigned i = (end - 1) / key_tiles, tile_begin = i * key_tiles, from = max(begin, tile_begin);
        f(i, Range{static_cast<int>(from - tile_begin), static_cast<int>(end - tile_begin)},
          ((tile_begin + 1) * gridDim.x - 1) / all_key_tiles);
        end = from;
    }
}

// Sets the counters of a persistent kernel to 0; one thread for each of its blocks.
__device__ __forceinline__ void clear_stream_k_counters(float* partials) {
    reinterpret_cast<uint4*>(partials)[threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// A ticket. Its counter is the fourth of block 0, which has no fourth consumer.
__device__ __forceinline__ unsigned draw_ticket(float* partials) {
    return atomicAdd(reinterpret_cast<unsigned*>(partials) + 3, 1u);
}

// The partial O of blocks that share a work tile: slot first_slot + block of `partials`, and one counter for each of at
// most three consumer warpgroups. State: its O, m and l, and rescale_to.
template <class State, int THREADS>
struct StreamKExchange {
    using Slot = PartialO<sizeof(State::O) / sizeof(float), THREADS>;
    float* const partials;
    const unsigned consumer, first_slot;

    __device__ __forceinline__ Slot slot(unsigned block) const { return {partials, first_slot + block}; }
    __device__ __forceinline__ unsigned* counter(unsigned block) const {
        return reinterpret_cast<unsigned*>(partials) + 4 * block + consumer;
    }
    // Stores the partial O of a consumer warpgroup. `barrier`: a named barrier of its threads.
    __device__ __forceinline__ void publish(const State& softmax, unsigned block, unsigned barrier, bool leader) const {
        slot(block).store(softmax.O, softmax.m, softmax.l[0], softmax.l[1]);
        named_barrier_sync(barrier, 128);  // all 128 threads have stored their part
        if (leader) counter_arrive(counter(block));
    }
    // Adds the partial O of blocks first .. end - 1.
    __device__ __forceinline__ void merge(State& softmax, unsigned first, unsigned end, float scale_log2) const {
        float m_new[2] = {softmax.m[0], softmax.m[1]};
#pragma unroll 1
        for (unsigned block = first; block < end; ++block) {
            counter_wait(counter(block), 1);
            const float4 stored = slot(block).row_stats();
            m_new[0] = fmaxf(m_new[0], stored.x), m_new[1] = fmaxf(m_new[1], stored.y);
        }
        softmax.rescale_to(m_new, scale_log2);
#pragma unroll 1
        for (unsigned block = first; block < end; ++block)
            slot(block).add_to(softmax.O, softmax.m, softmax.l, scale_log2);
    }
};
