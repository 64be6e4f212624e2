// Merges the partial results of split-KV. All sums have a fixed order: results are deterministic.
//
//   CombinedRow::add                                              merges partial results of four columns of a row
//   Partials(partials, blocks, rows, split).store(row, split.split, quad, sum)     stores O, not divided by l, m and l
#pragma once
#include "softmax_rows.cuh"
#include "split_kv.cuh"

// Four columns of a row, merged from partial results; combines by LSE as split-KV in FlashAttention does.
struct CombinedRow {
    float m = -INF, l = 0.0f;
    float4 O = {0.0f, 0.0f, 0.0f, 0.0f};

    template <int COUNT>
    __device__ __forceinline__ void add(const float2 (&sums)[COUNT], const float4 (&parts)[COUNT], float scale_log2) {
        float m_new = m;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) m_new = fmaxf(m_new, sums[i].x);
        const float alpha = rescale_factor(m, m_new, scale_log2);
        m = m_new, l *= alpha, O.x *= alpha, O.y *= alpha, O.z *= alpha, O.w *= alpha;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float weight = rescale_factor(sums[i].x, m_new, scale_log2);
            l += weight * sums[i].y;
            O.x += weight * parts[i].x, O.y += weight * parts[i].y;
            O.z += weight * parts[i].z, O.w += weight * parts[i].w;
        }
    }
};

// Scratch memory for partial results: O, not divided by l, of all rows and splits, then m and l. The splits of a row
// are adjacent. The number of a row is its index in LSE, or, of ragged queries with blocks for each sequence, its index
// in a tensor (H, rows_per_head) of its sequence.
struct Partials {
    static constexpr bool OF_SEQUENCE = RAGGED && BLOCKS_BY_ENTRY;
    float* data;
    long long count, origin;
    int splits;
    // blocks: at least the splits of all entries; rows: rows per entry, all heads.
    __device__ __forceinline__ Partials(float* data, int blocks, long long rows, const Split& split)
        : data(data), count(blocks * rows),
          origin((split.before - (OF_SEQUENCE ? 0 : static_cast<long long>(split.b) * split.splits)) * rows),
          splits(split.splits) {}
    // Rows per head and entry.
    static __device__ __forceinline__ int rows_per_head(const Score& score) {
        return OF_SEQUENCE ? min(score.Sq, MOST_QUERIES) : query_rows(score);
    }
    // The number of query i of head h; `in_LSE` is its index in LSE.
    static __device__ __forceinline__ long long row(const Score& score, int h, int i, long long in_LSE) {
        return OF_SEQUENCE ? static_cast<long long>(h) * rows_per_head(score) + i : in_LSE;
    }
    __device__ __forceinline__ float* O(long long row, int split) const {
        return data + (origin + row * splits + split) * HEAD_DIM_V;
    }
    __device__ __forceinline__ float2* sums(long long row, int split) const {
        return reinterpret_cast<float2*>(data + count * HEAD_DIM_V) + origin + row * splits + split;
    }
    // Stores columns 4 quad .. 4 quad + 3, and for quad 0 also m and l.
    __device__ __forceinline__ void store(long long row, int split, int quad, const CombinedRow& sum) const {
        reinterpret_cast<float4*>(O(row, split))[quad] = sum.O;
        if (quad == 0) *sums(row, split) = make_float2(sum.m, sum.l);
    }
};
