// The consumers of bwd_ladder: those of kernels_cu/include/bwd_consumer.cuh with switches (1: off, 2: on).
//
// clang-format off
//   OVERLAP     dQ of an m_block is computed together with S^T and dP^T of the next one
//   PING_PONG   the consumers alternate in computing P and dS
// clang-format on
//
// Without OVERLAP an iteration waits for all of its products, and releases Q and dO at its end: one stage is then
// possible. No score options but masks by position, and no skipped tiles.
#pragma once
#include "bwd_consumer_keys.cuh"

constexpr int OFF = 1, ON = 2;
static_assert(OVERLAP == ON || PING_PONG == OFF, "ping-pong needs OVERLAP");
static_assert(OVERLAP == ON || BLOCK_M == 64, "dK is staged in Q, which has 64 rows");

struct ConsumerWarpgroup : KeyConsumer {
    using KeyConsumer::KeyConsumer;

    __device__ __forceinline__ void wait_turn() const {
        if (PING_PONG == ON) named_barrier_sync(own_turn, BOTH_CONSUMERS);
    }
    __device__ __forceinline__ void end_turn() const {
        if (PING_PONG == ON) named_barrier_arrive(other_turn, BOTH_CONSUMERS);
    }

    // One m_block. FIRST: dK and dV are overwritten.
    template <bool FIRST = false>
    __device__ __forceinline__ void bwd_step() {
        constexpr bool HAS_PREVIOUS = OVERLAP == ON && !FIRST;  // dQ of the previous m_block is computed here
        const bool accumulates = SKIPS_FIRST_TILE && OVERLAP == ON && !FIRST ? i > skipped_tiles : !FIRST;
        const auto [stage, Q_at, dO_at, dS_at, previous_dS_at] = TileOffsets(i);
        const float* const stats = stats_of(stage, 0);
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[DQ_COLS / 2];
        TIMELINE(wait_Q);
        QPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_keys<HEAD_DIM>(S, K_AT, Q_at);
        if (OVERLAP == ON) wgmma_wait<1>();  // dK of the previous m_block
        if (HAS_PREVIOUS) release_stage<QPipeline>(base, i - 1, elected());
        TIMELINE(wait_dO);
        if (FIRST) mbarrier_wait(FullV::at(base, 0), 0);
        dOPipeline::wait(base, i);
        TIMELINE(S);
        mma_SdP_own_keys<HEAD_DIM_V>(dP, V_AT, dO_at);
        if (HAS_PREVIOUS) commit_dQ_dS(i > 1, i % 2 ^ 1);

        const Head current_head(block.params.score, block.b, block.first_head() + head);
        const int first_query = m0, first_key = block.m_blocks.n0() + key_offset, warp_key = first_key + warp % 4 * 16;
        KeepBits<BLOCK_M> keep;
        keep.compute(current_head, 0, first_query, warp_key);  // seed 0: the steps have no dropout
        FragmentMask<BLOCK_M> mask{current_head, block.head0, first_query,
                                   first_key,    warp_key,    !block.m_blocks.fully_visible(head, m0)};
        mask.load();
        unsigned bias[BLOCK_M / 16][4], derivative[BLOCK_M / 16][4];

        wgmma_wait<1>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        wait_turn();
        TIMELINE(P);
        recompute_P(S, derivative, current_head, mask, bias, stats);
        TIMELINE(dP);
        wgmma_wait<0>();  // dP^T
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
        compute_dS(dS, P, dP, stats + BLOCK_M, keep, derivative);
        if (BLOCK_M == 128) end_turn();
        if (HAS_PREVIOUS) wait_dS(i - 1);
        store_transposed<SmemLayoutPdS>(own_keys(base + dS_at), warp % 4 * 2, dS);
        if (BLOCK_M == 64) end_turn();
        if (OVERLAP == OFF) {
            commit_dQ_dS(false, i % 2);
            wait_dS(i);  // both consumers have written dS
        }
        if (HAS_PREVIOUS || OVERLAP == OFF) mma_own_dQ(dQ, OVERLAP == ON ? previous_dS_at : dS_at);
        mma_dKV(dV, P, base + dO_at, accumulates);
        mma_dKV(dK, dS, base + Q_at, accumulates);

        TIMELINE(dQ);
        if (OVERLAP == OFF) {
            wgmma_wait<0>();
            warpgroup_fence_operand(dQ);
            warpgroup_fence_operand(dK);
            warpgroup_fence_operand(dV);
            release_stage<QPipeline>(base, i, elected());
            release_stage<dOPipeline>(base, i, elected());
            stage_own_dQ(dQ, i);
            commit_dQ();
        } else {
            if (!FIRST) {
                wgmma_wait<2>();  // dQ
                warpgroup_fence_operand(dQ);
                stage_own_dQ(dQ, i - 1);
            }
            wgmma_wait<1>();  // dV
            release_stage<dOPipeline>(base, i, elected());
        }
        block.m_blocks.advance(head, m0);
        ++i;
    }
    // Arrives on the full barrier of dQ.
    __device__ __forceinline__ void commit_dQ() const {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(Barriers::FulldQ::at(base, consumer));
    }

    __device__ __forceinline__ void first_step() {
        mbarrier_wait(FullK::at(base, 0), 0);
        if (PING_PONG == ON && consumer == 1) named_barrier_arrive(other_turn, BOTH_CONSUMERS);  // consumer 0 starts
        if (OVERLAP == ON && first_tile_hidden()) skip_step();
        else bwd_step<true>();
        wgmma_wait<0>();  // no wgmma is in flight when the loop starts: otherwise ptxas serialises the loop's wgmmas
        warpgroup_fence_operand(dK);
        warpgroup_fence_operand(dV);
    }
    __device__ __forceinline__ bool epilogue() {
        if (OVERLAP == ON) return KeyConsumer::epilogue();
        TIMELINE(store);
        named_barrier_sync(CONSUMERS_BARRIER, BOTH_CONSUMERS);  // both have read Q and dO, where dK is staged
        bool non_finite = store_dV();
        non_finite |= store_dK();
        return non_finite;
    }
};
