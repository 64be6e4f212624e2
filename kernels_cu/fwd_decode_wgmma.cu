// Rung 4: decoding on Hopper's warpgroup MMA (wgmma), fed by TMA: few queries, many keys, and enough heads to fill the
// GPU without split-KV.
//
// The query heads of a key/value head are the rows of one tile (packed GQA), as in fwd_decode: BLOCK_M packed rows. The
// operands are swapped (S^T = K Q^T, O^T = V^T P^T): wgmma's M is 64 keys (BLOCK_N), and then 64 columns of V, and its
// N is BLOCK_M. Few query rows therefore waste no work of the tensor cores. The kernel is persistent: a work tile is
// BLOCK_M packed rows of one key/value head, two blocks share an SM up to D = 128, and all blocks have the same number
// of work tiles, or one fewer.
//
// clang-format off
//   load warp     K0 V0 K1 V1 ... next work tile ...   STAGES stages of K and V, each with a full and an empty mbarrier
//   warpgroup     P^T -> shared memory | S^T = K Q^T of the next tile | O^T += V^T P^T       per tile of 64 keys
//
//   shared memory: Q | P [2], reused by O (the larger of both) | K [STAGES] | V [STAGES] | row statistics | mbarriers
// clang-format on
//
// With up to 32 rows or one block per SM (OVERLAP_QK) S^T of the next tile is issued before O^T of this one, so that P
// of the next tile is computed during O^T: 0.64 instead of 0.74 us per tile. The time of a tile matters for blocks that
// finish after all others, in the last 10 us of a launch: 0.3% with 512 heads of 8192 keys.
//
// In fwd_decode each warp has other keys. To combine the results of the warps takes 4 us per head, during which the SM
// loads nothing. Here the warps share all keys, and the keys of the next head load while O is stored.
//
// Deferred rescaling as in fwd_wgmma: P uses the maximum m of the first tile, until a P exceeds P_LIMIT. Then S is
// computed again (K is still in its stage), and all four warps raise m together, because each has columns of O of all
// rows. The named barrier after the store of P also combines the warps' votes. Layouts and shared memory:
// decode_tiles_wgmma.cuh. Measurements: experiments/020_decode.
#define FALLBACK_INLINE __forceinline__
#include "decode_tiles_wgmma.cuh"
#include "non_finite.cuh"
#include "wgmma_fragment.cuh"

// The thread that loads K and V of all work tiles.
__device__ __forceinline__ void load_KV(SmemAddr base, const View<const dtype>& K, const View<const dtype>& V,
                                        const TensorMap& K_map, const TensorMap& V_map, int row_tiles, int work_tiles,
                                        int Hk, int group, const Score& score) {
    unsigned next_pipe_index = 0;  // index in the pipeline of the next key tile
#pragma unroll 1
    for (int tile_index = blockIdx.x; tile_index < work_tiles; tile_index += gridDim.x) {
        const PackedWorkTile work_tile(tile_index, row_tiles, Hk, group, score);
        // The tensor map of a broadcast dimension (stride 0) has size 1.
        const auto load = [&](auto layout, auto pipeline, const TensorMap& map, const View<const dtype>& tensor,
                              unsigned tiles_at, int j) {
            const unsigned stage = stage_of(next_pipe_index);
            pipeline.acquire(base, next_pipe_index);
            layout.load(base + tiles_at + stage * layout.BYTES, map, work_tile.n0(j), tensor.stride_h ? work_tile.h : 0,
                        tensor.stride_b ? work_tile.b : 0, pipeline.full(base, stage));
        };
#pragma unroll 1
        for (int j = 0; j < work_tile.tiles; ++j, ++next_pipe_index) {
            load(Keys(), KPipeline(), K_map, K, K_AT, j);
            load(Values(), VPipeline(), V_map, V, V_AT, j);
        }
    }
}

// Sums of the row sums of the lanes that have the same rows.
__device__ __forceinline__ void sum_over_lanes(float (&l)[ROWS_PER_THREAD]) {
#pragma unroll 1
    for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) l[r] += __shfl_xor_sync(0xffffffffu, l[r], lanes);
}
__device__ __forceinline__ void consumer_barrier() { named_barrier_sync(CONSUMER_BARRIER, CONSUMER_THREADS); }

// The consumer warpgroup in one work tile. m, l, S and O_acc are references to variables of the kernel: as members,
// they would spill at D = 80 and 112.
struct ConsumerWarpgroup {
    const SmemAddr base;
    const unsigned warp, lane;
    const int g, q;
    const float scale_log2;
    const Head& group_head;       // all heads of the work tile have its ranges of keys
    float* const warp_stats;      // [4][BLOCK_M], in shared memory
    float (&m)[ROWS_PER_THREAD];  // a raw score, equal in all lanes that have the row
    float (&l)[ROWS_PER_THREAD];  // this thread's part of the row sum
    float (&S)[ACCUMULATORS], (&O_acc)[Values::SLABS][ACCUMULATORS];

    // MMAs on the i-th tile of the pipeline (issue only), and the release of its stage.
    __device__ __forceinline__ void mma_KQ(unsigned i) const {
        KPipeline::wait(base, i);
        const Descriptor K_smem = Keys::k_major(base + K_AT + stage_of(i) * Keys::BYTES);
        const Descriptor Q_smem = Queries::k_major(base);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < D_PAD / 16; ++step)
            wgmma<Order::K_MAJOR>(S, K_smem + Keys::k_step(step), Q_smem + Queries::k_step(step), step > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void mma_VP(unsigned i) const {
        VPipeline::wait(base, i);
        const Descriptor P_smem = PTile::k_major(base + P_AT + i % 2 * PTile::BYTES);
        wgmma_fence();
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab) {
            const Descriptor V_smem =
                Values::mn_major(base + V_AT + stage_of(i) * Values::BYTES + slab * Values::SLAB_BYTES);
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; ++step)
                wgmma<Order::K_MAJOR, Order::MN_MAJOR>(O_acc[slab], V_smem + Values::mn_step(step),
                                                       P_smem + PTile::k_step(step), true);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void release_K(unsigned i) const {
        if (lane == 0) KPipeline::release(base, i);
    }
    __device__ __forceinline__ void release_V(unsigned i) const {
        if (lane == 0) VPipeline::release(base, i);
    }
    __device__ __forceinline__ void wait_S() const {
        wgmma_wait<0>();
        warpgroup_fence_operand(S);
    }
    __device__ __forceinline__ void wait_O() const {
        wgmma_wait<0>();
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab) warpgroup_fence_operand(O_acc[slab]);
    }

    // Raw scores (score_mod.cuh); -INF where masked.
    __device__ __forceinline__ void score_mod_and_mask(const PackedWorkTile& work_tile, int key) const {
        const int q_opaque = opaque(q);  // hides that it is loop-invariant: saves registers
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; ++k) {
            const int row = tile_row(thread_row(k), q_opaque);
            const Head head(group_head, work_tile.head(row));
            const ScoreIndex at(work_tile.query(row), key, 0, k / 2 % 2 * 8);
            S[k] = head.visible(at.query_row(), at.key_col()) ? head.raw(S[k], at) : -INF;
        }
    }
    __device__ __forceinline__ float apply_dropout(const PackedWorkTile& work_tile, int k, float x, int key) const {
        if (!DROPOUT) return x;
        const int row = tile_row(thread_row(k), opaque(q));
        return Head(group_head, work_tile.head(row)).keep(work_tile.query(row), key + k / 2 % 2 * 8) ? x : 0.0f;
    }
    // P = exp(S - m), to P_smem; returns whether some P is too large. OF_DIFFERENCES: from S - m, which cannot
    // overflow.
    template <bool OF_DIFFERENCES>
    __device__ __forceinline__ bool exponentiate(const PackedWorkTile& work_tile, SmemAddr P_smem, int key) const {
        float max_P = 0.0f;
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; ++k) {
            const float top = m[thread_row(k)];
            if constexpr (OF_DIFFERENCES) S[k] = ex2((S[k] - m_or_zero(top)) * scale_log2);
            else S[k] = ex2(fmaf(S[k], scale_log2, softmax_shift(top, scale_log2)));
            max_P = fmaxf(max_P, S[k]);
        }
        unsigned packed[BLOCK_M / 16][4];
#pragma unroll
        for (int k = 0; k < ACCUMULATORS; k += 2)
            packed[k / 8][k / 2 % 4] =
                pack(apply_dropout(work_tile, k, S[k], key), apply_dropout(work_tile, k + 1, S[k + 1], key));
        store_transposed<PTile>(P_smem, warp * 2, packed);
        fence_proxy_async();
        return max_P > P_LIMIT;
    }
    // m = max(m, row maximum of S); rescales O and l. Returns whether some |m| is very large: every tile then takes P
    // from S - m. Equal in all warps.
    __device__ __forceinline__ bool rescale() const {
        float lane_max[ROWS_PER_THREAD];
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) lane_max[r] = fmaxf(S[r / 2 * 4 + r % 2], S[r / 2 * 4 + r % 2 + 2]);
#pragma unroll 1
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r)
                lane_max[r] = fmaxf(lane_max[r], __shfl_xor_sync(0xffffffffu, lane_max[r], lanes));
        if (g == 0) store_row_stats(warp_stats + warp * BLOCK_M, lane_max);
        consumer_barrier();
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) {
            float top = m[r];
            for (int w = 0; w < 4; ++w) top = fmaxf(top, warp_stats[w * BLOCK_M + tile_row(r, q)]);
            const float alpha = rescale_factor(m[r], top, scale_log2);
            m[r] = top, l[r] *= alpha, scale_O(r, alpha);
        }
        bool large = false;
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) large |= Head::is_large(m[r], scale_log2);
        return __any_sync(0xffffffffu, large);
    }
    __device__ __forceinline__ void store_row_stats(float* to, const float (&stats)[ROWS_PER_THREAD]) const {
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) to[tile_row(r, q)] = stats[r];
    }
    __device__ __forceinline__ void scale_O(int r, float factor) const {  // the thread's r-th row
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab)
            for (int half = 0; half < 2; ++half) O_acc[slab][r / 2 * 4 + r % 2 + 2 * half] *= factor;
    }

    // m, l and O_acc (not divided by l) of all key tiles. next_pipe_index: of the next tile in the pipeline.
    __device__ __forceinline__ void mainloop(const PackedWorkTile& work_tile, unsigned& next_pipe_index) const {
        const Range fully_visible = group_head.fully_visible_keys(work_tile.first_query, work_tile.end_of_queries());
        bool large = false;
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) m[r] = -INF, l[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < Values::SLABS * ACCUMULATORS; ++i) O_acc[i / ACCUMULATORS][i % ACCUMULATORS] = 0.0f;
        cp_async_wait<0>();
        fence_proxy_async();
        consumer_barrier();  // Q has arrived; the previous O has been read
        if (OVERLAP_QK && work_tile.tiles > 0) {
            mma_KQ(uniform(next_pipe_index));
            wait_S();
        }
#pragma unroll 1
        for (int j = 0; j < work_tile.tiles; ++j, ++next_pipe_index) {
            const unsigned pipe_index = uniform(next_pipe_index);
            const int n0 = work_tile.n0(j), key = n0 + static_cast<int>(warp) * 16 + g;
            if (!OVERLAP_QK) {
                mma_KQ(pipe_index);
                wait_S();
            }
            const bool needs_mask = Head::HAS_SCORE_MOD || (Head::HAS_LEFT_BOUND && n0 < fully_visible.begin) ||
                                    n0 + BLOCK_N > fully_visible.end;
            if (needs_mask) score_mod_and_mask(work_tile, key);
            const bool needs_rescale =
                exponentiate<false>(work_tile, base + P_AT + pipe_index % 2 * PTile::BYTES, key) || large;
            if (OVERLAP_QK) {
                wait_O();  // of the previous tile
                if (j > 0) release_V(pipe_index - 1);
            }
            if (named_barrier_or(CONSUMER_BARRIER, CONSUMER_THREADS, needs_rescale)) {
                mma_KQ(pipe_index);
                wait_S();
                if (needs_mask) score_mod_and_mask(work_tile, key);
                large = rescale();
                exponentiate<true>(work_tile, base + P_AT + pipe_index % 2 * PTile::BYTES, key);  // now P <= 1
                consumer_barrier();
            }
            release_K(pipe_index);
#pragma unroll
            for (int k = 0; k < ACCUMULATORS; ++k) l[thread_row(k)] += S[k];
            if (OVERLAP_QK && j + 1 < work_tile.tiles) mma_KQ(pipe_index + 1);
            mma_VP(pipe_index);
            if (OVERLAP_QK) {
                wgmma_wait<1>();  // S is ready; O may still be in flight
                warpgroup_fence_operand(S);
            } else {
                wait_O();
                release_V(pipe_index);
            }
        }
        if (OVERLAP_QK) {
            wait_O();
            if (work_tile.tiles > 0) release_V(next_pipe_index - 1);
        }
    }

    // O = O_acc / l and LSE. warp_stats has each warp's part of l, row_maxima has m.
    __device__ __forceinline__ void store_O_LSE(const PackedWorkTile& work_tile, char* smem, const View<dtype>& O,
                                                float* LSE, int H, int group, const float* row_maxima) const {
        const auto finalize = [&](const Head& head, int row, float row_max) {
            float sum = 0.0f;
            for (int w = 0; w < 4; ++w) sum += warp_stats[w * BLOCK_M + row];
            return head.finalize<ScoreUnits::RAW, Precision::APPROXIMATE>(row_max, sum);
        };
        const auto head_of = [&](int row) {
            return Head(group_head, work_tile.has(row) ? work_tile.head(row) : work_tile.h * group);
        };
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r)
            scale_O(r, finalize(SINK ? head_of(tile_row(r, q)) : group_head, tile_row(r, q), m[r]).O_scale);
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab) {
            unsigned packed[BLOCK_M / 16][4];
#pragma unroll
            for (int k = 0; k < ACCUMULATORS; k += 2)
                packed[k / 8][k / 2 % 4] = pack(O_acc[slab][k], O_acc[slab][k + 1]);
            store_transposed<PTile>(base + P_AT + slab * PTile::BYTES, warp * 2, packed);
        }
        consumer_barrier();
        store_packed_rows<PTile, HEAD_DIM_V, CONSUMER_THREADS>(smem + P_AT, O, work_tile, group_head);
        if (const int row = threadIdx.x; row < BLOCK_M && work_tile.has(row)) {  // one thread per row
            const Head head = head_of(row);
            LSE[head.lse_offset(H, work_tile.head(row)) + work_tile.query(row)] =
                finalize(head, row, row_maxima[row]).lse;
        }
    }
};

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void fwd_decode_wgmma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map, int B, int H, int Hk,
    int group,  // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int row_tiles = (score.Sq * group + BLOCK_M - 1) / BLOCK_M, work_tiles = row_tiles * Hk * B;
    unsigned next_pipe_index = 0;  // index in the pipeline of the next key tile

    if (warp == CONSUMER_THREADS / 32) {
        const bool leader = elect();  // initialises the mbarriers and loads at once
        if (leader) init_barriers(base);
        __syncwarp();  // the mbarriers are initialised
        named_barrier_arrive(BARRIERS_READY, THREADS);
        if (leader) load_KV(base, K, V, K_map, V_map, row_tiles, work_tiles, Hk, group, score);
        return;
    }

    const float scale_log2 = Head::softmax_scale_of(score) * Head::LOG2E;
    const int g = lane / 4, q = lane % 4;
    float* const warp_stats = reinterpret_cast<float*>(smem + ROW_STATS_AT);  // [4][BLOCK_M]
    float* const row_maxima = warp_stats + 4 * BLOCK_M;                       // [BLOCK_M]
    PackedWorkTile work_tile(blockIdx.x, row_tiles, Hk, group, score);
    load_packed_rows<Queries, HEAD_DIM, CONSUMER_THREADS>(base, Q, work_tile, score);
    named_barrier_sync(BARRIERS_READY, THREADS);  // the mbarriers are initialised before they are used
#pragma unroll 1
    for (;;) {
        const Head group_head(score, work_tile.b, work_tile.h * group);  // all heads have its ranges of keys
        float m[ROWS_PER_THREAD], l[ROWS_PER_THREAD], S[ACCUMULATORS], O_acc[Values::SLABS][ACCUMULATORS];
        ConsumerWarpgroup consumer{base, warp, lane, g, q, scale_log2, group_head, warp_stats, m, l, S, O_acc};
        consumer.mainloop(work_tile, next_pipe_index);

        const int tile_index = work_tile.index(row_tiles, Hk) + gridDim.x;
        const bool has_next = tile_index < work_tiles;
        PackedWorkTile next = work_tile;
        if (has_next) {
            next = PackedWorkTile(tile_index, row_tiles, Hk, group, score);
            // Every warp has read the current Q: it passed the barrier after the last P.
            load_packed_rows<Queries, HEAD_DIM, CONSUMER_THREADS>(base, Q, next, score);
        }
        bool non_finite = false;
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab) non_finite |= !all_finite<1>(O_acc[slab]);
        sum_over_lanes(l);
        if (g == 0) consumer.store_row_stats(warp_stats + warp * BLOCK_M, l);
        if (warp == 0 && g == 1) consumer.store_row_stats(row_maxima, m);  // for LSE
        // The row sums are stored, and no MMA reads P any more. A masked key has P = 0, but 0 * NaN is NaN: if a row
        // is not finite, all rows of the work tile are recomputed. Rare.
        if (named_barrier_or(CONSUMER_BARRIER, CONSUMER_THREADS, Head::HAS_MASK && non_finite)) {
#pragma unroll 1
            for (int row = warp; work_tile.has(row); row += CONSUMER_THREADS / 32)
                attend_non_finite<1, 1>(Q, K, V, O, LSE, group, score, work_tile.b, work_tile.head(row), H,
                                        work_tile.query(row), 0);
        } else {
            consumer.store_O_LSE(work_tile, smem, O, LSE, H, group, row_maxima);
        }
        if (!has_next) return;
        work_tile = next;
    }
}
