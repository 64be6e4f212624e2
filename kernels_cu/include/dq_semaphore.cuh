// The backward's work tiles (an n_block of a key/value head), and the semaphores that order the blocks which add to a dQ tile.
#pragma once
#include <hopper.cuh>
#include "tile_scheduler.cuh"
#include "score_mod.cuh"

// Layout of dQ_accum: the tile counter; at SEMAPHORES_AT a semaphore for each half of each query tile, which counts the work tiles
// that have added to it; the accumulators. These start at a multiple of 128 bytes, an L2 line, or of the 512 bytes that a warp
// adds at a time if consumers add by themselves.
// DETERMINISTIC: blocks add to a query tile in the order of their work tiles, and the first one stores. Only the counters have to
// be zeroed.
constexpr long long SEMAPHORES_AT = 4, ACCUM_ALIGNMENT = HEAD_DIM > 128 ? 128 : 32;
constexpr bool HAS_SEMAPHORES = DETERMINISTIC || (HEAD_DIM <= 128 && !(RAGGED && HEAD_DIM <= 64));  // ragged, D <= 64: 1% slower
__device__ __forceinline__ long long accumulators_at(long long query_tiles) {
    return HAS_SEMAPHORES ? (SEMAPHORES_AT + 2 * query_tiles + ACCUM_ALIGNMENT - 1) / ACCUM_ALIGNMENT * ACCUM_ALIGNMENT : 0;
}

// Not DETERMINISTIC: the first block to arrive stores, which saves zeroing and reading the accumulators. Blocks that arrive before
// this store is complete wait for it; the first block adds FIRST_STORED to the counter when it is. The first block never waits,
// so there is no deadlock.
constexpr bool FIRST_BLOCK_STORES = HAS_SEMAPHORES && !DETERMINISTIC;
constexpr unsigned FIRST_STORED = 1 << 16;
// Whether a block reads the counter before its dQ is ready. With a window or a block map, where few work tiles add to a query
// tile, this is 0.5% slower or spills.
constexpr bool SEMAPHORE_EARLY = FIRST_BLOCK_STORES && !Head::FIRST && !Head::MAPPED;

// The work tile of a block.
// RAGGED: by block index; the scheduler kernel has sorted the work tiles, longest first (tile_scheduler.cuh).
// L2_HEAD_GROUPS (causal, or DETERMINISTIC): the grid is (heads of a group, n_blocks, groups). Causal: the first n_blocks of a head
// have the longest m_block range. A group starts with the first n_block of all its heads, so that the short work tiles at the end
// balance the load; head by head, the longest work tiles of the last head would start when other blocks exit.
// DETERMINISTIC: blocks take work tiles by tile counter ticket, so that a block waits only for work tiles that have started.
// ALTERNATING (causal): groups alternate between two directions. In one the last n_blocks come first, and each work tile visits
// m_blocks upwards from its own diagonal: blocks that start together add to different query tiles, and the longest work tiles come
// last. In the next group, and in the last one, the first n_blocks come first, with m_blocks `descending`. In both, consecutive
// work tiles have similar length, also across groups, and a work tile reaches a query tile after those that precede it in the
// semaphore's order.
constexpr bool L2_HEAD_GROUPS = (Head::LAST || DETERMINISTIC) && !RAGGED;
constexpr bool ALTERNATING = DETERMINISTIC && Head::LAST && !Head::FIRST;  // with a window: always the last n_block first
struct BwdWorkTile {
    int key_tile, kv_head, b;
    bool descending = false;

    __device__ __forceinline__ BwdWorkTile(unsigned number, unsigned Hk, unsigned B)
        : key_tile(blockIdx.x), kv_head(blockIdx.y), b(blockIdx.z) {
        if (DETERMINISTIC) {
            const unsigned group_row = number / gridDim.x, head_group = group_row / gridDim.y;
            const unsigned head = head_group * gridDim.x + number % gridDim.x;
            key_tile = group_row % gridDim.y, kv_head = head % Hk, b = head / Hk;
            descending = ALTERNATING && (gridDim.z - head_group) % 2;
            if (Head::LAST && !descending) key_tile = gridDim.y - 1 - key_tile;
        } else if (L2_HEAD_GROUPS) {
            const unsigned head = blockIdx.z * gridDim.x + blockIdx.x;
            key_tile = blockIdx.y, kv_head = head % Hk, b = head / Hk;
        }
    }
#if RAGGED
    SeqlenOffsets extent;
    __device__ __forceinline__ BwdWorkTile(const volatile WorkTile& entry)
        : key_tile(uniform(entry.row0) / BLOCK_N), kv_head(uniform(entry.head)), b(uniform(entry.b)),
          extent{entry.extent.first_query, entry.extent.Sq, entry.extent.first_key, entry.extent.all_keys, entry.extent.Sk} {}
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b, extent); }
#else
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b); }
#endif
    // The value of the semaphore at which this work tile may add to query tile m0: the number of work tiles that precede it.
    __device__ __forceinline__ int semaphore_target(const Head& head, int m0) const {
        const Range keys = head.keys(m0, m0 + BLOCK_M);
        return Head::LAST && !descending ? (keys.end - 1) / BLOCK_N - key_tile : key_tile - (Head::FIRST ? keys.begin / BLOCK_N : 0);
    }
};
