// Tiles of the bias, loaded by TMA with the key tiles: for each stage and each consumer, 64 query rows x BLOCK_N keys.
// Used in dense batches for a bias of Q's dtype that differs between queries and between keys and whose strides TMA
// supports (Problem.bias_tiles); any other bias is read from global memory (score_mod.cuh).
#pragma once
#include "pipeline.cuh"
#include "score_mod.cuh"
#include "softmax_rows.cuh"
#include "swizzle.cuh"
#include "work_tile.cuh"

constexpr bool BIAS_TILES = BIAS_HAS_TENSOR_MAP;  // score.cuh

// STAGES stages at byte AT of shared memory.
template <unsigned AT>
struct BiasTiles {
    using Tile = Swizzled<WARPGROUP_ROWS, BLOCK_N>;
    static constexpr unsigned STAGE_BYTES = BIAS_TILES ? BLOCK_M / WARPGROUP_ROWS * Tile::BYTES : 0;
    static constexpr unsigned END = AT + STAGES * STAGE_BYTES;

    // Loads the bias of query rows row0 .. and keys n0 .. of head (b, h). It completes on the barrier of K, which
    // expects STAGE_BYTES for it.
    static __device__ __forceinline__ void load(SmemAddr base, unsigned stage, const TensorMap& map, const Score& score,
                                                int work_tile_h, int work_tile_b, int row0, int n0, SmemAddr barrier) {
#if BIAS
        const int h = score.bias.stride_h ? work_tile_h : 0, b = score.bias.stride_b ? work_tile_b : 0;
#pragma unroll 1
        for (int consumer = 0; consumer < BLOCK_M / WARPGROUP_ROWS; ++consumer)
            Tile::load_part(base + AT + stage * STAGE_BYTES + consumer * Tile::BYTES, map, n0,
                            row0 + WARPGROUP_ROWS * consumer, h, b, barrier);
#endif
    }

    // The raw scores of S, with the bias of `consumer`. row, column: the thread's first element. 16 x 16 elements at a
    // time; lane 4 g + q has rows g and g + 8 of the warp's 16.
    static __device__ __forceinline__ void score_mod(float (&S)[BLOCK_N / 2], const Head& head, SmemAddr base,
                                                     unsigned stage, unsigned consumer, int row, int column,
                                                     unsigned warp, unsigned lane) {
        const SmemAddr bias_smem = base + AT + stage * STAGE_BYTES + consumer * Tile::BYTES;
#pragma unroll
        for (int step = 0; step < (BIAS_TILES ? BLOCK_N / 16 : 0); ++step) {
            unsigned packed[4];  // 16 x 16 elements of the bias, in the layout of S
            ldmatrix_x4(packed, bias_smem + Tile::chunk(warp % 4 * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float2 bias = unpack(packed[k]);
                const int i = 8 * step + 2 * k;
                S[i] = head.raw(S[i], QueryRows::index(row, column, i), bias.x);
                S[i + 1] = head.raw(S[i + 1], QueryRows::index(row, column, i + 1), bias.y);
            }
        }
    }
};
