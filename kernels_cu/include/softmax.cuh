// Online softmax of wgmma accumulators, with deferred rescaling: P is computed with the maximum m of the row's first
// tile, and m is raised only if a P is too large.
//
//   rescale_factor, softmax_shift     alpha, and the exponent of P
//   RowSoftmax<Fragment>              maxima, rescaling and finite results, for any layout of the accumulator
//   SoftmaxState                      O, m and l of a consumer thread of fwd_wgmma; softmax_fp8.cuh has that of
//                                     fwd_wgmma_fp8
//
// m is the maximum of raw scores, and l a thread's part of the row sum. The parameter `exponent` is the factor of raw
// scores in exp2, unit * log2(e) (score_mod.cuh).
#pragma once
#include "score_mod.cuh"

// Limit of the sum of one thread's P in a row of a tile. If no sum exceeds it, every P fits in fp16 (max 65504).
constexpr float P_SUM_LIMIT = 16384.0f;
constexpr float SCORE_LIMIT = 3e38f;  // upper limit of -m * exponent, for m = -INF: finite, near the largest float

// The factor alpha = e^(m_old - m_new) of sums under an old maximum.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new, float exponent) {
    return m_old == m_new ? 1.0f : ex2((m_old - m_new) * exponent);  // for equal infinities 1, not NaN
}
// P = exp2(S * exponent + shift). While m is -INF, the shift is SCORE_LIMIT: P is 0 where S = -INF, and exceeds any
// limit elsewhere. With log2_factor, P is multiplied by 2^log2_factor.
__device__ __forceinline__ float softmax_shift(float m, float exponent) { return fminf(-m * exponent, SCORE_LIMIT); }
__device__ __forceinline__ float softmax_shift(float m, float exponent, float log2_factor) {
    return fminf(fmaf(-m, exponent, log2_factor), SCORE_LIMIT);
}
// P = exp2((S - finite_max(m)) * exponent): accurate for any |m|. While m is -INF, P is 0, not NaN.
__device__ __forceinline__ float finite_max(float m) { return m == -INF ? 0.0f : m; }

// Layouts of an accumulator: of how many rows a thread has elements, and which of these rows register i belongs to.
struct QueryRows {  // S = Q K^T and O = P V: rows g and g + 8 of the warp's 16
    static constexpr int ROWS = 2;
    static constexpr __device__ int row(int i) { return i / 2 % 2; }
};
template <int QUERIES>
struct QueryColumns {  // S^T = K Q^T and O^T = V^T P^T: columns 2q and 2q + 1 of every 8
    static constexpr int ROWS = QUERIES / 4;
    static constexpr __device__ int row(int i) { return i / 4 * 2 + i % 2; }
};

template <class Fragment>
struct RowSoftmax {
    static constexpr int ROWS = Fragment::ROWS;
    // lane_max = max(lane_max, the thread's elements of S), per row; with two numbers per row, of the even and of the
    // odd elements: shorter dependency chains.
    template <int N>
    static __device__ __forceinline__ void max_of(float (&lane_max)[ROWS], const float (&S)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) lane_max[Fragment::row(i)] = fmaxf(lane_max[Fragment::row(i)], S[i]);
    }
    template <int N>
    static __device__ __forceinline__ void max_of(float (&lane_max)[ROWS][2], const float (&S)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i)
            lane_max[Fragment::row(i)][i % 2] = fmaxf(lane_max[Fragment::row(i)][i % 2], S[i]);
    }
    template <int N>
    static __device__ __forceinline__ void scale_O(float (&O)[N], const float (&alpha)[ROWS]) {
#pragma unroll
        for (int i = 0; i < N; ++i) O[i] *= alpha[Fragment::row(i)];
    }
};

// Whether all elements are finite: 0 * O is then 0, otherwise NaN. CHAINS dependency chains, one or four.
template <int CHAINS, int N>
__device__ __forceinline__ bool all_finite(const float (&O)[N]) {
    float zero[4] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) zero[i % CHAINS] = fmaf(O[i], 0.0f, zero[i % CHAINS]);
    return (CHAINS == 1 ? zero[0] : (zero[0] + zero[1]) + (zero[2] + zero[3])) == 0.0f;
}

// Softmax state of a consumer thread of fwd_wgmma, with its part of O.
struct SoftmaxState : RowSoftmax<QueryRows> {
    static constexpr int O_REGISTERS = (HEAD_DIM_V + 15) / 16 * 16 / 2;
    float O[O_REGISTERS];
    float m[2] = {-INF, -INF}, l[2] = {};
    bool m_is_large = false;  // `large`, at the last change of m

    // m = max(m, row maximum of S).
    __device__ __forceinline__ void update_max(const float (&S)[BLOCK_N / 2]) {
        float lane_max[2] = {-INF, -INF};
        max_of(lane_max, S);
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
            alpha[half] = rescale_factor(m_old[half], m[half], exponent);
            l[half] *= alpha[half];
        }
        scale_O(O, alpha);
    }
    // P = exp2((S - m) * exponent); `sum`: this thread's row sums of P. True if one exceeds P_SUM_LIMIT: m must be
    // raised.
    __device__ __forceinline__ bool exponentiate(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2],
                                                 float exponent, float (&sum)[2]) const {
        float sums[2][2] = {};  // two partial sums per row: shorter dependency chains
        const float shifts[2] = {softmax_shift(m[0], exponent), softmax_shift(m[1], exponent)};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            const float p0 = ex2(fmaf(S[2 * i], exponent, shifts[i % 2]));
            const float p1 = ex2(fmaf(S[2 * i + 1], exponent, shifts[i % 2]));
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
        const float tops[2] = {finite_max(m[0]), finite_max(m[1])};
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 4; ++i) {
            const float p0 = ex2((S[2 * i] - tops[i % 2]) * exponent);
            const float p1 = ex2((S[2 * i + 1] - tops[i % 2]) * exponent);
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
    // Whether all of this thread's O are finite.
    __device__ __forceinline__ bool finite() const { return all_finite<4>(O); }
};
