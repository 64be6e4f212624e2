// Who works on which query tile of a dense batch, and which key tiles it visits, for kernels whose blocks stay on their SM and
// take one piece after the other. Pieces of ragged batches, and by a block map: dealing.cuh.
#pragma once
#include "score.cuh"

// The key tiles that some of the rows m0 .. m1 see anything of.
__device__ __forceinline__ Range tiles_of(const Head& head, int m0, int m1) {
    const Range keys = head.keys(m0, m1);
    const int end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    return {Head::FIRST ? min(keys.begin / BLOCK_N, end) : 0, end};
}

// Calls f(i) with each i below `many` that is the block's: a round of all blocks from `begin` on, the next one backwards. Of
// several `heads`, i being of head i % heads, a block takes of its two of these two rounds the one of the earlier head first.
template <class F>
__device__ __forceinline__ void back_and_forth(unsigned begin, unsigned many, unsigned heads, F f) {
#pragma unroll 1
    for (unsigned first = 0, i = begin; first < many; first += gridDim.x, i = 2 * first - 1 - i) {
        unsigned own = i;
        if (heads > 1) {
            const bool back = first / gridDim.x % 2;
            const unsigned other = 2 * (back ? first : first + gridDim.x) - 1 - i;
            const unsigned there = back ? other : i, then = back ? i : other;
            if (then < many && then % heads < there % heads) own = other;
        }
        if (own >= many) continue;
        f(own);
    }
}

// Calls f(query tile, head) with each piece of the block, of so many query tiles a head.
//
// Causal: heads in sections of two rounds of the blocks, so that few heads at a time stay in L2, longest pieces first. The
// second round goes backwards: two pieces together are as long as any other two. What is left uneven evens out: the blocks
// begin each section at another place, and heads too few for a section of their own join the last one, of long rows as many as
// L2 bears with, of float8 twice as many (B8 H12 S1024 D64: 0.79 of the blocks' time was work, now 0.95; B1 H16 S8191 D128: 0.95,
// 0.97). Heads of four rounds and more are even on their own, and blocks that drift apart on one head share keys longer than on
// many (B1 H16 D128, S 128k: +4%, 256k: +9%, 512k: +10%). In a window most pieces are alike and read few keys: one section, in which
// the short pieces of all heads come last (fwd_wgmma, window 1024: +5%).
//
// TOGETHER: of its two pieces of two rounds a block takes the one of the earlier head first, so that all pieces of half of the
// heads are under way at one time. At D = 256 two rounds of Q, K, V and O are more than L2 holds: S = 512 +9%, 1k +3%, 2k +1%,
// D = 64 and 128 -0.3 ... +0.9%; float8, of half as many bytes, up to -3%.
template <bool TOGETHER = false, class F>
__device__ __forceinline__ void for_each_query_tile(unsigned tiles, unsigned heads, F f) {
    constexpr bool SECTIONS = CAUSAL && !Head::FIRST;
    const unsigned section = SECTIONS ? max(2 * gridDim.x / tiles, 1) : heads;
    constexpr unsigned BORNE = (HEAD_DIM <= 128 ? 28 : 8) / sizeof(dtype);  // heads, by L2
    const unsigned joined = SECTIONS && tiles >= 4 * gridDim.x ? 0 : max(section / 2, BORNE);
    const unsigned last = section + joined;
#pragma unroll 1
    for (unsigned head = 0, size; head < heads; head += size) {
        size = heads - head < last ? heads - head : section;
        const unsigned begin = (blockIdx.x + 17 * (head % gridDim.x)) % gridDim.x;
        back_and_forth(begin, size * tiles, SECTIONS && TOGETHER ? size : 1, [&](unsigned i) {
            CAUSAL ? f(tiles - 1 - i / size, head + i % size) : f(i % tiles, i / tiles);
        });
    }
}

// Likewise of a causal window: the pieces that are alike come one head after the other, so that blocks which work side by side
// share keys; then, the longest first, those of all heads that the first key shortens.
template <class F>
__device__ __forceinline__ void for_each_window_tile(const Score& score, unsigned tiles, unsigned heads, F f) {
    const unsigned shortened = max(-Head(score, 0, 0).first_key(0), 0);  // rows of a head
    const unsigned brief = min((shortened + BLOCK_M - 1) / BLOCK_M, tiles), alike = tiles - brief;
    back_and_forth(blockIdx.x, heads * tiles, 1, [&](unsigned i) {
        const bool late = i >= heads * alike;
        const unsigned j = late ? i - heads * alike : i, by = late ? heads : alike;
        f(late ? brief - 1 - j / by : tiles - 1 - j % by, late ? j % by : j / by);
    });
}
