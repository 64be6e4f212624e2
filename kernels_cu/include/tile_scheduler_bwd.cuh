// Tile scheduler of bwd_wgmma: the work tile of a block, and the order of work tiles. A work tile is one n_block of a
// key/value head, or with SPLIT_GROUP (bwd_combine_group.cuh) of a query head.
#pragma once
#include <hopper.cuh>
#include "bwd_stream_k.cuh"
#include "longest_first.cuh"
#include "m_block_range.cuh"
#include "score_mod.cuh"

// The order of work tiles. To change it, edit the constructor of BwdWorkTile and, unless DETERMINISTIC,
// n_block_of_block (m_block_range.cuh calls it as well); the grid in sandbox/core/head_groups.py; and the conditions in
// bwd_wgmma.cu under which a block has no work tile. If DETERMINISTIC, semaphore_target must count the work tiles in
// the same order: otherwise blocks can deadlock.
//
// STREAM_K: whole work tiles in the order of blockIdx, then parts of work tiles (bwd_stream_k.cuh).
//
// RAGGED: entry blockIdx of the list that bwd_wgmma_scheduler has sorted, longest first (longest_first.cuh).
//
// L2_HEAD_GROUPS (causal, or DETERMINISTIC; here `group` is an L2 head group): the grid is (heads of a group, n_blocks,
// groups), so that the same n_block of all heads of a group starts together. Causal: the first n_blocks of a head have
// the most m_blocks and, unless DETERMINISTIC, start first; the short work tiles at the end of a group balance the
// load. Without groups, the heads would start one after the other: the longest work tiles of the last head would start
// when other SMs are already idle. Unless DETERMINISTIC, the groups start from the last heads to the first ones: a
// group with fewer heads than the others, and fewer short work tiles, is the first one.
//
// DETERMINISTIC: work tiles are numbered in this order. A block takes the next number from the tile counter when it
// starts, not its blockIdx, so that it waits only for work tiles that have started.
//
// ALTERNATING (DETERMINISTIC, causal): groups alternate between two orders. The last group is `descending`.
//
//   order          n_blocks start    lengths of work tiles    m_blocks are visited
//   ascending      last to first     shortest first           in ascending order, from the diagonal on
//   descending     first to last     longest first            in descending order
//
// A block waits at an m_block if it gets there before its predecessors, the blocks whose work tiles precede its own in
// the semaphore's order. Ascending: a block gets to an m_block in a later iteration than its predecessors (in the same
// iteration if both begin at row 0), so it rarely waits; blocks of one head that start together begin with different
// m_blocks. Descending: a block gets to an m_block of its first query head in the same iteration as its predecessors.
// With grouped heads, it gets to the m_blocks of a later head in an earlier iteration than its predecessors, because
// these have more m_blocks per head; then it waits. Because the two orders alternate, consecutive work tiles have
// similar lengths also where one group ends and the next begins.
constexpr bool L2_HEAD_GROUPS = (Head::HAS_RIGHT_BOUND || DETERMINISTIC) && !RAGGED;
// DETERMINISTIC, a window that has both bounds: every group is ascending. DETERMINISTIC without a right bound (no mask,
// or a left bound only): n_blocks start first to last, and m_blocks are visited in ascending order.
constexpr bool ALTERNATING = DETERMINISTIC && Head::HAS_RIGHT_BOUND && !Head::HAS_LEFT_BOUND;

struct BwdWorkTile {
    int n_block;    // index among those of a head
    int work_head;  // among the heads of b that have work tiles: a key/value head, or with SPLIT_GROUP a query head
    int b;
    bool descending = false;

    // The n_block of a block, if blockIdx determines it: neither RAGGED nor DETERMINISTIC. Index: BlockIndex, or
    // BlockIndexReread in MBlockRange.
    template <class Index>
    static __device__ __forceinline__ int n_block_of_block() {
        return L2_HEAD_GROUPS ? Index::y() : Index::x();
    }

    // number: the number of the work tile if DETERMINISTIC, otherwise unused. work_heads: heads of a batch entry that
    // have work tiles (work_tile_heads in bwd_combine_group.cuh).
    __device__ __forceinline__ BwdWorkTile(unsigned number, unsigned work_heads)
        : n_block(DETERMINISTIC ? 0 : n_block_of_block<BlockIndex>()), work_head(blockIdx.y), b(blockIdx.z) {
        if (DETERMINISTIC) {
            const unsigned group_row = number / gridDim.x, head_group = group_row / gridDim.y;
            const unsigned head = head_group * gridDim.x + number % gridDim.x;
            n_block = group_row % gridDim.y, work_head = head % work_heads, b = head / work_heads;
            descending = ALTERNATING && (gridDim.z - head_group) % 2;
            if (last_n_block_first()) n_block = gridDim.y - 1 - n_block;
        } else if (L2_HEAD_GROUPS) {
            const unsigned head = (gridDim.z - 1 - blockIdx.z) * gridDim.x + blockIdx.x;
            work_head = head % work_heads, b = head / work_heads;
        }
    }
#if RAGGED
    SequenceExtent extent;
    __device__ __forceinline__ BwdWorkTile(const volatile WorkTile& entry)
        : n_block(uniform(entry.row0) / BLOCK_N), work_head(uniform(entry.batch_head)), b(uniform(entry.b)),
          extent{entry.extent.first_query, entry.extent.Sq, entry.extent.first_key, entry.extent.all_keys,
                 entry.extent.Sk} {}
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b, extent); }
#else
    explicit __device__ __forceinline__ BwdWorkTile(const volatile WorkTilePart& part)
        : n_block(uniform(part.n_block)), work_head(uniform(part.kv_head)), b(uniform(part.b)) {}
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b); }
#endif
    // DETERMINISTIC: whether the work tiles of a head start, and add to dQ, from its last n_block to its first one.
    __device__ __forceinline__ bool last_n_block_first() const { return Head::HAS_RIGHT_BOUND && !descending; }
    // The value of the semaphore at which this work tile may add to the dQ tile of the m_block at row m0: the number of
    // work tiles that add to it earlier.
    __device__ __forceinline__ int semaphore_target(const Head& head, int m0) const {
        const Range keys = head.keys(m0, m0 + BLOCK_M);
        return last_n_block_first() ? (keys.end - 1) / BLOCK_N - n_block
                                    : n_block - (Head::HAS_LEFT_BOUND ? keys.begin / BLOCK_N : 0);
    }
};

// The block's work tile in shared memory, at `slot`: its number from the tile counter if DETERMINISTIC, its WorkTile if
// RAGGED. Written before the block's first __syncthreads.
__device__ __forceinline__ void fetch_tile_number(char* slot, float* dQ_accum) {  // by one thread
    if (DETERMINISTIC) *reinterpret_cast<unsigned*>(slot) = atomicAdd(reinterpret_cast<unsigned*>(dQ_accum), 1u);
}
// By a warp. work_tiles: output of bwd_wgmma_scheduler, 8 ints each.
__device__ __forceinline__ void copy_work_tile(char* slot, const int* work_tiles) {
    const int *const from = work_tiles + 8 * (blockIdx.y * gridDim.x + blockIdx.x), lane = threadIdx.x % 32;
    if (lane < 8) reinterpret_cast<int*>(slot)[lane] = from[lane];
}
__device__ __forceinline__ BwdWorkTile load_work_tile(const char* slot, unsigned work_heads) {
#if RAGGED
    return BwdWorkTile(*reinterpret_cast<const volatile WorkTile*>(slot));
#elif STREAM_K
    return BwdWorkTile(*reinterpret_cast<const volatile WorkTilePart*>(slot));
#else
    return BwdWorkTile(DETERMINISTIC ? uniform(*reinterpret_cast<const volatile unsigned*>(slot)) : 0, work_heads);
#endif
}
// Prefetches the work tile of the next block on this SM, which starts about one wave (132 blocks) later. Its number is
// not known: the warp prefetches approximately the work tiles from 64 to 191 after this one, each lane one line of 128
// bytes, which holds four.
__device__ __forceinline__ void prefetch_next_work_tile(const int* work_tiles) {
    const unsigned next = blockIdx.y * gridDim.x + blockIdx.x + 64 + 4 * (threadIdx.x % 32);
    prefetch_L1(work_tiles + 8 * min(next, gridDim.x * gridDim.y - 1));
}
