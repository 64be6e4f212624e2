// Building blocks of online softmax, for any layout of the accumulator: the factor alpha, the argument of exp2, row
// maxima, and rescaling of O. The parameter `scale_log2` is the factor of raw scores in exp2, softmax_scale * log2(e)
// (score_mod.cuh; FlashAttention: softmax_scale_log2).
//
// Deferred rescaling (FlashAttention-4: rescale threshold): m need not be the maximum of all scores so far. As long as
// P cannot overflow its 16-bit type (fp16: 65504), m does not change, and O and l are not rescaled. O / l is the same
// for any m, because O and l have the same factor. m is raised if a limit is exceeded:
//
//   softmax_mma.cuh     before exp2: a score exceeds m by more than RESCALE_THRESHOLD / scale_log2. If no score does,
//                       P <= 2^RESCALE_THRESHOLD; softmax_transposed.cuh, too
//   softmax.cuh         after exp2: a thread's sum of P exceeds P_SUM_LIMIT. No maximum of the tile is needed
//   fwd_decode_wgmma    after exp2: an element of P exceeds P_LIMIT. No sum of the tile is needed
//
// If the limit is exceeded after exp2, P of the tile is computed again with a larger m. float8 has stricter limits:
// softmax_fp8.cuh.
#pragma once
#include "score_mod.cuh"

constexpr float RESCALE_THRESHOLD = 8.0f;  // P stays below 2^8, which fp16 can represent
constexpr float MAX_SHIFT = 3e38f;  // upper limit of -m * scale_log2, for m = -INF: finite, near the largest float

// alpha: the factor that rescales l and O from the maximum m_old to m_new.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new, float scale_log2) {
    return m_old == m_new ? 1.0f : ex2((m_old - m_new) * scale_log2);  // for equal infinities 1, not NaN
}
// P = exp2(S * scale_log2 + shift). While m is -INF, the shift is MAX_SHIFT: P is 0 where S = -INF, and above every
// limit elsewhere, so that m is raised. With log2_factor, P is multiplied by 2^log2_factor.
__device__ __forceinline__ float softmax_shift(float m, float scale_log2) { return fminf(-m * scale_log2, MAX_SHIFT); }
__device__ __forceinline__ float softmax_shift(float m, float scale_log2, float log2_factor) {
    return fminf(fmaf(-m, scale_log2, log2_factor), MAX_SHIFT);
}
// P = exp2((S - m_or_zero(m)) * scale_log2): accurate for any |m|. While m is -INF, P is 0, not NaN.
__device__ __forceinline__ float m_or_zero(float m) { return m == -INF ? 0.0f : m; }

// Layouts of an accumulator. ROWS: the number of query rows of which a thread has elements; row(i): which of these rows
// register i belongs to.
struct QueryRows {  // S = Q K^T and O = P V: rows g and g + 8 of the warp's 16, columns 2q and 2q + 1 of every 8
    static constexpr int ROWS = 2;
    static constexpr __device__ int row(int i) { return i / 2 % 2; }
    static constexpr __device__ int column(int i) { return i / 4 * 8 + i % 2; }  // relative to the lane's first column
    // The query and key of S[i]. query, key: those of the thread's first element.
    static __device__ __forceinline__ ScoreIndex index(int query, int key, int i) {
        return {query, key, row(i) * 8, column(i)};
    }
};
template <int QUERIES>
struct QueryColumns {  // S^T = K Q^T and O^T = V^T P^T: columns 2q and 2q + 1 of every 8
    static constexpr int ROWS = QUERIES / 4;
    static constexpr __device__ int row(int i) { return i / 4 * 2 + i % 2; }
};

template <class Fragment>
struct AccumulatorRows {  // operations on accumulators in registers, by row
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
        for (int i = 0; i < N; ++i) lane_max[Fragment::row(i)][i % 2] = fmaxf(lane_max[Fragment::row(i)][i % 2], S[i]);
    }
    template <int N>
    static __device__ __forceinline__ void scale_O(float (&O)[N], const float (&alpha)[ROWS]) {
#pragma unroll
        for (int i = 0; i < N; ++i) O[i] *= alpha[Fragment::row(i)];
    }
};
