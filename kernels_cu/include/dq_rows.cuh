// Rows of dQ from their sums in float32, for the entries of a backward that put dQ_accum into its place.
#pragma once
#include "score.cuh"

// Rows row0 and row0 + 8 of dQ, eight columns from `col` on, as fetch_rows brings their sums; `zero` stays so while all are finite.
__device__ __forceinline__ void put_rows(const View<dtype>& dQ, const Sequence& sequence, int h, int row0, int col,
                                         const float (&sums)[2][8], float scale, float& zero) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned packed[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float x = sums[half][2 * pair], y = sums[half][2 * pair + 1];
            zero = fmaf(x, 0.0f, fmaf(y, 0.0f, zero));
            packed[pair] = pack(x * scale, y * scale);
        }
        const int row = row0 + 8 * half;
        if (row < sequence.Sq && col < HEAD_DIM)
            *reinterpret_cast<uint4*>(sequence.query(dQ, h, row) + col) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}
