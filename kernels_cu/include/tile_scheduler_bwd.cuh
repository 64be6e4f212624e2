// Tile scheduler of bwd_wgmma: the work tile of a block, and the order of work tiles. A work tile is one n_block of a
// key/value head, or with SPLIT_GROUP (bwd_combine_group.cuh) of a query head.
#pragma once
#include <hopper.cuh>
#include "longest_first.cuh"
#include "score_mod.cuh"

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
    int n_block;    // index among those of a head
    int work_head;  // among the heads of b that have work tiles: a key/value head, or with SPLIT_GROUP a query head
    int b;
    bool descending = false;

    // number: the block's ticket if DETERMINISTIC, otherwise unused. work_heads: see work_tile_heads.
    __device__ __forceinline__ BwdWorkTile(unsigned number, unsigned work_heads, unsigned B)
        : n_block(blockIdx.x), work_head(blockIdx.y), b(blockIdx.z) {
        if (DETERMINISTIC) {
            const unsigned group_row = number / gridDim.x, head_group = group_row / gridDim.y;
            const unsigned head = head_group * gridDim.x + number % gridDim.x;
            n_block = group_row % gridDim.y, work_head = head % work_heads, b = head / work_heads;
            descending = ALTERNATING && (gridDim.z - head_group) % 2;
            if (Head::HAS_RIGHT_BOUND && !descending) n_block = gridDim.y - 1 - n_block;
        } else if (L2_HEAD_GROUPS) {
            const unsigned head = blockIdx.z * gridDim.x + blockIdx.x;
            n_block = blockIdx.y, work_head = head % work_heads, b = head / work_heads;
        }
    }
#if RAGGED
    SeqlenOffsets extent;
    __device__ __forceinline__ BwdWorkTile(const volatile WorkTile& entry)
        : n_block(uniform(entry.row0) / BLOCK_N), work_head(uniform(entry.head)), b(uniform(entry.b)),
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
        return Head::HAS_RIGHT_BOUND && !descending ? (keys.end - 1) / BLOCK_N - n_block
                                                    : n_block - (Head::HAS_LEFT_BOUND ? keys.begin / BLOCK_N : 0);
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
__device__ __forceinline__ BwdWorkTile load_work_tile(const char* slot, unsigned work_heads, unsigned B) {
#if RAGGED
    return BwdWorkTile(*reinterpret_cast<const volatile WorkTile*>(slot));
#else
    return BwdWorkTile(DETERMINISTIC ? uniform(*reinterpret_cast<const volatile unsigned*>(slot)) : 0, work_heads, B);
#endif
}
// Prefetches the work tile of the next block on this SM: usually one of the 128 that are 64 .. 191 after this one. Each
// lane prefetches four, a 128-byte line.
__device__ __forceinline__ void prefetch_next_work_tile(const int* work_tiles) {
    const unsigned next = blockIdx.y * gridDim.x + blockIdx.x + 64 + 4 * (threadIdx.x % 32);
    prefetch_L1(work_tiles + 8 * min(next, gridDim.x * gridDim.y - 1));
}
