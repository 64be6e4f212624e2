// Postprocess of the backward: converts the float32 accumulators of dQ to rows of dQ.
#pragma once
#include "score_mod.cuh"

// Writes eight columns from `col` on of rows row0 and row0 + 8 of dQ, from accumulators in the layout of load_fragment_rows. `zero`
// remains 0 as long as all are finite.
__device__ __forceinline__ void write_dQ_rows(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0, int col,
                                         const float (&accum)[2][8], float scale, float& zero) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned packed[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float x = accum[half][2 * pair], y = accum[half][2 * pair + 1];
            zero = fmaf(x, 0.0f, fmaf(y, 0.0f, zero));
            packed[pair] = pack(x * scale, y * scale);
        }
        const int row = row0 + 8 * half;
        if (row < sequence.Sq && col < HEAD_DIM)
            *reinterpret_cast<uint4*>(sequence.query(dQ, h, row) + col) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}

// One warp writes columns col0 .. col0 + COLUMNS of query rows row0 .. row0 + ROWS of dQ, scaled, or zeros if no_keys. `from` has the
// layout of add_fragment: per 16 rows, fragments of eight columns each, CHUNK_STRIDE floats from one to the next. Returns whether a
// value is NaN or inf, which a masked key or a large LSE may have caused.
template <int ROWS, int COLUMNS, int CHUNK_STRIDE>
__device__ __forceinline__ bool write_dQ_fragments(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0, int col0, int lane,
                                              const float* from, float scale, bool no_keys = false) {
    constexpr int CHUNKS = COLUMNS / 8;
    float zero = 0.0f;
#pragma unroll
    for (int i = lane; i < ROWS / 2 * CHUNKS; i += 32) {  // 8 columns of two rows each; adjacent lanes have adjacent columns
        const int chunk = i % CHUNKS, g = ROWS == 16 ? i / CHUNKS : i / CHUNKS % 8, row_group = ROWS == 16 ? 0 : i / COLUMNS;
        const int col = col0 + 8 * chunk;
        float accum[2][8];
        load_fragment_rows(accum, from + (row_group * CHUNKS + chunk) * CHUNK_STRIDE, g);
        for (int k = 0; k < (no_keys ? 16 : 0); ++k) accum[k / 8][k % 8] = 0.0f;
        write_dQ_rows(dQ, sequence, h, row0 + 16 * row_group + g, col, accum, scale, zero);
    }
    return !__all_sync(0xffffffffu, zero == 0.0f);
}
