// The consumers of bwd_wgmma for HEAD_DIM <= 128 (BLOCK_N = 128), included by bwd_wgmma.cu.
//
// P^T and dS^T stay in registers. The wgmmas are S1 dP1 dQ0 dV1 dK1 S2 ...
#pragma once
#include "bwd_consumer_keys.cuh"

struct ConsumerWarpgroup : KeyConsumer {
    using KeyConsumer::KeyConsumer;

    // One m_block, and dQ of the previous one. FIRST: there is no previous one; dK and dV are overwritten.
    template <bool FIRST = false>
    __device__ __forceinline__ void bwd_step() {
        // Whether dK and dV contain an earlier m_block.
        const bool accumulates = !FIRST && (!SKIPS_FIRST_TILE || i > skipped_tiles);
        const auto [stage, Q_at, dO_at, dS_at, previous_dS_at] = TileOffsets(i);
        const float* const stats = stats_of(stage, 0);
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[DQ_COLS / 2];
        const unsigned long long seed = block.dropout_seed();
        TIMELINE(wait_Q);
        QPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_keys<HEAD_DIM>(S, K_AT, Q_at);
        wgmma_wait<1>();  // dK of the previous m_block
        if (!FIRST) release_stage<QPipeline>(base, i - 1, elected());
        TIMELINE(wait_dO);
        if (FIRST) mbarrier_wait(FullV::at(base, 0), 0);
        dOPipeline::wait(base, i);
        TIMELINE(S);  // S again: this step issues the wgmmas of S^T and, here, those of dP^T
        mma_SdP_own_keys<HEAD_DIM_V>(dP, V_AT, dO_at);
        if (!FIRST) commit_dQ_dS(i > 1, i - 1);  // dS of i - 1; dQ of i - 2 exists from i = 2 on

        // Dropout and mask bits do not depend on S and are computed while the wgmmas run.
        const Head current_head(block.params.score, block.b, block.first_head() + head);
        const int first_query = m0, first_key = block.m_blocks.n0() + key_offset, warp_key = first_key + warp % 4 * 16;
        KeepBits<BLOCK_M> keep;
        keep.compute(current_head, seed, first_query, warp_key);
        FragmentMask<BLOCK_M> mask{current_head, block.head0, first_query,
                                   first_key,    warp_key,    !block.m_blocks.fully_visible(head, m0)};
        mask.load();
        unsigned bias[BLOCK_M / 16][4];  // in the layout of S^T
        if (BIAS) load_bias_fragment(bias, own_keys(base + BIAS_AT + stage * BIAS_BYTES), warp % 4 * 2);

        wgmma_wait<1>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(own_turn, BOTH_CONSUMERS);  // the other consumer has computed its P and dS
        TIMELINE(P);
        unsigned derivative[BLOCK_M / 16][4];
        recompute_P(S, derivative, current_head, mask, bias, stats);
        TIMELINE(dP);
        wgmma_wait<0>();  // dP^T
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
        compute_dS(dS, P, dP, stats + BLOCK_M, keep, derivative);
        // The other consumer's turn. It is faster to arrive here if BLOCK_M = 128, and after the store of dS if 64.
        if (BLOCK_M == 128) named_barrier_arrive(other_turn, BOTH_CONSUMERS);
        if (!FIRST) wait_dS(i - 1);  // dS of i - 1 is complete; both have read that of i - 2, which is overwritten here
        store_transposed<SmemLayoutPdS>(own_keys(base + dS_at), warp % 4 * 2, dS);
        if (BLOCK_M == 64) named_barrier_arrive(other_turn, BOTH_CONSUMERS);
        if (!FIRST) mma_own_dQ(dQ, previous_dS_at);
        mma_dKV(dV, P, base + dO_at, accumulates);
        mma_dKV(dK, dS, base + Q_at, accumulates);

        TIMELINE(dQ);
        if (!FIRST) {
            wgmma_wait<2>();  // dQ
            warpgroup_fence_operand(dQ);
            stage_own_dQ(dQ, i - 1);
        }
        wgmma_wait<1>();  // dV
        release_stage<dOPipeline>(base, i, elected());
        block.m_blocks.advance(head, m0);
        ++i;
    }

    // The first m_block. If consumer 1 skips it, consumer 1 takes no turn for it: its first turn, in a
    // later bwd_step, follows consumer 0's first one.
    __device__ __forceinline__ void first_step() {
        mbarrier_wait(FullK::at(base, 0), 0);
        if (consumer == 1) named_barrier_arrive(other_turn, BOTH_CONSUMERS);  // consumer 0 starts
        if (first_tile_hidden()) skip_step();
        else bwd_step<true>();
        wgmma_wait<0>();  // no wgmma is in flight when the loop starts: otherwise ptxas serialises the loop's wgmmas
        warpgroup_fence_operand(dK);
        warpgroup_fence_operand(dV);
    }
};
