// How the four kernels from fwd_wgmma.cu differ:
//
// - fwd_wgmma: one range of keys; the functions for several do nothing. store_non_finite recomputes all rows of a warp.
// - fwd_wgmma_split: the warps of a work tile may have rows of several heads (PACK_GQA), and several work tiles share
//   the keys of the same rows (key_splits.cuh).
// - fwd_wgmma_invariant: as fwd_wgmma_split, but the keys are divided into fixed ranges (KeyRange), and the sums of a
//   row start again with each range; the rows of V after the last key are cleared, and only rows that are not finite
//   are recomputed. Differences in other files: only rows that need it raise m (softmax.cuh), -0 in O becomes 0
//   (epilogue.cuh), and LSE is computed by an explicit fmaf (score_mod.cuh).
// - fwd_wgmma_stream_k: work tiles that do not fill a wave are split by key tiles, as equally as possible among all
//   blocks (stream_k.cuh). The block that has the last key tiles of a work tile merges the others' partial O.
#pragma once
#include "fwd_consumer.cuh"
#include "key_splits.cuh"
#include "non_finite.cuh"
#include "stream_k.cuh"

// Number of work tiles that share the keys of the same rows.
__device__ __forceinline__ unsigned key_splits(const Arguments& args) {
#if KEY_SPLITS
    return args.splits;
#else
    return 1;
#endif
}

// KEY_SPLITS: loads Q for one consumer, 16 rows for each of its warps: with PACK_GQA the warps may have rows of
// different heads. Used by one thread. Q_map has boxes of 16 rows.
__device__ __forceinline__ void load_Q_by_warp(SmemAddr base, const Arguments& args, const WorkTile& work_tile,
                                               const SeqlenInfo& sequence, int b, int consumer) {
    const SmemAddr Q_smem = base + consumer * Queries::BYTES, full = FullQ::at(base, consumer);
    mbarrier_arrive_expect_tx(full, Queries::BYTES);
#pragma unroll 1
    for (int warp = 0; warp < 4; ++warp) {
        const WorkTile rows = rows_of_warp(work_tile, 4 * consumer + warp, args.score);
        Queries::load_part(Q_smem + warp * WARP_ROWS * 128, args.Q_map, 0, sequence.tma_query_row(rows.row0),
                           args.Q.stride_h ? rows.h() : 0, sequence.tma_query_batch(b), full);
    }
}

// fwd_wgmma: a row has one range of keys, which one block computes.
struct OneRangeConsumer : WorkTileConsumer {
    using WorkTileConsumer::WorkTileConsumer;
    struct EarlierFactors {};
    __device__ __forceinline__ EarlierFactors merge_stats(SoftmaxState&) const { return {}; }
    __device__ __forceinline__ void merge_O(SoftmaxState&, EarlierFactors) const {}
    __device__ __forceinline__ void store_earlier_keys(SoftmaxState&, int) const {}
    // Whether O, m and l of the work tile are a partial result, which store_partial stores.
    static __device__ __forceinline__ bool is_partial() { return SPLIT_KEYS; }
    __device__ __forceinline__ void store_partial(const SoftmaxState&) const {}
    __device__ __forceinline__ void merge_blocks(SoftmaxState&, float (&)[2]) const {}
};

// The other kernels hide functions of OneRangeConsumer.
struct KeyRangeConsumer : OneRangeConsumer {
    using OneRangeConsumer::OneRangeConsumer;

    // Whether key tile j is the first of a range of keys, other than the first range.
    __device__ __forceinline__ bool begins_key_range(int j) const {
        return MERGE_RANGES && j > first_own && KeyRange::begins(j);
    }
    // The last key tile of the range that begins with tile `begin`.
    __device__ __forceinline__ int last_of_range(int begin) const {
        return MERGE_RANGES ? min(last, begin + KeyRange::tiles(begin) - 1) : last;
    }

    // Stores LSE, and returns in O_scale the factors that normalise O. STREAM_K: merge_blocks does this for rows with
    // keys.
    __device__ __forceinline__ void finalize(const SoftmaxState& softmax, float (&O_scale)[2]) {
        if (SPLIT_KEYS || (STREAM_K && own_tiles > 0)) return;
        finalize_rows(softmax, head, args.LSE, batch_head, warp_row + state.g, state.q, O_scale);
    }
    // Waits for P V of tile j, after which O includes all tiles of the range up to j, and releases V.
    __device__ __forceinline__ void wait_PV(SoftmaxState& softmax, int j) {
        wgmma_wait<0>();
        warpgroup_fence_operand(softmax.O);
        release_V(j);
    }

    // INVARIANT: sets the rows of V after the last valid key to 0. P is 0 there, but the memory may contain NaN, and 0
    // * NaN = NaN would make the fallback compute all rows, with other rounding. Needed only in a dense batch with
    // key_lengths and without pages; also done with pages, and in a ragged batch with key_lengths, where TMA has
    // already filled these rows with zeros. Every consumer does this for itself: they write equal values, without
    // order, which `sanitize` reports as a race.
    __device__ __forceinline__ void clear_invalid_V(int j) {
        const int first = head.Sk - (Head::HAS_BLOCK_MAP ? PV_n0 : n0(j));
        if (!INVARIANT || !(KEY_LENGTHS || PAGE_SIZE) || first >= BLOCK_N) return;
        char* const tile = state.smem + VPipeline::tile_at(pipe_index + j);
        for (int i = threadIdx.x % 128; i < Values::SLABS * 8 * (BLOCK_N - max(first, 0)); i += 128) {
            const unsigned row = max(first, 0) + i / (Values::SLABS * 8), chunk = i % (Values::SLABS * 8);
            *reinterpret_cast<uint4*>(tile + Values::chunk(row, chunk)) = make_uint4(0, 0, 0, 0);
        }
        fence_proxy_async();
        named_barrier_sync(CONSUMER_BARRIER + consumer, 128);  // all rows are cleared before a warp reads them
    }

    // Stores the 16 rows of a warp if O of one is not finite. non_finite.cuh recomputes all of them in fwd_wgmma, and
    // only those that are not finite in fwd_wgmma_invariant.
    __device__ __forceinline__ void store_non_finite(const SoftmaxState& softmax, const float (&O_scale)[2]) const {
        if (INVARIANT) store_by_row(softmax, O_scale);
        else
            attend_non_finite<16, 1>(args.Q, args.K, args.V, args.O, args.LSE, args.group, args.score, b, h(), args.H,
                                     warp_row, 0);
    }

#if KEY_SPLITS
    using Earlier = EarlierKeys<SoftmaxState, THREADS - 128, EARLIER_IN_SMEM>;
    using EarlierFactors = Earlier::Factors;
    __device__ __forceinline__ Earlier earlier_keys() const {
        float4* const in_smem = reinterpret_cast<float4*>(state.smem + EARLIER_AT);
        float4* const in_global = reinterpret_cast<float4*>(args.partials) + blockIdx.x * Earlier::BLOCK_VECTORS;
        return {EARLIER_IN_SMEM ? in_smem : in_global, threadIdx.x - 128};
    }
    // Whether the rows have keys before the range of the last tile.
    __device__ __forceinline__ bool has_earlier_keys() const { return last >= KeyRange::tiles(0); }

    // MERGE_RANGES: m and l become those of all keys. Lane q = 0 then has l of the whole row, and the other three lanes
    // have 0, since finalize_rows adds up l of the four lanes. Returns the factors for merge_O.
    __device__ __forceinline__ EarlierFactors merge_stats(SoftmaxState& softmax) const {
        if (!MERGE_RANGES) return {};
        sum_l(softmax);
        const EarlierFactors factors = earlier_keys().merge_stats(softmax, state.scale_log2, has_earlier_keys());
        if (state.q) softmax.l[0] = softmax.l[1] = 0.0f;
        return factors;
    }
    // MERGE_RANGES: adds O of the keys before the range of the last tile.
    __device__ __forceinline__ void merge_O(SoftmaxState& softmax, const EarlierFactors& factors) const {
        if (MERGE_RANGES && has_earlier_keys()) earlier_keys().add_to(softmax, factors);
    }
    // Moves the sums of the keys before tile j to memory: tile j is the first of a range.
    __device__ __forceinline__ void store_earlier_keys(SoftmaxState& softmax, int j) const {
        sum_l(softmax);
        earlier_keys().add(softmax, state.scale_log2, j > KeyRange::tiles(0));
        softmax.m[0] = softmax.m[1] = -INF, softmax.l[0] = softmax.l[1] = 0.0f;
    }
    static __device__ __forceinline__ void sum_l(SoftmaxState& softmax) {
        softmax.l[0] = row_sum<4>(softmax.l[0]), softmax.l[1] = row_sum<4>(softmax.l[1]);
    }
    // SPLIT_KEYS: stores the partial result of a split, O, m and l.
    __device__ __forceinline__ void store_partial(const SoftmaxState& softmax) const {
        const SplitResults results{args.partials, static_cast<long long>(args.batch_heads) * head.Sq, args.splits};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = row_sum<4>(softmax.l[half]);
            const int row = warp_row + state.g + 8 * half;
            if (row >= head.Sq) continue;
            const long long number = head.lse_offset(batch_head) + row;
            float* const to = results.O(number, split);
#pragma unroll
            for (int i = 0; i < DV_PAD / 8; ++i)
                if (8 * i + 2 * state.q < HEAD_DIM_V)
                    *reinterpret_cast<float2*>(to + 8 * i + 2 * state.q) =
                        make_float2(softmax.O[4 * i + 2 * half], softmax.O[4 * i + 2 * half + 1]);
            if (state.q == 0) results.sums(number, split) = make_float2(softmax.m[half], l);
        }
    }
#endif

#if STREAM_K
    static_assert(CONSUMERS <= 3, "a block has counters for three consumers");
    using Exchange = StreamKExchange<SoftmaxState, THREADS - 128>;
    __device__ __forceinline__ Exchange exchange() const { return {args.partials, consumer, /*first_slot=*/0}; }
    // Whether another block has the next key tiles of the rows; the last one finalizes them.
    __device__ __forceinline__ bool is_partial() const { return n_blocks.end * BLOCK_N < head.Sk; }
    // Adds the partial O of the other blocks that have key tiles of the rows, and finalizes.
    __device__ __forceinline__ void merge_blocks(SoftmaxState& softmax, float (&O_scale)[2]) const {
        if (is_partial()) return;
        if (n_blocks.begin > 0) exchange().merge(softmax, first_block, block, state.scale_log2);
        // Read again: otherwise an address is computed before `merge`, and spilled.
        const int lane = thread_index_x() % 32;
        finalize_rows(softmax, head, args.LSE, batch_head, warp_row + lane / 4, lane % 4, O_scale);
    }
    __device__ __forceinline__ void store_partial(const SoftmaxState& softmax) const {
        exchange().publish(softmax, block, CONSUMER_BARRIER + consumer, warp % 4 == 0 && state.lane == 0);
    }
#endif

  private:
    // Stores all rows of the warp from registers, then recomputes and overwrites those that are not finite.
    __device__ __forceinline__ void store_by_row(const SoftmaxState& softmax, const float (&O_scale)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp_row + state.g + 8 * half;
            float zero = 0.0f;
#pragma unroll
            for (int i = 0; i < DV_PAD / 4; ++i) zero = fmaf(softmax.O[i / 2 * 4 + 2 * half + i % 2], 0.0f, zero);
            const unsigned lanes = __ballot_sync(0xffffffffu, !(zero == 0.0f));
#pragma unroll
            for (int i = 0; i < DV_PAD / 8; ++i) {
                const float* const pair = softmax.O + 4 * i + 2 * half;
                const int column = 8 * i + 2 * state.q;
                if (row < head.Sq && column < HEAD_DIM_V)
                    *reinterpret_cast<unsigned*>(head.query(args.O, h(), row) + column) =
                        pack(normalized(pair[0], O_scale[half]), normalized(pair[1], O_scale[half]));
            }
            __syncwarp();  // the rows are stored before some of them are overwritten
            attend_non_finite_rows(args.Q, args.K, args.V, args.O, args.LSE, args.group, args.score, b, h(), args.H,
                                   warp_row + 8 * half, lanes);
        }
    }
};
