// The semaphores of bwd_wgmma and bwd_wgmma_persistent, two per dQ tile: which block stores first and, if
// DETERMINISTIC, in which order the others add.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

// dQ_accum, in elements of 4 bytes:
//
//   0                     tile counter, used only if DETERMINISTIC (fetch_tile_number) and in bwd_wgmma_persistent
//   SEMAPHORES_INDEX      two semaphores per dQ tile, one per consumer
//   accumulators_index    the dQ tiles (bwd_tiles.cuh), aligned to ACCUM_ALIGNMENT: an L2 line of 128 bytes or, if
//                         the consumers themselves may add dQ (BLOCK_N = 64), the 512 bytes that a warp adds at a time
//
// Only the tile counter and the semaphores are zeroed, because the first block stores. Without HAS_SEMAPHORES dQ_accum
// has only the dQ tiles, which are zeroed, and all blocks add.
//
// DETERMINISTIC: a semaphore counts the work tiles that have added to the consumer's part of the dQ tile. Blocks add in
// the order of their work tiles.
constexpr long long SEMAPHORES_INDEX = 4, ACCUM_ALIGNMENT = BLOCK_N == 64 ? 128 : 32;
// ZEROED_DQ: see zeroed_dQ in bwd_wgmma.py.
#ifndef ZEROED_DQ
#define ZEROED_DQ 0
#endif
constexpr bool HAS_SEMAPHORES = DETERMINISTIC || !ZEROED_DQ;
// Index: int in the store warps of bwd_wgmma_persistent, which have few registers.
template <class Index>
__device__ __forceinline__ long long semaphore_index(Index dQ_tile, unsigned consumer) {
    return SEMAPHORES_INDEX + 2 * dQ_tile + consumer;
}
__device__ __forceinline__ long long accumulators_index(long long dQ_tiles) {
    return HAS_SEMAPHORES ? (SEMAPHORES_INDEX + 2 * dQ_tiles + ACCUM_ALIGNMENT - 1) / ACCUM_ALIGNMENT * ACCUM_ALIGNMENT
                          : 0;
}

// Not DETERMINISTIC: there is no order, but the first block that increments a tile's semaphore stores, so that the
// accumulators need not be zeroed or read. When its store is complete, it adds FIRST_STORED to the semaphore; blocks
// that arrive earlier wait for this. The first block never waits (BLOCK_N = 64: see finish_previous_dQ in
// bwd_consumer_wide.cuh), so there is no deadlock. Bits 0 to 15 of the
// semaphore count the blocks that have incremented it. The count does not reach FIRST_STORED before the first store is
// complete: until then each of these blocks waits, so the count is at most the number of resident blocks.
constexpr bool FIRST_BLOCK_STORES = HAS_SEMAPHORES && !DETERMINISTIC;
constexpr unsigned FIRST_STORED = 1 << 16;
// Called when dQ is ready. Whether this block is the first to arrive at the semaphore, so that it stores; if not, waits
// until the first block has stored.
__device__ __forceinline__ bool arrive_first(unsigned* semaphore) {
    const unsigned arrived_before = counter_fetch_add(semaphore);
    const bool first = arrived_before == 0;
    if (!first && arrived_before < FIRST_STORED) counter_wait(semaphore, FIRST_STORED);
    return first;
}
// Called by the first block after its store, which TMA may not have completed.
__device__ __forceinline__ void signal_first_store(unsigned* semaphore) {
    tma_store_wait_complete();
    counter_arrive(semaphore, FIRST_STORED);
}
// Whether a block reads the semaphore before its dQ is ready. With a left bound (window) or a block map, few work tiles
// add to a dQ tile, and this is 0.5% slower, or spills. bwd_wgmma_persistent always does.
constexpr bool SEMAPHORE_EARLY = FIRST_BLOCK_STORES && !Head::HAS_LEFT_BOUND && !Head::HAS_BLOCK_MAP;

// A dQ-store warp reads the semaphore of its next tile while the store of dQ is in flight; one fence then serves as
// release of this tile and as acquire of the next (counter_arrive_acquire). 8% faster at D = 96; 0.7% slower at BLOCK_M
// = 128, where iterations are longer.
constexpr bool SEMAPHORE_PREFETCH = DETERMINISTIC && BLOCK_N == 128 && BLOCK_M == 64;

// Decides when a dQ-store warp may write its consumer's part of a dQ tile, and whether it stores or adds this part. For
// each tile, in this order: wait_turn, claim_first_store, the store or addition, signal_done. Block: see BwdBlock
// (bwd_wgmma_tiles.cuh).
template <class Block>
struct dQAccumulation {
    const Block& block;
    bool semaphore_reached = false;  // whether the next tile's semaphore has reached its target: SEMAPHORE_PREFETCH
    bool already_stored;             // another block has stored already
    bool this_block_stores;          // instead of adding

    // Called while the consumer computes dQ. DETERMINISTIC: waits for the additions that precede this one.
    __device__ __forceinline__ void wait_turn(int head, int m0, unsigned consumer) {
        if (DETERMINISTIC && !(SEMAPHORE_PREFETCH && semaphore_reached))
            counter_wait(block.dQ_semaphore(head, m0, consumer), block.semaphore_target(m0));
        // Usually another block has stored already; reading the semaphore early hides its latency.
        already_stored = SEMAPHORE_EARLY && counter_reached(block.dQ_semaphore(head, m0, consumer), FIRST_STORED);
    }
    // Called when dQ is in shared memory. Returns whether the block stores dQ; otherwise it adds dQ. Not DETERMINISTIC:
    // arrives at the semaphore and, if another block's store is not complete, waits for it.
    __device__ __forceinline__ bool claim_first_store(int head, int m0, unsigned consumer) {
        this_block_stores = DETERMINISTIC && block.semaphore_target(m0) == 0;
        // The semaphore is incremented only when dQ is ready, so that the first block never waits.
        if (FIRST_BLOCK_STORES && !already_stored)
            this_block_stores = arrive_first(block.dQ_semaphore(head, m0, consumer));
        return this_block_stores;
    }
    // Called after the store or addition, which TMA may not have completed.
    __device__ __forceinline__ void signal_done(int head, int m0, unsigned consumer) {
        if (DETERMINISTIC && !SEMAPHORE_PREFETCH) tma_store_wait_complete();
        if (SEMAPHORE_PREFETCH) {
            int next_head = head, next_m0 = block.m_blocks.next(m0);
            block.m_blocks.seek(next_head, next_m0);
            if (next_head == block.heads_per_work_tile)
                next_head = head, next_m0 = m0;  // after the last tile: a valid address
            const unsigned semaphore_value = counter_load(block.dQ_semaphore(next_head, next_m0, consumer));
            tma_store_wait_complete();
            counter_arrive_acquire(block.dQ_semaphore(head, m0, consumer));
            semaphore_reached = semaphore_value >= block.semaphore_target(next_m0);
        }
        if (FIRST_BLOCK_STORES && this_block_stores) signal_first_store(block.dQ_semaphore(head, m0, consumer));
        if (DETERMINISTIC && !SEMAPHORE_PREFETCH) counter_arrive(block.dQ_semaphore(head, m0, consumer));
    }
};
