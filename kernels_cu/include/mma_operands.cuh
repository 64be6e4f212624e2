// Operands and MMAs of S = Q K^T and O += P V in the mma.sync kernels, by the dtypes of Q, K and V:
//
//   16 bits                      m16n8k16
//   float8                       S: m16n8k32; O: fp16, to which V is converted (exact) and P is rounded
//   Q 16 bits, K and V float8    S: m16n8k16 of Q's dtype, to which K is converted (exact), or of halves, to which
//                                both are converted (queries_as_halves.cuh); O as with float8
//
// K and V are converted after the load from shared memory. The order in which S sums over columns is arbitrary: a
// register of float8 K has columns 4q .. 4q + 3, which take the places 2q, 2q + 1, 2q + 8 and 2q + 9 of the MMA, in K
// and in Q.
//
// With float8 V, an accumulator of O has the even columns of 16, and the next one the odd columns.
#pragma once
#include "mma_smem.cuh"
#if FLOAT8_KEYS
#include <fp8.cuh>  // the CPU backend has its own
#endif

constexpr int Q_REGISTERS = 4 * sizeof(dtype) / sizeof(dtype_k);  // of a step of S, for 16 rows

#if FLOAT8
struct MmaQK {
    __device__ __forceinline__ void operator()(float (&S)[4], const unsigned (&Q)[4], unsigned k0, unsigned k1) const {
        mma_m16n8k32<dtype>(S, Q, k0, k1);
    }
};
#elif FLOAT8_KEYS
// HALVES: Q consists of halves, whatever its dtype is (queries_as_halves.cuh).
template <bool HALVES = false>
struct MmaFloat8Keys {
    // Four columns of K in one register as two registers of Q's elements.
    static __device__ __forceinline__ void convert(unsigned K, unsigned (&pairs)[2]) {
        bytes_as_halves<dtype_k>(K, pairs);
#if defined(DTYPE_bfloat16)
#pragma unroll
        for (int i = 0; i < (HALVES ? 0 : 2); ++i) {
            const float2 x = halves_as_floats(pairs[i]);
            pairs[i] = pack(x.x, x.y);
        }
#endif
    }
    __device__ __forceinline__ void operator()(float (&S)[4], const unsigned (&Q)[8], unsigned k0, unsigned k1) const {
        const unsigned low[4] = {Q[0], Q[1], Q[2], Q[3]}, high[4] = {Q[4], Q[5], Q[6], Q[7]};
        unsigned pairs[2];
        convert(k0, pairs);
        mma(S, low, pairs);
        convert(k1, pairs);
        mma(S, high, pairs);
    }
    static __device__ __forceinline__ void mma(float (&S)[4], const unsigned (&A)[4], const unsigned (&B)[2]) {
        if (HALVES) mma_m16n8k16_halves(S, A, B[0], B[1]);
        else mma_m16n8k16(S, A, B[0], B[1]);
    }
};
using MmaQK = MmaFloat8Keys<>;
#else
using MmaQK = Mma16Bit;
#endif

#if FLOAT8_KEYS
struct MmaPV {
    static constexpr int COLUMNS = 32;
    __device__ __forceinline__ void operator()(float (*O)[4], const unsigned (&P)[4], const unsigned (&V)[4]) const {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            unsigned even[2], odd[2];
            columns_as_halves<dtype_v>(V[2 * block], even[0], odd[0]);
            columns_as_halves<dtype_v>(V[2 * block + 1], even[1], odd[1]);
            mma_m16n8k16_halves(O[2 * block], P, even[0], even[1]);
            mma_m16n8k16_halves(O[2 * block + 1], P, odd[0], odd[1]);
        }
    }
};
__device__ __forceinline__ unsigned pack_P(float low, float high) { return pack_halves(low, high); }
#else
using MmaPV = MmaRows16Bit;
__device__ __forceinline__ unsigned pack_P(float low, float high) { return pack(low, high); }
#endif

// The i-th two adjacent columns of O that a lane has. low, high: indices of their accumulators of 16 x 8 elements;
// low_element, high_element: 0 or 1, the columns there (registers 0 and 1 of row g, 2 and 3 of row g + 8). chunk, byte:
// their place in a row of a 16-bit tile.
struct OutputPair {
    int low, low_element, high, high_element, chunk, byte;
    __device__ __forceinline__ OutputPair(int i, int q) {
#if FLOAT8_KEYS
        low = i / 2 * 2, high = low + 1, low_element = high_element = i % 2;
        chunk = low + q / 2, byte = q % 2 * 8 + i % 2 * 4;
#else
        low = high = chunk = i, low_element = 0, high_element = 1, byte = 4 * q;
#endif
    }
};

// Offsets of this lane in a tile of Q with COLUMNS columns of 16 bits, and its part of step `step` of S.
#if FLOAT8_KEYS && !FLOAT8
template <int COLUMNS, bool ONE_REGISTER = false>
struct QOffsets {
    FragmentOffsets<COLUMNS, ONE_REGISTER> chunks;
    unsigned in_chunk;
    // The row and chunk that row_offsets gives to the lane for ldmatrix; here it has columns 4q .. 4q + 3 of row g.
    __device__ __forceinline__ QOffsets(unsigned row, unsigned chunk)
        : chunks((16 * chunk + row) / 4, row % 4 / 2), in_chunk(row % 2 * 8) {}
    __device__ __forceinline__ void load(unsigned (&Q)[8], SmemAddr tile, int row, int step) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const SmemAddr at = tile + chunks(row, 2 * step + i) + in_chunk;
            const uint2 upper = load_shared_8(at), lower = load_shared_8(at + 8 * SwizzledRows<COLUMNS>::ROW);
            Q[4 * i] = upper.x, Q[4 * i + 1] = lower.x, Q[4 * i + 2] = upper.y, Q[4 * i + 3] = lower.y;
        }
    }
};
#else
template <int COLUMNS, bool ONE_REGISTER = false>
struct QOffsets : FragmentOffsets<COLUMNS, ONE_REGISTER> {
    using FragmentOffsets<COLUMNS, ONE_REGISTER>::FragmentOffsets;
    __device__ __forceinline__ void load(unsigned (&Q)[4], SmemAddr tile, int row, int step) const {
        ldmatrix_x4(Q, tile + (*this)(row, step));
    }
};
#endif
