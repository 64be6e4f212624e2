// Which keys a block of a backward owns, and in what order blocks add to the query tiles that they share.
#pragma once
#include <hopper.cuh>
#include "tile_scheduler.cuh"
#include "score_mod.cuh"

// DETERMINISTIC: the blocks that add to a query tile do so in the order of their pieces, the first by storing: nothing has to be zero
// but counters, with which dQ_accum begins, one of pieces, and at ADDED one for each half of each query tile, of those that have
// added to it. Where the sums begin, with so many query tiles of all heads, at a whole number of L2's lines of 128 bytes, and where
// lanes add by themselves of the 512 that a warp adds at a time:
constexpr long long ADDED = 4, SUMS_ALIGNED = HEAD_DIM > 128 ? 128 : 32;
constexpr bool COUNTED = DETERMINISTIC || (HEAD_DIM <= 128 && !(RAGGED && HEAD_DIM <= 64));  // there 1% slower
__device__ __forceinline__ long long sums_at(long long query_tiles) {
    return COUNTED ? (ADDED + 2 * query_tiles + SUMS_ALIGNED - 1) / SUMS_ALIGNED * SUMS_ALIGNED : 0;
}

// In any order: the first to come stores too. The counters count those who come before the first one's numbers are there, and hold
// STORED more from then on. Who is first waits for nobody: nobody waits for ever.
constexpr bool FIRST_BLOCK_STORES = COUNTED && !DETERMINISTIC;
constexpr unsigned STORED = 1 << 16;
// Whether a block asks before it has numbers if they are there: where few pieces add to a query tile it is 0.5% slower, or spills.
constexpr bool SEMAPHORE_EARLY = FIRST_BLOCK_STORES && !Head::FIRST && !Head::MAPPED;

// The keys of a block. RAGGED: by its place in the grid, since blocks begin in that order, the longest first (tile_scheduler.cuh).
// ABREAST, where a last key (causal) makes the first keys of a head the longest piece: the heads of a section come side by side,
// first all their first pieces, so that short ones even out what long ones left uneven; the grid is (heads of a section, key tiles,
// sections). Head after head, the last head's longest pieces would begin when the other blocks end.
// DETERMINISTIC: as many as they claim one after the other, abreast, so that whoever waits for a piece waits for one that a block has
// begun. With a last key (causal) sections take turns: in one the last keys come first and each piece walks its queries up from its
// own diagonal, so that blocks which begin together do not meet and the longest pieces come last; in the next, and in the last of
// all, the first keys come first, the longest pieces, and are walked from the last query `down`. Either way pieces that follow one
// another are of like length, also where two sections meet, a piece comes to a query tile after those that it has to wait for, and
// the shortest ones come at the end.
constexpr bool ABREAST = (Head::LAST || DETERMINISTIC) && !RAGGED;
constexpr bool TURNS = DETERMINISTIC && Head::LAST && !Head::FIRST;  // of a window pieces are alike: the last keys come first in all
struct WorkTileRange {
    int key_tile, kv_head, b;
    bool down = false;

    __device__ __forceinline__ WorkTileRange(unsigned number, unsigned Hk, unsigned B)
        : key_tile(blockIdx.x), kv_head(blockIdx.y), b(blockIdx.z) {
        if (DETERMINISTIC) {
            const unsigned row = number / gridDim.x, section = row / gridDim.y, head = section * gridDim.x + number % gridDim.x;
            key_tile = row % gridDim.y, kv_head = head % Hk, b = head / Hk;
            down = TURNS && (gridDim.z - section) % 2;
            if (Head::LAST && !down) key_tile = gridDim.y - 1 - key_tile;
        } else if (ABREAST) {
            const unsigned head = blockIdx.z * gridDim.x + blockIdx.x;
            key_tile = blockIdx.y, kv_head = head % Hk, b = head / Hk;
        }
    }
#if RAGGED
    SeqlenOffsets extent;
    __device__ __forceinline__ WorkTileRange(const volatile WorkTile& dealt)
        : key_tile(uniform(dealt.row0) / BLOCK_N), kv_head(uniform(dealt.head)), b(uniform(dealt.b)),
          extent{dealt.extent.first_query, dealt.extent.Sq, dealt.extent.first_key, dealt.extent.all_keys, dealt.extent.Sk} {}
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b, extent); }
#else
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return SeqlenInfo(score, b); }
#endif
    // How many pieces of the head add to query tile m0 before this one.
    __device__ __forceinline__ int before(const Head& head, int m0) const {
        const Range keys = head.keys(m0, m0 + BLOCK_M);
        return Head::LAST && !down ? (keys.end - 1) / BLOCK_N - key_tile : key_tile - (Head::FIRST ? keys.begin / BLOCK_N : 0);
    }
};
