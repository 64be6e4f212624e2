// The consumers of bwd_wgmma_head: the mainloop over the m_blocks of an n_block, and its epilogue. Included by
// bwd_wgmma_head.cu after `HeadBlock`.
#pragma once

// Loop state of a consumer, in one register, because the mainloop has none to spare. From the top: 2 bits: the number
// of m_blocks so far, modulo 4, which determines stage and parity; 14 bits: index of the n_block; 16 bits: the number
// of m_blocks so far in this n_block.
class LoopState {
    static constexpr unsigned NEXT_M_BLOCK = (1u << 30) + 1, N_BLOCK = 1u << 16;
    unsigned count = 0;

  public:
    __device__ __forceinline__ unsigned i() const { return count >> 30; }  // modulo 4
    __device__ __forceinline__ unsigned m_blocks_of_n_block() const { return count & 0xffff; }
    __device__ __forceinline__ int n0() const { return (count >> 16 & 0x3fff) * BLOCK_N; }
    __device__ __forceinline__ void next() { count += NEXT_M_BLOCK; }
    __device__ __forceinline__ void next_n_block() { count = (count & ~(N_BLOCK - 1)) + N_BLOCK; }
    __device__ __forceinline__ void make_uniform() { count = uniform(count); }
};

// A consumer warpgroup: dK and dV of 64 keys of each n_block, and 64 rows of each dQ tile.
struct ConsumerWarpgroup {
    const HeadBlock& block;
    const SmemAddr base;
    const unsigned warp, lane, consumer;
    const int key_offset;                      // first key of the consumer within the n_block
    const float scale_log2;                    // of P = exp2(S * scale_log2 - LSE * log2(e))
    float (&dK)[D_PAD / 2], (&dV)[D_PAD / 2];  // local arrays of the kernel: see bwd_consumer_persistent.cuh
    LoopState state;
    int head = 0, m0 = 0;  // of the next m_block

    __device__ __forceinline__ ConsumerWarpgroup(const HeadBlock& block, unsigned warp, unsigned lane,
                                                 float (&dK)[D_PAD / 2], float (&dV)[D_PAD / 2])
        : block(block), base(block.base), warp(warp), lane(lane), consumer(warp / 4 - 1), key_offset(64 * consumer),
          scale_log2(Head::softmax_scale_of(block.params.score) * Head::LOG2E), dK(dK), dV(dV) {}

    // S^T or dP^T of the consumer's keys.
    __device__ __forceinline__ void mma_SdP_own_keys(float (&C)[BLOCK_M / 2], unsigned keys_at,
                                                     unsigned queries_at) const {
        mma_SdP<HEAD_DIM>(C, SmemLayoutK::k_major(base + keys_at + key_offset * SmemLayoutK::ROW_BYTES),
                          SmemLayoutQ::k_major(base + queries_at));
    }
    // 64 rows of dQ.
    __device__ __forceinline__ void mma_own_dQ(float (&dQ)[D_PAD / 2], unsigned dS_at) const {
        mma_dQ(dQ, SmemLayoutPdS::k_major(base + dS_at + consumer * (64 * SmemLayoutPdS::ROW_BYTES)),
               SmemLayoutK::mn_major(base + K_AT));
    }
    // Waits until the dQ-store warp has read dQ of m_block i - 1, then writes dQ of m_block i to shared memory.
    __device__ __forceinline__ void stage_own_dQ(const float (&dQ)[D_PAD / 2], unsigned i) const {
        mbarrier_wait(Barriers::EmptydQ::at(base, consumer), i % 2 ^ 1);  // phase ^ 1: the first wait returns at once
        stage_dQ(base + dQ_AT + consumer * 4 * DQ_CONSUMER_FLOATS, dQ);
    }
    // Arrives on the full barriers of dS of m_block i and, if has_dQ, of dQ of m_block i - 1: the consumer has written
    // them.
    __device__ __forceinline__ void commit_dQ_dS(bool has_dQ, unsigned i) const {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0 && has_dQ) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
        if (lane == 0) mbarrier_arrive(Barriers::FulldS::at(base, i % 2));
    }
    // Waits until both consumers have written dS of m_block i.
    __device__ __forceinline__ void wait_dS(unsigned i) const {
        mbarrier_wait(Barriers::FulldS::at(base, i % 2), i / 2 % 2);
    }

    // One m_block, and dQ of the previous one of the same n_block.
    __device__ __forceinline__ void bwd_step() {
        state.make_uniform();
        const bool has_previous = state.m_blocks_of_n_block() > 0;  // within this n_block
        const unsigned i = state.i();
        const auto [stage, Q_at, dO_at, dS_at, previous_dS_at] = TileOffsets(i);
        // Without a previous m_block the product is discarded: any initialised memory that is not being written will
        // do, here K.
        const unsigned dQ_from = has_previous ? previous_dS_at : K_AT;
        const float* const stats =  // of the lane's first two queries
            reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + thread_index_x() % 4 * 2;
        unsigned P[BLOCK_M / 16][4], dS[BLOCK_M / 16][4];  // P^T and dS^T
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[D_PAD / 2];
        TIMELINE(wait_Q);
        QPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_keys(S, K_AT, Q_at);
        wgmma_wait<1>();  // dK of the previous m_block
        if (has_previous) release_stage<QPipeline>(base, i - 1, lane == 0);
        TIMELINE(wait_dO);
        dOPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_keys(dP, V_AT, dO_at);
        if (has_previous) commit_dQ_dS(state.m_blocks_of_n_block() > 1, i - 1);

        wgmma_wait<1>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(scheduler_barrier(consumer), BOTH_CONSUMERS);
        TIMELINE(P);
        const int first_key = state.n0() + key_offset;
        const Range fully_visible = block.head0.fully_visible_queries<true>(first_key, first_key + 64);
        // Query rows from Sq on are masked, too: their q is 0, and 0 * inf is NaN.
        if ((m0 < fully_visible.begin) | (m0 + BLOCK_M > fully_visible.end)) {
            const FragmentCoords coords(m0, first_key);
            mask_fragment<BLOCK_M / 2>(block.head0, coords, [&](int k) { S[k] = -INF; });
        }
        compute_P(P, S, scale_log2, stats);
        named_barrier_arrive(scheduler_barrier(1 - consumer), BOTH_CONSUMERS);
        TIMELINE(dP);
        mma_dKV(dV, P, base + dO_at);
        if (has_previous) wait_dS(i - 1);
        // Discarded in the first iteration: a branch around it would serialise the wgmmas.
        mma_own_dQ(dQ, dQ_from);

        wgmma_wait<2>();  // dP^T
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
        compute_dS(dS, P, dP, stats + BLOCK_M);
        store_transposed<SmemLayoutPdS>(base + dS_at + consumer * SmemLayoutPdS::SLAB_BYTES, warp % 4 * 2, dS);
        mma_dKV(dK, dS, base + Q_at);

        TIMELINE(dQ);
        wgmma_wait<1>();  // dV and dQ
        release_stage<dOPipeline>(base, i, lane == 0);
        warpgroup_fence_operand(dQ);
        if (has_previous) stage_own_dQ(dQ, i - 1);
        m0 += BLOCK_M;
        block.m_blocks_of(state.n0()).seek(head, m0);
        state.next();
    }
    // After the last m_block of an n_block: computes and stages dQ of that m_block, and waits until dK and dV are
    // complete.
    __device__ __forceinline__ void mainloop_tail() {
        const unsigned i = state.i();
        commit_dQ_dS(state.m_blocks_of_n_block() > 1, i - 1);
        float dQ[D_PAD / 2];
        wait_dS(i - 1);
        mma_own_dQ(dQ, dS_AT + (i - 1) % 2 * SmemLayoutPdS::BYTES);
        wgmma_wait<0>();
        warpgroup_fence_operand(dQ);
        stage_own_dQ(dQ, i - 1);
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
        wgmma_wait<0>();  // returns at once: no wgmma is in flight
        warpgroup_fence_operand(dK);
        warpgroup_fence_operand(dV);
        release_stage<QPipeline>(base, i - 1, lane == 0);
    }

    // Before the first m_block of an n_block: waits for K and V.
    __device__ __forceinline__ void begin_n_block() {
        if (threadIdx.x % 128 == 0) tma_store_wait_read();
        // TMA has read dK and dV of the previous n_block before dS overwrites them.
        named_barrier_sync(consumer_barrier(consumer), CONSUMER_THREADS);
        mbarrier_wait(FullK::at(base, 0), state.n0() / BLOCK_N % 2);
        mbarrier_wait(FullV::at(base, 0), state.n0() / BLOCK_N % 2);
        block.m_blocks_of(state.n0()).start(head, m0);
        zero(dK), zero(dV);
    }
    // Stores dK and dV of the n_block.
    __device__ __forceinline__ void epilogue() {
        const BwdParams& params = block.params;
        TIMELINE(store);
        // Non-finite fallback (non_finite.cuh): a masked P is 0, but 0 * NaN = NaN; and P is NaN for a row with a large
        // LSE. After this barrier neither consumer reads K and V again.
        const bool non_finite =
            named_barrier_or(CONSUMERS_BARRIER, BOTH_CONSUMERS, !(all_finite(dK) && all_finite(dV)));
        if (threadIdx.x % 128 == 0) mbarrier_arrive(EmptyKV::at(base, 0));
        if (non_finite) {
            key_gradients_non_finite<BLOCK_N, 8>(params.Q, params.K, params.V, params.dO, params.LSE, params.delta,
                                                 params.dK, params.dV, block.group, params.score, block.b,
                                                 block.kv_head, block.H, state.n0(), warp - 4);
            return;
        }
        stage_dKV<SmemLayoutdKV>(base + dKV_staging(false), dV, 1.0f, warp, lane);
        stage_dKV<SmemLayoutdKV>(base + dKV_staging(true), dK, params.score.scale, warp, lane);
        fence_proxy_async();
        // All four warps have written dK and dV before the TMA store.
        named_barrier_sync(consumer_barrier(consumer), CONSUMER_THREADS);
        if (threadIdx.x % 128 == 0) {
            const int row = block.head0.tma_dKV_row(state.n0() + key_offset),
                      batch = block.head0.tma_dKV_batch(block.b);
            tma_store(params.dV_map, 0, row, block.kv_head, batch, base + dKV_staging(false));
            tma_store(params.dK_map, 0, row, block.kv_head, batch, base + dKV_staging(true));
            tma_store_commit();
        }
    }
    // dK and dV are staged in the consumer's own part of dS, so that the next K and V can be loaded meanwhile.
    __device__ __forceinline__ unsigned dKV_staging(bool is_dK) const {
        return dS_AT + !is_dK * SmemLayoutPdS::BYTES + consumer * SmemLayoutPdS::SLAB_BYTES;
    }
};
