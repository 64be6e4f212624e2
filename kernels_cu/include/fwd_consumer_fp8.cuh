// The mainloop of fwd_wgmma_fp8: what a consumer warpgroup does in a work tile, apart from the epilogue. Included by
// fwd_wgmma_fp8.cu after `Arguments`.
#pragma once

// A consumer warpgroup's part of a work tile: 64 query rows.
struct ConsumerWarpgroup {
    using FragmentS = float[BLOCK_N / 2];
    using FragmentP = unsigned[BLOCK_N / 32][4];
    using LongSums = PartialO<HEAD_DIM_V / 2, THREADS - 128>;

    const Arguments& args;
    const SmemAddr base;
    const unsigned warp, lane, consumer, own_turn, next_turn;  // turns: see warp_scheduler_barrier
    const unsigned pipe_index;  // key tiles of earlier work tiles; the highest bit is the phase of Q's barriers
    const Fp8WorkTileRange work_tile;
    const int warpgroup_row, warp_row;  // of the warpgroup, of the warp
    const Head head;
    const float scale_log2;            // of P = exp2((S - m) * scale_log2)
    const Range own_n_blocks;          // key tiles that the warpgroup sees
    const int tiles, first_own, last;  // their number, and their indices in the work tile
    const Range fully_visible_keys;    // keys that all rows of the warp see

    __device__ __forceinline__ ConsumerWarpgroup(const Arguments& args, SmemAddr base, unsigned warp, unsigned lane,
                                                 unsigned pipe_index, const TileInfo& info)
        : args(args), base(base), warp(warp), lane(lane), consumer(warp / 4 - 1),
          own_turn(warp_scheduler_barrier(consumer)), next_turn(warp_scheduler_barrier((consumer + 1) % CONSUMERS)),
          pipe_index(pipe_index), work_tile(uniform(info), args.score),
          warpgroup_row(work_tile.m0 + WARPGROUP_ROWS * consumer), warp_row(warpgroup_row + warp % 4 * 16),
          head(args.score, work_tile.b, work_tile.h), scale_log2(head.softmax_scale * Head::LOG2E),
          own_n_blocks(SPLITS_LAST_WAVE ? work_tile.n_blocks
                                        : n_block_range(head, warpgroup_row, warpgroup_row + WARPGROUP_ROWS)),
          tiles(has_rows() ? own_n_blocks.end - own_n_blocks.begin : 0),
          first_own(first_own_tile(work_tile, own_n_blocks, tiles)), last(first_own + tiles - 1),
          fully_visible_keys(head.fully_visible_keys(warp_row, warp_row + 16)) {}

    // Whether the warpgroup has rows in this work tile.
    __device__ __forceinline__ bool has_rows() const { return warpgroup_row < min(head.Sq, work_tile.end); }

    // All key tiles that the warpgroup sees. Each iteration: P V of a key tile, and Q K^T and softmax of the next one.
    __device__ __forceinline__ void mainloop(Fp8SoftmaxState& softmax) {
        const LongSums long_sums(args.partials, blockIdx.x);
        FragmentS S;
        FragmentP P;
        first_tile(softmax, S, P);
        unsigned V_full = 0, K_full = 0;  // results of test_wait, issued ahead of the exponentials
#pragma unroll 1
        for (int j = first_own; j < last; ++j) {
            const int tiles_in_O = (j - first_own) % MMA_SUM_TILES;  // key tiles accumulated in the tensor cores
            if (tiles_in_O == 0 && j > first_own) {
                if (j - first_own > MMA_SUM_TILES) long_sums.add_to(softmax.O, softmax.m, softmax.l, scale_log2);
                long_sums.store(softmax.O, softmax.m);
            }
            TIMELINE(wait_V);
            wait<VtPipeline>(j, V_full);
            TIMELINE(wait_barrier);
            wait_turn();
            TIMELINE(multiply);
            mma_PV(softmax, P, j, tiles_in_O > 0);
            TIMELINE(wait_K);
            wait<KPipeline>(j + 1, K_full);
            wait_PV(softmax);
            wgmma_discard(S);
            mma_QK(S, j + 1);
            pass_turn();
            release<VtPipeline>(j);
            finish_S(S, j + 1);
            if (!CHECK_SUMS && softmax.scores_too_large(S, scale_log2)) softmax.rescale(S, scale_log2);
            V_full = is_full<VtPipeline>(j + 1), K_full = is_full<KPipeline>(j + 2);
            float sums[2][2];
            softmax.exponentiate(S, scale_log2, sums);
            if (CHECK_SUMS && softmax.sums_too_large(sums)) softmax.rescale_after_exp(S, sums, scale_log2);
            softmax.add(sums);
            convert_P(P, S, head, warp_row, work_tile.n0(j + 1));
        }
        last_PV(softmax, P, long_sums);
    }

    // Q K^T and softmax of the first key tile.
    __device__ __forceinline__ void first_tile(Fp8SoftmaxState& softmax, FragmentS& S, FragmentP& P) {
        wait<KPipeline>(first_own);
        mma_QK(S, first_own);
        finish_S(S, first_own);
        float unused_alpha[2];  // O and l are still 0
        softmax.raise_max(S, scale_log2, unused_alpha);
        float sums[2][2];
        softmax.exponentiate(S, scale_log2, sums);
        softmax.add(sums);
        convert_P(P, S, head, warp_row, work_tile.n0(first_own));
    }
    // P V of the last key tile. Long sums: adds the other key tiles.
    __device__ __forceinline__ void last_PV(Fp8SoftmaxState& softmax, const FragmentP& P, const LongSums& long_sums) {
        wait<VtPipeline>(last);
        wait_turn();
        mma_PV(softmax, P, last, last > first_own);
        wait_PV(softmax);
        pass_turn();
        release<VtPipeline>(last);
        if (last - first_own > MMA_SUM_TILES) long_sums.add_to(softmax.O, softmax.m, softmax.l, scale_log2);
    }

    // S = Q K^T
    __device__ __forceinline__ void mma_QK(FragmentS& S, int j) const {
        const Descriptor Q_smem = Queries::k_major(address(base + consumer * Queries::BYTES));
        const Descriptor K_smem = Keys::k_major(address(base + K_AT + stage_of(pipe_index + j) * Keys::BYTES));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < D_PAD / 32; ++step)
            wgmma8<dtype>(S, Q_smem + Queries::k_step(step), K_smem + Keys::k_step(step), step > 0);
        wgmma_commit();
    }
    // Waits for Q K^T: S becomes the raw scores, -INF where masked.
    __device__ __forceinline__ void finish_S(FragmentS& S, int j) const {
        TIMELINE(wait_S);
        wgmma_wait<0>();
        TIMELINE(softmax);
        warpgroup_fence_operand(S);
        release<KPipeline>(j);
        if (j == last) release_Q();
        score_mod_and_mask(S, head, fully_visible_keys, warp_row + lane / 4, work_tile.n0(j), lane % 4);
    }
    // O += P V, or O = P V.
    __device__ __forceinline__ void mma_PV(Fp8SoftmaxState& softmax, const FragmentP& P, int j, bool accumulate) const {
        const Descriptor Vt_smem = Transposed::k_major(address(base + VT_AT + stage_of(pipe_index + j) * VT_BYTES));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 32; ++step)
            wgmma8<dtype_v>(softmax.O, P[step], Vt_smem + Transposed::k_step(step), step > 0 || accumulate);
        wgmma_commit();
    }
    __device__ __forceinline__ void wait_PV(Fp8SoftmaxState& softmax) const {
        TIMELINE(wait_PV);
        wgmma_wait<0>();
        TIMELINE(multiply);
        warpgroup_fence_operand(softmax.O);
    }

    // Key tiles j .. end - 1 of the work tile, which only other consumers see.
    __device__ __forceinline__ void drain_tiles(int j, int end) const {
#pragma unroll 1
        for (; j < end; ++j) {
            wait_turn();
            pass_turn();
            wait<KPipeline>(j);
            __syncwarp();  // all lanes have waited: one that waited after the stage is filled again would wait forever
            release<KPipeline>(j);
            wait<VtPipeline>(j);
            __syncwarp();
            release<VtPipeline>(j);
        }
    }

    // Wide heads: recompute the descriptors, which would not fit in registers.
    static __device__ __forceinline__ SmemAddr address(SmemAddr tile) {
        return D_PAD > 128 || HEAD_DIM_V > 128 ? uniform(tile) : tile;
    }
    // Whether key tile j has been loaded; the wait for it does not test again if is_full.
    template <class TilePipeline>
    __device__ __forceinline__ unsigned is_full(int j) const {
        const unsigned i = pipe_index + j;
        return mbarrier_test_wait(TilePipeline::full(base, stage_of(i)), parity_of(i));
    }
    template <class TilePipeline>
    __device__ __forceinline__ void wait(int j, unsigned is_full = 0) const {
        const unsigned i = pipe_index + j;
        mbarrier_wait_unless(is_full, TilePipeline::full(base, stage_of(i)), parity_of(i));
    }
    template <class TilePipeline>
    __device__ __forceinline__ void release(int j) const {
        if (lane == 0) TilePipeline::release(base, pipe_index + j);
    }
    __device__ __forceinline__ void release_Q() const {
        if (lane == 0) mbarrier_arrive(EmptyQ::at(base, consumer));
    }
    // Ping-pong: the consumers issue their wgmmas in turn.
    __device__ __forceinline__ void wait_turn() const {
        if (PING_PONG) named_barrier_sync(own_turn, TURN_THREADS);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (PING_PONG) named_barrier_arrive(next_turn, TURN_THREADS);
    }
};
