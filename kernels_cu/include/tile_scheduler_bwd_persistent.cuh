// Tile scheduler of bwd_wgmma_persistent: dynamic. One warp fetches the work tiles of the block and publishes them in
// shared memory, where the other warps read them.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

// COUNT values of type T at byte AT of shared memory, written by one warp and read by others. They are volatile: a warp
// with few registers reads a value again instead of keeping it.
template <class T, unsigned AT, unsigned COUNT>
struct Published {
    static constexpr unsigned END = AT + COUNT * sizeof(T);
    static __device__ __forceinline__ volatile T& at(char* smem, unsigned i) {
        return reinterpret_cast<volatile T*>(smem + AT)[i];
    }
};

// A work tile: its keys, its m_block range, and the rows to which all 64 keys of a consumer are visible.
struct PersistentWorkTile {
    int n_block, kv_head, b;  // b < 0: invalid
    int begin, end;           // m_block range in query rows; begin is a multiple of BLOCK_M
    Range fully_visible[2];

    __device__ __forceinline__ void publish(volatile PersistentWorkTile& slot) const {
        slot.n_block = n_block;
        slot.kv_head = kv_head;
        slot.b = b;
        slot.begin = begin;
        slot.end = end;
        for (int consumer = 0; consumer < 2; ++consumer) {
            slot.fully_visible[consumer].begin = fully_visible[consumer].begin;
            slot.fully_visible[consumer].end = fully_visible[consumer].end;
        }
    }
};

// Work tile `number`. Causal: the first n_blocks of a head have the longest m_block range. Work tiles are in L2 head
// groups, first n_blocks first, as in tile_scheduler_bwd.cuh; a group has one wave of work tiles, or half a wave if a
// head has at most four n_blocks, and the first group the heads that are left.
__device__ __forceinline__ PersistentWorkTile work_tile_of(unsigned number, const Score& score, unsigned Hk,
                                                           unsigned B) {
    const unsigned key_tiles = (opaque(score.Sk) + BLOCK_N - 1) / BLOCK_N, heads = opaque(Hk) * B;
    unsigned width = 1, first_heads = 0;  // heads of an L2 head group; of the first group, if they are fewer
    if (Head::HAS_RIGHT_BOUND) {
        const unsigned wave = key_tiles > 4 ? BLOCKS : (BLOCKS + 1) / 2;
        const unsigned groups = min(max((heads * key_tiles + wave / 2) / wave, 1u), heads);
        width = (heads + groups - 1) / groups, first_heads = heads % width;
    }
    const bool in_first = number < first_heads * key_tiles;
    const unsigned after_first = number - first_heads * key_tiles,
                   first = in_first ? 0 : first_heads + after_first / (width * key_tiles) * width,
                   group_heads = in_first ? first_heads : width;
    const unsigned index = number - first * key_tiles, head = first + index % group_heads;
    PersistentWorkTile work_tile{static_cast<int>(index / group_heads), static_cast<int>(head % Hk),
                                 number < heads * key_tiles ? static_cast<int>(head / Hk) : -1};
    if (work_tile.b < 0) return work_tile;
    const SeqlenInfo sequence(score, work_tile.b);
    const Head any_head(sequence, 0);  // the mask does not depend on the head
    const int n0 = work_tile.n_block * BLOCK_N;
    const Range queries = any_head.queries(n0, n0 + BLOCK_N);
    work_tile.begin = queries.begin / BLOCK_M * BLOCK_M, work_tile.end = queries.end;
    for (int consumer = 0; consumer < 2; ++consumer)
        work_tile.fully_visible[consumer] =
            any_head.fully_visible_queries<true>(n0 + 64 * consumer, n0 + 64 * consumer + 64);
    return work_tile;
}

// The loop over the m_blocks of a published work tile, for each query head of the group. The range is read from shared
// memory in each step. Without a mask the loop starts at row n0 and wraps around, so that the blocks of a head rarely
// wait for a first store (ROTATED in bwd_wgmma_tiles.cuh).
struct MBlockLoop {
    static constexpr bool ROTATED = !Head::HAS_LEFT_BOUND && !Head::HAS_RIGHT_BOUND;
    int head, m0;  // head within the group and first row; head = group after the last m_block

    __device__ __forceinline__ MBlockLoop(const volatile PersistentWorkTile& work_tile, int group)
        : m0(first(work_tile)) {
        head = m0 < work_tile.end ? 0 : group;
    }
    static __device__ __forceinline__ int first(const volatile PersistentWorkTile& work_tile) {
        if (!ROTATED) return work_tile.begin;
        const int n0 = work_tile.n_block * BLOCK_N;
        return n0 < work_tile.end ? n0 : 0;
    }
    __device__ __forceinline__ void next(const volatile PersistentWorkTile& work_tile) {
        m0 += BLOCK_M;
        if (ROTATED) {
            if (m0 >= work_tile.end) m0 = 0;
            if (m0 == first(work_tile)) ++head;
        } else if (m0 >= work_tile.end) ++head, m0 = work_tile.begin;
    }
};
