// bfloat16 queries over float8 keys become halves: then two elements of a key take one conversion instead of four
// (experiment 028).
//
// Each row is multiplied by a power of two, so that its largest element is in [2^14, 2^15), or by 2^52 if the row is
// smaller than 2^-38. Elements of at least 2^-31 of the largest, or of 2^-66, are exact; the error of the others is at
// most 2^-39 of the largest, or 2^-77. Scores that an option modifies are multiplied by the reciprocal; other scores
// keep the unit of their row, and the reciprocal belongs to the scale of the softmax, which stays normal.
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

// Converts a row of CHUNKS times 16 bytes in shared memory, by LANES adjacent lanes, of which this is number `chunk`.
// Returns the reciprocal of the row's factor.
template <unsigned CHUNKS, unsigned LANES>
__device__ __forceinline__ float row_as_halves(uint4* row, unsigned chunk) {
    static_assert(CHUNKS <= LANES, "one per lane");
    const uint4 x = chunk < CHUNKS ? row[chunk] : make_uint4(0, 0, 0, 0);
    const unsigned of_lane = max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
    const unsigned largest =
        LANES == 32 ? __reduce_max_sync(0xffffffffu, of_lane) : row_max<LANES>(static_cast<int>(of_lane));
    // The biased exponent; at least 89, so that the reciprocal times Head::MIN_SCALE is normal.
    const int exponent = max(static_cast<int>(largest >> 23), 89);
    const float factor = __int_as_float((268 - exponent) << 23);  // 2^(14 - (exponent - 127))
    if (chunk < CHUNKS)
        row[chunk] = make_uint4(scaled_halves(x.x, factor), scaled_halves(x.y, factor), scaled_halves(x.z, factor),
                                scaled_halves(x.w, factor));
    return __int_as_float((exponent - 14) << 23);
}

// The factors of the scores of a lane's rows: 2q and 2q + 1 of every 8.
template <int ROWS, int WARPS_, class QTile>
struct RowFactors {
    static constexpr bool IN_SCALE = !Head::HAS_SCORE_MOD;
    const float2* const own;
    float of[ROWS / 8][2];
    // Converts the block's queries in shared memory, by all warps. sums: room for each warp's sums at the end, where it
    // finds its own copy of the factors: no other warp reads it.
    __device__ __forceinline__ RowFactors(char* Q_smem, float2* sums, unsigned warp, unsigned lane)
        : own(sums + warp * ROWS + lane % 4 * 2) {
        constexpr unsigned LANES = QTile::CHUNKS <= 4 ? 4 : QTile::CHUNKS <= 8 ? 8 : QTile::CHUNKS <= 16 ? 16 : 32;
        constexpr int ROWS_AT_ONCE = 32 / LANES;
        static_assert(ROWS % ROWS_AT_ONCE == 0, "all lanes of a warp have rows, or none");
        const unsigned chunk = lane % LANES;
        // Constant trip counts, so that the loops have no remainders: 256 fewer instructions with 8 rows and 4 warps.
        constexpr int STEP = WARPS_ * ROWS_AT_ONCE;
#pragma unroll 2
        for (int i = 0; i < (ROWS + STEP - 1) / STEP; ++i) {
            const int row = i * STEP + warp * ROWS_AT_ONCE + lane / LANES;
            if (ROWS % STEP != 0 && row >= ROWS) break;  // all lanes of a warp
            uint4* const chunks = reinterpret_cast<uint4*>(Q_smem + row * QTile::ROW);
            const float factor = row_as_halves<QTile::CHUNKS, LANES>(chunks, chunk);
#pragma unroll
            for (unsigned w = 0; w < WARPS_; w += LANES)
                if (WARPS_ % LANES == 0 || w + chunk < WARPS_) sums[(w + chunk) * ROWS + row].x = factor;
        }
        __syncthreads();  // all rows are converted
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) of[i / 2][i % 2] = read(i);
    }
    __device__ __forceinline__ float read(int i) const { return own[i / 2 * 8 + i % 2].x; }
    __device__ __forceinline__ float in_scale(int row_tile, int r) const { return IN_SCALE ? of[row_tile][r] : 1.0f; }
    // Converts m to the unit of scores; an overflow makes l NaN. Reads the factors again, for which the mainloop then
    // needs no registers. After this call the warp may store its sums in their place.
    __device__ __forceinline__ void finish(float (&m)[ROWS / 8][2], float (&l)[ROWS / 8][2]) const {
#pragma unroll
        for (int i = 0; i < (IN_SCALE ? ROWS / 4 : 0); ++i) {
            float& x = m[i / 2][i % 2];
            const float score = x * read(i);
            if (x != -INF) l[i / 2][i % 2] += score - score;
            x = score;
        }
        __syncwarp();  // all lanes have read the factors, also of a warp without keys
    }
    template <int KEY_TILES>
    __device__ __forceinline__ void apply(float (&S)[KEY_TILES][ROWS / 8][4]) const {
#pragma unroll
        for (int i = 0; i < (IN_SCALE ? 0 : KEY_TILES * ROWS / 2); ++i)
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
    __device__ __forceinline__ void finish(float (&)[ROWS / 8][2], float (&)[ROWS / 8][2]) const {}
    template <int KEY_TILES>
    __device__ __forceinline__ void apply(float (&)[KEY_TILES][ROWS / 8][4]) const {}
};
#endif
