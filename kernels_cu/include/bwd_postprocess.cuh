// Rows of dQ from their sums in float32, for the entries of a backward that put dQ_accum into its place.
#pragma once
#include "score_mod.cuh"

// Rows row0 and row0 + 8 of dQ, eight columns from `col` on, as load_fragment_rows brings their sums; `zero` stays so while all are finite.
__device__ __forceinline__ void write_dQ_rows(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0, int col,
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

// Of dQ columns col0 .. col0 + COLUMNS of query rows row0 .. row0 + ROWS, by a warp, scaled: from fragments that add_fragment has left at `from`, APART
// floats from one to that of the next eight columns, 16 rows after 16 rows; zeros where `untouched`. Returns whether one is NaN or inf: it may
// come of a key which its row does not see, or of a large LSE.
template <int ROWS, int COLUMNS, int APART>
__device__ __forceinline__ bool write_dQ_fragments(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0, int col0, int lane,
                                              const float* from, float scale, bool untouched = false) {
    constexpr int CHUNKS = COLUMNS / 8;
    float zero = 0.0f;
#pragma unroll
    for (int i = lane; i < ROWS / 2 * CHUNKS; i += 32) {  // 8 columns of two rows each, neighbours side by side
        const int chunk = i % CHUNKS, g = ROWS == 16 ? i / CHUNKS : i / CHUNKS % 8, below = ROWS == 16 ? 0 : i / COLUMNS, col = col0 + 8 * chunk;
        float sums[2][8];
        load_fragment_rows(sums, from + (below * CHUNKS + chunk) * APART, g);
        for (int k = 0; k < (untouched ? 16 : 0); ++k) sums[k / 8][k % 8] = 0.0f;
        write_dQ_rows(dQ, sequence, h, row0 + 16 * below + g, col, sums, scale, zero);
    }
    return !__all_sync(0xffffffffu, zero == 0.0f);
}
