// What a consumer thread of fwd_wgmma_fp8 does with its fragments: masking of S, P in 8 bits, and the store of O. Lane
// 4 g + q has rows g and g + 8 of the warp's 16, and columns 2q and 2q + 1 of every 8.
#pragma once
#include "softmax_fp8.cuh"
#include "tile_scheduler_fp8.cuh"

// S becomes raw scores (score_mod.cuh), -INF where masked. row: the thread's first one; n0: first key of the tile;
// fully_visible_keys: keys that all rows of the warp see.
__device__ __forceinline__ void score_mod_and_mask(float (&S)[BLOCK_N / 2], const Head& head, Range fully_visible_keys,
                                                   int row, int n0, int q) {
    const int column = n0 + 2 * q;
    // QueryRows::index, written out: the call gives other machine code with an element mask, which has not been timed.
    const auto at = [&](int i) { return ScoreIndex(row, column, i / 2 % 2 * 8, i / 4 * 8 + i % 2); };
#pragma unroll
    for (int i = 0; i < (Head::HAS_SCORE_MOD ? BLOCK_N / 2 : 0); ++i) S[i] = head.raw(S[i], at(i));
    if ((!Head::HAS_LEFT_BOUND || fully_visible_keys.begin <= n0) && n0 + BLOCK_N <= fully_visible_keys.end) return;
    if (Head::ELEMENT_MASK) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i)
            if (!head.visible(at(i).query_row(), at(i).key_col())) S[i] = -INF;
        return;
    }
    const Range seen[2] = {head.keys(row, row + 1), head.keys(row + 8, row + 9)};
    const int end[2] = {seen[0].end - column, seen[1].end - column};
    const int begin[2] = {seen[0].begin - column, seen[1].begin - column};
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) {
        if (QueryRows::column(i) >= end[QueryRows::row(i)]) S[i] = -INF;
        if (Head::HAS_LEFT_BOUND && QueryRows::column(i) < begin[QueryRows::row(i)]) S[i] = -INF;
    }
}

// S, after dropout, to P in 8 bits.
__device__ __forceinline__ void convert_P(unsigned (&P)[BLOCK_N / 32][4], float (&S)[BLOCK_N / 2], const Head& head,
                                          int first_row, int n0) {
    Head::Kept kept[BLOCK_N / 16];
    head.keep_along_queries(kept, first_row, n0);
#pragma unroll
    for (int i = 0; i < (DROPOUT ? BLOCK_N / 2 : 0); ++i)
        if (!kept[i / 8].keep(i / 4 % 2 * 2 + i / 2 % 2, i % 2)) S[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i) {
        const float* s = S + i / 2 * 8 + i % 2 * 2;  // column blocks 2 k and 2 k + 1 (k = i / 2), row g or g + 8
        P[i / 4][i % 4] = pack4<dtype_v>(s[0], s[1], s[4], s[5]);
    }
}

// Epilogue: O / l and LSE of the warp's 16 rows, to global memory.
__device__ __forceinline__ void store_O_and_LSE(const Fp8SoftmaxState& softmax, const TileInfo& info, const Head& head,
                                                const View<dtype_o>& O, float* LSE, int H, int q) {
    const int thread = thread_index_x() - 128;  // read again: saves registers
    const int row = info.m0 + thread / 32 * 16 + thread % 32 / 4;
    const float sum[2] = {row_sum<4>(softmax.l[0]), row_sum<4>(softmax.l[1])};
    float* const lse = LSE + head.lse_offset(H, info.h) + row;
    dtype_o* const dst = head.query(O, info.h, row) + 4 * q;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float l = sum[half] * (1.0f / P_MAX);
        const FinalizedRow final_row = head.finalize<ScoreUnits::RAW, Precision::APPROXIMATE>(softmax.m[half], l);
        const float O_scale = final_row.O_scale * (1.0f / P_MAX);
        if (row + 8 * half >= head.Sq) continue;
        if (q == 0) lse[8 * half] = final_row.lse;
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 16; ++i) {  // even columns of each 16 in one block of 8, odd in the next
            const float* o = softmax.O + 8 * i + 2 * half;
            store4(dst + 8 * half * O.stride_s + 16 * i, o[0] * O_scale, o[4] * O_scale, o[1] * O_scale,
                   o[5] * O_scale);
        }
    }
}
