// S^T = K Q^T and O^T = V^T P^T of a warp of fwd_decode, on m16n8k16: keys, and columns of V, are the 16 rows of A, and
// the queries the 8 columns of B. A tile of few queries is then not padded to 16: half the MMAs and half the
// accumulators of S = Q K^T for up to 8 packed rows. Fragment layouts: ptx.cuh.
//
//   S^T   rows: keys g and g + 8 of every 16          columns: packed rows 2q and 2q + 1 of every 8
//   O^T   rows: columns g and g + 8 of every 16 of V; float8: 2g and 2g + 1
//
// A lane has P of keys g, and needs that of keys 2q and 2q + 1 as an operand of O^T: movmatrix transposes 8 x 8
// elements.
//
// float8 keys are converted after the load from shared memory, once for all queries. A register of K has columns
// 4q .. 4q + 3, which take the places 2q, 2q + 1, 2q + 8 and 2q + 9 of the MMA, in K and in Q: a sum over columns has
// no order. Queries of bfloat16 are halves then (queries_as_halves.cuh).
//
// Included by decode_epilogue.cuh, after the constants of fwd_decode.cu.
#pragma once
#include "queries_as_halves.cuh"

constexpr int ROW_TILES = BLOCK_M / 8, KEY_TILES = BLOCK_N / 16, V_TILES = DV_PAD / 16;
constexpr int K_STEPS = D_PAD / STEP_D;                                // of 32 bytes of a row of K
constexpr int Q_STEP_REGISTERS = 2 * sizeof(dtype) / sizeof(dtype_k);  // of 8 rows
using ScoreTiles = float[KEY_TILES][ROW_TILES][4];

// S += K Q^T of one step and 16 keys, and O += V^T P^T of 32 bytes of each of 16 keys. K, V: results of ldmatrix.
#if FLOAT8_KEYS
__device__ __forceinline__ void multiply_V(float (*O)[ROW_TILES][4], const unsigned (&V)[4],
                                           const unsigned (&P)[ROW_TILES][2]) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        unsigned A[4];
        columns_as_halves<dtype_v>(V[chunk], A[0], A[1]);
        columns_as_halves<dtype_v>(V[2 + chunk], A[2], A[3]);
#pragma unroll
        for (int rt = 0; rt < ROW_TILES; ++rt) mma_m16n8k16_halves(O[chunk][rt], A, P[rt][0], P[rt][1]);
    }
}
#else
__device__ __forceinline__ void multiply_V(float (*O)[ROW_TILES][4], const unsigned (&V)[4],
                                           const unsigned (&P)[ROW_TILES][2]) {
#pragma unroll
    for (int rt = 0; rt < ROW_TILES; ++rt) mma_m16n8k16(O[0][rt], V, P[rt][0], P[rt][1]);
}
#endif
#if FLOAT8_KEYS && !FLOAT8
__device__ __forceinline__ void multiply_K(float (&S)[ROW_TILES][4], const unsigned (&K)[4],
                                           const unsigned (&Q)[ROW_TILES][Q_STEP_REGISTERS]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        unsigned upper[2], lower[2];
        KeyConversion::convert(K[2 * half], upper);
        KeyConversion::convert(K[2 * half + 1], lower);
        const unsigned A[4] = {upper[0], lower[0], upper[1], lower[1]};
#pragma unroll
        for (int rt = 0; rt < ROW_TILES; ++rt) KeyConversion::mma(S[rt], A, {Q[rt][2 * half], Q[rt][2 * half + 1]});
    }
}
#else
__device__ __forceinline__ void multiply_K(float (&S)[ROW_TILES][4], const unsigned (&K)[4],
                                           const unsigned (&Q)[ROW_TILES][Q_STEP_REGISTERS]) {
#pragma unroll
    for (int rt = 0; rt < ROW_TILES; ++rt) MmaQK()(S[rt], K, Q[rt][0], Q[rt][1]);
}
#endif

// Q of a step, as B operands.
struct QueryLoader {
    using Offsets = FragmentOffsets<Q_COLUMNS, false, QTile>;
    const SmemAddr tile;
    const Offsets offsets;
    const unsigned in_chunk;

    __device__ __forceinline__ QueryLoader(SmemAddr tile, unsigned lane)
        : tile(tile), offsets(first_offsets(lane)), in_chunk(CONVERTS_KEYS ? lane % 2 * 8 : 0) {}
    static __device__ __forceinline__ Offsets first_offsets(unsigned lane) {
        if (CONVERTS_KEYS) return {lane / 4, lane % 4 / 2};
        return {(ROW_TILES > 1 ? lane / 16 * 8 : 0) + lane % 8, lane / 8 % 2};
    }
    __device__ __forceinline__ void load(unsigned (&Q)[ROW_TILES][Q_STEP_REGISTERS], int step) const {
        if constexpr (CONVERTS_KEYS) {
#pragma unroll
            for (int i = 0; i < 2 * ROW_TILES; ++i) {
                const SmemAddr from = tile + offsets(0, 2 * step + i % 2) + i / 2 * 8 * QTile::ROW + in_chunk;
                const uint2 x = load_shared_8(from);
                Q[i / 2][i % 2 * 2] = x.x, Q[i / 2][i % 2 * 2 + 1] = x.y;
            }
        } else {
#pragma unroll
            for (int rt = 0; rt < ROW_TILES; rt += 2) {
                unsigned x[4];
                ldmatrix_x4(x, tile + offsets(8 * rt, step));
                Q[rt][0] = x[0], Q[rt][1] = x[1];
                if (ROW_TILES > 1) Q[rt + 1][0] = x[2], Q[rt + 1][1] = x[3];
            }
        }
    }
};

// Q of all steps in registers, if there are few; otherwise each step loads it.
struct Queries {
    static constexpr bool IN_REGISTERS = ROW_TILES * D_PAD * sizeof(dtype) <= 256;
    const QueryLoader loader;
    unsigned own[IN_REGISTERS ? K_STEPS : 1][ROW_TILES][Q_STEP_REGISTERS];

    __device__ __forceinline__ Queries(SmemAddr tile, unsigned lane) : loader(tile, lane) {
#pragma unroll
        for (int step = 0; IN_REGISTERS && step < K_STEPS; ++step) loader.load(own[step], step);
    }
    // S = K Q^T of a tile of keys.
    template <class Offsets>
    __device__ __forceinline__ void scores(ScoreTiles& S, SmemAddr K_tile, const Offsets& row_offsets) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            unsigned (&Q)[ROW_TILES][Q_STEP_REGISTERS] = own[IN_REGISTERS ? step : 0];
            if (!IN_REGISTERS) loader.load(Q, step);
#pragma unroll
            for (int kt = 0; kt < KEY_TILES; ++kt) {
                unsigned K[4];
                ldmatrix_x4(K, K_tile + row_offsets(16 * kt, step));
                multiply_K(S[kt], K, Q);
            }
        }
    }
};

// P of 16 keys and 8 rows as a B operand of O^T.
using Weights = unsigned[KEY_TILES][ROW_TILES][2];

// O += V^T P^T of a tile of keys.
template <class Offsets>
__device__ __forceinline__ void add_products(float (&O)[V_TILES][ROW_TILES][4], const Weights& P, SmemAddr V_tile,
                                             const Offsets& transposed_offsets) {
#pragma unroll
    for (int kt = 0; kt < KEY_TILES; ++kt) {
#pragma unroll
        for (int dt = 0; dt < DV_PAD / STEP_D; ++dt) {
            unsigned V[4];
            ldmatrix_x4_trans(V, V_tile + transposed_offsets(16 * kt, dt));
            multiply_V(&O[STEP_D / 16 * dt], V, P[kt]);
        }
    }
}
