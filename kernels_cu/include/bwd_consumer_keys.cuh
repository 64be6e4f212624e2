// The dQ-store warps of bwd_wgmma, and what its consumers have in common, for BLOCK_N = 128: included by
// bwd_consumer.cuh and bwd_consumer_narrow_v.cuh, which add the mainloop.
//
// A consumer owns 64 keys. It writes dS to shared memory: in the next iteration each consumer computes a part of
// dQ = dS K from the dS of all 128 keys. The part is 64 rows of dQ if BLOCK_M = 128, and some columns of dQ if
// BLOCK_M = 64.
#pragma once

// Shared memory of a consumer's dQ. NARROW_V: the same for both consumers, which write there in turn, consumer 0 first.
__device__ __forceinline__ SmemAddr own_dQ(SmemAddr base, unsigned consumer) {
    return NARROW_V ? base + dQ_AT : base + dQ_AT + consumer * 4 * DQ_CONSUMER_FLOATS;
}

// A dQ-store warp: adds one consumer's dQ from shared memory to dQ_accum in L2, or stores it (dq_semaphore.cuh).
__device__ __forceinline__ void dQ_warp(const BwdBlock& block, unsigned warp) {
    dQAccumulation<BwdBlock> accumulation{block};
    block.m_blocks.for_each([&](unsigned i, int head, int m0) {
        // Recomputed with a block map, where keeping it spills.
        const unsigned consumer = (Head::HAS_BLOCK_MAP ? thread_index_x() / 32 : warp) - 2;
        TIMELINE(wait_dQ);
        accumulation.wait_turn(head, m0, consumer);
        mbarrier_wait(Barriers::FulldQ::at(block.base, consumer), i % 2);
        TIMELINE(store_dQ);
        float* const to = block.dQ_tile(head, m0) + consumer * DQ_CONSUMER_FLOATS;
        const SmemAddr from = own_dQ(block.base, consumer);
        const bool stores = accumulation.claim_first_store(head, m0, consumer);
        const unsigned bytes = 4 * 64 * (consumer ? DQ_COLS_OF_CONSUMER_1 : DQ_COLS);
        if (stores) bulk_store(to, from, bytes);
        else tma_reduce_add(to, from, bytes);
        tma_store_commit();
        tma_store_wait_read();
        mbarrier_arrive(Barriers::EmptydQ::at(block.base, NARROW_V ? consumer ^ 1 : consumer));
        accumulation.signal_done(head, m0, consumer);
    });
    TIMELINE(done);
}

// A consumer warpgroup: dK and dV of 64 keys, and a part of each tile of dQ. dQ of an m_block is computed in the next
// iteration. The consumers alternate in computing P and dS (ping-pong).
struct KeyConsumer {
    // Whether a consumer skips the first m_block if no query of that m_block sees a key of the consumer. With dropout,
    // skipping is slower.
    static constexpr bool SKIPS_FIRST_TILE = Head::HAS_RIGHT_BOUND && !DROPOUT;

    const BwdBlock& block;
    const SmemAddr base;
    const unsigned warp, lane, consumer, own_turn, other_turn;  // turns: see scheduler_barrier
    const int key_offset;                                       // first key of the consumer within the tile
    const float scale_log2;                                     // of P = exp2(S * scale_log2 - LSE * log2(e))
    float dK[D_PAD / 2], dV[DV_PAD / 2];
    unsigned P[BLOCK_M / 16][4], dS[BLOCK_M / 16][4];  // P^T and dS^T
    int head, m0;                                      // of the next m_block
    unsigned i = 0;                                    // number of m_blocks so far
    unsigned skipped_tiles = 0;  // 1 if the consumer has skipped the first m_block: dK and dV do not contain it

    // `consumer` is opaque: otherwise the compiler folds the - 1 of warp / 4 - 1 into every address, and computes the
    // addresses before the mainloop, during which they then take registers.
    explicit __device__ __forceinline__ KeyConsumer(const BwdBlock& block)
        : block(block), base(block.base), warp(block.warp), lane(block.lane), consumer(opaque(warp / 4 - 1)),
          own_turn(scheduler_barrier(warp / 4 - 1)), other_turn(scheduler_barrier(2 - warp / 4)),
          key_offset(64 * consumer), scale_log2(Head::softmax_scale_of(block.params.score) * Head::LOG2E) {
        block.m_blocks.start(head, m0);
    }
    // Whether the lane arrives for its warp. Computed on each call: a predicate kept through the mainloop would spill.
    __device__ __forceinline__ bool elected() const { return opaque(lane) == 0; }
    // Address of the consumer's 64 keys (one slab) in a tile of dS or of the bias.
    __device__ __forceinline__ SmemAddr own_keys(SmemAddr tile) const {
        return tile + consumer * SmemLayoutPdS::SLAB_BYTES;
    }

    // S^T or dP^T of the consumer's keys and all queries.
    template <int COLUMNS>
    __device__ __forceinline__ void mma_SdP_own_keys(float (&C)[BLOCK_M / 2], unsigned keys_at,
                                                     unsigned queries_at) const {
        const SmemAddr tiles =
            D_PAD > 96 ? uniform(base) : base;  // without `uniform` the descriptors would stay in registers and spill
        mma_SdP<COLUMNS>(C, SmemLayoutK::k_major(tiles + keys_at + key_offset * SmemLayoutK::ROW_BYTES),
                         SmemLayoutQ::k_major(tiles + queries_at));
    }
    // The consumer's part of dQ: 64 rows if BLOCK_M = 128, a part of the columns if BLOCK_M = 64.
    __device__ __forceinline__ void mma_own_dQ(float (&dQ)[DQ_COLS / 2], unsigned dS_at) const {
        if constexpr (NARROW_V) {
            // Slab `consumer` (columns 64 * consumer to 64 * consumer + 63), and the consumer's half of slab 2.
            const SmemAddr tiles = uniform(base);
            // The descriptor's leading byte offset is the distance between that slab and that half. A half is 32
            // columns, 64 bytes per row.
            const unsigned leading_bytes = 2 * SmemLayoutK::SLAB_BYTES - consumer * (SmemLayoutK::SLAB_BYTES - 64);
            return mma_dQ(dQ, SmemLayoutPdS::k_major(tiles + dS_at),
                          make_descriptor(tiles + K_AT + consumer * SmemLayoutK::SLAB_BYTES, leading_bytes, 1024));
        }
        constexpr unsigned BYTES_OF_64_ROWS = 64 * SmemLayoutPdS::ROW_BYTES,
                           BYTES_OF_COLUMNS = DQ_COLS < 64 ? DQ_COLS * 2 : DQ_COLS / 64 * SmemLayoutK::SLAB_BYTES;
        mma_dQ(dQ, SmemLayoutPdS::k_major(base + dS_at + (BLOCK_M == 128 ? consumer * BYTES_OF_64_ROWS : 0)),
               SmemLayoutK::mn_major(base + K_AT + (BLOCK_M == 128 ? 0 : consumer * BYTES_OF_COLUMNS)));
    }

    // Waits until the dQ-store warp has read dQ of m_block i - 1, then writes dQ of m_block i to shared memory.
    __device__ __forceinline__ void stage_own_dQ(const float (&dQ)[DQ_COLS / 2], unsigned i) const {
        // i % 2 ^ 1: the first wait returns at once. NARROW_V: consumer 0 waits until the other's dQ of i - 1 has been
        // read (the first wait returns at once), consumer 1 until the other's dQ of i has been read.
        mbarrier_wait(Barriers::EmptydQ::at(base, consumer), NARROW_V ? (i + 1 + consumer) % 2 : i % 2 ^ 1);
        stage_dQ(own_dQ(base, consumer), dQ);
    }
    // Arrives on the full barrier of dS and, if has_dQ, on that of dQ: the consumer has written dS, and dQ, to shared
    // memory since the last call. m_block_of_dS: the index of the m_block of dS; only the parity counts.
    __device__ __forceinline__ void commit_dQ_dS(bool has_dQ, unsigned m_block_of_dS) const {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0 && has_dQ) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
        if (lane == 0) mbarrier_arrive(Barriers::FulldS::at(base, m_block_of_dS % 2));
    }
    // Waits until both consumers have written dS of m_block i, and have read dS of m_block i - 1.
    __device__ __forceinline__ void wait_dS(unsigned i) const {
        mbarrier_wait(Barriers::FulldS::at(base, i % 2), i / 2 % 2);
    }

    // Computes P^T from S^T: score modification, mask, exponential. derivative: see apply_score_mod.
    __device__ __forceinline__ void recompute_P(float (&S)[BLOCK_M / 2], unsigned (&derivative)[BLOCK_M / 16][4],
                                                const Head& current_head, const FragmentMask<BLOCK_M>& mask,
                                                const unsigned (&bias)[BLOCK_M / 16][4], const float* stats) {
        const FragmentCoords coords(mask.first_query, block.m_blocks.n0() + key_offset);
        apply_score_mod(S, derivative, current_head, coords, bias);
        if constexpr (!MASKS_P) mask.apply(block.m_blocks, key_offset, coords, [&](int k) { S[k] = -INF; });
        compute_P(P, S, scale_log2, stats);
        if constexpr (MASKS_P) mask.apply(block.m_blocks, key_offset, coords, [&](int k) { hide(P, k); });
    }

    // Whether the mask hides all of the consumer's keys from all queries of the first m_block. Possible only for
    // consumer 1: with a causal mask the first m_block may end before the first row that sees consumer 1's keys.
    __device__ __forceinline__ bool first_tile_hidden() const {
        const int first_key = block.m_blocks.n0() + key_offset;
        return SKIPS_FIRST_TILE && block.head0.queries(first_key, first_key + 64).begin >= m0 + BLOCK_M;
    }
    // Replaces the first bwd_step of a consumer whose keys are all hidden. Writes dS = 0, because the other consumer
    // multiplies the dS of all 128 keys. Does not arrive for this dS: the next bwd_step does, or the epilogue
    // (NARROW_V: first_step). Does not release Q: the next bwd_step does. The consumer takes no turn of the ping-pong
    // in this iteration (NARROW_V: first_step takes it).
    __device__ __forceinline__ void skip_step() {
        mbarrier_wait(FullV::at(base, 0), 0);
        QPipeline::wait(base, 0);
        dOPipeline::wait(base, 0);
        const unsigned zeros[BLOCK_M / 16][4] = {};
        store_transposed<SmemLayoutPdS>(own_keys(base + dS_AT), warp % 4 * 2, zeros);
        release_stage<dOPipeline>(base, 0, elected());
        block.m_blocks.advance(head, m0);
        i = skipped_tiles = 1;
    }

    // After the mainloop: computes dQ of the last m_block, and stores dV and dK. Returns whether a value of dV or dK is
    // not finite.
    __device__ __forceinline__ bool epilogue() {
        TIMELINE(store);
        if constexpr (!NARROW_V) commit_dQ_dS(i > 1, (i - 1) % 2);
        warpgroup_fence_operand(dV);  // the last iteration has waited for it
        zero_unless_accumulated(dV);
        float dQ[DQ_COLS / 2];
        wait_dS(i - 1);
        mma_own_dQ(dQ, dS_AT + (i - 1) % 2 * SmemLayoutPdS::BYTES);
        bool non_finite = store_dV();
        wgmma_wait<0>();
        warpgroup_fence_operand(dQ);
        warpgroup_fence_operand(dK);
        zero_unless_accumulated(dK);
        stage_own_dQ(dQ, i - 1);
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
        non_finite |= store_dK();
        return non_finite;
    }
    template <int R>
    __device__ __forceinline__ void zero_unless_accumulated(float (&accum)[R]) const {
#pragma unroll
        for (int k = 0; k < R; ++k)
            if (SKIPS_FIRST_TILE && !NARROW_V && i == skipped_tiles) accum[k] = 0.0f;  // every m_block was skipped
    }
    // Staged in the consumer's own rows of V: the other consumer does not read them.
    __device__ __forceinline__ bool store_dV() const {
        return store_dKV<SmemLayoutV, Gradient::dV>(block, consumer, base + V_AT + key_offset * SmemLayoutV::ROW_BYTES,
                                                    dV, 1.0f, key_offset, 0);
    }
    // Staged where the next m_block would be loaded: consumer 0 in Q, consumer 1 in dO. NARROW_V: consumer 1's dK is
    // wider than a stage of dO and takes both stages of dO (STAGES = 2). In all cases both consumers had read the
    // overwritten stages before the last dS was complete, for which this consumer has waited.
    __device__ __forceinline__ SmemAddr dK_staging() const {
        if constexpr (NARROW_V) return base + (consumer ? dO_AT : Q_AT + stage_of(i) * SmemLayoutQ::BYTES);
        return base + (consumer ? dO_AT : Q_AT) + stage_of(i) * SmemLayoutQ::BYTES;
    }
    __device__ __forceinline__ bool store_dK() const {
        return store_dKV<SmemLayoutQ, Gradient::dK>(block, consumer, dK_staging(), dK, block.params.score.scale,
                                                    key_offset, 0);
    }
};
