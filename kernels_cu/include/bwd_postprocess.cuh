// Postprocess of the backward: converts the float32 accumulators of dQ to rows of dQ.
#pragma once
#include "score_mod.cuh"

// Writes columns col .. col + 7 of rows row0 and row0 + 8 of dQ, scaled; accum[0] and accum[1] are these rows
// (load_fragment_rows). `nan_if_not_finite` stays 0 if all values are finite, and becomes NaN otherwise.
__device__ __forceinline__ void write_dQ_rows(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0,
                                              int col, const float (&accum)[2][8], float scale,
                                              float& nan_if_not_finite) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned packed[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const float x = accum[half][2 * pair], y = accum[half][2 * pair + 1];
            nan_if_not_finite = fmaf(x, 0.0f, fmaf(y, 0.0f, nan_if_not_finite));
            packed[pair] = pack(x * scale, y * scale);
        }
        const int row = row0 + 8 * half;
        if (row < sequence.Sq && col < HEAD_DIM)
            // __stcs: dQ is not read again; and the compiler splits a plain store into four at D = 64.
            __stcs(reinterpret_cast<uint4*>(sequence.query(dQ, h, row) + col),
                   make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
}

// By a warp: writes columns col0 .. col0 + COLUMNS - 1 of query rows row0 .. row0 + ROWS - 1 of dQ: the scaled
// accumulators, or zeros if no_keys. `from` consists of fragments of 16 rows x 8 columns, CHUNK_STRIDE floats apart:
// first those of all columns of 16 rows, then those of the next 16 rows. Within a fragment, the floats are in the order
// of add_fragment (ptx.cuh). Returns whether a value is NaN or inf; a masked key or a large LSE may be the cause
// (non_finite.cuh).
template <int ROWS, int COLUMNS, int CHUNK_STRIDE>
__device__ __forceinline__ bool write_dQ_fragments(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0,
                                                   int col0, int lane, const float* from, float scale,
                                                   bool no_keys = false) {
    constexpr int CHUNKS = COLUMNS / 8, ALL_ITEMS = ROWS / 2 * CHUNKS,
                  BATCH = ALL_ITEMS > 64 ? 4 : (ALL_ITEMS + 31) / 32;  // items per lane that are loaded at a time
    float nan_if_not_finite = 0.0f;
    // All items of a batch are loaded before the first store, since the compiler moves no load before a store.
#pragma unroll
    for (int first = lane; first < ALL_ITEMS; first += 32 * BATCH) {
        float accum[BATCH][2][8];
        // Item i: 8 columns of two rows; adjacent lanes have adjacent columns.
        const auto for_each = [&](auto f) {
#pragma unroll
            for (int n = 0; n < BATCH; ++n) {
                const int i = first + 32 * n;
                if (i < ALL_ITEMS)
                    f(accum[n], i % CHUNKS, ROWS == 16 ? i / CHUNKS : i / CHUNKS % 8, ROWS == 16 ? 0 : i / COLUMNS);
            }
        };
        for_each([&](float (&rows)[2][8], int chunk, int g, int row_group) {
            load_fragment_rows(rows, from + (row_group * CHUNKS + chunk) * CHUNK_STRIDE, g);
        });
        for_each([&](float (&rows)[2][8], int chunk, int g, int row_group) {
            for (int k = 0; k < (no_keys ? 16 : 0); ++k) rows[k / 8][k % 8] = 0.0f;
            write_dQ_rows(dQ, sequence, h, row0 + 16 * row_group + g, col0 + 8 * chunk, rows, scale, nan_if_not_finite);
        });
    }
    return !__all_sync(0xffffffffu, nan_if_not_finite == 0.0f);
}

// 16 rows of dQ, COLUMNS columns: loaded from dQ_accum, converted and stored by one warp. As write_dQ_fragments, but in
// two steps, so that the loads of several fragments can overlap.
template <int COLUMNS, int CHUNK_STRIDE>
struct dQFragment {
    // An item is 8 columns of two rows; adjacent lanes have adjacent columns. 8 pairs of rows have 8 * CHUNKS items.
    static constexpr int CHUNKS = COLUMNS / 8, ALL_ITEMS = 8 * CHUNKS,
                         ITEMS = (ALL_ITEMS + 31) / 32;  // ITEMS: per lane
    float accum[ITEMS][2][8];

    static __device__ __forceinline__ int item(int n) { return n * 32 + threadIdx.x % 32; }
    static __device__ __forceinline__ int chunk(int n) { return item(n) % CHUNKS; }
    static __device__ __forceinline__ int row(int n) { return item(n) / CHUNKS; }

    // `from` is the start of the warp's part of the tile.
    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int n = 0; n < ITEMS; ++n)
            if (item(n) < ALL_ITEMS) load_fragment_rows(accum[n], from + chunk(n) * CHUNK_STRIDE, row(n));
    }
    // Stores query rows row0 .. row0 + 15, scaled; zeros if no_keys. Returns whether all values of the lane are finite.
    __device__ __forceinline__ bool store(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0,
                                          float scale, bool no_keys) {
        float nan_if_not_finite = 0.0f;
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) {
            if (item(n) >= ALL_ITEMS) break;
            for (int k = 0; k < (no_keys ? 16 : 0); ++k) accum[n][k / 8][k % 8] = 0.0f;
            write_dQ_rows(dQ, sequence, h, row0 + row(n), 8 * chunk(n), accum[n], scale, nan_if_not_finite);
        }
        return nan_if_not_finite == 0.0f;
    }
};
