// The consumers of bwd_wgmma for 128 < HEAD_DIM <= 192 and HEAD_DIM_V <= 128 (BLOCK_N = 128), included by bwd_wgmma.cu.
//
// dK and dV of 64 keys take 160 registers of a thread, so S^T, dP^T and dQ are in registers one after the other, and
// dS^T is read from shared memory for dK. The wgmmas are S1 dP1 dV1 dQ0 dK1 S2 ...
#pragma once
#include "bwd_consumer_keys.cuh"

struct ConsumerWarpgroup : KeyConsumer {
    using KeyConsumer::KeyConsumer;

    // dK += dS^T Q, dS in shared memory.
    __device__ __forceinline__ void mma_dK(unsigned dS_at, unsigned Q_at) {
        const SmemAddr tiles = uniform(base);
        const Descriptor A = SmemLayoutPdS::mn_major(own_keys(tiles + dS_at)), B = SmemLayoutQ::mn_major(tiles + Q_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step)
            wgmma<Order::MN_MAJOR, Order::MN_MAJOR>(dK, A + SmemLayoutPdS::mn_step(step),
                                                    B + SmemLayoutQ::mn_step(step), true);
        wgmma_commit();
    }

    // One m_block, and dQ of the previous one.
    __device__ __forceinline__ void bwd_step() {
        const bool has_previous = i > 0;
        const auto [stage, Q_at, dO_at, dS_at, previous_dS_at] = TileOffsets(i);
        // Without a previous m_block, dQ is computed from K in place of dS, and not used: a branch around wgmmas, or a
        // separate first iteration, would serialise them.
        const unsigned dQ_from = has_previous ? previous_dS_at : K_AT;
        const float* const stats = stats_of(stage, 0);
        const unsigned long long seed = block.dropout_seed();
        TIMELINE(wait_Q);
        QPipeline::wait(base, i);
        TIMELINE(S);
        float S[BLOCK_M / 2];
        mma_SdP_own_keys<HEAD_DIM>(S, K_AT, Q_at);

        // Dropout and mask bits do not depend on S and are computed while the wgmmas run.
        const Head current_head(block.params.score, block.b, block.first_head() + head);
        const int first_query = m0, first_key = block.m_blocks.n0() + key_offset, warp_key = first_key + warp % 4 * 16;
        KeepBits<BLOCK_M> keep;
        keep.compute(current_head, seed, first_query, warp_key);
        FragmentMask<BLOCK_M> mask{current_head, block.head0, first_query,
                                   first_key,    warp_key,    !block.m_blocks.fully_visible(head, m0)};
        mask.load();

        wgmma_wait<1>();  // dK of the previous m_block
        release_stage<QPipeline>(base, i - 1, has_previous && elected());
        wgmma_wait<0>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(own_turn, BOTH_CONSUMERS);  // the other consumer has computed its P and dS
        TIMELINE(P);
        unsigned derivative[BLOCK_M / 16][4];
        const unsigned no_bias[BLOCK_M / 16][4] = {};
        recompute_P(S, derivative, current_head, mask, no_bias, stats);
        TIMELINE(wait_dO);
        dOPipeline::wait(base, i);
        TIMELINE(dP);
        float dP[BLOCK_M / 2];
        mma_SdP_own_keys<HEAD_DIM_V>(dP, V_AT, dO_at);
        if (!DROPOUT) mma_dKV(dV, P, base + dO_at);
        wgmma_wait<DROPOUT ? 0 : 1>();  // dP^T; without dropout dV is still in flight
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
        compute_dS(dS, P, dP, stats + BLOCK_M, keep, derivative);
        named_barrier_arrive(other_turn, BOTH_CONSUMERS);
        wait_dS(i - 1);  // as in bwd_consumer.cuh. i = 0: i - 1 wraps around; parity 1 of a new barrier returns at once
        store_transposed<SmemLayoutPdS>(own_keys(base + dS_at), warp % 4 * 2, dS);
        if (DROPOUT) mma_dKV(dV, P, base + dO_at);
        wgmma_wait<0>();  // dV: dQ takes the registers of P
        release_stage<dOPipeline>(base, i, elected());
        float dQ[DQ_COLS / 2];
        mma_own_dQ(dQ, dQ_from);
        fence_proxy_async();
        named_barrier_sync(consumer_barrier(consumer), CONSUMER_THREADS);  // the four warps have written dS
        mma_dK(dS_at, Q_at);

        TIMELINE(dQ);
        wgmma_wait<1>();  // dQ
        if (has_previous) {
            warpgroup_fence_operand(dQ);
            stage_own_dQ(dQ, i - 1);
        }
        commit_dQ_dS(has_previous, i);
        block.m_blocks.advance(head, m0);
        ++i;
    }

    // Before the mainloop. Consumer 1 may skip the first m_block.
    __device__ __forceinline__ void first_step() {
        zero(dK), zero(dV);
        warpgroup_fence_operand(dK);  // fences keep the zeros before the loop: otherwise ptxas serialises the wgmmas
        warpgroup_fence_operand(dV);
        mbarrier_wait(FullK::at(base, 0), 0);
        mbarrier_wait(FullV::at(base, 0), 0);
        if (consumer == 1) named_barrier_arrive(other_turn, BOTH_CONSUMERS);  // consumer 0 starts
        if (!first_tile_hidden()) return;
        skip_step();
        commit_dQ_dS(false, 0);
        named_barrier_sync(own_turn, BOTH_CONSUMERS);  // consumer 0 stays first
        named_barrier_arrive(other_turn, BOTH_CONSUMERS);
    }
};
