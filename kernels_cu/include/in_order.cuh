// Which keys a block of a backward owns, and in what order blocks add to the query tiles that they share.
#pragma once
#include <hopper.cuh>
#include "dealing.cuh"
#include "score.cuh"

// ORDERED: the blocks that add to a query tile do so in the order of their pieces, the first by storing: nothing has to be zero
// but counters, with which dQ_accum begins, one of pieces, and at ADDED one for each half of each query tile, of those that have
// added to it. Where the sums begin, with so many query tiles of all heads, at a whole number of L2's lines of 128 bytes:
constexpr long long ADDED = 4;
constexpr bool COUNTED = ORDERED || (64 < HEAD_DIM && HEAD_DIM <= 128);
__device__ __forceinline__ long long sums_at(long long query_tiles) {
    return COUNTED ? (ADDED + 2 * query_tiles + 31) / 32 * 32 : 0;
}

// In any order: the first to come stores too, where few pieces add to a query tile, those of a window or what a block map leaves, or
// where there are at most so many query rows, and else adds to zeros. (Of a ragged batch few pieces are no reason: 1% slower.) The
// counters count those who come, and hold STORED more once the first one's numbers are there. Who is first waits for nobody:
// nobody waits for ever.
constexpr int FIRST_STORES = COUNTED && !ORDERED ? 2048 : 0;
constexpr bool FEW_PIECES = !RAGGED && (Head::FIRST || Head::MAPPED);
constexpr unsigned STORED = 1 << 16;
__device__ __forceinline__ bool first_stores(const Score& score) {
    return FIRST_STORES > 0 && (FEW_PIECES || score.Sq <= FIRST_STORES);
}

// The keys of a block. RAGGED: by its place in the grid, since blocks begin in that order, the longest first (dealing.cuh).
// ABREAST, where a last key (causal) makes the first keys of a head the longest piece: the heads of a section come side by side,
// first all their first pieces, so that short ones even out what long ones left uneven; the grid is (heads of a section, key tiles,
// sections). Head after head, the last head's longest pieces would begin when the other blocks end.
// ORDERED: as many as they claim one after the other, so that whoever waits for a piece waits for one that a block has begun.
// Heads come in sections of BLOCKS pieces at least, as many as run at one time; of a section first the first piece of each head,
// then the second. With a last key (causal) the last keys come first, which see fewest queries: then blocks that begin together
// do not meet, since each walks from its own diagonal, and without waiting each adds to a query tile after those it has to wait
// for.
constexpr bool ABREAST = Head::LAST && !ORDERED && !RAGGED;
struct Piece {
    int key_tile, kv_head, b;

    __device__ __forceinline__ Piece(unsigned number, unsigned Hk, unsigned B)
        : key_tile(blockIdx.x), kv_head(blockIdx.y), b(blockIdx.z) {
        if (ABREAST) {
            const unsigned head = blockIdx.z * gridDim.x + blockIdx.x;
            key_tile = blockIdx.y, kv_head = head % Hk, b = head / Hk;
        }
        if (!ORDERED) return;
        const unsigned heads = Hk * B, most = (BLOCKS + gridDim.x - 1) / gridDim.x;  // of a section
        const unsigned first = number / (most * gridDim.x) * most, own = min(most, heads - first), place = number - first * gridDim.x;
        const unsigned head = first + place % own;
        key_tile = Head::LAST ? gridDim.x - 1 - place / own : place / own, kv_head = head % Hk, b = head / Hk;
    }
#if RAGGED
    Extent extent;
    __device__ __forceinline__ Piece(const volatile Dealt& dealt)
        : key_tile(uniform(dealt.row0) / BLOCK_N), kv_head(uniform(dealt.head)), b(uniform(dealt.b)),
          extent{dealt.extent.first_query, dealt.extent.Sq, dealt.extent.first_key, dealt.extent.all_keys, dealt.extent.Sk} {}
    __device__ __forceinline__ Sequence sequence(const Score& score) const { return Sequence(score, b, extent); }
#else
    __device__ __forceinline__ Sequence sequence(const Score& score) const { return Sequence(score, b); }
#endif
    // How many pieces of the head add to query tile m0 before this one.
    __device__ __forceinline__ int before(const Head& head, int m0) const {
        const Range keys = head.keys(m0, m0 + BLOCK_M);
        return Head::LAST ? (keys.end - 1) / BLOCK_N - key_tile : key_tile - (Head::FIRST ? keys.begin / BLOCK_N : 0);
    }
};
