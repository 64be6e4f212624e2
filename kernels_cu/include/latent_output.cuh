// The warpgroups of fwd_latent_wgmma that own the left and the right half of O: P V, and the epilogue.
#pragma once
#include "latent_tiles.cuh"

// Partial results: O, not divided by l, of every slot (key_scheduler.cuh) and row of an entry, H * Sq of them; then m
// and l.
struct SlotPartials {
    float* data;
    long long slots, rows;
    __device__ __forceinline__ float* O(long long row, int slot) const {
        return data + (slot * rows + row) * HEAD_DIM_V;
    }
    __device__ __forceinline__ float2* sums(long long row, int slot) const {
        return reinterpret_cast<float2*>(data + slots * rows * HEAD_DIM_V) + slot * rows + row;
    }
};

// Where the result of a segment goes: to O and LSE, or with several splits to `parts`.
struct Result {
    const View<dtype>& O;
    float* LSE;
    const SlotPartials& parts;
    int H;
    // Number of a row in LSE; number among the rows of its entry.
    static __device__ __forceinline__ long long number(const BlockTile& tile, const PackedRow& row, int H) {
        return tile.seqlen.lse_offset(H, row.h) + row.i;
    }
    static __device__ __forceinline__ long long number(const BlockTile& tile, const PackedRow& row) {
        return tile.seqlen.lse_offset(row.h) + row.i;
    }
};

// The left (half 0) or right warpgroup of O.
template <int HALF>
struct OutputWarpgroup {
    const SmemAddr base;
    const int warp, lane;  // warp: of the warpgroup's four
    float O[HALF_COLUMNS / 2];
    float2 sums[2];  // m and l of the thread's rows
    // Steps of P V, of 16 keys, and those that do not wait for the next Q K^T.
    static constexpr int STEPS = BLOCK_N / 16, EARLY = S_BUFFERS > 1 ? STEPS : HALF == 0 ? EARLY_STEPS : 0;

    __device__ __forceinline__ OutputWarpgroup(SmemAddr base, int warp, int lane)
        : base(base), warp(warp), lane(lane) {}

    // Zeros in the rows of keys that no row sees: P is 0 there, but 0 * NaN would be NaN. Rows beyond the tensor are
    // zeros already.
    __device__ __forceinline__ void clear_hidden(SmemAddr V_smem, int keys) {
#pragma unroll 1
        for (int i = thread_index_x() % 128; i < (BLOCK_N - keys) * Half::SLABS * 8; i += 128) {
            const int row = keys + i / (Half::SLABS * 8), chunk = i % (Half::SLABS * 8);
            store_floats(V_smem + Half::chunk(row, chunk), 0.0f, 0.0f, 0.0f, 0.0f);
        }
        fence_proxy_async();
        named_barrier_sync(HALF_BARRIER + HALF, 128);  // all rows are cleared before wgmma reads them
    }

    // O += P V of key tile j: 16 keys per step.
    template <int BEGIN, int END>
    __device__ __forceinline__ void mma_PV(unsigned j, SmemAddr V_at) {
        const Descriptor P_smem = Pairs::k_major(base + P_AT + j % 2 * Pairs::BYTES), V_smem = Half::mn_major(V_at);
        wgmma_fence();
#pragma unroll
        for (int step = BEGIN; step < END; ++step)
            wgmma<Order::MN_MAJOR>(O, P_smem + Pairs::k_step(step), V_smem + Half::mn_step(step), true);
        wgmma_commit();
    }

    // P V of a segment: key tiles first .. end - 1 of the block. keys: valid ones of the entry, from key tile `first`
    // on. P of the last key tile is not released: the result is stored first.
    __device__ __forceinline__ void mainloop(unsigned first, unsigned end, int keys, const KeyLoader& loader,
                                             const char* smem) {
        const bool loads = warp == 0 && lane == 0;
        const int r = 16 * warp + lane / 4;
        const float* const factors = reinterpret_cast<const float*>(smem + ALPHA_AT);
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) O[i] = 0.0f;
#pragma unroll 1
        for (unsigned j = first; j < end; ++j, keys -= BLOCK_N) {
            const unsigned index = uniform(j), unit = 2 * index + HALF;
            KeyAddress next = {-1, 0};
            if (loads) {
                next = loader.next();
                if (HALF == 0) loader.load_rest(index + REST_STAGES, next);  // when Q K^T of key tile j is complete
            }
            __syncwarp();  // wgmma needs the whole warp
            PPipeline::wait(base, index);
            const float alpha[2] = {factors[index % 2 * BLOCK_M + r], factors[index % 2 * BLOCK_M + r + 8]};
            if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) RowStats::scale_O(O, alpha);
            HalfPipeline::wait(base, unit);
            const SmemAddr V_at = base + stage_of<STAGES>(unit) * Half::BYTES;
            if (KEY_LENGTHS && keys < BLOCK_N) clear_hidden(V_at, keys);
            if constexpr (EARLY > 0) mma_PV<0, EARLY>(index, V_at);
            if constexpr (EARLY < STEPS) {
                if (j + 1 < end) mbarrier_wait(NearlyDone::at(base, (index + 1) % 2), (index + 1) / 2 % 2);
                mma_PV<EARLY, STEPS>(index, V_at);
            }
            wgmma_wait<0>();
            warpgroup_fence_operand(O);
            __syncwarp();  // all lanes have read the factors
            release_K<HalfPipeline, STAGES>(base, unit, lane);
            if (lane == 0 && j + 1 < end) PPipeline::release(base, index);
            if (loads) loader.load_half(unit + STAGES, next);
            __syncwarp();  // wgmma needs the whole warp
        }
        const float2* const sums_smem = reinterpret_cast<const float2*>(smem + SUMS_AT) + (end - 1) % 2 * BLOCK_M;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            sums[half] = end > first ? sums_smem[r + 8 * half] : make_float2(-INF, 0.0f);
    }

    // Stores m, l and this half of O, not divided by l, for the combine kernel.
    __device__ __forceinline__ void store_partial(const BlockTile& tile, const Result& result) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * warp + 8 * half + lane / 4;
            if (!tile.has(r)) continue;
            const long long number = Result::number(tile, tile.row(r));
            float* const to = result.parts.O(number, tile.segment.slot) + HALF * HALF_COLUMNS + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < HALF_COLUMNS / 8; ++i)
                if (HALF * HALF_COLUMNS + 8 * i < HEAD_DIM_V)
                    *reinterpret_cast<float2*>(to + 8 * i) = make_float2(O[4 * i + 2 * half], O[4 * i + 2 * half + 1]);
            if (HALF == 0 && lane % 4 == 0) *result.parts.sums(number, tile.segment.slot) = sums[half];
        }
    }

    // Stores this half of O, and the left half LSE. Neighbouring lanes exchange pairs of columns: a lane stores 8
    // bytes, four lanes 32 bytes in a row.
    __device__ __forceinline__ void store_final(const BlockTile& tile, const Result& result) const {
        const bool odd = lane % 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * warp + 8 * half + lane / 4;
            const PackedRow row = tile.row(tile.has(r) ? r : 0);
            const FinalizedRow final_row = Head(tile.seqlen, row.h).finalize(sums[half].x, sums[half].y);
            if (HALF == 0 && lane % 4 == 0 && tile.has(r)) result.LSE[Result::number(tile, row, result.H)] = final_row.lse;
            const int first_column = HALF * HALF_COLUMNS + 8 * odd;
            dtype* const to = tile.seqlen.query(result.O, row.h, row.i) + first_column + 2 * (lane % 4 - odd);
#pragma unroll
            for (int i = 0; i < HALF_COLUMNS / 8; i += 2) {
                unsigned pairs[2];
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    pairs[k] = pack(O[4 * (i + k) + 2 * half] * final_row.inverse,
                                    O[4 * (i + k) + 2 * half + 1] * final_row.inverse);
                const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? pairs[0] : pairs[1], 1);
                if (tile.has(r) && first_column + 8 * i < HEAD_DIM_V)
                    *reinterpret_cast<uint2*>(to + 8 * i) =
                        make_uint2(odd ? other : pairs[0], odd ? pairs[1] : other);
            }
        }
    }

    // The non-finite fallback: each warp of the left half computes every fourth row again. O_smem: a row of each warp.
    __device__ __forceinline__ void store_non_finite(const BlockTile& tile, const Result& result,
                                                     const View<const dtype>& Q, const View<const dtype>& K,
                                                     const View<const dtype>& V, float* O_smem) const {
        float* const O_row = O_smem + warp * DV_PAD;
        const Segment& segment = tile.segment;
#pragma unroll 1
        for (int r = warp; tile.has(r) && r < BLOCK_M; r += 4) {
            const PackedRow row = tile.row(r);
            const Head head(tile.seqlen, row.h);
            const float2 stats = partial_non_finite(Q, K, V, tile.seqlen, row, tile.kv_head, segment.first,
                                                    segment.first + segment.tiles, O_row);
            CombinedRow sum;
            sum.m = stats.x, sum.l = stats.y;
            __syncwarp();  // the row is complete
#pragma unroll 1
            for (int quad = lane; quad < HEAD_DIM_V / 4; quad += 32) {
                sum.O = reinterpret_cast<const float4*>(O_row)[quad];
                if (segment.splits > 1) {
                    const long long number = Result::number(tile, row);
                    reinterpret_cast<float4*>(result.parts.O(number, segment.slot))[quad] = sum.O;
                    if (quad == 0) *result.parts.sums(number, segment.slot) = stats;
                } else {
                    store_row(result.O, result.LSE, head, row.h, row.i, Result::number(tile, row, result.H), quad, sum);
                }
            }
            __syncwarp();  // the row has been read before it is overwritten
        }
    }
};

// A warpgroup of O processes the segments of the block.
template <int HALF>
__device__ __forceinline__ void output_warpgroup(SmemAddr base, const Score& score, int group,
                                                 const View<const dtype>& Q, const View<const dtype>& K,
                                                 const View<const dtype>& V, const TensorMap& K_map,
                                                 const Result& result, char* smem) {
    const KeyLoader loader(base, score, K, K_map, smem, HALF);
    if (thread_index_x() % 128 == 0) {
        loader.begin();
        if (HALF == 0) loader.load_first();  // while the warpgroup of S loads Q
        else
            for (unsigned j = 0; j < (1 + STAGES) / 2; ++j) loader.next();
    }
    __syncwarp();
    unsigned end = 0;
#pragma unroll 1
    for (; warp_scheduler(smem).valid(); next_segment(warp_scheduler(smem), score)) {
        const unsigned thread = thread_index_x(), first = end;
        OutputWarpgroup<HALF> warpgroup(base, uniform(thread / 32) % 4, thread % 32);
        {
            const Segment segment = warp_scheduler(smem).segment(score);
            end += segment.tiles;
            const int keys = SeqlenInfo(score, segment.b).Sk - segment.first * BLOCK_N;
            warpgroup.mainloop(first, end, keys, loader, smem);
        }
        const BlockTile tile(score, warp_scheduler(smem).segment(score), group);
        // The vote: P V of both halves is complete, so that the fallback can use P's shared memory.
        if (Head::HIDES && named_barrier_or(OUTPUT_BARRIER, THREADS, !all_finite<4>(warpgroup.O))) {
            if (HALF == 0)
                warpgroup.store_non_finite(tile, result, Q, K, V,
                                           reinterpret_cast<float*>(smem + P_AT + (end - 1) % 2 * Pairs::BYTES));
        } else if (tile.segment.splits > 1) warpgroup.store_partial(tile, result);
        else warpgroup.store_final(tile, result);
        __syncwarp();  // all lanes have read m and l
        if (end > first && warpgroup.lane == 0) PPipeline::release(base, end - 1);
    }
}
