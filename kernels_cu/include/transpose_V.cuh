// Transposes a tile of float8 V in shared memory: wgmma of 8 bits reads both operands K-major, so P V needs Vt, in
// which the keys of a column are contiguous. ldmatrix.trans, two byte permutations and stmatrix, without bank conflicts
// (FlashAttention-3, section 3.3, Shah et al. 2024).
#pragma once
#include <fp8.cuh>  // angle brackets: the CPU backend has its own
#include "swizzle.cuh"

// Warp `warp` of WARPS transposes its part of V (KEYS x COLUMNS), 16 columns per step. A row of Vt is a column of V, of
// each 16 the even ones first, so that a thread stores four adjacent columns of O; the keys are in the order SLOTS
// (fp8.cuh), in which a thread holds its scores. LOADS * 32 keys are loaded before the first are stored, which hides
// the latency of shared memory.
template <unsigned WARPS, int KEYS, int COLUMNS>
__device__ __forceinline__ void transpose_V(SmemAddr V_smem, SmemAddr Vt_smem, unsigned warp) {
    using Values = Swizzled<KEYS, COLUMNS, 1>;
    using Transposed = Swizzled<COLUMNS, KEYS, 1>;
    constexpr unsigned BLOCKS_OF_KEYS = KEYS / 32;
    const unsigned lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll 1
    for (unsigned columns = warp; columns < COLUMNS / 16; columns += WARPS) {
        const SmemAddr from = V_smem + Values::chunk(lane, columns);
        const unsigned slot = Transposed::chunk(matrix % 2 * 8 + row, matrix / 2);
        const SmemAddr dst = Vt_smem + 16 * 128 * columns;
#pragma unroll
        for (unsigned keys = 0; keys < BLOCKS_OF_KEYS; keys += LOADS) {
            unsigned pairs[LOADS][4];  // keys from 0, 8, 16 and 24
#pragma unroll
            for (unsigned i = 0; i < LOADS && keys + i < BLOCKS_OF_KEYS; ++i)
                ldmatrix_x4_trans(pairs[i], from + 32 * 128 * (keys + i));
#pragma unroll
            for (unsigned i = 0; i < LOADS && keys + i < BLOCKS_OF_KEYS; ++i) {
                const unsigned (&pair)[4] = pairs[i];
                const unsigned slab = (keys + i) / 4 * Transposed::SLAB_BYTES, chunk = (keys + i) % 4 * 2;
                stmatrix_x4(dst + (slot ^ chunk * 16) + slab, even_column(pair[0], pair[1]),
                            odd_column(pair[0], pair[1]), even_column(pair[2], pair[3]), odd_column(pair[2], pair[3]));
            }
        }
    }
}
