// bfloat16 queries over float8 keys become halves: then two elements of a key take one conversion instead of four
// (experiment 028).
//
// Each row is multiplied by a power of two, so that its largest element is in [2^14, 2^15). Elements of at least 2^-31
// of the largest are exact; the error of the others is at most 2^-39 of it. Scores, or the scale of the
// softmax, are multiplied by the reciprocal.
#pragma once
#include "mma_operands.cuh"

#if FLOAT8_KEYS && defined(DTYPE_bfloat16)
using KeyConversion = MmaFloat8Keys<true>;

__device__ __forceinline__ unsigned scaled_halves(unsigned pair, float factor) {
    return pack_halves(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
}

// The bits of the larger one of two elements, without its sign.
__device__ __forceinline__ unsigned magnitude(unsigned pair) {
    return max(pair & 0x7fffffffu, pair << 16 & 0x7fffffffu);
}

// Converts a row of CHUNKS times 16 bytes in shared memory, by one warp. Returns the reciprocal of the row's factor.
template <unsigned CHUNKS>
__device__ __forceinline__ float row_as_halves(uint4* row, unsigned lane) {
    static_assert(CHUNKS <= 32, "one per lane");
    const uint4 x = lane < CHUNKS ? row[lane] : make_uint4(0, 0, 0, 0);
    const unsigned largest = max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
    // The biased exponent; at least 15, so that the reciprocal is normal.
    const int exponent = max(static_cast<int>(__reduce_max_sync(0xffffffffu, largest) >> 23), 15);
    const float factor = __int_as_float((268 - exponent) << 23);  // 2^(14 - (exponent - 127))
    if (lane < CHUNKS)
        row[lane] = make_uint4(scaled_halves(x.x, factor), scaled_halves(x.y, factor), scaled_halves(x.z, factor),
                               scaled_halves(x.w, factor));
    return __int_as_float((exponent - 14) << 23);
}

// The factors of the scores of a lane's rows: 2q and 2q + 1 of every 8. Scores that no option modifies keep the unit of
// their row, and the factor belongs to the scale of the softmax.
template <int ROWS, int WARPS_, class QTile>
struct RowFactors {
    static constexpr bool IN_SCALE = !Head::HAS_SCORE_MOD;
    float of[ROWS / 8][2];
    __device__ __forceinline__ float in_scale(int row_tile, int r) const { return IN_SCALE ? of[row_tile][r] : 1.0f; }
    // Converts the block's queries in shared memory, by all warps. sums: room for each warp's sums at the end, where it
    // finds its own copy of the factors: no other warp reads it.
    __device__ __forceinline__ RowFactors(char* Q_smem, float2* sums, unsigned warp, unsigned lane) {
#pragma unroll 2
        for (int row = warp; row < ROWS; row += WARPS_) {
            const float factor =
                row_as_halves<QTile::CHUNKS>(reinterpret_cast<uint4*>(Q_smem + row * QTile::ROW), lane);
            if (lane < WARPS_) sums[lane * ROWS + row].x = factor;
        }
        __syncthreads();  // all rows are converted
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) of[i / 2][i % 2] = sums[warp * ROWS + i / 2 * 8 + lane % 4 * 2 + i % 2].x;
        __syncwarp();  // all lanes have read the factors before a warp without keys stores its sums there
    }
    template <int KEY_TILES>
    __device__ __forceinline__ void apply(float (&S)[KEY_TILES][ROWS / 8][4]) const {
        if (IN_SCALE) return;
#pragma unroll
        for (int i = 0; i < KEY_TILES * ROWS / 2; ++i)
            S[i * 2 / ROWS][i / 4 % (ROWS / 8)][i % 4] *= of[i / 4 % (ROWS / 8)][i % 2];
    }
};
#else
#if FLOAT8_KEYS && !FLOAT8
using KeyConversion = MmaFloat8Keys<>;
#endif

// The queries keep their dtype, and the scores need no factors.
template <int ROWS, int WARPS_, class QTile>
struct RowFactors {
    static constexpr bool IN_SCALE = false;
    __device__ __forceinline__ RowFactors(char*, float2*, unsigned, unsigned) {}
    __device__ __forceinline__ float in_scale(int, int) const { return 1.0f; }
    template <int KEY_TILES>
    __device__ __forceinline__ void apply(float (&)[KEY_TILES][ROWS / 8][4]) const {}
};
#endif
