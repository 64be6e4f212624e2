// Ping-pong of consumer warpgroups (FlashAttention-3): while one uses the tensor cores, the others compute
// exponentials. Each consumer has a warp scheduler barrier. It waits there for its turn, issues the MMAs of one key
// tile, and arrives at the barrier of the next consumer.
#pragma once
#include "n_block_range.cuh"

// Named barriers: 1 .. CONSUMERS synchronise the 128 threads of one consumer; the next CONSUMERS are the warp scheduler
// barriers (FlashAttention-3's name; the tile scheduler does not use them). A turn has 256 threads: the consumer that
// waits, and the one before it, which arrives.
constexpr unsigned CONSUMER_BARRIER = 1, WARP_SCHEDULER_BARRIER = CONSUMER_BARRIER + CONSUMERS, TURN_THREADS = 2 * 128;

// The last consumer passes the first turn to the first one. Called once per block, by all consumers.
__device__ __forceinline__ void start_ping_pong(unsigned consumer) {
    if (CONSUMERS > 1 && consumer == CONSUMERS - 1) named_barrier_arrive(WARP_SCHEDULER_BARRIER, TURN_THREADS);
}
struct WarpSchedulerBarrier {
    const unsigned this_consumer, next_consumer;  // their warp scheduler barriers
    __device__ __forceinline__ explicit WarpSchedulerBarrier(unsigned consumer)
        : this_consumer(WARP_SCHEDULER_BARRIER + consumer),
          next_consumer(WARP_SCHEDULER_BARRIER + (consumer + 1) % CONSUMERS) {}
    __device__ __forceinline__ void wait() const { named_barrier_sync(this_consumer, TURN_THREADS); }
    __device__ __forceinline__ void pass() const { named_barrier_arrive(next_consumer, TURN_THREADS); }
};

// The consumers take turns for key tiles j < ping_pong_end, except for key tile 0, or with STAGGERED the first one of
// each consumer (first_tile_has_turn). ping_pong_end is:
//   STAGGERED: first_own plus the number of own key tiles of the consumer that has the fewest, so that all consumers
//   take equally many turns.
//   Four consumers (short sequences): the end of the first consumer's key tiles; 0 if the last consumer has no rows.
//   With a causal mask the first consumer finishes first, and the kernel is faster if it does not wait for the others:
//   +4% at S = 512 (with two or three consumers: -2 ... +1%).
//   Two or three consumers, or PACK_GQA, with which all consumers see the same key tiles: UNBOUNDED, all key tiles.
__device__ __forceinline__ int ping_pong_end(const ConsumerTiles& work_tile) {
    const Head& head = work_tile.head;
    if (STAGGERED) {
        int min_tiles = UNBOUNDED;
#pragma unroll
        for (int warpgroup_row = work_tile.row0; warpgroup_row < work_tile.row0 + BLOCK_M;
             warpgroup_row += WARPGROUP_ROWS) {
            const Range own_n_blocks = n_block_range(head, warpgroup_row, warpgroup_row + WARPGROUP_ROWS);
            min_tiles = min(min_tiles, warpgroup_row < head.Sq ? own_n_blocks.end - own_n_blocks.begin : 0);
        }
        return work_tile.first_own + min_tiles;
    }
    if (CONSUMERS < 4 || PACK_GQA) return CONSUMERS > 1 ? UNBOUNDED : 0;
    if (work_tile.row0 + BLOCK_M - WARPGROUP_ROWS >= head.Sq) return 0;  // the last consumer has no rows
    const Range first = n_block_range(head, work_tile.row0, work_tile.row0 + WARPGROUP_ROWS);
    const int tiles = first.end - first.begin;
    return work_tile.first_own_tile(first, tiles) + tiles;
}
