// Online softmax of mma.sync accumulators, with deferred rescaling (softmax_rows.cuh): after the first tiles a step
// costs one vote instead of shuffles and HEAD_DIM_V / 4 multiplications per lane and row.
//
// A warp has M_TILES tiles of 16 query rows; a lane has rows g and g + 8 (half 0 and 1) of each, g = lane / 4, and
// columns 2q and 2q + 1 of every 8, q = lane % 4 (ptx.cuh). Scores are raw (score_mod.cuh).
#pragma once
#include <ptx.cuh>  // the CPU backend has its own
#include "score_mod.cuh"
#include "softmax_rows.cuh"

// Score modification and mask of the lane's scores of one row, query row i + row_offset; j: key of its first score.
// masked: some may be hidden. Returns the largest of them and `lane_max`.
template <int N_TILES>
__device__ __forceinline__ float score_mod_and_mask(float (&S)[N_TILES][4], int half, const Head& head, int i,
                                                    int row_offset, int j, bool masked, float lane_max = -INF) {
#pragma unroll
    for (int k = 0; k < 2 * N_TILES; ++k) {
        float& s = S[k / 2][2 * half + k % 2];
        const ScoreIndex at(i, j, row_offset, k / 2 * 8 + k % 2);
        s = head.raw(s, at);
        if (masked && !head.visible(at.query_row(), at.key_col())) s = -INF;
        lane_max = fmaxf(lane_max, s);
    }
    return lane_max;
}

// O, m and l of a warp's query rows, with COLUMNS columns of O.
template <int M_TILES, int COLUMNS>
struct WarpSoftmax {
    float O[M_TILES][COLUMNS / 8][4];
    float m[M_TILES][2], l[M_TILES][2];  // m: maximum of raw scores; l: sum over this lane's columns
    bool large;                          // Head::is_large of some m of the warp: then m is updated in every step

    __device__ __forceinline__ void reset() {
        large = false;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            m[mt][0] = m[mt][1] = -INF;
            l[mt][0] = l[mt][1] = 0.0f;
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) O[mt][i / 4][i % 4] = 0.0f;
        }
    }

    // Updates m with the row maxima lane_max of this lane's scores, and rescales O and l. In rows whose m is large, S
    // becomes S - m.
    template <int N_TILES>
    __device__ __forceinline__ void rescale(float (&S)[M_TILES][N_TILES][4], const float (&lane_max)[M_TILES][2],
                                            const float (&scales_log2)[M_TILES][2]) {
        bool any_large = false;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float m_old = m[mt][half], scale_log2 = scales_log2[mt][half];
                const float highest = row_max<4>(lane_max[mt][half]);
                // INVARIANT: only rows that exceed their own limit change, not all rows of the warp.
                const bool own =
                    !INVARIANT || highest > m_old + RESCALE_THRESHOLD / scale_log2 || Head::is_large(m_old, scale_log2);
                const float m_new = own ? fmaxf(m_old, highest) : m_old;
                const float alpha = rescale_factor(m_old, m_new, scale_log2);
                m[mt][half] = m_new;
                any_large |= Head::is_large(m_new, scale_log2);
                l[mt][half] *= alpha;
#pragma unroll
                for (int nt = 0; nt < COLUMNS / 8; ++nt) {
                    O[mt][nt][2 * half] *= alpha;
                    O[mt][nt][2 * half + 1] *= alpha;
                }
            }
        }
        large = __any_sync(0xffffffffu, any_large);
        if (!large) return;
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES * 4; ++i) {
            const int mt = i / (N_TILES * 4), half = i / 2 % 2;
            if (Head::is_large(m[mt][half], scales_log2[mt][half])) S[mt][i / 4 % N_TILES][i % 4] -= m[mt][half];
        }
    }

    // The lanes with an element of O that is not finite, in rows g (half 0) or g + 8 of tile mt.
    __device__ __forceinline__ unsigned non_finite_lanes(int mt, int half) const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i) zero = fmaf(O[mt][i / 2][2 * half + i % 2], 0.0f, zero);
        return __ballot_sync(0xffffffffu, !(zero == 0.0f));
    }

    // P = exp2((S - m) * scale_log2) of one row, and l += P: calls use(nt, p0, p1) for each pair of adjacent keys.
    template <int N_TILES, class Use>
    __device__ __forceinline__ void exponentiate(int mt, int half, const float (&S)[N_TILES][4], float scale_log2,
                                                 const Use& use) {
        const float scaled_m = -m[mt][half] * scale_log2;
        const float shift =
            fabsf(scaled_m) > Head::LARGE ? 0.0f : scaled_m;  // no visible key: P = 0; large: S is S - m
#pragma unroll
        for (int nt = 0; nt < N_TILES; ++nt) {
            const float p0 = ex2(fmaf(S[nt][2 * half], scale_log2, shift));
            const float p1 = ex2(fmaf(S[nt][2 * half + 1], scale_log2, shift));
            l[mt][half] += p0 + p1;
            use(nt, p0, p1);
        }
    }

    // LSE and the factor of O of a row; all lanes of the row get the result. P_scale: factor of P, and so of l, in a
    // float8 kernel.
    __device__ __forceinline__ FinalizedRow finalize(const Head& head, int mt, int half, float P_scale = 1.0f) const {
        return head.finalize(m[mt][half], row_sum<4>(l[mt][half]) * (1.0f / P_scale));
    }
};
