// The scale, and the score options softcap, ALiBi, bias, score_mod, sink, dropout; with mask.cuh also masks and
// lengths. A kernel constructs one object per query head and calls its functions:
//
//   const Head head(score, b, h);
//
// The options modify a score x in this order:
//
//   x = scale * (q . k) -> softcap -> ALiBi -> bias -> score_mod (the user's expression)
//
// An option that a problem does not use is not compiled in.
//
// Scores have two representations. fwd_minimal, fwd_block2d and their backwards use x itself (`Head::masked_score`,
// `Head::recompute_P`). Tensor-core kernels use raw scores, with raw * softmax_scale = x, as FlashAttention does:
//
//   without softcap    raw = q . k                              softmax_scale = scale
//   with softcap       raw = tanh(scale * (q . k) / softcap)    softmax_scale = softcap
//   with a score_mod   raw = x                                  softmax_scale = 1         (an expression of the user)
//
// In the first two cases ALiBi and bias add their terms, divided by softmax_scale, to raw.
//
// The factor scale_log2 = softmax_scale * log2(e) is part of the FFMA before exp2: one multiplication less per score.
#pragma once
#include "tensor.cuh"
#include "dropout.cuh"
#include "dual.cuh"
#include "score.cuh"
#include "seqlen.cuh"
#include "mask.cuh"

// A row of the output: its LSE, and the factor of the accumulated O: 1 / l, times the factors of the sink, of dropout
// and of the descale of V. A further scale of O belongs here (Head::finalize).
struct FinalizedRow {
    float lse, O_scale;
};

// p: P of an element of S, recomputed from LSE. dx: the derivative of x with respect to scale * (q . k), or with
// OF_BIAS to the bias. dS = p * (dP - delta) * dx.
struct RecomputedP {
    float p, dx;
};

// The representation of scores (above). RAW: raw * softmax_scale = x. SCALED: x.
enum class ScoreUnits { RAW, SCALED };
// EXACT: rounded as expf and logf. APPROXIMATE: hardware instructions, with an error of a few ulp.
enum class Precision { EXACT, APPROXIMATE };

// Element (i + row_offset, j + col_offset) of S. i and j are the same for all elements of a thread; row_offset and
// col_offset are constants after unrolling.
struct ScoreIndex {
    int i, j, row_offset, col_offset;
    __device__ __forceinline__ ScoreIndex(int i, int j, int row_offset = 0, int col_offset = 0)
        : i(i), j(j), row_offset(row_offset), col_offset(col_offset) {}
    __device__ __forceinline__ int query_row() const { return i + row_offset; }
    __device__ __forceinline__ int key_col() const { return j + col_offset; }
};

// Head h of batch entry b: its scores, mask, and row addresses.
struct Head : Mask {
    // Add a new score modification to HAS_SCORE_MOD and, if its derivative is not 1, to HAS_DERIVATIVE: without these,
    // kernels skip it, and the multiplication by its derivative. HAS_SCORE_MOD is any modification,
    // Snippet::HAS_SCORE_MOD only the user's expression.
    static constexpr bool HAS_SCORE_MOD =
        SOFTCAP || ALIBI || BIAS || Snippet::HAS_SCORE_MOD;                    // x is not scale * (q . k)
    static constexpr bool HAS_DERIVATIVE = SOFTCAP || Snippet::HAS_SCORE_MOD;  // dx / d(scale * (q . k)) is not 1
    static constexpr bool READS_TENSORS = BIAS || ELEMENT_MASK || Snippet::HAS_SCORE_MOD;  // needs more registers
    static constexpr float LOG2E = 1.4426950408889634f;                                    // e^x = 2^(x log2(e))
    // Up to this |m| * scale_log2, the argument of exp2 is one FFMA, fma(S, scale_log2, -m * scale_log2). Its last
    // operand is rounded, which changes the argument by at most half an ulp of this operand, 2^-12 at the limit. Above
    // the limit the error would grow, until P overflows; so there the argument is (S - m) * scale_log2.
    static constexpr float LARGE = 8192.0f;
    // A softcap bounds |m| * scale_log2. The macro SOFTCAP is 1 if the softcap is at most 5000, and 3 if it is larger
    // (core/options.py); 5000 * log2(e) = 7213 is less than LARGE.
    static constexpr bool BELOW_LARGE = SOFTCAP == 1 && !ALIBI && !BIAS && !Snippet::HAS_SCORE_MOD;
    // The counterpart of LARGE for |LSE| in a backward. This limit is higher, because a lower one would not make P more
    // accurate: LSE itself is rounded, by up to 2^-8 at the limit, and that changes P as much as the rounding of the
    // FFMA's last operand does. The limit exceeds 65504, the largest float16: rows whose keys all have the bias -65504
    // (an additive mask) are common.
    static constexpr float LARGE_LSE = 81920.0f;
    // Lower limit of |scale|: the descale of a head of zeros may be 0, and 0 * -INF is NaN.
    static constexpr float MIN_SCALE = 1e-20f;

    float softmax_scale, inverse_softmax_scale;  // raw * softmax_scale = x
#if DESCALE_Q || DESCALE_K
    float scale;  // of this head
#endif
#if DESCALE_V
    float descale;
#endif
#if ALIBI
    float slope;
#endif
#if BIAS
    const bias_t* bias;
#endif
#if SINK
    float sink;
#endif
#if DROPOUT
    Dropout dropout;
#endif

    // softmax_scale of a problem in which it is the same for all heads.
    static __device__ __forceinline__ float softmax_scale_of(const Score& score) {
        if (Snippet::HAS_SCORE_MOD) return 1.0f;
#if SOFTCAP
        return score.softcap;
#else
        return score.scale;
#endif
    }

    // Whether |m * scale_log2| exceeds LARGE; m: a row's maximum, raw. False for -inf, a row without a visible key.
    static __device__ __forceinline__ bool is_large(float m, float scale_log2) {
        return !BELOW_LARGE && fabsf(m * scale_log2) > LARGE && m != -INF;
    }

    __device__ __forceinline__ Head(const Score& score, int b, int h) : Head(SeqlenInfo(score, b), h) {}
    __device__ __forceinline__ Head(const SeqlenInfo& sequence, int h)
        : Mask(sequence, h), softmax_scale(softmax_scale_of(score)) {
#if DESCALE_Q || DESCALE_K
        scale = score.scale;
#if DESCALE_Q
        scale *= score.descale_q(b, h);
#endif
#if DESCALE_K
        scale *= score.descale_k(b, h / score.group);
#endif
        if (fabsf(scale) < MIN_SCALE) scale = MIN_SCALE;
        if (!SOFTCAP && !Snippet::HAS_SCORE_MOD) softmax_scale = scale;
#endif
#if DESCALE_V
        descale = score.descale_v(b, h / score.group);
#endif
        if (HAS_SCORE_MOD) inverse_softmax_scale = 1.0f / softmax_scale;
#if ALIBI
        slope = score.slopes[b * score.slopes_stride_b + h * score.slopes_stride_h];
#endif
#if BIAS
        bias = score.bias.head(b, h);
#endif
#if SINK
        sink = score.sink[h * score.sink_stride];
#endif
#if DROPOUT
        dropout = {score.seed, score.dropout_threshold, static_cast<unsigned>(h), static_cast<unsigned>(b)};
#endif
    }

    // ---- score modification

    __device__ __forceinline__ float bias_of(ScoreIndex at) const {
#if BIAS
        const bias_t* const row = bias + min(at.query_row(), Sq - 1) * score.bias.stride_i;
        return BIAS_SAME_FOR_KEYS ? to_float(*row) : at.key_col() < Sk ? to_float(row[at.key_col()]) : 0.0f;
#else
        return 0.0f;
#endif
    }

    // The score of a dot product after all modifications. T is float, or Dual for the derivative of x with respect to
    // scale * (q . k), or with OF_BIAS to the bias. With RAW, too, the derivative is that of x, not of raw. Masked or
    // out-of-bounds elements give an unspecified value without an out-of-bounds access. bias_value: the element's bias;
    // without this argument it is loaded here. A new modification takes x and its derivative from the one before
    // (Dual's functions, or with_derivative); see also HAS_SCORE_MOD, HAS_DERIVATIVE and softmax_scale_of.
    template <class T, ScoreUnits UNITS, bool OF_BIAS = false>
    __device__ __forceinline__ T apply_score_mod(float dot, ScoreIndex at) const {
        return apply_score_mod<T, UNITS, OF_BIAS>(dot, at, bias_of(at));
    }
    template <class T, ScoreUnits UNITS, bool OF_BIAS = false>
    __device__ __forceinline__ T apply_score_mod(float dot, ScoreIndex at, float bias_value) const {
        constexpr bool SCALED =
            UNITS == ScoreUnits::SCALED || Snippet::HAS_SCORE_MOD;  // with a score_mod, softmax_scale is 1
        T x = with_derivative<T>(SCALED ? dot * head_scale() : dot, 1.0f);
#if SOFTCAP
        const float y = expression::tanh(dot * (head_scale() * (1.0f / score.softcap)));
        x = with_derivative<T>(SCALED ? score.softcap * y : y, derivative_of(x) * (1.0f - y * y));
#endif
#if ALIBI
        const float distance =
            static_cast<float>(at.i + diagonal - at.j) + static_cast<float>(at.row_offset - at.col_offset);
        x = x - (SCALED ? slope : slope * inverse_softmax_scale) * fabsf(distance);
#endif
#if BIAS
        x = x + (SCALED ? bias_value : bias_value * inverse_softmax_scale);
        if (OF_BIAS) x = with_derivative<T>(value_of(x), 1.0f);
#endif
#if SCORE_SNIPPET
        if (Snippet::HAS_SCORE_MOD)
            x = score.snippet.new_score(x, b, h, min(at.query_row(), Sq - 1), min(at.key_col(), key_rows() - 1), Sq,
                                        Sk);
#endif
        return x;
    }

    // x, or -INF where the mask hides it, even if the dot product is NaN.
    __device__ __forceinline__ float masked_score(float dot, int query_row, int key_col) const {
        return visible(query_row, key_col) ? apply_score_mod<float, ScoreUnits::SCALED>(dot, {query_row, key_col})
                                           : -INF;
    }

    // Backward. P is 0 where the mask hides the element, unless LSE is NaN.
    template <bool OF_BIAS = false>
    __device__ __forceinline__ RecomputedP recompute_P(float dot, float lse, int query_row, int key_col) const {
        const Dual x = apply_score_mod<Dual, ScoreUnits::SCALED, OF_BIAS>(dot, {query_row, key_col});
        const float finite_lse = lse == -INF ? 0.0f : lse;  // no visible key: -INF - -INF would be NaN
        const bool has_derivative = OF_BIAS ? Snippet::HAS_SCORE_MOD : HAS_DERIVATIVE;
        // __fadd_rn: x must be rounded as it was for LSE, so that the two roundings cancel; fma(dot, scale, -lse)
        // would not round it.
        const float exponent = __fadd_rn(visible(query_row, key_col) ? x.value : -INF, -finite_lse);
        // exponent > 0 only because LSE is rounded: P <= 1.
        return {expf(exponent > 0.0f ? 0.0f : exponent), has_derivative ? x.derivative : 1.0f};
    }

    // Backward: whether |LSE| is too large to compute P by one FFMA. The kernel then replaces it by NaN, which makes
    // all gradients that depend on the row NaN, and non_finite.cuh computes these again from S - LSE. False for -inf, a
    // row without a visible key.
    static __device__ __forceinline__ bool is_large(float lse) { return fabsf(lse) > LARGE_LSE && lse != -INF; }

    // Raw scores before masking.
    __device__ __forceinline__ float raw(float dot, ScoreIndex at) const {
        return HAS_SCORE_MOD ? apply_score_mod<float, ScoreUnits::RAW>(dot, at) : dot;
    }
    __device__ __forceinline__ float raw(float dot, ScoreIndex at, float bias_value) const {
        return apply_score_mod<float, ScoreUnits::RAW>(dot, at, bias_value);
    }
    __device__ __forceinline__ Dual raw_dual(float dot, ScoreIndex at) const {
        return apply_score_mod<Dual, ScoreUnits::RAW>(dot, at);
    }
    __device__ __forceinline__ Dual raw_dual(float dot, ScoreIndex at, float bias_value) const {
        return apply_score_mod<Dual, ScoreUnits::RAW>(dot, at, bias_value);
    }

    // LSE and the normalization factor of a row, from m (in UNITS; its maximum, or with deferred rescaling an earlier
    // one) and its sum l of exp(x - m). The factor is 0 for l = 0, a row without a visible key. APPROXIMATE requires l
    // = 0 or l >= about 1.
    template <ScoreUnits UNITS = ScoreUnits::RAW, Precision PRECISION = Precision::EXACT>
    __device__ __forceinline__ FinalizedRow finalize(float m, float l) const {
        constexpr bool APPROXIMATELY = PRECISION == Precision::APPROXIMATE;
        FinalizedRow row = {
            (UNITS == ScoreUnits::SCALED ? m : m * softmax_scale) + (APPROXIMATELY ? lg2(l) * 0.693147181f : logf(l)),
            l == 0.0f       ? 0.0f
            : APPROXIMATELY ? reciprocal(l)
                            : 1.0f / l};
        // With an explicit fmaf the rounding does not depend on which products the compiler contracts to FMAs.
        if (INVARIANT && UNITS != ScoreUnits::SCALED)
            row.lse = fmaf(m, softmax_scale, APPROXIMATELY ? lg2(l) * 0.693147181f : logf(l));
#if SINK
        // The sink adds exp(sink) to the sum. `without`: LSE without the sink.
        const float without = row.lse, gap = sink - without;
        row.lse = gap == 0.0f ? sink + 0.693147181f : fmaxf(sink, without) + log1pf(expf(-fabsf(gap)));
        if (sink == -INF || (without == INF && sink < INF)) row.lse = without;
        if (l != 0.0f && sink != -INF) row.O_scale *= expf(without - row.lse);
#endif
        row.O_scale *= dropout_factor(score) * head_descale();
        return row;
    }

    // The factors of this head: of q . k, and of O (the descale of V).
    __device__ __forceinline__ float head_scale() const {
#if DESCALE_Q || DESCALE_K
        return scale;
#else
        return score.scale;
#endif
    }
    __device__ __forceinline__ float head_descale() const {
#if DESCALE_V
        return descale;
#elif DESCALE
        return score.descale;
#else
        return 1.0f;
#endif
    }

    // ---- dropout, applied to P after the softmax: l and LSE include dropped elements

    static __device__ __forceinline__ float dropout_factor(const Score& score) {
#if DROPOUT
        return score.dropout_factor;
#else
        return 1.0f;
#endif
    }

    // Whether dropout keeps an element of P.
    __device__ __forceinline__ bool keep(int query_row, int key_col) const {
#if DROPOUT
        return dropout.keep(query_row, key_col);
#else
        return true;
#endif
    }

    // Dropout of an element of P; in the backward also of an element of dP.
    __device__ __forceinline__ float apply_dropout(float x, bool kept) const {
        return (DROPOUT && !kept ? 0.0f : x) * dropout_factor(score);
    }

    // Dropout's keep masks of this lane's elements of N 16 x 16 blocks of P. The blocks follow each other in the
    // direction of the keys, from (i, j) on. keep_along_queries: for an A operand whose rows are queries (P).
    // keep_along_keys: for one whose rows are keys (P^T); all lanes of the warp call this function.
#if DROPOUT
    using Kept = KeepMask;
#else
    using Kept = KeepAll;
#endif
    template <int N>
    __device__ __forceinline__ void keep_along_queries(Kept (&kept)[N], int i, int j) const {
#if DROPOUT
        dropout.along_queries(kept, i, j);
#endif
    }
    template <int N>
    __device__ __forceinline__ void keep_along_keys(Kept (&kept)[N], unsigned long long seed, int i, int j) const {
#if DROPOUT
        dropout.along_keys(kept, seed, i, j);
#endif
    }
    // Dropout's seed, loaded from global memory.
    static __device__ __forceinline__ unsigned long long dropout_seed(const Score& score) {
#if DROPOUT
        return *score.seed;
#else
        return 0;
#endif
    }

  private:
    // T = float: without the derivative.
    template <class T>
    static __device__ __forceinline__ T with_derivative(float value, float derivative);

    static __device__ __forceinline__ float value_of(float x) { return x; }
    static __device__ __forceinline__ float value_of(Dual x) { return x.value; }
    static __device__ __forceinline__ float derivative_of(float) { return 1.0f; }  // not used: see with_derivative
    static __device__ __forceinline__ float derivative_of(Dual x) { return x.derivative; }
};
template <>
__device__ __forceinline__ float Head::with_derivative<float>(float value, float) {
    return value;
}
template <>
__device__ __forceinline__ Dual Head::with_derivative<Dual>(float value, float derivative) {
    return {value, derivative};
}
