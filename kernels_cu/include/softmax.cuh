// Online softmax of a wgmma accumulator, with deferred rescaling: P is computed with the maximum m of the row's first
// tile, and m is raised only if the sum of a tile's P exceeds P_SUM_LIMIT.
#pragma once
#include "score_mod.cuh"

// Limit of the sum of one thread's P in a row of a tile. If no sum exceeds it, every P fits in fp16.
constexpr float P_SUM_LIMIT = 16384.0f;
constexpr float SCORE_LIMIT = 3e38f;  // upper limit of -m * exponent, for m = -INF: finite, near the largest float

// Softmax state of a consumer thread: O, m and l of its two query rows, g and g + 8 of the warp's 16. The parameter
// `exponent` is the factor of raw scores in exp2, unit * log2(e) (score_mod.cuh).
struct SoftmaxState {
    static constexpr int O_REGISTERS = (HEAD_DIM_V + 15) / 16 * 16 / 2;
    float O[O_REGISTERS];
    float m[2] = {-INF, -INF}, l[2] = {};  // m: maximum of the raw scores; l: this thread's part of the row sum
    bool m_is_large = false;               // `large`, at the last change of m

    // m = max(m, row maximum of S).
    __device__ __forceinline__ void update_max(const float (&S)[BLOCK_N / 2]) {
        float lane_max[2] = {-INF, -INF};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) lane_max[i / 2 % 2] = fmaxf(lane_max[i / 2 % 2], S[i]);
#pragma unroll
        for (int half = 0; half < 2; ++half) m[half] = fmaxf(m[half], row_max<4>(lane_max[half]));
    }
    // Updates m and rescales O and l.
    __device__ __forceinline__ void rescale(const float (&S)[BLOCK_N / 2], float exponent) {
        const float m_old[2] = {m[0], m[1]};
        float alpha[2];
        update_max(S);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            alpha[half] = m_old[half] == m[half] ? 1.0f  // also of equal infinities, instead of NaN
                                                 : ex2((m_old[half] - m[half]) * exponent);
            l[half] *= alpha[half];
        }
#pragma unroll
        for (int i = 0; i < O_REGISTERS; ++i) O[i] *= alpha[i / 2 % 2];
    }
    // P = exp2((S - m) * exponent); `sum`: this thread's row sums of P. True if one exceeds P_SUM_LIMIT: m must be
    // raised.
    __device__ __forceinline__ bool exponentiate(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                                 float exponent, float (&sum)[2]) const {
        float sums[2][2] = {};  // two partial sums per row: shorter dependency chains
        // While m is -INF, the shift is SCORE_LIMIT: P is 0 where S = -INF, and exceeds the limit elsewhere.
        const float shift[2] = {fminf(-m[0] * exponent, SCORE_LIMIT), fminf(-m[1] * exponent, SCORE_LIMIT)};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            const float p0 = ex2(fmaf(S[2 * i], exponent, shift[i % 2]));
            const float p1 = ex2(fmaf(S[2 * i + 1], exponent, shift[i % 2]));
            sums[i % 2][0] += p0;
            sums[i % 2][1] += p1;
            P[i / 4][i % 4] = pack(p0, p1);
        }
        sum[0] = sums[0][0] + sums[0][1];
        sum[1] = sums[1][0] + sums[1][1];
        return fmaxf(sum[0], sum[1]) > P_SUM_LIMIT;
    }
    // The same, but subtracts m before the multiplication: accurate for any |m|. If m is the row maximum, no sum
    // exceeds the limit.
    __device__ __forceinline__ void exponentiate_differences(unsigned (&P)[BLOCK_N / 16][4],
                                                             const float (&S)[BLOCK_N / 2], float exponent,
                                                             float (&sum)[2]) const {
        // All keys masked so far: P = 0, not NaN.
        const float finite_m[2] = {m[0] == -INF ? 0.0f : m[0], m[1] == -INF ? 0.0f : m[1]};
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            const float p0 = ex2((S[2 * i] - finite_m[i % 2]) * exponent);
            const float p1 = ex2((S[2 * i + 1] - finite_m[i % 2]) * exponent);
            sum[i % 2] += p0 + p1;
            P[i / 4][i % 4] = pack(p0, p1);
        }
    }
    // Whether |m| of a row of the warp is so large that P must be computed from S - m.
    __device__ __forceinline__ bool large(float exponent) const {
        return __any_sync(0xffffffffu, Head::is_large(m[0], exponent) || Head::is_large(m[1], exponent));
    }
    // One step of the online softmax: P of the raw scores S of a key tile; m, l and O are updated. FIRST: of the row's
    // first tile, whose P V overwrites O.
    template <bool FIRST>
    __device__ __forceinline__ void update(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                           float exponent) {
        if (FIRST) {
            update_max(S);
            exponentiate(P, S, exponent, l);
            m_is_large = large(exponent);
            if (m_is_large) exponentiate_differences(P, S, exponent, l);
            return;
        }
        float sum[2];
        if (__any_sync(0xffffffffu, exponentiate(P, S, exponent, sum) || m_is_large)) {
            rescale(S, exponent);
            exponentiate_differences(P, S, exponent, sum);
            m_is_large = large(exponent);
        }
        l[0] += sum[0];
        l[1] += sum[1];
    }
    // Whether all of this thread's O are finite: 0 * O is then 0, otherwise NaN.
    __device__ __forceinline__ bool finite() const {
        float zero[4] = {};  // four short dependency chains
#pragma unroll
        for (int i = 0; i < O_REGISTERS; ++i) zero[i % 4] = fmaf(O[i], 0.0f, zero[i % 4]);
        return (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0.0f;
    }
};
