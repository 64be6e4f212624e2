// Online softmax of a wgmma accumulator, with deferred rescaling (softmax_rows.cuh): P is computed with the maximum m
// of the row's first tile. In a later tile, all 16 rows of a warp raise m if, in any of these rows, a thread's sum of
// the tile's P exceeds P_SUM_LIMIT or |m| is large (m_is_large). INVARIANT: only the rows for which one of these
// conditions holds raise m.
#pragma once
#include "non_finite.cuh"
#include "softmax_rows.cuh"

// Limit of the sum of one thread's P in a row of a tile. If no sum exceeds it, every P fits in fp16 (max 65504).
// Any limit up to 65504 would ensure this.
constexpr float P_SUM_LIMIT = 16384.0f;

// For update() of kernels that do not store P.
struct NoStore {
    __device__ __forceinline__ void operator()(int, const unsigned (&)[4]) const {}
};

// m and l of a thread's two rows of S (QueryRows). Functions return alpha, the factors of O, and do not rescale O:
// its rows may be in other threads (fwd_latent_wgmma).
struct SoftmaxStats : AccumulatorRows<QueryRows> {
    float m[2] = {-INF, -INF}, l[2] = {};
    bool m_is_large = false;  // result of large() when m last changed

    // m = max(m, row maximum of S).
    __device__ __forceinline__ void update_max(const float (&S)[BLOCK_N / 2]) {
        float lane_max[2] = {-INF, -INF};
        max_of(lane_max, S);
#pragma unroll
        for (int half = 0; half < 2; ++half) m[half] = fmaxf(m[half], row_max<4>(lane_max[half]));
    }
    // Updates m and rescales l. alpha: the factors of O.
    __device__ __forceinline__ void raise_max(const float (&S)[BLOCK_N / 2], float scale_log2, float (&alpha)[2]) {
        const float m_old[2] = {m[0], m[1]};
        update_max(S);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            alpha[half] = rescale_factor(m_old[half], m[half], scale_log2);
            l[half] *= alpha[half];
        }
    }
    // P = exp2((S - m) * scale_log2); store(i, P[i]) follows when P[i] is complete. `sum`: this thread's row sums of P.
    // Returns whether one exceeds P_SUM_LIMIT: m must then be raised.
    template <class Store = NoStore>
    __device__ __forceinline__ bool exponentiate(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                                 float scale_log2, float (&sum)[2], const Store& store = {}) const {
        float sums[2][2] = {};  // two partial sums per row: shorter dependency chains
        const float shifts[2] = {softmax_shift(m[0], scale_log2), softmax_shift(m[1], scale_log2)};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            const float p0 = ex2(fmaf(S[2 * i], scale_log2, shifts[i % 2]));
            const float p1 = ex2(fmaf(S[2 * i + 1], scale_log2, shifts[i % 2]));
            sums[i % 2][0] += p0;
            sums[i % 2][1] += p1;
            P[i / 4][i % 4] = pack(p0, p1);
            if (i % 4 == 3) store(i / 4, P[i / 4]);
        }
        sum[0] = sums[0][0] + sums[0][1];
        sum[1] = sums[1][0] + sums[1][1];
        return fmaxf(sum[0], sum[1]) > P_SUM_LIMIT;
    }
    // The same, but subtracts m before the multiplication: accurate for any |m|. If m is the row maximum, no sum
    // exceeds the limit.
    __device__ __forceinline__ void exponentiate_differences(unsigned (&P)[BLOCK_N / 16][4],
                                                             const float (&S)[BLOCK_N / 2], float scale_log2,
                                                             float (&sum)[2]) const {
        const float tops[2] = {m_or_zero(m[0]), m_or_zero(m[1])};
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            const float p0 = ex2((S[2 * i] - tops[i % 2]) * scale_log2);
            const float p1 = ex2((S[2 * i + 1] - tops[i % 2]) * scale_log2);
            sum[i % 2] += p0 + p1;
            P[i / 4][i % 4] = pack(p0, p1);
        }
    }
    // INVARIANT: a row whose sum exceeds the limit, or whose |m| is large, has its m raised and its P computed from
    // differences; the other rows of the warp keep theirs. alpha: the factors of O.
    __device__ __forceinline__ void raise_own_max(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                                  float scale_log2, float (&sum)[2], float (&alpha)[2]) {
        float lane_max[2] = {-INF, -INF};
        max_of(lane_max, S);
        bool raised[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            raised[half] = row_max<4>(sum[half]) > P_SUM_LIMIT || Head::is_large(m[half], scale_log2);
            const float m_old = m[half], highest = row_max<4>(lane_max[half]);
            if (raised[half]) m[half] = fmaxf(m_old, highest), sum[half] = 0.0f;
            alpha[half] = rescale_factor(m_old, m[half], scale_log2);
            l[half] *= alpha[half];
        }
        const float tops[2] = {m_or_zero(m[0]), m_or_zero(m[1])};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            if (!raised[i % 2]) continue;
            const float p0 = ex2((S[2 * i] - tops[i % 2]) * scale_log2);
            const float p1 = ex2((S[2 * i + 1] - tops[i % 2]) * scale_log2);
            sum[i % 2] += p0 + p1;
            P[i / 4][i % 4] = pack(p0, p1);
        }
    }
    // Whether |m| of a row of the warp is so large that P must be computed from S - m.
    __device__ __forceinline__ bool large(float scale_log2) const {
        return !Head::BELOW_LARGE &&
               __any_sync(0xffffffffu, Head::is_large(m[0], scale_log2) || Head::is_large(m[1], scale_log2));
    }
    // One step of the online softmax: P of the raw scores S of a key tile; m and l are updated. Calls rescale_O(alpha)
    // if m has been raised. IS_FIRST_TILE: the first key tile of the row, or of a range
    // of keys (key_splits.cuh): its P V overwrites O. store(i, P[i]) is called when P[i] is complete, and for all i
    // again if m is raised; not for IS_FIRST_TILE.
    template <bool IS_FIRST_TILE, class RescaleO, class Store = NoStore>
    __device__ __forceinline__ void update(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                           float scale_log2, const RescaleO& rescale_O, const Store& store = {}) {
        if (IS_FIRST_TILE) {
            update_max(S);
            // INVARIANT: P from differences, as in raise_own_max, which computes P of a row whose first visible key is
            // in a later tile: the bits of a row must not depend on which of the two computes them.
            if (INVARIANT) exponentiate_differences(P, S, scale_log2, l);
            else exponentiate(P, S, scale_log2, l);
            m_is_large = large(scale_log2);
            if (m_is_large && !INVARIANT) exponentiate_differences(P, S, scale_log2, l);
            return;
        }
        float sum[2];
        if (__any_sync(0xffffffffu, exponentiate(P, S, scale_log2, sum, store) || m_is_large)) {
            float alpha[2];
            if (INVARIANT) raise_own_max(P, S, scale_log2, sum, alpha);
            else raise_max(S, scale_log2, alpha);
            rescale_O(alpha);
            if (Head::BELOW_LARGE && !INVARIANT) exponentiate(P, S, scale_log2, sum);
            else if (!INVARIANT) exponentiate_differences(P, S, scale_log2, sum);
            m_is_large = large(scale_log2);
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; ++step) store(step, P[step]);
        }
        l[0] += sum[0];
        l[1] += sum[1];
    }
};

// Softmax state of a consumer thread of fwd_wgmma, with its part of O.
struct SoftmaxState : SoftmaxStats {
    static constexpr int O_REGISTERS = (HEAD_DIM_V + 15) / 16 * 16 / 2;
    float O[O_REGISTERS];

    template <bool IS_FIRST_TILE>
    __device__ __forceinline__ void update(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                           float scale_log2) {
        SoftmaxStats::update<IS_FIRST_TILE>(P, S, scale_log2, [&](const float (&alpha)[2]) { scale_O(O, alpha); });
    }
    // m becomes m_new, which is not smaller; l and O are rescaled.
    __device__ __forceinline__ void rescale_to(const float (&m_new)[2], float scale_log2) {
        float alpha[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            alpha[half] = rescale_factor(m[half], m_new[half], scale_log2);
            l[half] *= alpha[half];
            m[half] = m_new[half];
        }
        scale_O(O, alpha);
    }
    // Whether all of this thread's O are finite.
    __device__ __forceinline__ bool finite() const { return all_finite<4>(O); }
};
