// Online softmax of S^T and O^T (decode_products.cuh), with deferred rescaling as in softmax_mma.cuh. A lane has packed
// rows 2q and 2q + 1 of every 8, of the keys g and g + 8 of every 16. Scores are raw (score_mod.cuh), with
// RowFactors::IN_SCALE divided by the factor of their row.
#pragma once
#include "decode_products.cuh"
#include "softmax_rows.cuh"

// A number for each row of a lane: [row tile][0: row 2q, 1: row 2q + 1].
using LaneRows = float[ROW_TILES][2];

// O, m and l of a warp's rows.
struct TransposedSoftmax {
    float O[V_TILES][ROW_TILES][4];
    LaneRows m, l;  // m: maximum of these scores; l: sum over this lane's keys
    bool large;     // Head::is_large of some m of the warp: then m is updated in every step

    __device__ __forceinline__ void reset() {
        large = false;
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) m[i / 2][i % 2] = -INF, l[i / 2][i % 2] = 0.0f;
#pragma unroll
        for (int i = 0; i < V_TILES * ROW_TILES * 4; ++i) O[i / (4 * ROW_TILES)][i / 4 % ROW_TILES][i % 4] = 0.0f;
    }

    // Updates m with the maxima lane_max of this lane's scores, and rescales O and l. In rows whose m is large, S
    // becomes S - m.
    __device__ __forceinline__ void rescale(ScoreTiles& S, const LaneRows& lane_max, const LaneRows& scales_log2) {
        bool any_large = false;
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int rt = i / 2, r = i % 2;
            const float m_old = m[rt][r], m_new = fmaxf(m_old, column_max(lane_max[rt][r]));
            const float alpha = rescale_factor(m_old, m_new, scales_log2[rt][r]);
            m[rt][r] = m_new;
            any_large |= Head::is_large(m_new, scales_log2[rt][r]);
            l[rt][r] *= alpha;
#pragma unroll
            for (int dt = 0; dt < V_TILES; ++dt) O[dt][rt][r] *= alpha, O[dt][rt][r + 2] *= alpha;
        }
        large = __any_sync(0xffffffffu, any_large);
        if (!large) return;
#pragma unroll
        for (int i = 0; i < KEY_TILES * ROW_TILES * 4; ++i) {
            const int rt = i / 4 % ROW_TILES;
            if (Head::is_large(m[rt][i % 2], scales_log2[rt][i % 2])) S[i / (4 * ROW_TILES)][rt][i % 4] -= m[rt][i % 2];
        }
    }

    // S becomes P = exp2((S - m) * scale_log2), and l += P.
    __device__ __forceinline__ void exponentiate(ScoreTiles& S, const LaneRows& scales_log2) {
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int rt = i / 2, r = i % 2;
            const float scaled_m = -m[rt][r] * scales_log2[rt][r];
            // No visible key: P = 0; large: S is S - m.
            const float shift = fabsf(scaled_m) > Head::LARGE ? 0.0f : scaled_m;
#pragma unroll
            for (int k = 0; k < 2 * KEY_TILES; ++k) {
                float& s = S[k / 2][rt][k % 2 * 2 + r];
                s = ex2(fmaf(s, scales_log2[rt][r], shift));
                l[rt][r] += s;
            }
        }
    }
};
