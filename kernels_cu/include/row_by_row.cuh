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
