// The loads of the wgmma backward kernels: tiles of Q, dO, K and V (load_tile.cuh), LSE and delta by one warp.
#pragma once
#include "bwd_tiles.cuh"
#include "load_tile.cuh"

// By a half-warp: copies LSE, as -LSE * log2(e), or delta of BLOCK_M query rows to shared memory. A lane copies every
// 16th row: `from` and `to` point to its first row, and `rows` is the number of valid rows from that row on. A large
// LSE becomes NaN, so that non_finite.cuh computes the gradients of its row.
//
// Dropout: LSE is reduced so that P contains the factor f = 1 / (1 - p) of kept elements, and delta is divided by f.
// With P' = f P before dropout and P_d' after it, dV = P_d'^T dO and dS = P_d' dP - P' (delta / f). Where P' exceeds
// float16 (p > 0.99998), non_finite.cuh computes the gradients.
__device__ __forceinline__ void load_LSE_or_delta(float* to, const float* from, int rows, bool is_LSE,
                                                  float dropout_factor) {
    float x[BLOCK_M / 16];  // all loads are issued before the first store
#pragma unroll
    for (int t = 0; t < BLOCK_M; t += 16) x[t / 16] = t < rows ? from[t] : is_LSE ? -INF : 0.0f;
#pragma unroll
    for (int t = 0; t < BLOCK_M; t += 16)
        // -INF, a row without a visible key, keeps its sign: P is 0.
        to[t] = !is_LSE || x[t / 16] == -INF ? x[t / 16] : -x[t / 16] * Head::LOG2E;
#if DROPOUT
    const float shift = lg2(dropout_factor), inverse = dropout_factor > 0.0f ? 1.0f / dropout_factor : 0.0f;
#pragma unroll
    for (int t = 0; t < BLOCK_M; t += 16) to[t] = is_LSE ? to[t] + shift : to[t] * inverse;
#endif
    bool large = false;
#pragma unroll
    for (int t = 0; t < BLOCK_M; t += 16) large |= fabsf(x[t / 16]) > Head::LARGE_LSE;
    if (large && is_LSE) {  // some LSE of the lane is large, or -INF
#pragma unroll
        for (int t = 0; t < BLOCK_M; t += 16)
            if (Head::is_large(x[t / 16])) to[t] = NOT_A_NUMBER;
    }
}

// By a warp: loads LSE and delta of the i-th m_block to stats[STAGES][2][BLOCK_M], and arrives on the full barrier of
// Q. m0: first row of the m_block; head: query head within the work tile; first_head: its first query head.
template <class QPipeline>
__device__ __forceinline__ void load_LSE_and_delta(const BwdParams& params, SmemAddr base, float* stats,
                                                   const Head& head0, int H, int first_head, unsigned i, int head,
                                                   int m0) {
    TIMELINE(wait_empty);
    const unsigned lane = thread_index_x() % 32;            // recomputed to save a register
    const bool is_LSE = lane < 16;                          // lanes 16 to 31 load delta
    const int row = m0 + lane % 16, rows = head0.Sq - row;  // valid rows from the lane's first row on
    const float* const from = (is_LSE ? params.LSE : params.delta) + head0.lse_offset(H, first_head) +
                              static_cast<long long>(head) * query_rows(params.score) + row;
    float* const to = stats + (2 * stage_of(i) + !is_LSE) * BLOCK_M + lane % 16;
    QPipeline::acquire(base, i);
    TIMELINE(load_stats);
    load_LSE_or_delta(to, from, rows, is_LSE, Head::dropout_factor(params.score));
    __syncwarp();  // all lanes have written before lane 0 arrives
    if (lane == 0) mbarrier_arrive(QPipeline::full(base, stage_of(i)));
}

// By a warp: loads LSE and delta of an m_block by cp.async, which needs no registers, for bwd_wgmma_persistent: there
// the code that ptxas generates waits for each plain load before it issues the next. The caller acquires the stage and
// arrives on its full barrier. A lane copies every 32nd row to stats[2][BLOCK_M]; LSE, delta and `to` (byte offset in
// shared memory) point to its first row, and `rows` is the number of valid rows from that row on.
__device__ __forceinline__ void load_LSE_and_delta_async(char* smem, unsigned to, const float* LSE, const float* delta,
                                                         int rows) {
    const SmemAddr base = smem_address(smem);
#pragma unroll
    for (int t = 0; t < BLOCK_M; t += 32) {
        cp_async_4(base + to + 4 * t, LSE + t, t < rows);
        cp_async_4(base + to + 4 * (BLOCK_M + t), delta + t, t < rows);
    }
    cp_async_commit();
    cp_async_wait<0>();
#pragma unroll
    for (int t = 0; t < BLOCK_M; t += 32) {
        float& x = reinterpret_cast<float*>(smem + to)[t];
        const float lse = x;
        x = t < rows && lse != -INF ? -lse * Head::LOG2E : -INF;  // no visible key: P is 0
        if (Head::is_large(lse)) x = NOT_A_NUMBER;
    }
}
