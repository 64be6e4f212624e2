// Epilogue of kernels with packed rows and split-KV: partial results, the output rows, and the combine kernel. Included
// after the kernel's constants: THREADS, of the block that combines, and WARPS, by which its key tiles are interleaved.
#pragma once
#include "combine.cuh"

// Query i and head h of a row of the packed tile.
struct PackedRow {
    int i, h;
    __device__ __forceinline__ PackedRow(int row, int kv_head, int group)
        : i(row / group), h(kv_head * group + row % group) {}
};

// The non-finite fallback (non_finite.cuh) of one packed row: a warp computes its partial result again, from visible
// keys only: those of key tiles `first`, `first` + WARPS, ... before `end`. Writes O, not divided by l, to O(column);
// returns m and l.
template <class Columns>
__device__ __forceinline__ float2 partial_non_finite(const View<const dtype>& Q, const View<const dtype_k>& K,
                                                     const View<const dtype_v>& V, const SeqlenInfo& seqlen,
                                                     const PackedRow& row, int kv_head, int first, int end,
                                                     const Columns& O) {
    const int lane = threadIdx.x % 32;
    const Head head(seqlen, row.h);
    const float scale_log2 = head.softmax_scale * Head::LOG2E;
    float m = -INF, l = 0.0f;
    for (int d = lane; d < HEAD_DIM_V; d += 32) O(d) = 0.0f;
    for (int n = 0; row.i < head.Sq && first + n / BLOCK_N * WARPS < end; ++n) {
        const int j = (first + n / BLOCK_N * WARPS) * BLOCK_N + n % BLOCK_N;
        if (!head.visible(row.i, j)) continue;
        float dot = 0.0f;
        for (int d = lane; d < HEAD_DIM; d += 32)
            dot += to_float(head.query(Q, row.h, row.i)[d]) * to_float(head.key(K, kv_head, j)[d]);
        const float s = head.raw(row_sum<32>(dot), ScoreIndex(row.i, j)), m_new = fmaxf(m, s);
        const float alpha = rescale_factor(m, m_new, scale_log2),
                    p = ex2((s - (m_new == -INF ? 0.0f : m_new)) * scale_log2);
        const float kept = head.keep(row.i, j) ? p : 0.0f;
        for (int d = lane; d < HEAD_DIM_V; d += 32) O(d) = alpha * O(d) + kept * to_float(head.key(V, kv_head, j)[d]);
        l = alpha * l + p;
        m = m_new;
    }
    return make_float2(m, l);
}

// Stores columns 4 quad .. 4 quad + 3 of a row of O.
__device__ __forceinline__ void store_quad(dtype_o* row, int quad, const float4& sum, float scale) {
    constexpr bool WIDE = sizeof(dtype_o) == 4;  // fp32 output of float8 inputs
    const float4 o = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    if (WIDE) *reinterpret_cast<float4*>(row + 4 * quad) = o;
    else *reinterpret_cast<uint2*>(row + 4 * quad) = make_uint2(pack(o.x, o.y), pack(o.z, o.w));
}

// The same, and for quad 0 the row's LSE. number: its index in LSE.
__device__ __forceinline__ void store_row(const View<dtype_o>& O, float* LSE, const Head& head, int h, int i,
                                          long long number, int quad, const CombinedRow& sum) {
    const FinalizedRow final_row = head.finalize(sum.m, sum.l);
    store_quad(head.query(O, h, i), quad, sum.O, final_row.O_scale);
    if (quad == 0) LSE[number] = final_row.lse;
}

// Combines the partial results of all splits, in a fixed order, by groups of HEAD_DIM_V / 4 threads. By the grid (in
// the spec), a block has one head of a row, or up to GROUPS. The groups merge the splits of a row together, or, if
// there are several heads with few splits, each those of one head. gridDim.z: batch entries, or, with stream-K, blocks
// if they are fewer: then only the entries that are cut where a block begins have several splits (B256, 1024 keys: 17
// us less).
template <class Scheduler>
struct SplitCombiner {
    static constexpr int QUADS = HEAD_DIM_V / 4, GROUPS = THREADS / QUADS;
    // With more splits, the groups merge the splits of a row together.
    static constexpr int MOST_SPLITS_PER_GROUP = 8;
    // Four: with four warps a block needs 9 KB, so that two wait beside the blocks of fwd_decode. HEAD_DIM_V > 256: not
    // timed.
    static constexpr int LOADS_AHEAD = QUADS > 64 ? 8 : 4;
    static_assert(GROUPS >= 1, "one thread per four columns");
    const View<dtype_o>& O;
    float* const LSE;
    float* const partials;
    const int H, splits, entries;
    const Score& score;
    float4 (&O_smem)[LOADS_AHEAD][THREADS];  // private to each thread until the groups' sums are merged
    float2 (&sums_smem)[GROUPS];

    // The first split of the entry whose rows the block combines; invalid if they need not be combined.
    __device__ __forceinline__ Split first_split() const {
        const int z = blockIdx.z;
        if constexpr (Scheduler::STREAM)
            if (gridDim.z < entries) return Scheduler(score, entries, splits).first_split_cut_by(z);
        return Scheduler(score, entries, splits).first_split(z);
    }

    // The sum of splits `begin`, `begin` + `step`, ... of a row, four columns.
    __device__ __forceinline__ CombinedRow merge(const Partials& parts, long long row, int begin, int step,
                                                 float scale_log2) const {
        const int quad = threadIdx.x % QUADS, end = parts.splits;
        CombinedRow sum;
#pragma unroll 1
        for (int first = begin; first < end; first += LOADS_AHEAD * step) {
            float2 sums[LOADS_AHEAD];
            float4 O_part[LOADS_AHEAD];
#pragma unroll
            for (int i = 0; i < LOADS_AHEAD; ++i) {
                const int split = min(first + i * step, end - 1);
                cp_async_16(smem_address(&O_smem[i][threadIdx.x]), parts.O(row, split) + 4 * quad,
                            first + i * step < end);
                sums[i] = *parts.sums(row, split);
                if (first + i * step >= end) sums[i] = make_float2(-INF, 0.0f);
            }
            cp_async_commit();
            cp_async_wait<0>();
#pragma unroll
            for (int i = 0; i < LOADS_AHEAD; ++i) O_part[i] = O_smem[i][threadIdx.x];
            sum.add(sums, O_part, scale_log2);
        }
        return sum;
    }
    // The sum of all groups. A call for all threads; only the first group gets the result.
    __device__ __forceinline__ CombinedRow merge_groups(const CombinedRow& of_group, float scale_log2) const {
        const int group = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
        O_smem[0][threadIdx.x] = of_group.O;
        if (group < GROUPS && quad == 0) sums_smem[group] = make_float2(of_group.m, of_group.l);
        __syncthreads();  // the sums of all groups are in shared memory
        CombinedRow sum;
        float2 sums[GROUPS];
        float4 O_part[GROUPS];
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) sums[i] = sums_smem[i], O_part[i] = O_smem[0][i * QUADS + quad];
        sum.add(sums, O_part, scale_log2);
        return sum;
    }

    __device__ __forceinline__ void run() const {
        if (SHORT_SEQUENCES && gridDim.z == entries && row_tile<1>(score, blockIdx.x, blockIdx.z).invalid())
            return end_after_previous_entry_point();
        const Split split = first_split();
        if (split.invalid()) return end_after_previous_entry_point();
        const RowTile tile = row_tile<1>(score, blockIdx.x, split.b);
        // Without waiting, so that blocks that have work can start sooner.
        if ((RAGGED && tile.invalid()) || (Scheduler::DYNAMIC && split.splits == 1))
            return end_after_previous_entry_point();
        const Partials parts(partials, Scheduler::parts(splits, entries),
                             static_cast<long long>(H) * Partials::rows_per_head(score), split);
        const int heads = (H + gridDim.y - 1) / gridDim.y, first_head = blockIdx.y * heads,
                  end_head = min(first_head + heads, H), group = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
        const bool together = heads == 1 || split.splits > MOST_SPLITS_PER_GROUP;
#pragma unroll 1
        for (int h = first_head + (together ? 0 : group); h < end_head; h += together ? 1 : GROUPS) {
            if (together && h > first_head) __syncthreads();  // the sums of the previous head have been read
            const Head head(score, tile.b, h);
            const long long number = head.lse_offset(H, h) + tile.row0,
                            partial_row = Partials::row(score, h, tile.row0, number);
            const float scale_log2 = head.softmax_scale * Head::LOG2E;
            const bool idle = group >= GROUPS;  // threads that are no whole group
            const int begin = idle ? split.splits : together ? group : 0;
            griddepcontrol_wait();  // after the lengths are read: the partial results are complete
            CombinedRow sum = merge(parts, partial_row, begin, together ? GROUPS : 1, scale_log2);
            if (together) sum = merge_groups(sum, scale_log2);
            if (together ? group == 0 : !idle) store_row(O, LSE, head, h, tile.row0, number, quad, sum);
        }
    }
};

template <class Scheduler>
__device__ __forceinline__ void combine_splits(const View<dtype_o>& O, float* LSE, float* partials, int H, int splits,
                                               int entries, const Score& score) {
    using Combiner = SplitCombiner<Scheduler>;
    __shared__ float4 O_smem[Combiner::LOADS_AHEAD][THREADS];
    __shared__ float2 sums_smem[Combiner::GROUPS];
    Combiner{O, LSE, partials, H, splits, entries, score, O_smem, sums_smem}.run();
}
