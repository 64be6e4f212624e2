// struct Score: the score options as an argument of every kernel, with the macros that select its fields. score_mod.cuh
// has the arithmetic.
#pragma once
#include "tensor.cuh"
#include "dual.cuh"

// Defaults of the option macros; 0: not used. Other values (+: bits that are added):
// WINDOW   1: left bound, 2: right bound, 3: both
// SOFTCAP  1; + 2: it is more than 5000 (BELOW_LARGE in score_mod.cuh)
// BIAS     1: O's dtype, 2: fp32; + 4: the same for every key; + 8: tiles can be loaded by TMA
// MASK     1; + 4: the same for every key
// INVARIANT  1: the bits of a row must not depend on the other rows of its warp, nor on where its tile begins
// KEY_SPLITS  1: compiled as fwd_wgmma_split or fwd_wgmma_invariant, in which a row may have several ranges of keys
//             (key_splits.cuh). The next two macros say whether it has
// MERGE_RANGES  1: a block computes the ranges of its rows one after the other and merges them; SPLIT_KEYS 1: a work
//               tile has one range, and another entry point merges; both 0: every row has one range
// STREAM_K  1: compiled as fwd_wgmma_stream_k or bwd_wgmma_stream_k: work tiles that do not fill a wave are split by
// key
//             tiles (stream_k.cuh), or by queries (bwd_stream_k.cuh)
// PACK_GQA  1: the rows of a work tile may belong to several query heads of a group (work_tile.cuh)
// DESCALE  8: float8; + 1, 2, 4: Q, K, V have one factor per head (descale)
// BLOCK_MAP  1: two bits per block of queries x keys; 2: also one bit per (query, key) (block_map.cuh)
// SCORE_SNIPPET  a hash of the user's expressions (score_mod and mask_mod of FlexAttention) as CUDA code
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
#ifndef INVARIANT
#define INVARIANT 0
#endif
#ifndef KEY_SPLITS
#define KEY_SPLITS 0
#endif
#ifndef STREAM_K
#define STREAM_K 0
#endif
#ifndef MERGE_RANGES
#define MERGE_RANGES 0
#endif
#ifndef SPLIT_KEYS
#define SPLIT_KEYS 0
#endif
#ifndef PACK_GQA
#define PACK_GQA 0
#endif
#ifndef SCORE_BYTES
#define SCORE_BYTES 16
#endif

// The bits of these macros.
#define BIAS_FP32 (BIAS % 4 == 2)
#define BIAS_SAME_FOR_KEYS (BIAS & 4)
#define BIAS_HAS_TENSOR_MAP (BIAS & 8)
#define MASK_SAME_FOR_KEYS (MASK & 4)
#define DESCALE_Q (DESCALE & 1)
#define DESCALE_K (DESCALE & 2)
#define DESCALE_V (DESCALE & 4)

// A tensor that broadcasts to (B, H, Sq, Sk). Strides in elements, 0 in a broadcast dimension. The stride in Sk is 1,
// or 0 with BIAS_SAME_FOR_KEYS, MASK_SAME_FOR_KEYS.
template <class T>
struct Broadcast {
    const T* data;
    long long stride_b, stride_h, stride_i;
    __device__ __forceinline__ const T* head(int b, int h) const { return data + b * stride_b + h * stride_h; }
};
#if BIAS_FP32
using bias_t = float;
#else
using bias_t = dtype_o;
#endif

// A tensor that broadcasts to (B, heads): one factor per head.
struct HeadFactors {
    const float* data;
    long long stride_b, stride_h;
    __device__ __forceinline__ float operator()(int b, int h) const { return data[b * stride_b + h * stride_h]; }
};

#if SCORE_SNIPPET
// A tensor with RANK dimensions that score_mod and mask_mod read as name(i, j). Strides in elements.
template <class T, int RANK>
struct SnippetTensor {
    const T* data;
    long long strides[RANK ? RANK : 1];
    template <class... I>
    __device__ __forceinline__ auto operator()(I... indices) const {
        static_assert(sizeof...(I) == RANK, "a tensor takes one index per dimension");
        const long long at[] = {static_cast<long long>(indices)..., 0};
        long long offset = 0;
        for (int axis = 0; axis < RANK; ++axis) offset += at[axis] * strides[axis];
        return read(data[offset]);
    }

  private:
    static __device__ __forceinline__ int read(int x) { return x; }
    static __device__ __forceinline__ bool read(bool x) { return x; }
    template <class Float>
    static __device__ __forceinline__ Real read(Float x) {
        return static_cast<float>(x);
    }
};
#include <score_snippet.cuh>  // struct Snippet, generated from score_mod and mask_mod (sandbox/core/snippet.py)
#else
struct Snippet {
    static constexpr bool HAS_SCORE_MOD = false, HAS_MASK_MOD = false;
};
#endif

// An argument of every kernel, passed by value. score_structure in sandbox/core/options.py has the same fields.
struct Score {
    int Sq, Sk;
    int diagonal;  // key i + diagonal is on the diagonal of query i (Sk - Sq: bottom-right, 0: top-left)
    float scale;
#if WINDOW
    int left, right;  // visible keys: i + diagonal - left .. i + diagonal + right, inclusive; causal: right is not read
#endif
#if SOFTCAP
    float softcap;
#endif
#if DROPOUT
    unsigned dropout_threshold;  // an element is kept if (its 16 random bits) << 16 is at least this
    float dropout_factor;        // of kept elements: 1 / (1 - p), or 0 if p = 1
#endif
#if KEY_LENGTHS || RAGGED
    int bottom_right;  // whether `diagonal` is Sk - Sq of each batch entry
#endif
#if RAGGED
    int rows_q;  // total rows of the tensors; Sq is then max_seqlen_q
#if !PAGE_SIZE
    int rows_k;  // of the keys; Sk is then max_seqlen_k
#endif
    int sequences;  // batch size
#endif
#if PAGE_SIZE
    int pages;  // of K and V
#endif
#if DESCALE
    float descale;  // of V. Descales of Q and K that are the same for all heads are part of `scale`
    int group;      // H / Hk
#endif
#if RAGGED
    const int* cu_seqlens_q;  // (sequences + 1,)
    long long cu_seqlens_q_stride_b;
#if !PAGE_SIZE
    const int* cu_seqlens_k;
    long long cu_seqlens_k_stride_b;
#endif
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
    const unsigned long long* seed;  // one element
#endif
#if DESCALE_Q
    HeadFactors descale_q;
#endif
#if DESCALE_K
    HeadFactors descale_k;
#endif
#if DESCALE_V
    HeadFactors descale_v;
#endif
#if BLOCK_MAP
    Broadcast<unsigned> block_map;  // block_map.cuh
#endif
#if SCORE_SNIPPET
    Snippet snippet;
#endif
};
static_assert(sizeof(Score) == SCORE_BYTES, "Score and sandbox/core/options.py disagree");
