// Epilogue of fwd_decode: partial results of warps and of blocks of a cluster are combined in a fixed order; those of
// splits by split_epilogue.cuh. Included by fwd_decode.cu after its constants.
#pragma once
#include "softmax_transposed.cuh"
#include "split_epilogue.cuh"

using Softmax = TransposedSoftmax;  // of one warp, all rows

// The results of a warp in shared memory: O [BLOCK_M][DV_PAD] in fp32; m and l.
struct WarpResult {
    char* const smem;
    const unsigned warp;

    // Four columns of O. The order of each four groups depends on the row, so that of rows 0, 2, 4 and 6, which a warp
    // stores at the same time, only two are in the same banks.
    __device__ __forceinline__ float4& O(int r, int quad) const {
        float4* const row = reinterpret_cast<float4*>(smem + RINGS_AT + warp * RING + O_AT) + r * DV_PAD / 4;
        return row[quad ^ r / 2 % 4];
    }
    __device__ __forceinline__ float& O_element(int r, int column) const {
        return reinterpret_cast<float*>(&O(r, column / 4))[column % 4];
    }
    __device__ __forceinline__ float2& sums(int r) const {
        return reinterpret_cast<float2*>(smem + SUMS_AT)[warp * BLOCK_M + r];
    }
    // factors: of the queries (RowFactors).
    template <class Factors>
    __device__ __forceinline__ void store(Softmax& state, const Factors& factors) const {
        factors.finish(state.m, state.l);
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int rt = i / 2, r = i % 2, row = 8 * rt + 2 * q + r;
            const float l = column_sum(state.l[rt][r]);
            if (g == 0) sums(row) = make_float2(state.m[rt][r], l);
#pragma unroll
            for (int dt = 0; dt < V_TILES; ++dt) {
                const float low = state.O[dt][rt][r], high = state.O[dt][rt][r + 2];
                if (FLOAT8_KEYS) *reinterpret_cast<float2*>(&O_element(row, 16 * dt + 2 * g)) = make_float2(low, high);
                else O_element(row, 16 * dt + g) = low, O_element(row, 16 * dt + 8 + g) = high;
            }
        }
    }
};

// The non-finite fallback of the warp's results, row by row.
__device__ __noinline__ void store_partial_non_finite(const View<const dtype>& Q, const View<const dtype_k>& K,
                                                      const View<const dtype_v>& V, const Score& score, int b, int row0,
                                                      int kv_head, int group, int first, int end, WarpResult result) {
    const SeqlenInfo seqlen(score, b);
    for (int r = 0; r < BLOCK_M; ++r) {
        const PackedRow row(row0 + r, kv_head, group);
        const float2 sum = partial_non_finite(Q, K, V, seqlen, row, kv_head, first, end,
                                              [&](int d) -> float& { return result.O_element(r, d); });
        if (threadIdx.x % 32 == 0) result.sums(r) = sum;
    }
}

// Epilogue: combines the results of the block's warps, and those of the blocks of a cluster, and stores the sums.
struct Combine {
    static constexpr int QUADS = HEAD_DIM_V / 4;  // groups of four columns of a row
    const View<dtype_o>& O;
    float* LSE;
    const Partials& parts;
    const Split& split;
    const SeqlenInfo& seqlen;
    char* smem;
    int row0, valid_rows, kv_head, group, H;  // packed rows row0 .. row0 + valid_rows - 1

    // Written by the other blocks of the cluster, one slot each: [CLUSTER - 1][BLOCK_M][RANK_QUADS].
    __device__ __forceinline__ float4* O_dsmem() const { return reinterpret_cast<float4*>(smem + DSMEM_AT); }
    __device__ __forceinline__ float2* sums_dsmem() const {  // [CLUSTER - 1][BLOCK_M]
        return reinterpret_cast<float2*>(O_dsmem() + (CLUSTER - 1) * BLOCK_M * RANK_QUADS);
    }
    static __device__ __forceinline__ int slot(int from, int owner) { return from < owner ? from : from - 1; }
    __device__ __forceinline__ WarpResult of_warp(int w) const { return {smem, static_cast<unsigned>(w)}; }
    // The sums of this block's own part, where Q was.
    __device__ __forceinline__ float2& own_sums(int r) const { return reinterpret_cast<float2*>(smem)[r]; }
    __device__ __forceinline__ void store(const PackedRow& row, const Head& head, int quad,
                                          const CombinedRow& sum) const {
        const long long number = head.lse_offset(H, row.h) + row.i;
        if (split.splits == 1) store_row(O, LSE, head, row.h, row.i, number, quad, sum);
        else parts.store(Partials::row(seqlen.score, row.h, row.i, number), split.split, quad, sum);
    }

    // Four columns of a row go to the block that combines them. Its own ones replace those of warp 0, which only this
    // thread reads, and their sums replace Q, which no warp reads any more. With room for them in distributed shared
    // memory, two blocks instead of three would run on an SM (1.04 to 1.2 times as fast; experiment 020).
    __device__ __forceinline__ void store_for_ranks(int r, int quad, const CombinedRow& sum) const {
        const int rank = cluster_cta_rank(), owner = quad / RANK_QUADS, rank_quad = quad - owner * RANK_QUADS;
        const float2 sums = make_float2(sum.m, sum.l);
        if (owner == rank) {
            of_warp(0).O(r, quad) = sum.O;
            if (rank_quad == 0) own_sums(r) = sums;
        } else {
            const int to = slot(rank, owner) * BLOCK_M + r;
            map_shared_rank(O_dsmem(), owner)[to * RANK_QUADS + rank_quad] = sum.O;
            if (rank_quad == 0) map_shared_rank(sums_dsmem(), owner)[to] = sums;
        }
    }

    // A thread combines four columns of a row, or eight if BLOCK_M = 32.
    __device__ __forceinline__ void warps() const {
        constexpr int QUADS_PER_THREAD = BLOCK_M > 16 ? 2 : 1;
#pragma unroll 1
        for (int i = threadIdx.x * QUADS_PER_THREAD; i < valid_rows * QUADS; i += QUADS_PER_THREAD * THREADS) {
            const int r = i / QUADS;
            const PackedRow row(row0 + r, kv_head, group);
            const Head head(seqlen, row.h);
            float2 sums_of_warps[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sums_of_warps[w] = of_warp(w).sums(r);
#pragma unroll
            for (int quad = i % QUADS; quad < i % QUADS + QUADS_PER_THREAD; ++quad) {
                float4 O_of_warps[WARPS];
#pragma unroll
                for (int w = 0; w < WARPS; ++w) O_of_warps[w] = of_warp(w).O(r, quad);
                CombinedRow sum;
                sum.add(sums_of_warps, O_of_warps, head.softmax_scale * Head::LOG2E);
                if (CLUSTER == 1) store(row, head, quad, sum);
                else store_for_ranks(r, quad, sum);
            }
        }
    }

    // Combines this block's columns from the blocks of the cluster.
    __device__ __forceinline__ void ranks() const {
        const int rank = cluster_cta_rank(), first_quad = rank * RANK_QUADS,
                  rank_quads = min(QUADS - first_quad, RANK_QUADS);
#pragma unroll 1
        for (int i = threadIdx.x; i < valid_rows * rank_quads; i += THREADS) {
            const int r = i / rank_quads, rank_quad = i % rank_quads;
            const PackedRow row(row0 + r, kv_head, group);
            const Head head(seqlen, row.h);
            float2 sums_of_ranks[CLUSTER];
            float4 O_of_ranks[CLUSTER];
#pragma unroll
            for (int from = 0; from < CLUSTER; ++from) {
                const int at = slot(from, rank) * BLOCK_M + r;
                sums_of_ranks[from] = from == rank ? own_sums(r) : sums_dsmem()[at];
                O_of_ranks[from] =
                    from == rank ? of_warp(0).O(r, first_quad + rank_quad) : O_dsmem()[at * RANK_QUADS + rank_quad];
            }
            CombinedRow sum;
            sum.add(sums_of_ranks, O_of_ranks, head.softmax_scale * Head::LOG2E);
            store(row, head, first_quad + rank_quad, sum);
        }
    }
};
