// The backward's work tiles (a work tile is one n_block of a key/value head), and the semaphores that order the blocks
// which add to a dQ tile.
#pragma once
#include <hopper.cuh>
#include "tile_scheduler.cuh"
#include "score_mod.cuh"

// Layout of dQ_accum: the tile counter (see draw_ticket); from SEMAPHORES_AT on two semaphores per query tile, one per
// consumer; the accumulators. These start at a multiple of ACCUM_ALIGNMENT floats: an L2 line (128 bytes), or, if
// consumers add to dQ_accum themselves (BLOCK_N = 64), the 512 bytes that a warp adds at a time.
// DETERMINISTIC: a semaphore counts the work tiles that have added to the consumer's half of the query tile. Blocks add
// to a query tile in the order of their work tiles. The first one stores, so that only the tile counter and the
// semaphores have to be zeroed.
constexpr long long SEMAPHORES_AT = 4, ACCUM_ALIGNMENT = BLOCK_N == 64 ? 128 : 32;
// Ragged, D <= 64: 1% slower with semaphores.
constexpr bool HAS_SEMAPHORES = DETERMINISTIC || (BLOCK_N == 128 && !(RAGGED && HEAD_DIM <= 64));
__device__ __forceinline__ long long accumulators_at(long long query_tiles) {
    return HAS_SEMAPHORES ? (SEMAPHORES_AT + 2 * query_tiles + ACCUM_ALIGNMENT - 1) / ACCUM_ALIGNMENT * ACCUM_ALIGNMENT
                          : 0;
}

// Not DETERMINISTIC: the first block that increments a tile's semaphore stores, so that the accumulators need not be
// zeroed or read. When its store is complete, it adds FIRST_STORED to the semaphore; blocks that arrive earlier wait
// for this. The first block never waits, so there is no deadlock.
constexpr bool FIRST_BLOCK_STORES = HAS_SEMAPHORES && !DETERMINISTIC;
constexpr unsigned FIRST_STORED = 1 << 16;
// Whether a block reads the semaphore before its dQ is ready. With a window or a block map, few work tiles add to a
// query tile, and this is 0.5% slower, or spills.
constexpr bool SEMAPHORE_EARLY = FIRST_BLOCK_STORES && !Head::HAS_LEFT_BOUND && !Head::MAPPED;

// A dQ-store warp reads the semaphore of its next tile while the store of dQ is in flight; one fence then serves as
// release of this tile and as acquire of the next (counter_arrive_acquire). 8% faster at D = 96; 0.7% slower at BLOCK_M
// = 128, where iterations are longer.
constexpr bool SEMAPHORE_PREFETCH = DETERMINISTIC && BLOCK_N == 128 && BLOCK_M == 64;

// The work tile of a block. The order of work tiles:
//
// RAGGED: entry blockIdx of the list that bwd_wgmma_scheduler has sorted, longest first (longest_first.cuh).
//
// L2_HEAD_GROUPS (causal, or DETERMINISTIC; here `group` is an L2 head group): the grid is (heads of a group, n_blocks,
// groups), so that the same n_block of all heads of a group starts together. Causal: the first n_blocks of a head have
// the most m_blocks and start first; the short work tiles at the end of a group balance the load. Without groups the
// heads would start one after the other, and the longest work tiles of the last head when other blocks already exit.
//
// DETERMINISTIC: blocks take work tiles in the order in which they draw tickets from the tile counter, not by blockIdx,
// so that a block waits only for work tiles that have started.
//
// ALTERNATING (DETERMINISTIC, causal): groups alternate between two orders. In one, the last n_blocks start first.
// Their work tiles are the shortest. A work tile visits its m_blocks in ascending order from the diagonal on, so that
// blocks that start together add to different query tiles. In the other order, the first n_blocks start first, and
// m_blocks are visited in descending order (`descending`); the last group has this order. In both, consecutive work
// tiles have similar lengths, also from one group to the next, and a work tile reaches a query tile after the work
// tiles that precede it in the semaphore's order.
constexpr bool L2_HEAD_GROUPS = (Head::HAS_RIGHT_BOUND || DETERMINISTIC) && !RAGGED;
constexpr bool ALTERNATING = DETERMINISTIC && Head::HAS_RIGHT_BOUND &&
                             !Head::HAS_LEFT_BOUND;  // with a window: the last n_block first in every group
struct BwdWorkTile {
    int key_tile, kv_head, b;  // key_tile: index of the n_block
    bool descending = false;

    // number: the block's ticket if DETERMINISTIC, otherwise unused.
    __device__ __forceinline__ BwdWorkTile(unsigned number, unsigned Hk, unsigned B)
        : key_tile(blockIdx.x), kv_head(blockIdx.y), b(blockIdx.z) {
        if (DETERMINISTIC) {
            const unsigned group_row = number / gridDim.x, head_group = group_row / gridDim.y;
            const unsigned head = head_group * gridDim.x + number % gridDim.x;
            key_tile = group_row % gridDim.y, kv_head = head % Hk, b = head / Hk;
            descending = ALTERNATING && (gridDim.z - head_group) % 2;
            if (Head::HAS_RIGHT_BOUND && !descending) key_tile = gridDim.y - 1 - key_tile;
        } else if (L2_HEAD_GROUPS) {
            const unsigned head = blockIdx.z * gridDim.x + blockIdx.x;
            key_tile = blockIdx.y, kv_head = head % Hk, b = head / Hk;
        }
    }
#if RAGGED
    SeqlenOffsets extent;
    __device__ __forceinline__ BwdWorkTile(const volatile WorkTile& entry)
        : key_tile(uniform(entry.row0) / BLOCK_N), kv_head(uniform(entry.head)), b(uniform(entry.b)),
          extent{entry.extent.first_query, entry.extent.Sq, entry.extent.first_key, entry.extent.all_keys,
                 entry.extent.Sk} {}
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b, extent); }
#else
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b); }
#endif
    // The value of the semaphore at which this work tile may add to the query tile that begins at row m0: the number of
    // work tiles that add to it earlier.
    __device__ __forceinline__ int semaphore_target(const Head& head, int m0) const {
        const Range keys = head.keys(m0, m0 + BLOCK_M);
        return Head::HAS_RIGHT_BOUND && !descending ? (keys.end - 1) / BLOCK_N - key_tile
                                                    : key_tile - (Head::HAS_LEFT_BOUND ? keys.begin / BLOCK_N : 0);
    }
};

// The block's work tile in shared memory, at `slot`: its ticket from the tile counter if DETERMINISTIC, its WorkTile if
// RAGGED. Written before the block's first __syncthreads.
__device__ __forceinline__ void draw_ticket(char* slot, float* dQ_accum) {  // by one thread
    if (DETERMINISTIC) *reinterpret_cast<unsigned*>(slot) = atomicAdd(reinterpret_cast<unsigned*>(dQ_accum), 1u);
}
// By a warp. work_tiles: output of bwd_wgmma_scheduler, 8 ints each.
__device__ __forceinline__ void copy_work_tile(char* slot, const int* work_tiles) {
    const int *const from = work_tiles + 8 * (blockIdx.y * gridDim.x + blockIdx.x), lane = threadIdx.x % 32;
    if (lane < 8) reinterpret_cast<int*>(slot)[lane] = from[lane];
}
__device__ __forceinline__ BwdWorkTile load_work_tile(const char* slot, unsigned Hk, unsigned B) {
#if RAGGED
    return BwdWorkTile(*reinterpret_cast<const volatile WorkTile*>(slot));
#else
    return BwdWorkTile(DETERMINISTIC ? uniform(*reinterpret_cast<const volatile unsigned*>(slot)) : 0, Hk, B);
#endif
}
// Prefetches the work tile of the next block on this SM: usually one of the 128 that are 64 .. 191 after this one. Each
// lane prefetches four, a 128-byte line.
__device__ __forceinline__ void prefetch_next_work_tile(const int* work_tiles) {
    const unsigned next = blockIdx.y * gridDim.x + blockIdx.x + 64 + 4 * (threadIdx.x % 32);
    prefetch_L1(work_tiles + 8 * min(next, gridDim.x * gridDim.y - 1));
}

// Orders the additions of one dQ-store warp to its consumer's halves of dQ tiles. For each tile, in this order:
// acquire, ready, the store or addition, release. Block: see BwdBlock.
template <class Block>
struct dQOrder {
    const Block& block;
    bool semaphore_reached = false;  // whether the next tile's semaphore has reached its target: SEMAPHORE_PREFETCH
    bool already_stored, first;      // whether another block has stored already; whether this block stores

    // While the consumer computes dQ.
    __device__ __forceinline__ void acquire(int head, int m0, unsigned consumer) {
        if (DETERMINISTIC && !(SEMAPHORE_PREFETCH && semaphore_reached))
            counter_wait(block.dQ_semaphore(head, m0, consumer), block.semaphore_target(m0));
        // Usually another block has stored already; reading the counter early hides its latency.
        already_stored = SEMAPHORE_EARLY && counter_reached(block.dQ_semaphore(head, m0, consumer), FIRST_STORED);
    }
    // When dQ is ready. Returns true if the block has to store dQ, false if it has to add dQ.
    __device__ __forceinline__ bool ready(int head, int m0, unsigned consumer) {
        first = DETERMINISTIC && block.semaphore_target(m0) == 0;
        // The counter is incremented only when dQ is ready, so that the first block never waits.
        if (FIRST_BLOCK_STORES && !already_stored) {
            const unsigned arrived_before = counter_fetch_add(block.dQ_semaphore(head, m0, consumer));
            first = arrived_before == 0;
            if (!first && arrived_before < FIRST_STORED)
                counter_wait(block.dQ_semaphore(head, m0, consumer), FIRST_STORED);
        }
        return first;
    }
    // After the store or addition, which TMA may not have completed.
    __device__ __forceinline__ void release(int head, int m0, unsigned consumer) {
        if (DETERMINISTIC && !SEMAPHORE_PREFETCH) tma_store_wait_complete();
        if (SEMAPHORE_PREFETCH) {
            int next_head = head, next_m0 = block.m_blocks.next(m0);
            block.m_blocks.seek(next_head, next_m0);
            if (next_head == block.group) next_head = head, next_m0 = m0;  // after the last tile: a valid address
            const unsigned semaphore_value = counter_load(block.dQ_semaphore(next_head, next_m0, consumer));
            tma_store_wait_complete();
            counter_arrive_acquire(block.dQ_semaphore(head, m0, consumer));
            semaphore_reached = semaphore_value >= block.semaphore_target(next_m0);
        }
        if (FIRST_BLOCK_STORES && first) {
            tma_store_wait_complete();
            counter_arrive(block.dQ_semaphore(head, m0, consumer), FIRST_STORED);
        }
        if (DETERMINISTIC && !SEMAPHORE_PREFETCH) counter_arrive(block.dQ_semaphore(head, m0, consumer));
    }
};
