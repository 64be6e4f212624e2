// Which query tiles a block of a backward visits that owns BLOCK_N keys: of each head of its group those that see something of the
// keys, by ranges or by a block map. As tile_scheduler.cuh, the other way round.
#pragma once
#include "score_mod.cuh"

// Of the block map what concerns a block's keys, in shared memory: a bit for each query tile of each head of a group.
struct GroupBlockMap {
    static constexpr unsigned MAP_WORDS = 128;

    unsigned some_visible[MAP_WORDS], fully_visible[MAP_WORDS];  // of the keys is seen

    static __device__ __forceinline__ int words(const Score& score) { return (score.Sq + 32 * BLOCK_M - 1) / (32 * BLOCK_M); }

    // By all WARPS warps of the block. Heads are those from `first_head` on.
    template <unsigned WARPS>
    __device__ __forceinline__ void fill(const SeqlenInfo& sequence, int first_head, int group, int n0) {
        const Score& score = sequence.score;
        for (int word = threadIdx.x / 32; word < group * words(score); word += WARPS) {
            const Head head(sequence, first_head + word / words(score));
            const int m0 = (word % words(score) * 32 + threadIdx.x % 32) * BLOCK_M;
            static_assert(BLOCK_M % 64 == 0, "the map has a row for every 64 queries");
            bool some = false, every = true;
#pragma unroll
            for (int i = 0; i < BLOCK_M / 64; ++i) {
                const Head::MapTile own = head.map_tile<BLOCK_N>(m0 + 64 * i, n0);
                some |= own.some_visible, every &= own.fully_visible;
            }
            some_visible[word] = __ballot_sync(0xffffffffu, some);
            fully_visible[word] = __ballot_sync(0xffffffffu, every);
        }
    }
};

// The query tiles that see something of a block's keys: rows `begin`, `begin` + BLOCK_M ... before `end`, of each of `group` heads;
// where there is a block map, those that it leaves.
// Whether n0 is kept in a register; whether it goes from the row of its number round to it; whether key tiles are the grid's y;
// whether some walks go `down`.
template <bool KEPT_N0, bool ROUND, bool ABREAST, bool BOTH_WAYS = false>
struct MBlockRange {
    const Head& head0;  // of the group's first head: what keys are seen by does not depend on the head
    const GroupBlockMap& map;
    const int group, row0;
    const bool down = false;  // from the last tile of each head to the first: BOTH_WAYS, and then neither ROUND nor by a map

    // Computed anew each time it is asked for, unless it is kept: then it takes a register that the accumulators may need.
    __device__ __forceinline__ int n0() const {
        return KEPT_N0 ? row0 : static_cast<int>(ABREAST ? block_index_y() : block_index_x()) * BLOCK_N;
    }
    __device__ __forceinline__ int begin() const { return head0.queries(n0(), n0() + BLOCK_N).begin / BLOCK_M * BLOCK_M; }
    __device__ __forceinline__ int end() const { return head0.queries(n0(), n0() + BLOCK_N).end; }

    __device__ __forceinline__ bool backwards() const {
        if constexpr (BOTH_WAYS) return down;
        return false;
    }
    // Where the walk of a head begins.
    __device__ __forceinline__ int first() const {
        if (backwards()) return (end() - 1) / BLOCK_M * BLOCK_M;
        return !ROUND ? begin() : n0() < end() ? n0() / BLOCK_M * BLOCK_M : 0;
    }

    // Where it ends, if there is a tile.
    __device__ __forceinline__ int stop() const {
        return backwards() ? begin() - BLOCK_M : (end() + BLOCK_M - 1) / BLOCK_M * BLOCK_M;
    }

    // The tile behind m0, or a row where there is none.
    __device__ __forceinline__ int next(int m0) const { return backwards() ? m0 - BLOCK_M : m0 + BLOCK_M; }

    // From row m0 of a head of the group on, the next tile; or head = group: there is none.
    __device__ __forceinline__ void find(int& head, int& m0) const {
        if (!Head::MAPPED) {
            if (BOTH_WAYS ? m0 == stop() : m0 >= end()) head += !ROUND, m0 = ROUND ? begin() : first();
            if (ROUND && m0 == first()) ++head;
            return;
        }
        const int words = GroupBlockMap::words(head0.score);
#pragma unroll 1
        for (; head < group; ++head, m0 = begin())
#pragma unroll 1
            for (unsigned first = m0 / BLOCK_M; static_cast<int>(first * BLOCK_M) < end(); first = (first / 32 + 1) * 32) {
                const unsigned left = map.some_visible[head * words + first / 32] & ~0u << first % 32;
                if (!left) continue;
                m0 = (first / 32 * 32 + __ffs(left) - 1) * BLOCK_M;
                if (m0 < end()) return;
            }
    }
    // The first tile.
    __device__ __forceinline__ void start(int& head, int& m0) const {
        m0 = first(), head = (BOTH_WAYS ? begin() : m0) < end() ? 0 : group;
        if (Head::MAPPED) find(head, m0);
    }
    // Whether all rows of a tile may see all of the block's keys, as far as the map tells.
    __device__ __forceinline__ bool whole(int head, int m0) const {
        if (!Head::MAPPED) return !Head::ELEMENT_MASK;
        const unsigned tile = m0 / BLOCK_M;
        return map.fully_visible[head * GroupBlockMap::words(head0.score) + tile / 32] >> tile % 32 & 1;
    }

    // Calls f(i, head of the group, m0) with each, i counting.
    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        int head, m0;
        start(head, m0);
#pragma unroll 1
        for (unsigned i = 0; head < group; m0 = next(m0), find(head, m0)) f(i++, head, m0);
    }
};
