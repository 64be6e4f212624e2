// What a score means: each option of a problem comes in here and nowhere else. A kernel binds its head once,
//
//   const Head head(score, b, h);
//
// and asks it everything: which keys a row sees, what a dot product becomes, how that differs in the backward, which tiles are
// to be walked and which of them are seen whole. An option that is not asked for is not compiled in.
//
//   x = scale * (q . k) -> softcap -> slopes -> bias -> the user's expression       the order of the steps
//
// Small kernels take x as it is (`score`, `pair`). Tensor-core kernels take it `raw`, in units that save instructions: of a
// plain problem raw is the dot product itself, its unit the scale, folded with log2(e) into the one FFMA before exp2.
#pragma once
#include "dropout.cuh"
#include "dual.cuh"

// Macros of options that nobody asked for. WINDOW: 1, a row's keys have a first; 2, a last. BIAS: 1, as Q; 2, fp32. MASK: 1.
// BIAS and MASK + 4: the same for every key. BIAS + 8: tensor maps can copy tiles of it. DESCALE: 8 of float8; 1, 2, 4: Q, K, V
// have a tensor of numbers.
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef BIAS
#define BIAS 0
#endif
#ifndef MASK
#define MASK 0
#endif
#ifndef SINK
#define SINK 0
#endif
#ifndef KEY_LENGTHS
#define KEY_LENGTHS 0
#endif
#ifndef RAGGED
#define RAGGED 0
#endif
#ifndef PAGE_SIZE
#define PAGE_SIZE 0
#endif
#ifndef SCORE_SNIPPET
#define SCORE_SNIPPET 0
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef DESCALE
#define DESCALE 0
#endif
#ifndef BLOCK_MAP
#define BLOCK_MAP 0
#endif
#ifndef SCORE_BYTES
#define SCORE_BYTES 16
#endif

// A tensor that broadcasts to (B, H, Sq, Sk): strides in elements, 0 where it does not vary; in Sk 1, or it does not vary.
template <class T>
struct Broadcast {
    const T* data;
    long long stride_b, stride_h, stride_i;
    __device__ __forceinline__ const T* head(int b, int h) const { return data + b * stride_b + h * stride_h; }
};
#if BIAS % 4 == 2
using bias_t = float;
#else
using bias_t = dtype_o;
#endif

// A tensor that broadcasts to (B, heads), likewise.
struct HeadNumbers {
    const float* data;
    long long stride_b, stride_h;
    __device__ __forceinline__ float operator()(int b, int h) const { return data[b * stride_b + h * stride_h]; }
};

#if SCORE_SNIPPET
// A tensor that the user's expressions read as name(i, j), with RANK indices; strides in elements.
template <class T, int RANK>
struct SnippetTensor {
    const T* data;
    long long strides[RANK ? RANK : 1];
    template <class... I>
    __device__ __forceinline__ auto operator()(I... indices) const {
        static_assert(sizeof...(I) == RANK, "a tensor is read with as many indices as it has dimensions");
        const long long at[] = {static_cast<long long>(indices)..., 0};
        long long offset = 0;
        for (int axis = 0; axis < RANK; ++axis) offset += at[axis] * strides[axis];
        return read(data[offset]);
    }

  private:
    static __device__ __forceinline__ int read(int x) { return x; }
    static __device__ __forceinline__ bool read(bool x) { return x; }
    template <class Float>
    static __device__ __forceinline__ Real read(Float x) { return static_cast<float>(x); }
};
#include <score_snippet.cuh>  // struct Snippet: generated from the user's lines (sandbox/core/snippet.py)
#else
struct Snippet {
    static constexpr bool SCORES = false, HIDES = false;
};
#endif

// Passed by value to every kernel, last. Mirrored by score_fields in sandbox/core/options.py.
struct Score {
    int Sq, Sk;
    int diagonal;  // key i + diagonal lies opposite of query i (Sk - Sq: bottom-right, 0: top-left)
    float scale;
#if WINDOW
    int left, right;  // a row sees keys from i + diagonal - left to i + diagonal + right; causal: right is 0 at most
#endif
#if SOFTCAP
    float softcap;
#endif
#if DROPOUT
    unsigned dropout_threshold;  // what an element's 16 bits, shifted up by 16, must reach to be kept
    float dropout_factor;    // of what is kept: 1 / (1 - p), or 0 where nothing is
#endif
#if KEY_LENGTHS || RAGGED
    int bottom_right;  // whether `diagonal` moves with the numbers of queries and keys
#endif
#if RAGGED
    int rows_q, rows_k;  // of the tensors; Sq and Sk are then the most that a sequence has
    int sequences;
#endif
#if PAGE_SIZE
    int pages;  // that K and V have
#endif
#if DESCALE
    float descale;  // of V; those of Q and K, where they are the same for all heads, are a part of `scale`
    int group;      // H / Hk
#endif
#if RAGGED
    const int* cu_seqlens_q;  // (sequences + 1,)
    long long cu_seqlens_q_stride_b;
    const int* cu_seqlens_k;
    long long cu_seqlens_k_stride_b;
#endif
#if KEY_LENGTHS
    const int* key_lengths;  // (B,)
    long long key_lengths_stride_b;
#endif
#if PAGE_SIZE
    const int* block_table;  // (B, ceil(Sk / PAGE_SIZE))
    long long block_table_stride_b, block_table_stride_i;
#endif
#if ALIBI
    const float* slopes;  // (B, H), strides in elements
    long long slopes_stride_b, slopes_stride_h;
#endif
#if BIAS
    Broadcast<bias_t> bias;
#endif
#if MASK
    Broadcast<bool> mask;
#endif
#if SINK
    const float* sink;  // (H,)
    long long sink_stride;
#endif
#if DROPOUT
    const unsigned long long* seed;  // of one element
#endif
#if DESCALE & 1
    HeadNumbers descale_q;
#endif
#if DESCALE & 2
    HeadNumbers descale_k;
#endif
#if DESCALE & 4
    HeadNumbers descale_v;
#endif
#if BLOCK_MAP
    Broadcast<unsigned> block_map;  // block_map.cuh
#endif
#if SCORE_SNIPPET
    Snippet snippet;
#endif
};
static_assert(sizeof(Score) == SCORE_BYTES, "Score differs from sandbox/core/options.py");

#include "seqlen.cuh"
#include "mask.cuh"

struct FinalizedRow {  // of a row: what its accumulated O is multiplied by
    float lse, inverse;
};

constexpr bool NATURAL = true;  // of x itself, where the scores of a kernel are not raw
constexpr bool APPROXIMATE = true;

// The element of row i and column j of S: a place that all elements of a thread share, and a distance from it that is known
// when loops are unrolled.
struct ScoreIndex {
    int i, j, down, right;
    __device__ __forceinline__ ScoreIndex(int i, int j, int down = 0, int right = 0) : i(i), j(j), down(down), right(right) {}
    __device__ __forceinline__ int query_row() const { return i + down; }
    __device__ __forceinline__ int key_col() const { return j + right; }
};

// Scores of head h of batch entry b, which of them are seen, and where its rows lie.
struct Head : Mask {
    static constexpr bool LINEAR = !SOFTCAP && !ALIBI && !BIAS && !Snippet::SCORES;  // x is the dot product, scaled
    static constexpr bool HAS_DERIVATIVE = SOFTCAP || Snippet::SCORES;  // x has another derivative than the scaled dot product's
    static constexpr bool READS_TENSORS = BIAS || ELEMENT_MASK || Snippet::SCORES;  // in memory: more registers
    static constexpr float LOG2E = 1.4426950408889634f;  // e^x = 2^(x log2(e))
    // Limit of |m| * exponent for exponentials by one FFMA, fma(S, exponent, -m * exponent): -m * exponent is off by half an ulp, 2^-12 at
    // this limit. Beyond it the error would grow to where P overflows; there the exponent is (S - m) * exponent.
    static constexpr float LARGE = 8192.0f;
    // The same limit for LSE in a backward: LSE itself is rounded, here by up to 2^-9, which changes P as much as the FFMA does, so that
    // a lower limit would not make P more accurate. Above 65504, the additive mask of float16: rows whose keys are all masked so are common.
    static constexpr float LARGE_LSE = 81920.0f;
    static constexpr float LEAST = 1e-20f;  // of |scale|: the descale of a head of zeros may be 0, and 0 * -inf is NaN

    float unit, per_unit;  // of raw scores: raw * unit = x
#if DESCALE % 4
    float scale;  // of this head
#endif
#if DESCALE & 4
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

    // Of raw scores, for any head: raw * unit = x.
    static __device__ __forceinline__ float unit_of(const Score& score) {
        if (Snippet::SCORES) return 1.0f;
#if SOFTCAP
        return score.softcap;
#else
        return score.scale;
#endif
    }

    // Whether a row's maximum m, a raw score, is beyond LARGE. Not of a row that has seen no key.
    static __device__ __forceinline__ bool is_large(float m, float exponent) { return fabsf(m * exponent) > LARGE && m != -INF; }

    __device__ __forceinline__ Head(const Score& score, int b, int h) : Head(SeqlenInfo(score, b), h) {}
    __device__ __forceinline__ Head(const SeqlenInfo& sequence, int h) : Mask(sequence, h), unit(unit_of(score)) {
#if DESCALE % 4
        scale = score.scale;
#if DESCALE & 1
        scale *= score.descale_q(b, h);
#endif
#if DESCALE & 2
        scale *= score.descale_k(b, h / score.group);
#endif
        if (fabsf(scale) < LEAST) scale = LEAST;
        if (!SOFTCAP && !Snippet::SCORES) unit = scale;
#endif
#if DESCALE & 4
        descale = score.descale_v(b, h / score.group);
#endif
        if (!LINEAR) per_unit = 1.0f / unit;
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

    // ---- what a dot product becomes

    __device__ __forceinline__ float bias_of(ScoreIndex at) const {
#if BIAS
        const bias_t* const row = bias + min(at.query_row(), Sq - 1) * score.bias.stride_i;
        return BIAS & 4 ? to_float(*row) : at.key_col() < Sk ? to_float(row[at.key_col()]) : 0.0f;
#else
        return 0.0f;
#endif
    }

    // IN_X: x itself; else in units of `unit`. T is float, or a Dual, whose derivative is that of x with respect to the
    // scaled dot product, or OF_BIAS, to the bias. Of a pair that is not seen: some value, but nothing is read beyond a tensor.
    // `shift` is the pair's bias, looked up unless somebody else brought it.
    template <class T, bool IN_X, bool OF_BIAS = false>
    __device__ __forceinline__ T apply_score_mod(float dot, ScoreIndex at) const { return apply_score_mod<T, IN_X, OF_BIAS>(dot, at, bias_of(at)); }
    template <class T, bool IN_X, bool OF_BIAS = false>
    __device__ __forceinline__ T apply_score_mod(float dot, ScoreIndex at, float shift) const {
        constexpr bool IN_UNITS_OF_1 = IN_X || Snippet::SCORES;
        T x = number<T>(IN_UNITS_OF_1 ? dot * head_scale() : dot, 1.0f);
#if SOFTCAP
        const float y = expression::tanh(dot * (head_scale() * (1.0f / score.softcap)));
        x = number<T>(IN_UNITS_OF_1 ? score.softcap * y : y, 1.0f - y * y);
#endif
#if ALIBI
        const float distance = static_cast<float>(at.i + diagonal - at.j) + static_cast<float>(at.down - at.right);
        x = x - (IN_UNITS_OF_1 ? slope : slope * per_unit) * fabsf(distance);
#endif
#if BIAS
        x = x + (IN_UNITS_OF_1 ? shift : shift * per_unit);
        if (OF_BIAS) x = number<T>(value_of(x), 1.0f);
#endif
#if SCORE_SNIPPET
        if (Snippet::SCORES)
            x = score.snippet.new_score(x, b, h, min(at.query_row(), Sq - 1), min(at.key_col(), key_rows() - 1), Sq, Sk);
#endif
        return x;
    }

    // x, or -INF where it is not seen, whatever NaN the dot product holds.
    __device__ __forceinline__ float masked(float dot, int query_row, int key_col) const {
        return visible(query_row, key_col) ? apply_score_mod<float, NATURAL>(dot, {query_row, key_col}) : -INF;
    }

    // Of a pair in the backward: P, recomputed from its row's LSE, and the derivative of x. 0 where it is not seen, unless the
    // LSE is NaN.
    template <bool OF_BIAS = false>
    __device__ __forceinline__ Dual P(float dot, float lse, int query_row, int key_col) const {
        const Dual x = apply_score_mod<Dual, NATURAL, OF_BIAS>(dot, {query_row, key_col});
        const float shift = lse == -INF ? 0.0f : lse;  // LSE of a row without keys: not NaN
        const bool steep = OF_BIAS ? Snippet::SCORES : HAS_DERIVATIVE;
        // __fadd_rn: contracted to fma(dot, scale, -shift), the difference would not cancel the rounding of LSE.
        const float exponent = __fadd_rn(visible(query_row, key_col) ? x.value : -INF, -shift);
        return {expf(exponent > 0.0f ? 0.0f : exponent), steep ? x.derivative : 1.0f};  // LSE is rounded, but P is 1 at most
    }

    // In the backward, whether an LSE is too large for P by one FFMA: then NaN takes its place, so that all gradients that depend on the row
    // are NaN and are computed once more by non_finite.cuh, with P of S - LSE. Not of a row without keys, whose P is 0.
    static __device__ __forceinline__ bool is_large(float lse) { return fabsf(lse) > LARGE_LSE && lse != -INF; }

    // Raw scores, for whoever applies the mask afterwards.
    __device__ __forceinline__ float raw(float dot, ScoreIndex at) const { return LINEAR ? dot : apply_score_mod<float, !NATURAL>(dot, at); }
    __device__ __forceinline__ float raw(float dot, ScoreIndex at, float shift) const {
        return apply_score_mod<float, !NATURAL>(dot, at, shift);
    }
    __device__ __forceinline__ Dual raw_dual(float dot, ScoreIndex at) const { return apply_score_mod<Dual, !NATURAL>(dot, at); }
    __device__ __forceinline__ Dual raw_dual(float dot, ScoreIndex at, float shift) const {
        return apply_score_mod<Dual, !NATURAL>(dot, at, shift);
    }

    // LSE, and 1 / l, of a row whose scores were exponentiated less `m`; natural: of a maximum of x. A row that sees no key: 0.
    // APPROXIMATELY: to a few ulp, for an l of 0 or not much below 1, as every row has; without a call, a jump or a long chain.
    template <bool IN_X = false, bool APPROXIMATELY = false>
    __device__ __forceinline__ FinalizedRow finalize(float m, float l) const {
        FinalizedRow row = {(IN_X ? m : m * unit) + (APPROXIMATELY ? lg2(l) * 0.693147181f : logf(l)),
                     l == 0.0f ? 0.0f : APPROXIMATELY ? reciprocal(l) : 1.0f / l};
#if SINK
        const float without = row.lse, gap = sink - without;  // one more summand, of no value
        row.lse = gap == 0.0f ? sink + 0.693147181f : fmaxf(sink, without) + log1pf(expf(-fabsf(gap)));
        if (sink == -INF || (without == INF && sink < INF)) row.lse = without;
        if (l != 0.0f && sink != -INF) row.inverse *= expf(without - row.lse);
#endif
        row.inverse *= dropout_factor(score) * head_descale();
        return row;
    }

    // What dot products are multiplied by, and the sums over V.
    __device__ __forceinline__ float head_scale() const {
#if DESCALE % 4
        return scale;
#else
        return score.scale;
#endif
    }
    __device__ __forceinline__ float head_descale() const {
#if DESCALE & 4
        return descale;
#elif DESCALE
        return score.descale;
#else
        return 1.0f;
#endif
    }

    // ---- dropout, after the softmax: LSE and l know nothing of it

    static __device__ __forceinline__ float dropout_factor(const Score& score) {
#if DROPOUT
        return score.dropout_factor;
#else
        return 1.0f;
#endif
    }

    // Whether P of a pair is kept.
    __device__ __forceinline__ bool keep(int query_row, int key_col) const {
#if DROPOUT
        return dropout.keep(query_row, key_col);
#else
        return true;
#endif
    }

    // What becomes of a pair's P, or in the backward of its dP.
    __device__ __forceinline__ float apply_dropout(float x, bool kept) const {
        return (DROPOUT && !kept ? 0.0f : x) * dropout_factor(score);
    }

    // Which of a lane's elements of N blocks of 16 x 16 side by side, the first at (i, j), are kept: in an A operand with
    // queries along rows (P), or with keys along rows (P^T; all lanes of a warp together).
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
    __device__ __forceinline__ void keep_along_keys(Kept (&kept)[N], int i, int j) const {
#if DROPOUT
        dropout.along_keys(kept, i, j);
#endif
    }

  private:
    template <class T>
    static __device__ __forceinline__ T number(float value, float derivative);

    static __device__ __forceinline__ float value_of(float x) { return x; }
    static __device__ __forceinline__ float value_of(Dual x) { return x.value; }
};
template <>
__device__ __forceinline__ float Head::number<float>(float value, float) { return value; }
template <>
__device__ __forceinline__ Dual Head::number<Dual>(float value, float derivative) { return {value, derivative}; }
