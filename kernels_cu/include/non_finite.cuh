// The non-finite fallback: attention with one warp per row, which visits only visible keys, one at a time. Slow, but
// correct for any input. Tensor-core kernels multiply P = 0 of a masked key by its V, and 0 * NaN = NaN would affect
// rows that must not depend on that key. Rows whose result is not finite are therefore computed again by these
// functions. In the backward, kernels also replace a large LSE (Head::is_large) by NaN, so that the gradients that
// depend on its row are computed here.
#pragma once
#include "tensor.cuh"
#include "score_mod.cuh"

// Not inlined, so that it does not use registers of the mainloop. Hopper kernels define FALLBACK_INLINE as
// __forceinline__: after a call the compiler assumes that a warp may have diverged and adds a WARPSYNC before each
// wgmma, which made causal fwd_wgmma 1 ... 11% slower (experiments/008_hopper).
#ifndef FALLBACK_INLINE
#define FALLBACK_INLINE __noinline__
#endif

// Whether all accumulators are finite: 0 * x is then 0, otherwise NaN. CHAINS dependency chains, one or four.
template <int CHAINS = 1, int N>
__device__ __forceinline__ bool all_finite(const float (&accum)[N]) {
    float nan_or_zero[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) nan_or_zero[i % CHAINS] = fmaf(accum[i], 0.0f, nan_or_zero[i % CHAINS]);
    return (CHAINS == 1 ? nan_or_zero[0] : (nan_or_zero[0] + nan_or_zero[1]) + (nan_or_zero[2] + nan_or_zero[3])) ==
           0.0f;
}
template <int CHAINS = 1, int M_TILES, int N_TILES>
__device__ __forceinline__ bool all_finite(const float (&accum)[M_TILES][N_TILES][4]) {
    return all_finite<CHAINS>(*reinterpret_cast<const float (*)[M_TILES * N_TILES * 4]>(accum[0][0]));
}

// A lane has every 32nd column: at most this many.
constexpr int OWNED_COLS = (HEAD_DIM + 31) / 32, OWNED_COLS_V = (HEAD_DIM_V + 31) / 32;

// O and LSE of query rows m0 .. m0 + ROWS - 1 of head h of H and batch entry b, computed by WARPS_ warps; `warp` is
// this warp's index.
template <int ROWS, int WARPS_>
__device__ FALLBACK_INLINE void attend_non_finite(const View<const dtype>& Q, const View<const dtype_k>& K,
                                                  const View<const dtype_v>& V, const View<dtype_o>& O, float* LSE,
                                                  int group, const Score& score, int b, int h, int H, int m0,
                                                  int warp) {
    const Head head(score, b, h);
    const int lane = threadIdx.x % 32;
    for (int i = m0 + warp; i < min(m0 + ROWS, head.Sq); i += WARPS_) {
        float o[OWNED_COLS_V] = {}, m = -INF, l = 0.0f;
        const Range keys = head.keys(i, i + 1);
        for (int j = keys.begin; j < keys.end; ++j) {
            if (!head.visible(i, j)) continue;
            float dot = 0.0f;
            for (int d = lane; d < HEAD_DIM; d += 32)
                dot += to_float(head.query(Q, h, i)[d]) * to_float(head.key(K, h / group, j)[d]);
            const float s = head.apply_score_mod<float, ScoreUnits::SCALED>(row_sum<32>(dot), {i, j}),
                        m_new = fmaxf(m, s);
            const float shift = m_new == -INF ? 0.0f : m_new;
            const float alpha = expf(m - shift), p = expf(s - shift), kept = head.keep(i, j) ? p : 0.0f;
            for (int d = 0; d < OWNED_COLS_V; ++d)
                if (lane + 32 * d < HEAD_DIM_V)
                    o[d] = alpha * o[d] + kept * to_float(head.key(V, h / group, j)[lane + 32 * d]);
            l = alpha * l + p;
            m = m_new;
        }
        const FinalizedRow final_row = head.finalize<ScoreUnits::SCALED>(m, l);
        for (int d = 0; d < OWNED_COLS_V; ++d)
            if (lane + 32 * d < HEAD_DIM_V) head.query(O, h, i)[lane + 32 * d] = dtype_o(o[d] * final_row.O_scale);
        if (lane == 0) LSE[head.lse_offset(H, h) + i] = final_row.lse;
    }
}

// INVARIANT: of rows m0 .. m0 + 7, computes again those whose O is not finite. lanes: a bit for each lane with an
// element of O that is not finite; lanes 4 g to 4 g + 3 have row m0 + g. The other rows keep their bits. Called by a
// warp.
__device__ __forceinline__ void attend_non_finite_rows(const View<const dtype>& Q, const View<const dtype_k>& K,
                                                       const View<const dtype_v>& V, const View<dtype_o>& O, float* LSE,
                                                       int group, const Score& score, int b, int h, int H, int m0,
                                                       unsigned lanes) {
#pragma unroll 1
    for (int g = 0; g < 8; ++g)
        if (lanes >> 4 * g & 15) attend_non_finite<1, 1>(Q, K, V, O, LSE, group, score, b, h, H, m0 + g, 0);
}

// P after dropout (p), and dS, of query row i and key j. All lanes of the warp call it.
struct ElementGradients {
    float p, ds;
    __device__ __forceinline__ ElementGradients(const dtype* q, const dtype* k, const dtype* v, const dtype* dO,
                                                float lse, float delta, const Head& head, int i, int j) {
        float s = 0.0f, dp = 0.0f;
        for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32) s += to_float(q[d]) * to_float(k[d]);
        for (int d = threadIdx.x % 32; d < HEAD_DIM_V; d += 32) dp += to_float(dO[d]) * to_float(v[d]);
        const RecomputedP P = head.recompute_P(row_sum<32>(s), lse, i, j);
        const bool kept = head.keep(i, j);
        const float undropped = lse == -INF ? 0.0f : P.p;
        p = head.apply_dropout(undropped, kept);
        ds = undropped * (head.apply_dropout(row_sum<32>(dp), kept) - delta) * P.dx;
    }
};

// dK and dV of keys n0 .. n0 + ROWS - 1 of head kv_head and batch entry b, computed by WARPS_ warps; `warp` is this
// warp's index.
template <int ROWS, int WARPS_>
__device__ FALLBACK_INLINE void key_gradients_non_finite(const View<const dtype>& Q, const View<const dtype>& K,
                                                         const View<const dtype>& V, const View<const dtype>& dO,
                                                         const float* LSE, const float* delta, const View<dtype>& dK,
                                                         const View<dtype>& dV, int group, const Score& score, int b,
                                                         int kv_head, int H, int n0, int warp) {
    const int lane = threadIdx.x % 32;
    const SeqlenInfo seqlen(score, b);
    for (int j = n0 + warp; j < min(n0 + ROWS, seqlen.key_rows()); j += WARPS_) {
        float dk[OWNED_COLS] = {}, dv[OWNED_COLS_V] = {};
        for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
            const Head head(score, b, h);
            const long long first = head.lse_offset(H, h);
            const Range queries = head.queries(j, j + 1);
            for (int i = queries.begin; i < queries.end; ++i) {
                if (!head.visible(i, j)) continue;
                const dtype *q = head.query(Q, h, i), *grad = head.query(dO, h, i);
                const ElementGradients element(q, head.key(K, kv_head, j), head.key(V, kv_head, j), grad,
                                               LSE[first + i], delta[first + i], head, i, j);
                for (int d = lane; d < HEAD_DIM; d += 32) dk[d / 32] += element.ds * to_float(q[d]);
                for (int d = lane; d < HEAD_DIM_V; d += 32) dv[d / 32] += element.p * to_float(grad[d]);
            }
        }
        for (int d = lane; d < HEAD_DIM; d += 32) seqlen.key(dK, kv_head, j)[d] = dtype(dk[d / 32] * score.scale);
        for (int d = lane; d < HEAD_DIM_V; d += 32) seqlen.key(dV, kv_head, j)[d] = dtype(dv[d / 32]);
    }
}

// Columns d0 .. d0 + COLS - 1 of dQ, of query rows m0 .. m0 + ROWS - 1 of head h of H and batch entry b, computed by
// one warp.
template <int ROWS, int COLS>
__device__ __forceinline__ void query_gradients_of(const View<const dtype>& Q, const View<const dtype>& K,
                                                   const View<const dtype>& V, const View<const dtype>& dO,
                                                   const float* LSE, const float* delta, const View<dtype>& dQ,
                                                   int group, const Score& score, int b, int h, unsigned H, int m0,
                                                   int d0) {
    const int lane = threadIdx.x % 32;
    const Head head(score, b, h);
    const long long first = head.lse_offset(H, h);
    for (int i = m0; i < min(m0 + ROWS, head.Sq); ++i) {
        float dq[OWNED_COLS] = {};
        const Range keys = head.keys(i, i + 1);
        for (int j = keys.begin; j < keys.end; ++j) {
            if (!head.visible(i, j)) continue;
            const dtype* k = head.key(K, h / group, j);
            const ElementGradients element(head.query(Q, h, i), k, head.key(V, h / group, j), head.query(dO, h, i),
                                           LSE[first + i], delta[first + i], head, i, j);
            for (int d = lane; d < HEAD_DIM; d += 32) dq[d / 32] += element.ds * to_float(k[d]);
        }
        for (int d = lane; d < HEAD_DIM; d += 32)
            if (d0 <= d && d < d0 + COLS) head.query(dQ, h, i)[d] = dtype(dq[d / 32] * score.scale);
    }
}

// The same for head blockIdx.y and the batch entry of the block's query tile.
template <int ROWS, int COLS>
__device__ FALLBACK_INLINE void query_gradients_non_finite(const View<const dtype>& Q, const View<const dtype>& K,
                                                           const View<const dtype>& V, const View<const dtype>& dO,
                                                           const float* LSE, const float* delta, const View<dtype>& dQ,
                                                           int group, const Score& score, int m0, int d0) {
    const int h = blockIdx.y, b = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z).b;
    query_gradients_of<ROWS, COLS>(Q, K, V, dO, LSE, delta, dQ, group, score, b, h, gridDim.y, m0, d0);
}
