// The m_blocks of a backward work tile: for each of its query heads, the m_blocks to which some key of the n_block is
// visible. These are the m_blocks in the mask's range of query rows, except those that the block map (if there is one)
// hides.
#pragma once
#include "score_mod.cuh"

// The column of the block map for one n_block, in shared memory: a some_visible and a fully_visible bit (block_map.cuh)
// per m_block of each head of the work tile.
struct GroupBlockMap {
    static constexpr unsigned MAP_WORDS = 128;

    unsigned some_visible[MAP_WORDS], fully_visible[MAP_WORDS];

    static __device__ __forceinline__ int words_per_head(const Score& score) {
        return (score.Sq + 32 * BLOCK_M - 1) / (32 * BLOCK_M);
    }

    // Called by all WARPS warps of the block. first_head: first query head of the work tile; n0: first key of the
    // n_block.
    template <unsigned WARPS>
    __device__ __forceinline__ void fill(const SeqlenInfo& sequence, int first_head, int heads, int n0) {
        const Score& score = sequence.score;
        for (int word = threadIdx.x / 32; word < heads * words_per_head(score); word += WARPS) {
            const Head head(sequence, first_head + word / words_per_head(score));
            const int m0 = (word % words_per_head(score) * 32 + threadIdx.x % 32) * BLOCK_M;
            static_assert(BLOCK_M % 64 == 0, "the block map has one row per 64 queries");
            bool some = false, every = true;
#pragma unroll
            for (int i = 0; i < BLOCK_M / 64; ++i) {
                const Head::MapTile tile = head.map_tile<BLOCK_N>(m0 + 64 * i, n0);
                some |= tile.some_visible, every &= tile.fully_visible;
            }
            some_visible[word] = __ballot_sync(0xffffffffu, some);
            fully_visible[word] = __ballot_sync(0xffffffffu, every);
        }
    }
};

// BlockIndex: blockIdx, kept in a register. BlockIndexReread: read from the special register at each call.
struct BlockIndex {
    static __device__ __forceinline__ unsigned x() { return blockIdx.x; }
    static __device__ __forceinline__ unsigned y() { return blockIdx.y; }
};
struct BlockIndexReread {
    static __device__ __forceinline__ unsigned x() { return block_index_x(); }
    static __device__ __forceinline__ unsigned y() { return block_index_y(); }
};

// Iterates over the m_blocks of each of `heads` query heads. `m0` is the first row of an m_block: from begin(), in
// steps of BLOCK_M, before end(), without those that the block map excludes. first, next, past_last and seek define the
// order.
//
//   N0_IN_REGISTER        n0, the first key of the n_block, is kept in a register
//   ROTATED               starts at row n0 and wraps around
//   WorkTile              has n_block_of_block(), the n_block that blockIdx determines; only without N0_IN_REGISTER
//   MAY_DESCEND           some work tiles are `descending`
template <bool N0_IN_REGISTER, bool ROTATED, class WorkTile = void, bool MAY_DESCEND = false>
struct MBlockRange {
    const Head& head0;  // the work tile's first query head; the ranges are the same for all heads
    const GroupBlockMap& map;
    const int heads, n0_register;
    // Visits the m_blocks of each head from the last to the first. Requires MAY_DESCEND; not with ROTATED or a block
    // map.
    const bool descending = false;

    // First key of the n_block. Without N0_IN_REGISTER it is recomputed on each call, which saves a register.
    __device__ __forceinline__ int n0() const {
        if constexpr (N0_IN_REGISTER) return n0_register;
        else return WorkTile::template n_block_of_block<BlockIndexReread>() * BLOCK_N;
    }
    __device__ __forceinline__ int begin() const {
        return head0.queries(n0(), n0() + BLOCK_N).begin / BLOCK_M * BLOCK_M;
    }
    __device__ __forceinline__ int end() const { return head0.queries(n0(), n0() + BLOCK_N).end; }

    __device__ __forceinline__ bool is_descending() const {
        if constexpr (MAY_DESCEND) return descending;
        return false;
    }
    // m0 of the first m_block of a head, in iteration order.
    __device__ __forceinline__ int first() const {
        if (is_descending()) return (end() - 1) / BLOCK_M * BLOCK_M;
        return !ROTATED ? begin() : n0() < end() ? n0() / BLOCK_M * BLOCK_M : 0;
    }

    // m0 after the last m_block of a head, in iteration order. Only with MAY_DESCEND; requires a range that is not
    // empty.
    __device__ __forceinline__ int past_last() const {
        return is_descending() ? begin() - BLOCK_M : (end() + BLOCK_M - 1) / BLOCK_M * BLOCK_M;
    }

    // m0 of the next m_block in iteration order; may be out of range, see seek.
    __device__ __forceinline__ int next(int m0) const { return is_descending() ? m0 - BLOCK_M : m0 + BLOCK_M; }

    // Moves to the first m_block of `head` at row m0 or later in iteration order, or else to the first one of a later
    // head; head = heads if there is none. m0: the result of next(), or with a block map also of first().
    __device__ __forceinline__ void seek(int& head, int& m0) const {
        if constexpr (!Head::HAS_BLOCK_MAP) {
            if constexpr (ROTATED) {  // the loop of a head wraps around, and ends when it is back at first()
                if (m0 >= end()) m0 = begin();
                if (m0 == first()) ++head;
            } else if (MAY_DESCEND ? m0 == past_last() : m0 >= end()) {
                ++head, m0 = first();
            }
            return;
        }
        const int words = GroupBlockMap::words_per_head(head0.score);
#pragma unroll 1
        for (; head < heads; ++head, m0 = begin())
#pragma unroll 1
            for (unsigned first = m0 / BLOCK_M; static_cast<int>(first * BLOCK_M) < end();
                 first = (first / 32 + 1) * 32) {
                const unsigned remaining = map.some_visible[head * words + first / 32] & ~0u << first % 32;
                if (!remaining) continue;
                m0 = (first / 32 * 32 + __ffs(remaining) - 1) * BLOCK_M;
                if (m0 < end()) return;
            }
    }
    // The next m_block; head = heads after the last one.
    __device__ __forceinline__ void advance(int& head, int& m0) const {
        m0 = next(m0);
        seek(head, m0);
    }
    // The first m_block of the work tile; head = heads if there is none.
    __device__ __forceinline__ void start(int& head, int& m0) const {
        m0 = first(), head = (MAY_DESCEND ? begin() : m0) < end() ? 0 : heads;
        if (Head::HAS_BLOCK_MAP) seek(head, m0);
    }
    // Whether the element mask hides no element of the tile, as far as the block map shows; without a map: whether
    // there is no element mask. Ranges are not considered.
    __device__ __forceinline__ bool fully_visible(int head, int m0) const {
        if (!Head::HAS_BLOCK_MAP) return !Head::ELEMENT_MASK;
        const unsigned m_block = m0 / BLOCK_M;
        return map.fully_visible[head * GroupBlockMap::words_per_head(head0.score) + m_block / 32] >> m_block % 32 & 1;
    }

    // Calls f(i, head of the work tile, m0) for the i-th m_block.
    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        int head, m0;
        start(head, m0);
#pragma unroll 1
        for (unsigned i = 0; head < heads; m0 = next(m0), seek(head, m0)) f(i++, head, m0);
    }
};
