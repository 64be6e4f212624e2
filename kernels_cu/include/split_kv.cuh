// Split-KV: several blocks (splits) share the keys of a tile of query rows; the combine kernel merges their partial results. All sums
// have a fixed order: results are deterministic.
//
//   const Split split = DYNAMIC_SPLITS ? SplitScheduler(score, entries, splits).block(z) : ...    split.split of split.splits of entry split.b
//   CombinedRow::add                                                          merges partial results of four columns of a row
//   Partials(partials, blocks, rows, split).store(row, split.split, quad, sum)     stores O, not divided by l, with m and l
//
// With key_lengths the host does not know the keys per batch entry. SplitScheduler then assigns blocks on the device in proportion to
// the keys; each warp reads all lengths and computes the assignment itself.
#pragma once
#include "score_mod.cuh"

// The factor alpha = e^(m_old - m_new) of sums under an old maximum; exponent converts raw scores to powers of 2.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new, float exponent) {
    return m_old == m_new ? 1.0f : ex2((m_old - m_new) * exponent);  // for equal infinities 1, not NaN
}

constexpr bool DYNAMIC_SPLITS = KEY_LENGTHS && !RAGGED && CLUSTER == 1;  // the number of splits depends on the batch entry's keys

// Split `split` of the `splits` of batch entry b; `before`: the splits of earlier entries.
struct Split {
    int b, split, splits, before;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
};

// Assigns blocks to batch entries in proportion to their keys. A round is one key tile per warp of a block; no block has more than
// max_rounds. At least one block per entry, and at most splits + entries in total. A warp collective.
struct SplitScheduler {
    const Score& score;
    int entries, lane, max_rounds;

    __device__ __forceinline__ SplitScheduler(const Score& score, int entries, int splits)
        : score(score), entries(entries), lane(threadIdx.x % 32) {
        int sum = 0;
#pragma unroll 1
        for (int b = lane; b < entries; b += 32) sum += rounds(b);
        max_rounds = max((__reduce_add_sync(0xffffffffu, sum) + splits - 1) / splits, 1);
    }
    __device__ __forceinline__ int rounds(int b) const {
        const Head head0(score, b, 0);  // ranges are the same for all heads
        const Range keys = head0.keys(0, head0.Sq);
        return (max(max(keys.end, 0) - keys.begin / BLOCK_N * BLOCK_N, 0) + BLOCK_N * WARPS - 1) / (BLOCK_N * WARPS);
    }
    __device__ __forceinline__ int blocks(int b) const { return max((rounds(b) + max_rounds - 1) / max_rounds, 1); }

    // The split of block `number`; invalid if the grid has more blocks than splits.
    __device__ __forceinline__ Split block(int number) const {
        int before = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < entries; b0 += 32) {
            const int count = b0 + lane < entries ? blocks(b0 + lane) : 0;
            int upto = before + count;  // inclusive prefix sum over the lanes
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto - before, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned lanes = __ballot_sync(0xffffffffu, upto > number);
            if (lanes) {
                const int lane_of_b = __ffs(lanes) - 1, splits = __shfl_sync(0xffffffffu, count, lane_of_b);
                const int first = __shfl_sync(0xffffffffu, upto, lane_of_b) - splits;
                return {b0 + lane_of_b, number - first, splits, first};
            }
            before = __shfl_sync(0xffffffffu, upto, 31);
        }
        return {-1, 0, 1, 0};
    }
    // The first split of batch entry b.
    __device__ __forceinline__ Split first_split(int b) const {
        int before = 0;
#pragma unroll 1
        for (int other = lane; other < b; other += 32) before += blocks(other);
        return {b, 0, blocks(b), static_cast<int>(__reduce_add_sync(0xffffffffu, before))};
    }
};

// Four columns of a row, merged from partial results; combines by LSE as split-KV in FlashAttention does.
struct CombinedRow {
    float m = -INF, l = 0.0f;
    float4 O = {0.0f, 0.0f, 0.0f, 0.0f};

    template <int COUNT>
    __device__ __forceinline__ void add(const float2 (&sums)[COUNT], const float4 (&parts)[COUNT], float exponent) {
        float m_new = m;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) m_new = fmaxf(m_new, sums[i].x);
        const float alpha = rescale_factor(m, m_new, exponent);
        m = m_new, l *= alpha, O.x *= alpha, O.y *= alpha, O.z *= alpha, O.w *= alpha;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float weight = rescale_factor(sums[i].x, m_new, exponent);
            l += weight * sums[i].y;
            O.x += weight * parts[i].x, O.y += weight * parts[i].y, O.z += weight * parts[i].z, O.w += weight * parts[i].w;
        }
    }
};

// Scratch memory for partial results: O, not divided by l, of all rows and splits, then m and l. The splits of a row are adjacent.
struct Partials {
    float* data;
    long long count, origin;
    int splits;
    // blocks: splits of all entries; rows: rows per entry, all heads.
    __device__ __forceinline__ Partials(float* data, int blocks, long long rows, const Split& split)
        : data(data), count(blocks * rows), origin((split.before - static_cast<long long>(split.b) * split.splits) * rows), splits(split.splits) {}
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
