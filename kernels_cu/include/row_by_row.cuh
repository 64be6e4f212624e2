// Attention one warp a row, key after key, only those that the row sees: slow, and right whatever the inputs hold. Tensor-core
// kernels fall back on it for blocks that meet NaN or inf behind a mask, where 0 * NaN would reach rows that do not see it.
#pragma once
#include "common.cuh"
#include "score.cuh"

// Query rows m0 .. m0 + ROWS of head h of H and batch entry b, by WARPS_ warps, of which this is the one of number `warp`.
// Out of line, so that its registers are not the fast path's.
template <int ROWS, int WARPS_>
__device__ __noinline__ void attend_row_by_row(const View<const dtype>& Q, const View<const dtype>& K,
                                               const View<const dtype>& V, const View<dtype>& O, float* LSE, int group,
                                               const Score& score, int b, int h, int H, int m0, int warp) {
    constexpr int OWNED = (HEAD_DIM + 31) / 32;
    const int lane = threadIdx.x % 32;
    for (int i = m0 + warp; i < min(m0 + ROWS, score.Sq); i += WARPS_) {
        float o[OWNED] = {}, m = -INF, l = 0.0f;
        for (int j = 0; j < score.key_end(i + 1); ++j) {
            float dot = 0.0f;
            for (int d = lane; d < HEAD_DIM; d += 32)
                dot += to_float(Q.row(b, h, i)[d]) * to_float(K.row(b, h / group, j)[d]);
            const float s = score.score(row_sum<32>(dot), i, j), m_new = fmaxf(m, s), shift = m_new == -INF ? 0.0f : m_new;
            const float alpha = expf(m - shift), p = expf(s - shift);
            for (int d = 0; d < OWNED; ++d)
                if (score.sees(i, j) && lane + 32 * d < HEAD_DIM)
                    o[d] = alpha * o[d] + p * to_float(V.row(b, h / group, j)[lane + 32 * d]);
            l = alpha * l + p;
            m = m_new;
        }
        for (int d = 0; d < OWNED; ++d)
            if (lane + 32 * d < HEAD_DIM) O.row(b, h, i)[lane + 32 * d] = dtype(l == 0.0f ? 0.0f : o[d] / l);
        if (lane == 0) LSE[(static_cast<long long>(b) * H + h) * score.Sq + i] = m + logf(l);
    }
}

// P and dS of query row `i` and key `j`, by all lanes of a warp.
struct Pair {
    float p, ds;
    __device__ __forceinline__ Pair(const dtype* q, const dtype* k, const dtype* v, const dtype* dO, float lse, float delta,
                                    const Score& score, int i, int j) {
        float s = 0.0f, dp = 0.0f;
        for (int d = threadIdx.x % 32; d < HEAD_DIM; d += 32) {
            s += to_float(q[d]) * to_float(k[d]);
            dp += to_float(dO[d]) * to_float(v[d]);
        }
        p = lse == -INF ? 0.0f : expf(score.score(row_sum<32>(s), i, j) - lse);
        ds = p * (row_sum<32>(dp) - delta);
    }
};

// dK and dV of keys n0 .. n0 + ROWS of key/value head `head` of H / group and batch entry b, by WARPS_ warps, of which this is
// the one of number `warp`.
template <int ROWS, int WARPS_>
__device__ __noinline__ void key_gradients_row_by_row(const View<const dtype>& Q, const View<const dtype>& K,
                                                      const View<const dtype>& V, const View<const dtype>& dO,
                                                      const float* LSE, const float* delta, const View<dtype>& dK,
                                                      const View<dtype>& dV, int group, const Score& score, int b, int head,
                                                      int H, int n0, int warp) {
    constexpr int OWNED = (HEAD_DIM + 31) / 32;
    const int lane = threadIdx.x % 32;
    for (int j = n0 + warp; j < min(n0 + ROWS, score.Sk); j += WARPS_) {
        float dk[OWNED] = {}, dv[OWNED] = {};
        for (int h = head * group; h < (head + 1) * group; ++h) {
            const long long first = (static_cast<long long>(b) * H + h) * score.Sq;
            for (int i = score.query_start(j); i < score.Sq; ++i) {
                const dtype *q = Q.row(b, h, i), *grad = dO.row(b, h, i);
                const Pair pair(q, K.row(b, head, j), V.row(b, head, j), grad, LSE[first + i], delta[first + i], score, i, j);
                for (int d = lane; d < HEAD_DIM; d += 32) {
                    dk[d / 32] += pair.ds * to_float(q[d]);
                    dv[d / 32] += pair.p * to_float(grad[d]);
                }
            }
        }
        for (int d = lane; d < HEAD_DIM; d += 32) {
            dK.row(b, head, j)[d] = dtype(dk[d / 32] * score.scale);
            dV.row(b, head, j)[d] = dtype(dv[d / 32]);
        }
    }
}

// Columns d0 .. d0 + COLS of dQ of query rows m0 .. m0 + ROWS of head blockIdx.y and batch entry blockIdx.z, by one warp.
template <int ROWS, int COLS>
__device__ __noinline__ void query_gradients_row_by_row(const View<const dtype>& Q, const View<const dtype>& K,
                                                        const View<const dtype>& V, const View<const dtype>& dO,
                                                        const float* LSE, const float* delta, const View<dtype>& dQ, int group,
                                                        const Score& score, int m0, int d0) {
    constexpr int OWNED = (HEAD_DIM + 31) / 32;
    const int h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % 32;
    const long long first = (static_cast<long long>(b) * gridDim.y + h) * score.Sq;
    for (int i = m0; i < min(m0 + ROWS, score.Sq); ++i) {
        float dq[OWNED] = {};
        for (int j = 0; j < score.key_end(i + 1); ++j) {
            const dtype* k = K.row(b, h / group, j);
            const Pair pair(Q.row(b, h, i), k, V.row(b, h / group, j), dO.row(b, h, i), LSE[first + i], delta[first + i], score,
                            i, j);
            for (int d = lane; d < HEAD_DIM; d += 32) dq[d / 32] += pair.ds * to_float(k[d]);
        }
        for (int d = lane; d < HEAD_DIM; d += 32)
            if (d0 <= d && d < d0 + COLS) dQ.row(b, h, i)[d] = dtype(dq[d / 32] * score.scale);
    }
}
