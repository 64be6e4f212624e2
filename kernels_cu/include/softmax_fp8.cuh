// Online softmax of fwd_wgmma_fp8, with deferred rescaling. P is multiplied by P_MAX, the largest number of V's type,
// and m is HEADROOM bits above the score that set it. A row is rescaled only if a P exceeds RESCALE_SHARE of the row
// sum, or P_MAX: P of a dominant key must be exact. A thread estimates the row sum as four times its own part, so the
// test needs no shuffle, and no alpha is needed otherwise.
#pragma once
#include <fp8.cuh>  // angle brackets: the CPU backend has its own
#include "non_finite.cuh"
#include "softmax_rows.cuh"

// The test for rescaling uses the sums of P, which bound each P. This requires that all rows of a work tile begin with
// the same key tile, so that m is set, and that scores are dot products, which rarely rise by 120 bits. Other problems
// test the maximum of the scores, before the exponentials.
constexpr bool CHECK_SUMS = !Head::HAS_SCORE_MOD && !Head::HAS_LEFT_BOUND && !Head::ELEMENT_MASK;
// Whole bits, so that P of the maximum is exact. With 5 bits, BLOCK_N / 8 equal scores do not exceed the limit.
constexpr int HEADROOM = CHECK_SUMS && BLOCK_N > 128 ? 5 : 4;
constexpr float RESCALE_SHARE = 1.0f / 4;                   // of the row sum: see above
constexpr float P_AFTER_RESCALE = P_MAX / (1 << HEADROOM);  // P of the score that set m
// Up to here P is rounded to P_MAX, not clamped: float8_e4m3 rounds numbers up to 1.036 P_MAX to it, float8_e5m2 up to
// 1.07 P_MAX.
constexpr float P_OVERFLOW = 1.03f * P_MAX;

// Softmax state of a consumer thread: O, m and l of its two query rows, g and g + 8 of the warp's 16.
struct Fp8SoftmaxState : AccumulatorRows<QueryRows> {
    float O[HEAD_DIM_V / 2] = {};
    float m[2] = {-INF, -INF}, l[2] = {};  // l: times P_MAX

    // Maximum of a thread's scores in row g or g + 8, as integers: max3, four dependency chains.
    static __device__ __forceinline__ int largest(const float (&S)[BLOCK_N / 2], int half) {
        const auto score = [&](int k) { return static_cast<int>(__float_as_uint(S[k / 2 * 4 + half * 2 + k % 2])); };
        int lane_max[4] = {score(0), score(1), score(2), score(3)};
#pragma unroll
        for (int k = 4; k < BLOCK_N / 4; k += 2)
            lane_max[k / 2 % 4] = max3(lane_max[k / 2 % 4], score(k), score(k + 1));
        return max(max3(lane_max[0], lane_max[1], lane_max[2]), lane_max[3]);
    }
    // Limit of score * scale_log2 below which m stays: RESCALE_SHARE of the row sum, estimated from this thread's part.
    __device__ __forceinline__ float score_limit(int half, float scale_log2) const {
        const float room = LOG2_P_MAX - lg2(l[half] * (4 * RESCALE_SHARE));
        return fmaf(m[half], scale_log2, -fminf(fmaxf(room, 0.0f), HEADROOM));
    }
    // Whether a row of the warp may need another m. Integer order is the order of non-negative floats, and any negative
    // float is below them. Therefore a negative maximum is inconclusive if the limit is negative, too.
    __device__ __forceinline__ bool scores_too_large(const float (&S)[BLOCK_N / 2], float scale_log2) const {
        bool any = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int lane_max = largest(S, half);
            const float limit = score_limit(half, scale_log2);
            any |= __int_as_float(lane_max) * scale_log2 > limit || (lane_max < 0 && limit < 0.0f);
        }
        return __any_sync(0xffffffffu, any);
    }
    // Raises m of the rows that need it; alpha is the factor of their O and l. Returns whether a row changed.
    __device__ __forceinline__ bool raise_max(const float (&S)[BLOCK_N / 2], float scale_log2, float (&alpha)[2]) {
        float lane_max[2][2] = {{-INF, -INF}, {-INF, -INF}};
        max_of(lane_max, S);
        bool rescaled = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own = fmaxf(lane_max[half][0], lane_max[half][1]), highest = row_max<4>(own);
            const bool requested = row_max<4>(own * scale_log2 > score_limit(half, scale_log2) ? 1.0f : 0.0f) > 0.0f;
            alpha[half] = 1.0f;
            if (requested) {
                const float m_new = highest + HEADROOM / scale_log2;
                alpha[half] = rescale_factor(m[half], m_new, scale_log2);
                m[half] = m_new;
                rescaled = true;
            }
        }
        return __any_sync(0xffffffffu, rescaled);
    }
    __device__ __forceinline__ void scale_sums(const float (&alpha)[2]) {  // O and l
        l[0] *= alpha[0], l[1] *= alpha[1];
        scale_O(O, alpha);
    }
    // Raises m where needed, and rescales O and l.
    __device__ __forceinline__ void rescale(const float (&S)[BLOCK_N / 2], float scale_log2) {
        float alpha[2];
        if (raise_max(S, scale_log2, alpha)) scale_sums(alpha);
    }
    // Raises m to `m_new`, which is at least m.
    __device__ __forceinline__ void rescale_to(const float (&m_new)[2], float scale_log2) {
        float alpha[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            alpha[half] = rescale_factor(m[half], m_new[half], scale_log2);
            m[half] = m_new[half];
        }
        scale_sums(alpha);
    }
    // S becomes P = P_MAX * exp2((S - m) * scale_log2); two partial sums per row.
    __device__ __forceinline__ void exponentiate(float (&S)[BLOCK_N / 2], float scale_log2, float (&sums)[2][2]) {
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            shift[half] = softmax_shift(m[half], scale_log2, LOG2_P_MAX);
            sums[half][0] = sums[half][1] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            S[i] = ex2(fmaf(S[i], scale_log2, shift[i / 2 % 2]));
            sums[i / 2 % 2][i % 2] += S[i];
        }
    }
    __device__ __forceinline__ void add(const float (&sums)[2][2]) {
        l[0] += sums[0][0] + sums[0][1], l[1] += sums[1][0] + sums[1][1];
    }
    // Limit of P below which m stays. sums_too_large: whether a P may exceed it; no P exceeds its thread's sum.
    __device__ __forceinline__ float max_P(int half) const {
        return fminf(fmaxf(l[half] * (4 * RESCALE_SHARE), P_AFTER_RESCALE), P_OVERFLOW);
    }
    __device__ __forceinline__ bool sums_too_large(const float (&sums)[2][2]) const {
        bool any = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) any |= fmaxf(sums[half][0], sums[half][1]) > max_P(half);
        return __any_sync(0xffffffffu, any);
    }
    // Raises m of the rows that need it, after the exponentials: their largest P becomes P_AFTER_RESCALE. If P is
    // infinite, m becomes infinite, large() is true, and non_finite.cuh recomputes all rows of the warpgroup.
    __device__ __forceinline__ void rescale_after_exp(float (&P)[BLOCK_N / 2], float (&sums)[2][2], float scale_log2) {
        float lane_max[2][2] = {};
        max_of(lane_max, P);
        float alpha[2] = {1.0f, 1.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own = fmaxf(lane_max[half][0], lane_max[half][1]), highest = row_max<4>(own);
            const bool requested = own > max_P(half) || fmaxf(sums[half][0], sums[half][1]) > P_OVERFLOW;
            if (row_max<4>(requested ? 1.0f : 0.0f) == 0.0f) continue;
            alpha[half] = P_AFTER_RESCALE / highest;
            m[half] -= lg2(alpha[half]) / scale_log2;
            sums[half][0] *= alpha[half], sums[half][1] *= alpha[half];
        }
        if (!__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
        scale_O(P, alpha);
        scale_sums(alpha);
    }
    // Whether |m| is too large for one FFMA: at the limit the relative error of P is 2^-5, half of its rounding error.
    __device__ __forceinline__ bool large(float scale_log2) const {
        constexpr float LIMIT = 128.0f;  // times the limit of is_large: 2^20
        return Head::is_large(m[0], scale_log2 / LIMIT) || Head::is_large(m[1], scale_log2 / LIMIT);
    }
    // A masked key has P = 0, but 0 * NaN is NaN. Only masks hide keys.
    __device__ __forceinline__ bool finite() const { return !Head::HAS_MASK || all_finite<1>(O); }
};
