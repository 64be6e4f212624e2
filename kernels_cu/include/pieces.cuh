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

// Calls f(query tile, head) with each piece of the block, of so many query tiles a head.
//
// Causal: heads in sections of two rounds of the blocks, so that few heads at a time stay in L2, longest pieces first. The
// second round goes backwards: two pieces together are as long as any other two. What is left uneven evens out: the blocks
// begin each section at another place, and heads too few for a section of their own join the last one, of long rows as many as
// L2 bears with (B8 H12 S1024 D64: 0.79 of the blocks' time was work, now 0.95; B1 H16 S8191 D128: 0.95, 0.97). In a window most
// pieces are alike and read few keys: one section, in which the short pieces of all heads come last (fwd_wgmma, window 1024: +5%).
template <class F>
__device__ __forceinline__ void for_each_query_tile(unsigned tiles, unsigned heads, F f) {
    const unsigned section = CAUSAL && !Head::FIRST ? max(2 * gridDim.x / tiles, 1) : heads;
    const unsigned last = section + max(section / 2, HEAD_DIM <= 128 ? 14u : 4u);
#pragma unroll 1
    for (unsigned head = 0, size; head < heads; head += size) {
        size = heads - head < last ? heads - head : section;
        const unsigned begin = (blockIdx.x + 17 * (head % gridDim.x)) % gridDim.x;
#pragma unroll 1
        for (unsigned first = 0, i = begin; first < size * tiles; first += gridDim.x, i = 2 * first - 1 - i) {
            if (i >= size * tiles) continue;
            CAUSAL ? f(tiles - 1 - i / size, head + i % size) : f(i % tiles, i / tiles);
        }
    }
}
