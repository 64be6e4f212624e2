// The consumers of bwd_wgmma_persistent: the mainloop, and dK and dV at the end of a work tile. Included by
// bwd_wgmma_persistent.cu.
#pragma once

// A consumer warpgroup: dK and dV of 64 keys of each work tile, and 64 rows of each dQ tile.
struct ConsumerWarpgroup {
    const BwdParams& params;
    const SmemAddr base;
    const unsigned warp, lane, consumer;
    const int key_offset;    // first key of the consumer within the work tile
    const float scale_log2;  // of P = exp2(S * scale_log2 - LSE * log2(e))
    const SmemAddr staging;
    // References to arrays of the kernel. Members, as in bwd_wgmma, do not spill either, but give other machine code,
    // which was not timed.
    float (&dK)[D_PAD / 2], (&dV)[D_PAD / 2];
    // Counters over all work tiles.
    unsigned staged_count = 1;        // uses of the staging buffer; use 0 is a commit without data, before the first
                                      // dQ, so staged_store(n) describes use n + 1
    unsigned i = 0;                   // m_blocks
    unsigned previous_K_index = ~0u;  // K_index of the previous m_block, whose dQ is computed now
    unsigned K_index = ~0u;   // of the work tile, among those with visible queries (nonempty_tiles of the load warp);
                              // its K is in buffer K_index % 2
    unsigned tile_index = 0;  // work tiles

    __device__ __forceinline__ ConsumerWarpgroup(const BwdParams& params, SmemAddr base, unsigned warp, unsigned lane,
                                                 float (&dK)[D_PAD / 2], float (&dV)[D_PAD / 2])
        : params(params), base(base), warp(warp), lane(lane), consumer(warp / 4 - 1), key_offset(64 * consumer),
          scale_log2(Head::softmax_scale_of(params.score) * Head::LOG2E),
          staging(base + STAGING_AT + consumer * STAGING_BYTES), dK(dK), dV(dV) {}

    // Before the first work tile: dS of the m_block before the first one is 0, and consumer 0 has the first turn.
    __device__ __forceinline__ void start() const {
        const unsigned zeros[BLOCK_M / 16][4] = {};
        store_transposed<SmemLayoutPdS>(own_keys(base + dS_AT + SmemLayoutPdS::BYTES), warp % 4 * 2, zeros);
        if (consumer == 1) named_barrier_arrive(scheduler_barrier(1 - consumer), BOTH_CONSUMERS);
    }
    // Returns whether the work tile has m_blocks.
    __device__ __forceinline__ bool begin(const volatile PersistentWorkTile& work_tile) {
        const bool has_queries = static_cast<int>(uniform(work_tile.begin)) < static_cast<int>(uniform(work_tile.end));
        zero(dK), zero(dV);
        K_index += has_queries;
        if (i == 0) previous_K_index = K_index;
        return has_queries;
    }

    // One m_block, and dQ of the previous one. Returns whether this was the last m_block of the work tile.
    __device__ __forceinline__ bool bwd_step() {
        const auto [stage, Q_at, dO_at, dS_at, previous_dS_at] = TileOffsets(i);
        const float* const stats =  // of the lane's first two queries
            reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + thread_index_x() % 4 * 2;
        unsigned P[BLOCK_M / 16][4], dS[BLOCK_M / 16][4];  // P^T and dS^T
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[D_PAD / 2];
        TIMELINE(wait_Q);
        QPipeline::wait(base, i);
        TIMELINE(S);
        const unsigned lane_flags = flags_of(i, consumer);
        mma_SdP_own_keys<HEAD_DIM>(S, K_at(K_index), Q_at);
        const unsigned flags =
            uniform(lane_flags);  // not later, between the scheduler barriers, where the other consumer waits
        wgmma_wait<1>();          // dK of the previous m_block
        release_stage<QPipeline>(base, i - 1, lane == 0 && i > 0);
        TIMELINE(wait_dO);
        dOPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_keys<HEAD_DIM_V>(dP, V_AT, dO_at);
        commit_dQ_dS();

        wgmma_wait<1>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(scheduler_barrier(consumer), BOTH_CONSUMERS);
        TIMELINE(P);
        if (flags & NEEDS_MASK) apply_mask(S);
        compute_P(P, S, scale_log2, stats);
        TIMELINE(dP);
        wgmma_wait<0>();  // dP^T
        warpgroup_fence_operand(dP);
        if (lane == 0 && flags & LAST_M_BLOCK) mbarrier_arrive(EmptyV::at(base, 0));
        TIMELINE(dS);
        compute_dS(dS, P, dP, stats + BLOCK_M);
        wait_dS();  // both consumers have read the dS that this one overwrites
        store_transposed<SmemLayoutPdS>(own_keys(base + dS_at), warp % 4 * 2, dS);
        named_barrier_arrive(scheduler_barrier(1 - consumer), BOTH_CONSUMERS);
        mma_own_dQ(dQ, previous_dS_at);
        mma_dKV(dV, P, base + dO_at);
        mma_dKV(dK, dS, base + Q_at);

        TIMELINE(dQ);
        wgmma_wait<2>();  // dQ
        warpgroup_fence_operand(dQ);
        if (lane == 0 && previous_K_index != K_index) mbarrier_arrive(EmptyK::at(base, previous_K_index % 2));
        previous_K_index = K_index;
        wait_staging();
        stage_dQ(staging, dQ);
        wgmma_wait<1>();  // dV
        release_stage<dOPipeline>(base, i, lane == 0);
        ++i;
        return (flags & LAST_M_BLOCK) != 0;
    }
    __device__ __forceinline__ unsigned K_at(unsigned index) const { return K_AT + index % 2 * SECOND_K_OFFSET; }
    __device__ __forceinline__ SmemAddr own_keys(SmemAddr dS_tile) const {
        return dS_tile + consumer * SmemLayoutPdS::SLAB_BYTES;
    }
    // S^T or dP^T of the consumer's keys. Columns of V and dO from HEAD_DIM_V on are zeros, so those of dV are, too.
    template <int COLUMNS>
    __device__ __forceinline__ void mma_SdP_own_keys(float (&C)[BLOCK_M / 2], unsigned keys_at,
                                                     unsigned queries_at) const {
        mma_SdP<COLUMNS>(C, SmemLayoutK::k_major(base + keys_at + key_offset * SmemLayoutK::ROW_BYTES),
                         SmemLayoutQ::k_major(base + queries_at));
    }
    // 64 rows of dQ = dS K of the previous m_block.
    __device__ __forceinline__ void mma_own_dQ(float (&dQ)[D_PAD / 2], unsigned dS_at) const {
        mma_dQ(dQ, SmemLayoutPdS::k_major(base + dS_at + consumer * (64 * SmemLayoutPdS::ROW_BYTES)),
               SmemLayoutK::mn_major(base + K_at(previous_K_index)));
    }
    __device__ __forceinline__ void apply_mask(float (&S)[BLOCK_M / 2]) const {
        const volatile StagedStore& current = staged_store(staged_count - 1);  // of use staged_count: this m_block
        const FragmentCoords coords(current.m0, current.n0 + key_offset);
        const Head head(params.score, current.b, 0);
        mask_fragment<BLOCK_M / 2>(head, coords, [&](int k) { S[k] = -INF; });
    }

    // dQ, dV and dK use the same staging buffer: wait until it is empty, write, and commit before the next use.
    __device__ __forceinline__ void wait_staging() {
        mbarrier_wait(Barriers::EmptydQ::at(base, consumer), staged_count++ % 2 ^ 1);
    }
    __device__ __forceinline__ void commit_staging() const {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
    }
    // Commits dS of the previous m_block, i - 1, and the staging buffer. Called in the next iteration, and after the
    // last one. The barrier is FulldS[i % 2], not [(i - 1) % 2] as in bwd_wgmma: the zeros of `start`, dS of m_block
    // -1, take the first phase.
    __device__ __forceinline__ void commit_dQ_dS() const {
        commit_staging();
        if (lane == 0) mbarrier_arrive(Barriers::FulldS::at(base, i % 2));
    }
    __device__ __forceinline__ void wait_dS() const { mbarrier_wait(Barriers::FulldS::at(base, i % 2), i / 2 % 2); }

    // After the last m_block of a work tile: waits until dK and dV are complete.
    __device__ __forceinline__ void finish_dKV() const {
        TIMELINE(store);
        wgmma_wait<0>();
        warpgroup_fence_operand(dK);
        warpgroup_fence_operand(dV);
    }
    // Stages dV and dK, and before them commits what was staged last: dQ of the last iteration, or dK of the previous
    // work tile if this one has no m_blocks. Whatever is staged next, or stage_last_dQ, commits dK. non_finite: one of
    // their values is not finite; the consumer then computes them again and stores them itself.
    __device__ __forceinline__ void epilogue(const volatile PersistentWorkTile& work_tile, bool non_finite) {
        commit_staging();
        stage_tile_dKV(dV, 1.0f);
        // Not before stage_tile_dKV, which waits until the store warp has stored the previous dK: until then it reads
        // the previous work tile's flag.
        if (threadIdx.x % 128 == 0) NonFinite::at(smem, consumer) = non_finite;
        commit_staging();
        stage_tile_dKV(dK, params.score.scale);
        if (non_finite) {
            key_gradients_non_finite<64, 4>(params.Q, params.K, params.V, params.dO, params.LSE, params.delta,
                                            params.dK, params.dV, params.group, params.score, work_tile.b,
                                            work_tile.kv_head, params.Hk * params.group,
                                            work_tile.n_block * BLOCK_N + key_offset, warp % 4);
        }
    }
    __device__ __forceinline__ void stage_tile_dKV(const float (&accum)[D_PAD / 2], float factor) {
        wait_staging();
        stage_dKV<SmemLayoutdKV>(staging, accum, factor, warp, lane);
    }
    // dQ of the block's last m_block.
    __device__ __forceinline__ void stage_last_dQ() {
        float dQ[D_PAD / 2];
        commit_dQ_dS();
        wait_dS();
        mma_own_dQ(dQ, dS_AT + (i % 2 ^ 1) * SmemLayoutPdS::BYTES);
        wgmma_wait<0>();
        warpgroup_fence_operand(dQ);
        wait_staging();
        stage_dQ(staging, dQ);
        commit_staging();
    }
};
