// The consumers of bwd_wgmma for BLOCK_M = BLOCK_N = 64: HEAD_DIM > 128, unless bwd_consumer_narrow_v.cuh applies and
// does not spill (it spills with a mask tensor that varies along the keys, or with a mask_mod). Included by
// bwd_wgmma.cu.
//
// Both consumers work on the same 64 keys. A consumer computes P^T and dS^T of half of the queries and stores both in
// shared memory. It owns half of the columns of dK, dV and dQ. No ping-pong; dQ is computed in the same iteration: the
// wgmmas are S1 dP1 dV1 dQ1 dK1 S2 ... A dQ-store warp adds dQ from shared memory, which has space for half of a
// consumer's dQ: the consumer writes the second half in the next iteration. If DETERMINISTIC, the next work tile would
// wait for that, and the consumer adds dQ from registers.
#pragma once

#if DETERMINISTIC
// A dQ warp: orders the additions of one consumer, which adds dQ itself.
__device__ __forceinline__ void dQ_warp(const BwdBlock& block, unsigned warp) {
    const unsigned consumer = warp - 2;
    block.m_blocks.for_each([&](unsigned i, int head, int m0) {
        TIMELINE(wait_dQ);
        counter_wait(block.dQ_semaphore(head, m0, consumer), block.semaphore_target(m0));
        mbarrier_arrive(Barriers::EmptydQ::at(block.base, consumer));      // the consumer may add
        mbarrier_wait(Barriers::FulldQ::at(block.base, consumer), i % 2);  // the consumer has added
        counter_arrive(block.dQ_semaphore(head, m0, consumer));
    });
    TIMELINE(done);
}
#else
constexpr unsigned DQ_HALF_BYTES = 4 * DQ_CONSUMER_FLOATS / 2;  // half of the columns of a consumer's dQ
// Whether a consumer keeps the second half of dQ until the next iteration. Otherwise, where registers would spill, it
// waits until the first half has been read.
constexpr bool KEEPS_SECOND_HALF = !(Head::ELEMENT_MASK && (Head::HAS_DERIVATIVE || DROPOUT));

// Shared memory of a consumer's dQ, for one half at a time.
__device__ __forceinline__ SmemAddr own_dQ(SmemAddr base, unsigned consumer) {
    return base + dQ_AT + consumer * DQ_HALF_BYTES;
}

// A dQ-store warp: adds one consumer's dQ from shared memory to dQ_accum in L2, or stores it (dq_semaphore.cuh).
__device__ __forceinline__ void dQ_warp(const BwdBlock& block, unsigned warp) {
    dQAccumulation<BwdBlock> accumulation{block};
    const unsigned consumer = warp - 2;
    block.m_blocks.for_each([&](unsigned i, int head, int m0) {
        accumulation.wait_turn(head, m0, consumer);
        bool stores = false;
#pragma unroll 1
        for (unsigned half = 0; half < 2; ++half) {
            TIMELINE(wait_dQ);
            mbarrier_wait(Barriers::FulldQ::at(block.base, consumer), half);
            TIMELINE(store_dQ);
            if (half == 0) stores = accumulation.claim_first_store(head, m0, consumer);
            float* const to = block.dQ_tile(head, m0) + consumer * DQ_CONSUMER_FLOATS + half * (DQ_HALF_BYTES / 4);
            if (stores) bulk_store(to, own_dQ(block.base, consumer), DQ_HALF_BYTES);
            else tma_reduce_add(to, own_dQ(block.base, consumer), DQ_HALF_BYTES);
            tma_store_commit();
            tma_store_wait_read();
            mbarrier_arrive(Barriers::EmptydQ::at(block.base, consumer));
        }
        accumulation.signal_done(head, m0, consumer);
    });
    TIMELINE(done);
}
#endif

// A consumer warpgroup.
struct ConsumerWarpgroup {
    static constexpr int M = BLOCK_M / 2, COLS = D_PAD / 2,
                         V_COLS = DV_PAD / 2;  // queries of P^T and dS^T; columns of dK and dQ, and of dV

    const BwdBlock& block;
    const SmemAddr base;
    const unsigned warp, lane, consumer;
    const int query_offset;  // first query of the consumer within the tile
    const float scale_log2;  // of P = exp2(S * scale_log2 - LSE * log2(e))
    float dK[COLS / 2], dV[V_COLS / 2];
    unsigned P[M / 16][4], dS[M / 16][4];  // P^T and dS^T
    int head, m0;                          // of the next m_block
    unsigned i = 0;                        // number of m_blocks so far

    explicit __device__ __forceinline__ ConsumerWarpgroup(const BwdBlock& block)
        : block(block), base(block.base), warp(block.warp), lane(block.lane), consumer(warp / 4 - 1),
          query_offset(M * consumer), scale_log2(Head::softmax_scale_of(block.params.score) * Head::LOG2E) {
        block.m_blocks.start(head, m0);
    }
    // Address of the consumer's queries in a tile of P or dS.
    __device__ __forceinline__ SmemAddr own_queries(SmemAddr tile) const {
        return tile + query_offset * SmemLayoutPdS::ROW_BYTES;
    }

    // S^T or dP^T of the consumer's queries and all keys. Layouts: see bwd_wgmma_steps.cuh.
    template <int COLUMNS>
    __device__ __forceinline__ void mma_SdP_own_queries(float (&C)[M / 2], unsigned keys_at,
                                                        unsigned queries_at) const {
        const SmemAddr tiles = uniform(base);  // without `uniform` the descriptors would stay in registers and spill
        mma_SdP<COLUMNS>(C, SmemLayoutK::k_major(tiles + keys_at),
                         SmemLayoutQ::k_major(tiles + queries_at + query_offset * SmemLayoutQ::ROW_BYTES));
    }
    // dV += P^T dO or dK += dS^T Q: the consumer's columns; P or dS in shared memory.
    template <int R>
    __device__ __forceinline__ void mma_dKV_own_columns(float (&C)[R], unsigned A_at, unsigned queries_at,
                                                        bool accumulate) const {
        const Descriptor A = SmemLayoutPdS::mn_major(base + A_at);
        const Descriptor B = SmemLayoutQ::mn_major(base + queries_at + consumer * (R / 32 * SmemLayoutQ::SLAB_BYTES));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step)
            wgmma<Order::MN_MAJOR, Order::MN_MAJOR>(C, A + SmemLayoutPdS::mn_step(step), B + SmemLayoutQ::mn_step(step),
                                                    accumulate || step > 0);
        wgmma_commit();
    }
    // The consumer's columns of dQ.
    __device__ __forceinline__ void mma_own_dQ(float (&dQ)[COLS / 2], unsigned dS_at) const {
        mma_dQ(dQ, SmemLayoutPdS::k_major(base + dS_at),
               SmemLayoutK::mn_major(base + K_AT + consumer * (COLS / 64 * SmemLayoutK::SLAB_BYTES)));
    }
#if DETERMINISTIC
    // Address in dQ_accum of the lane's first accumulator.
    __device__ __forceinline__ float* dQ_address() const {
        return block.dQ_tile(head, m0) + consumer * DQ_CONSUMER_FLOATS + warp % 4 * DQ_FRAGMENT_FLOATS +
               threadIdx.x % 32 * 4;
    }
    // Adds dQ to dQ_accum, or stores it. STORES: a compile-time flag, so that there is no branch in the loop.
    template <bool STORES>
    static __device__ __forceinline__ void add_or_store(float* to, const float (&dQ)[COLS / 2]) {
#pragma unroll
        for (int k = 0; k < COLS / 2; k += 4) {
            const float accum[4] = {dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]};
            if (STORES) store_floats(to + k / 4 * DQ_CHUNK_FLOATS, accum);
            else add_floats(to + k / 4 * DQ_CHUNK_FLOATS, accum);
        }
    }
    // Waits for dV and dQ, and adds dQ when it is the work tile's turn.
    __device__ __forceinline__ void finish_dQ(float (&dQ)[COLS / 2]) const {
        // Computed while the wgmmas run.
        float* const address = pin_address(dQ_address());
        const bool stores = block.semaphore_target(m0) == 0;
        TIMELINE(wait_dQ);
        mbarrier_wait(Barriers::EmptydQ::at(base, consumer), i % 2);
        wgmma_wait<1>();  // dV and dQ
        release_stage<dOPipeline>(base, i, lane == 0);
        warpgroup_fence_operand(dQ);
        TIMELINE(store_dQ);
        if (stores) add_or_store<true>(address, dQ);
        else add_or_store<false>(address, dQ);
        __syncwarp();  // all lanes have added
        if (lane == 0) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
    }
    __device__ __forceinline__ void finish_previous_dQ() const {}
#else
    float second_dQ[COLS / 4];  // the second half of dQ, until the next m_block

    // Writes a half of dQ to shared memory, when the dQ-store warp has read the other one.
    template <int HALF>
    __device__ __forceinline__ void stage_half_dQ(const float (&half)[COLS / 4]) const {
        mbarrier_wait(Barriers::EmptydQ::at(base, consumer), HALF ^ 1);  // the first wait returns at once
        stage_dQ(own_dQ(base, consumer), half);
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
    }
    // Waits for dV and dQ, and writes the first half of dQ to shared memory.
    __device__ __forceinline__ void finish_dQ(float (&dQ)[COLS / 2]) {
        wgmma_wait<2>();  // dV
        release_stage<dOPipeline>(base, i, lane == 0);
        wgmma_wait<1>();  // dQ
        warpgroup_fence_operand(dQ);
        TIMELINE(store_dQ);
        float first_dQ[COLS / 4];
#pragma unroll
        for (int k = 0; k < COLS / 4; ++k) first_dQ[k] = dQ[k], second_dQ[k] = dQ[COLS / 4 + k];
        stage_half_dQ<0>(first_dQ);
        if (!KEEPS_SECOND_HALF) stage_half_dQ<1>(second_dQ);
    }
    // Writes the second half of the previous m_block's dQ to shared memory. Called between the barriers of P and of dS:
    // then no block waits for a second half that waits for the block. Its consumers arrive at the barrier of P without
    // waiting for a dQ-store warp, which may wait for another block's first store; and at that of dS after both of its
    // dQ-store warps have claimed the previous m_block.
    __device__ __forceinline__ void finish_previous_dQ() const {
        if (KEEPS_SECOND_HALF) stage_half_dQ<1>(second_dQ);
    }
#endif

    // Computes P^T from S^T: score modification, mask, exponential. derivative: see apply_score_mod.
    __device__ __forceinline__ void recompute_P(float (&S)[M / 2], unsigned (&derivative)[M / 16][4],
                                                const Head& current_head, const FragmentMask<M>& mask,
                                                const float* stats) {
        const FragmentCoords coords(mask.first_query, block.m_blocks.n0());
        const unsigned no_bias[M / 16][4] = {};
        apply_score_mod(S, derivative, current_head, coords, no_bias);
        if constexpr (!MASKS_P) mask.apply(block.m_blocks, 0, coords, [&](int k) { S[k] = -INF; });
        compute_P(P, S, scale_log2, stats);
        if constexpr (MASKS_P) mask.apply(block.m_blocks, 0, coords, [&](int k) { hide(P, k); });
    }

    // Before the mainloop: only waits for K and V, which TMA loads.
    __device__ __forceinline__ void first_step() const {
        mbarrier_wait(FullK::at(base, 0), 0);
        mbarrier_wait(FullV::at(base, 0), 0);
    }

    // One m_block.
    __device__ __forceinline__ void bwd_step() {
        const bool accumulates = i > 0;  // whether dK and dV contain an earlier m_block
        const auto [stage, Q_at, dO_at, dS_at, previous_dS_at] = TileOffsets(i);
        const unsigned P_at = P_AT + i % 2 * SmemLayoutPdS::BYTES;
        const float* const stats = stats_of(stage, query_offset);
        float S[M / 2], dP[M / 2], dQ[COLS / 2];
        const unsigned long long seed = block.dropout_seed();
        TIMELINE(wait_Q);
        QPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_queries<HEAD_DIM>(S, K_AT, Q_at);
        wgmma_wait<1>();  // dK of the previous m_block
        if (accumulates) release_stage<QPipeline>(base, i - 1, lane == 0);
        TIMELINE(wait_dO);
        dOPipeline::wait(base, i);
        TIMELINE(S);  // S again: this step issues the wgmmas of S^T and, here, those of dP^T
        mma_SdP_own_queries<HEAD_DIM_V>(dP, V_AT, dO_at);

        // Dropout and mask bits do not depend on S and are computed while the wgmmas run.
        const Head current_head(block.params.score, block.b, block.first_head() + head);
        const int first_query = m0 + query_offset, first_key = block.m_blocks.n0(),
                  warp_key = first_key + warp % 4 * 16;
        KeepBits<M> keep;
        keep.compute(current_head, seed, first_query, warp_key);
        FragmentMask<M> mask{current_head, block.head0, first_query,
                             first_key,    warp_key,    !block.m_blocks.fully_visible(head, m0)};
        mask.load();

        wgmma_wait<1>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(P);
        unsigned derivative[M / 16][4], P_dropped[M / 16][4];
        recompute_P(S, derivative, current_head, mask, stats);
        drop_P(P_dropped, P, keep);
        store_transposed<SmemLayoutPdS>(own_queries(base + P_at), warp % 4 * 2, P_dropped);
        fence_proxy_async();
        named_barrier_sync(CONSUMERS_BARRIER, BOTH_CONSUMERS);  // both consumers have written P
        TIMELINE(dP);
        mma_dKV_own_columns(dV, P_at, dO_at, accumulates);
        if (accumulates) finish_previous_dQ();
        wgmma_wait<1>();  // dP^T
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
        compute_dS(dS, P, dP, stats + BLOCK_M, keep, derivative);
        store_transposed<SmemLayoutPdS>(own_queries(base + dS_at), warp % 4 * 2, dS);
        fence_proxy_async();
        named_barrier_sync(CONSUMERS_BARRIER, BOTH_CONSUMERS);  // both consumers have written dS
        mma_own_dQ(dQ, dS_at);
        mma_dKV_own_columns(dK, dS_at, Q_at, accumulates);

        TIMELINE(dQ);
        finish_dQ(dQ);
        block.m_blocks.advance(head, m0);
        ++i;
    }

    // After the mainloop: stores dV and dK. Returns whether a value of dV or dK is not finite.
    __device__ __forceinline__ bool epilogue() {
        TIMELINE(store);
        finish_previous_dQ();
        warpgroup_fence_operand(dV);  // the last iteration has waited for it
        bool non_finite = store_dV();
        wgmma_wait<0>();
        warpgroup_fence_operand(dK);
        non_finite |= store_dK();
        return non_finite;
    }
    // Staged in V: both consumers have read V before the last barrier.
    __device__ __forceinline__ bool store_dV() const {
        constexpr unsigned SLABS = V_COLS / 64;
        return store_dKV<SmemLayoutV, Gradient::dV>(
            block, consumer, base + V_AT + consumer * SLABS * SmemLayoutV::SLAB_BYTES, dV, 1.0f, 0, consumer * SLABS);
    }
    // Staged where Q of the next m_block would be loaded.
    __device__ __forceinline__ bool store_dK() const {
        const unsigned tile = Q_AT + consumer * 2 * SmemLayoutQ::SLAB_BYTES + stage_of(i) * SmemLayoutQ::BYTES;
        return store_dKV<SmemLayoutQ, Gradient::dK>(block, consumer, base + tile, dK, block.params.score.scale, 0,
                                                    consumer * 2);
    }
};
