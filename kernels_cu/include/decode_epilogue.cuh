// Epilogue of fwd_decode, and the body of fwd_decode_combine: partial results of warps, blocks of a cluster and splits
// are combined in a fixed order. Included by fwd_decode.cu after its constants.
#pragma once

// Query i and head h of a row of the packed tile.
struct PackedRow {
    int i, h;
    __device__ __forceinline__ PackedRow(int row, int kv_head, int group)
        : i(row / group), h(kv_head * group + row % group) {}
};

using Softmax = WarpSoftmax<M_TILES, DV_PAD>;  // of one warp, all rows

// Stores the warp's results in shared memory: O [BLOCK_M][O_PITCH], m and l.
__device__ __forceinline__ void store_warp_result(const Softmax& state, float* O_smem, float2* sums) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * mt + 8 * half + g;
            const float l = row_sum<4>(state.l[mt][half]);
            if (q == 0) sums[row] = make_float2(state.m[mt][half], l);
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                const float low = state.O[mt][nt][2 * half], high = state.O[mt][nt][2 * half + 1];
                float* const to = O_smem + row * O_PITCH;
                if (FLOAT8) to[nt / 2 * 16 + 4 * q + nt % 2] = low, to[nt / 2 * 16 + 4 * q + nt % 2 + 2] = high;
                else *reinterpret_cast<float2*>(to + 8 * nt + 2 * q) = make_float2(low, high);
            }
        }
    }
}

// The non-finite fallback (non_finite.cuh): computes the warp's results again from visible keys only, row by row. Key
// tiles `first`, `first` + WARPS, ... before `end`.
__device__ __noinline__ void store_partial_non_finite(const View<const dtype>& Q, const View<const dtype>& K,
                                                      const View<const dtype_v>& V, const Score& score, int b, int row0,
                                                      int kv_head, int group, int first, int end, float* O_smem,
                                                      float2* sums) {
    const SeqlenInfo seqlen(score, b);
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < BLOCK_M; ++r) {
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(seqlen, row.h);
        const float exponent = head.unit * Head::LOG2E;
        float* const O = O_smem + r * O_PITCH;
        float m = -INF, l = 0.0f;
        for (int d = lane; d < HEAD_DIM_V; d += 32) O[d] = 0.0f;
        for (int n = 0; row.i < head.Sq && first + n / BLOCK_N * WARPS < end; ++n) {
            const int j = (first + n / BLOCK_N * WARPS) * BLOCK_N + n % BLOCK_N;
            if (!head.visible(row.i, j)) continue;
            float dot = 0.0f;
            for (int d = lane; d < HEAD_DIM; d += 32)
                dot += to_float(head.query(Q, row.h, row.i)[d]) * to_float(head.key(K, kv_head, j)[d]);
            const float s = head.raw(row_sum<32>(dot), ScoreIndex(row.i, j)), m_new = fmaxf(m, s);
            const float alpha = rescale_factor(m, m_new, exponent),
                        p = ex2((s - (m_new == -INF ? 0.0f : m_new)) * exponent);
            const float kept = head.keep(row.i, j) ? p : 0.0f;
            for (int d = lane; d < HEAD_DIM_V; d += 32)
                O[d] = alpha * O[d] + kept * to_float(head.key(V, kv_head, j)[d]);
            l = alpha * l + p;
            m = m_new;
        }
        if (lane == 0) sums[r] = make_float2(m, l);
    }
}

// Stores columns 4 quad .. 4 quad + 3 of a row of O, and for quad 0 its LSE. number: the row's index in LSE.
__device__ __forceinline__ void store_row(const View<dtype_o>& O, float* LSE, const Head& head, int h, int i,
                                          long long number, int quad, const CombinedRow& sum) {
    constexpr bool WIDE = sizeof(dtype_o) == 4;  // fp32 output of float8 inputs
    const FinalizedRow final_row = head.finalize(sum.m, sum.l);
    const float4 o = make_float4(sum.O.x * final_row.inverse, sum.O.y * final_row.inverse, sum.O.z * final_row.inverse,
                                 sum.O.w * final_row.inverse);
    dtype_o* const to = head.query(O, h, i) + 4 * quad;
    if (WIDE) *reinterpret_cast<float4*>(to) = o;
    else *reinterpret_cast<uint2*>(to) = make_uint2(pack(o.x, o.y), pack(o.z, o.w));
    if (quad == 0) LSE[number] = final_row.lse;
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

    // [CLUSTER][BLOCK_M][RANK_QUADS]
    __device__ __forceinline__ float4* O_dsmem() const { return reinterpret_cast<float4*>(smem + DSMEM_AT); }
    __device__ __forceinline__ float2* sums_dsmem() const {  // [CLUSTER][BLOCK_M]
        return reinterpret_cast<float2*>(O_dsmem() + CLUSTER * BLOCK_M * RANK_QUADS);
    }
    __device__ __forceinline__ void store(const PackedRow& row, const Head& head, int quad,
                                          const CombinedRow& sum) const {
        const long long number = head.lse_offset(H, row.h) + row.i;
        if (split.splits == 1) store_row(O, LSE, head, row.h, row.i, number, quad, sum);
        else parts.store(number, split.split, quad, sum);
    }

    // A thread combines four columns of a row, or eight if BLOCK_M = 32. In a cluster the result goes to the block that
    // combines these columns.
    __device__ __forceinline__ void warps() const {
        constexpr int QUADS_PER_THREAD = M_TILES > 1 ? 2 : 1;
        const float2* const sums = reinterpret_cast<float2*>(smem + SUMS_AT);
        const int rank = cluster_cta_rank();
#pragma unroll 1
        for (int i = threadIdx.x * QUADS_PER_THREAD; i < valid_rows * QUADS; i += QUADS_PER_THREAD * THREADS) {
            const int r = i / QUADS;
            const PackedRow row(row0 + r, kv_head, group);
            const Head head(seqlen, row.h);
            float2 sums_of_warps[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sums_of_warps[w] = sums[w * BLOCK_M + r];
#pragma unroll
            for (int quad = i % QUADS; quad < i % QUADS + QUADS_PER_THREAD; ++quad) {
                float4 O_of_warps[WARPS];
#pragma unroll
                for (int w = 0; w < WARPS; ++w)
                    O_of_warps[w] =
                        *reinterpret_cast<const float4*>(smem + RINGS_AT + w * RING + (r * O_PITCH + 4 * quad) * 4);
                CombinedRow sum;
                sum.add(sums_of_warps, O_of_warps, head.unit * Head::LOG2E);
                if (CLUSTER == 1) store(row, head, quad, sum);
                else {
                    const int owner = quad / RANK_QUADS, rank_quad = quad - owner * RANK_QUADS, to = rank * BLOCK_M + r;
                    map_shared_rank(O_dsmem(), owner)[to * RANK_QUADS + rank_quad] = sum.O;
                    if (rank_quad == 0) map_shared_rank(sums_dsmem(), owner)[to] = make_float2(sum.m, sum.l);
                }
            }
        }
    }

    // Combines this block's columns from the blocks of the cluster.
    __device__ __forceinline__ void ranks() const {
        const int first_quad = static_cast<int>(cluster_cta_rank()) * RANK_QUADS,
                  rank_quads = min(QUADS - first_quad, RANK_QUADS);
#pragma unroll 1
        for (int i = threadIdx.x; i < valid_rows * rank_quads; i += THREADS) {
            const int r = i / rank_quads, rank_quad = i % rank_quads;
            const PackedRow row(row0 + r, kv_head, group);
            const Head head(seqlen, row.h);
            float2 sums_of_ranks[CLUSTER];
            float4 O_of_ranks[CLUSTER];
#pragma unroll
            for (int m = 0; m < CLUSTER; ++m) {
                sums_of_ranks[m] = sums_dsmem()[m * BLOCK_M + r];
                O_of_ranks[m] = O_dsmem()[(m * BLOCK_M + r) * RANK_QUADS + rank_quad];
            }
            CombinedRow sum;
            sum.add(sums_of_ranks, O_of_ranks, head.unit * Head::LOG2E);
            store(row, head, first_quad + rank_quad, sum);
        }
    }
};

// Combines the partial results of all splits, one block per row. GROUPS groups of HEAD_DIM_V / 4 threads each merge
// every GROUPS-th split, with LOADS_AHEAD loads in flight; then the first group merges the groups' sums. The order of
// sums is fixed.
__device__ __forceinline__ void combine_splits(const View<dtype_o>& O, float* LSE, float* partials, int H, int splits,
                                               const Score& score) {
    constexpr int QUADS = HEAD_DIM_V / 4, GROUPS = THREADS / QUADS, LOADS_AHEAD = 8;
    static_assert(GROUPS >= 1, "one thread per four columns");
    __shared__ float4 O_smem[LOADS_AHEAD][THREADS];  // private to each thread until the groups' sums are merged
    __shared__ float2 sums_smem[GROUPS];
    const int h = blockIdx.y, entry = blockIdx.z, entries = gridDim.z, group = threadIdx.x / QUADS,
              quad = threadIdx.x % QUADS;
    const Split first_split = DYNAMIC_SPLITS ? SplitScheduler(score, entries, splits).first_split(entry)
                                             : Split{entry, 0, splits, entry * splits};
    const RowTile tile = query_tile<1>(score, blockIdx.x, entry);
    griddepcontrol_wait();
    if ((RAGGED && tile.invalid()) || (DYNAMIC_SPLITS && first_split.splits == 1)) return;
    const Head head(score, tile.b, h);
    const long long number = head.lse_offset(H, h) + tile.row0;
    const Partials parts(partials, DYNAMIC_SPLITS ? splits + entries : entries * splits,
                         static_cast<long long>(H) * query_rows(score), first_split);
    const float exponent = head.unit * Head::LOG2E;

    CombinedRow group_sum;
    const int splits_end = group < GROUPS ? first_split.splits : 0;
#pragma unroll 1
    for (int first = group; first < splits_end; first += LOADS_AHEAD * GROUPS) {
        float2 sums[LOADS_AHEAD];
        float4 O_part[LOADS_AHEAD];
#pragma unroll
        for (int i = 0; i < LOADS_AHEAD; ++i) {
            const int split = min(first + i * GROUPS, first_split.splits - 1);
            cp_async_16(smem_address(&O_smem[i][threadIdx.x]), parts.O(number, split) + 4 * quad,
                        first + i * GROUPS < first_split.splits);
            sums[i] = *parts.sums(number, split);
            if (first + i * GROUPS >= first_split.splits) sums[i] = make_float2(-INF, 0.0f);
        }
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll
        for (int i = 0; i < LOADS_AHEAD; ++i) O_part[i] = O_smem[i][threadIdx.x];
        group_sum.add(sums, O_part, exponent);
    }
    O_smem[0][threadIdx.x] = group_sum.O;
    if (group < GROUPS && quad == 0) sums_smem[group] = make_float2(group_sum.m, group_sum.l);
    __syncthreads();  // the sums of all groups are in shared memory
    if (group > 0) return;
    CombinedRow sum;
    float2 sums[GROUPS];
    float4 O_part[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sums[i] = sums_smem[i], O_part[i] = O_smem[0][i * QUADS + quad];
    sum.add(sums, O_part, exponent);
    store_row(O, LSE, head, h, tile.row0, number, quad, sum);
}
