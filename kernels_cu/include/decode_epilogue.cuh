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

    // Four columns of O. The order of each eight groups (or four) depends on the row, so that rows 0, 2, 4 and 6, which
    // a warp stores at the same time, are in different banks (or two of them in the same banks).
    static constexpr int PERIOD = DV_PAD % 32 == 0 ? 32 : 16;  // columns
    __device__ __forceinline__ float4& O(int r, int quad) const {
        float4* const row = reinterpret_cast<float4*>(smem + RINGS_AT + warp * RING + O_AT) + r * DV_PAD / 4;
        return row[quad ^ r / 2 % 4 * (PERIOD / 16)];
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
        // The addresses of row 2q and the first PERIOD columns; the others follow at constant distances.
        float* first[PERIOD / 8];
#pragma unroll
        for (int c = 0; c < PERIOD / 8; ++c) first[c] = &O_element(2 * q, 8 * c + (FLOAT8_KEYS ? 2 * g : g));
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int rt = i / 2, r = i % 2;
            const float l = column_sum(state.l[rt][r]);
            if (g == 0) sums(8 * rt + 2 * q + r) = make_float2(state.m[rt][r], l);
#pragma unroll
            for (int dt = 0; dt < V_TILES; ++dt) {
                const float low = state.O[dt][rt][r], high = state.O[dt][rt][r + 2];
                const int c = 16 * dt % PERIOD / 8, at = (8 * rt + r) * DV_PAD + 16 * dt / PERIOD * PERIOD;
                if (FLOAT8_KEYS) *reinterpret_cast<float2*>(first[c] + at) = make_float2(low, high);
                else first[c][at] = low, first[c + 1][at] = high;
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
    __device__ __forceinline__ long long number_of(const PackedRow& row, const Head& head) const {
        return head.lse_offset(H, row.h) + row.i;
    }

    // What a lane knows of a row: the weight of one warp's O; the factor of the weighted sum, and where it is stored.
    struct RowStore {
        float weight, O_scale = 1.0f;
        unsigned long long to;  // a row of O, or of partial results
    };
    // Combines m and l of row r. Each of WARPS adjacent lanes has those of one warp, `part`. stores: this lane
    // stores the result.
    __device__ __forceinline__ RowStore combine_sums(int r, int part, bool stores) const {
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(seqlen, row.h);
        const float2 own = of_warp(part).sums(r);
        const float m = row_max<WARPS>(own.x);
        RowStore found;
        found.weight = rescale_factor(own.x, m, head.softmax_scale * Head::LOG2E);
        const float l = row_sum<WARPS>(found.weight * own.y);
        if (CLUSTER > 1) {
            if (stores) store_sums_for_ranks(r, make_float2(m, l));
        } else if (split.splits == 1) {
            const FinalizedRow final_row = head.finalize(m, l);
            found.O_scale = final_row.O_scale;
            found.to = reinterpret_cast<unsigned long long>(head.query(O, row.h, row.i));
            if (stores) LSE[number_of(row, head)] = final_row.lse;
        } else {
            const long long number = Partials::row(seqlen.score, row.h, row.i, number_of(row, head));
            found.to = reinterpret_cast<unsigned long long>(parts.O(number, split.split));
            if (stores) *parts.sums(number, split.split) = make_float2(m, l);
        }
        return found;
    }
    // Its own sums replace Q, which no warp reads any more.
    __device__ __forceinline__ void store_sums_for_ranks(int r, const float2& sums) const {
        const int rank = cluster_cta_rank();
#pragma unroll
        for (int owner = 0; owner < CLUSTER; ++owner) {
            if (owner == rank) own_sums(r) = sums;
            else map_shared_rank(sums_dsmem(), owner)[slot(rank, owner) * BLOCK_M + r] = sums;
        }
    }
    // Four columns of a row go to the block that combines them. Its own ones replace those of warp 0, which only this
    // thread reads. With room for them in distributed shared memory, two blocks instead of three would run on an SM
    // (1.04 to 1.2 times as fast; experiment 020).
    __device__ __forceinline__ void store_O_for_ranks(int r, int quad, const float4& sum) const {
        const int rank = cluster_cta_rank(), owner = quad / RANK_QUADS, rank_quad = quad - owner * RANK_QUADS;
        if (owner == rank) of_warp(0).O(r, quad) = sum;
        else map_shared_rank(O_dsmem(), owner)[(slot(rank, owner) * BLOCK_M + r) * RANK_QUADS + rank_quad] = sum;
    }

    // A warp combines rows warp, warp + WARPS, ...: m and l of all of them at the same time, then O, with a lane for
    // four columns.
    __device__ __forceinline__ void warps(int warp, int lane) const {
        static_assert(BLOCK_M <= 32 && BLOCK_M % WARPS == 0, "a lane for each result of each row");
        const int row_of_lane = warp + lane / WARPS * WARPS, part = lane % WARPS;
        const RowStore own = combine_sums(min(row_of_lane, BLOCK_M - 1), part, part == 0 && row_of_lane < valid_rows);
        const int elements = (valid_rows - warp + WARPS - 1) / WARPS * QUADS;
#pragma unroll 2
        for (int first = 0; first < elements; first += 32) {
            const bool active = QUADS % 32 == 0 || first + lane < elements;
            const int i = active ? first + lane : 0, number = i / QUADS, r = warp + number * WARPS, quad = i % QUADS;
            float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float weight = __shfl_sync(0xffffffffu, own.weight, number * WARPS + w);
                const float4 O_of_warp = active ? of_warp(w).O(r, quad) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                sum.x += weight * O_of_warp.x, sum.y += weight * O_of_warp.y;
                sum.z += weight * O_of_warp.z, sum.w += weight * O_of_warp.w;
            }
            const float O_scale = __shfl_sync(0xffffffffu, own.O_scale, number * WARPS);
            const unsigned long long to = __shfl_sync(0xffffffffu, own.to, number * WARPS);
            if (!active) continue;
            if (CLUSTER > 1) store_O_for_ranks(r, quad, sum);
            else if (split.splits > 1) reinterpret_cast<float4*>(to)[quad] = sum;
            else store_quad(reinterpret_cast<dtype_o*>(to), quad, sum, O_scale);
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
            const long long number = number_of(row, head);
            const int quad = first_quad + rank_quad;
            if (split.splits == 1) store_row(O, LSE, head, row.h, row.i, number, quad, sum);
            else parts.store(Partials::row(seqlen.score, row.h, row.i, number), split.split, quad, sum);
        }
    }
};
