// The load and store warps of bwd_wgmma_head, included by bwd_wgmma_head.cu after `HeadBlock`.
#pragma once

// Warp 0: loads Q and dO per m_block, K and V per n_block.
__device__ __forceinline__ void load_tiles(const HeadBlock& block) {
    const BwdParams& params = block.params;
    const SmemAddr base = block.base;
    const int b = block.b, kv_head = block.kv_head;
    const auto load_KV = [&](const TensorMap& map, const View<const dtype>& tensor, int n0, unsigned tile,
                             SmemAddr full) {
        load_key_tile<SmemLayoutK>(base + tile, map, tensor, block.head0, b, kv_head, n0, full);
    };
    bool KV_loaded = false;
    const auto load_next_KV = [&](int n0) {  // called after the loads of Q and dO, whose stages are free earlier
        if (KV_loaded) return;
        mbarrier_wait(EmptyKV::at(base, 0), n0 / BLOCK_N % 2 ^ 1);
        load_KV(params.K_map, params.K, n0, K_AT, FullK::at(base, 0));
        load_KV(params.V_map, params.V, n0, V_AT, FullV::at(base, 0));
        KV_loaded = true;
    };
    block.for_each(
        [&](unsigned i, int head, int m0, int n0) {
            const unsigned stage = stage_of(i);
            TIMELINE(wait_empty);
            QPipeline::acquire(base, i);
            TIMELINE(load);
            load_query_tile<SmemLayoutQ>(base + Q_AT + stage * SmemLayoutQ::BYTES, params.Q_tile_map, params.Q,
                                         block.head0, b, kv_head * block.group + head, m0,
                                         QPipeline::full(base, stage));
            TIMELINE(wait_empty);
            dOPipeline::acquire(base, i);
            TIMELINE(load);
            load_query_tile<SmemLayoutQ>(base + dO_AT + stage * SmemLayoutQ::BYTES, params.dO_tile_map, params.dO,
                                         block.head0, b, kv_head * block.group + head, m0,
                                         dOPipeline::full(base, stage));
            load_next_KV(n0);
        },
        [&](int n0) {
            load_next_KV(n0);  // also for n_blocks without visible queries
            KV_loaded = false;
        });
}

// Warp 1: loads LSE and delta per m_block.
__device__ __forceinline__ void load_stats(const HeadBlock& block) {
    block.for_each(
        [&](unsigned i, int head, int m0, int) {
            load_LSE_and_delta<QPipeline>(block.params, block.base, reinterpret_cast<float*>(smem + STATS_AT),
                                          block.head0, block.H, block.kv_head * block.group, i, head, m0);
        },
        [](int) {});
}

// Warps 2 and 3: dQ-store warps.
__device__ __forceinline__ void store_dQ_tiles(const HeadBlock& block, unsigned consumer) {
    const SmemAddr base = block.base;
    block.for_each(
        [&](unsigned i, int head, int m0, int n0) {
            TIMELINE(wait_dQ);
            mbarrier_wait(Barriers::FulldQ::at(base, consumer), i % 2);
            TIMELINE(store_dQ);
            float* const to = block.dQ_tile(head, m0) + consumer * DQ_CONSUMER_FLOATS;
            const SmemAddr from = base + dQ_AT + consumer * 4 * DQ_CONSUMER_FLOATS;
            if (n0 == 0)
                bulk_store(to, from,
                           4 * DQ_CONSUMER_FLOATS);  // no window: if a row has visible keys, one is in n_block 0
            else tma_reduce_add(to, from, 4 * DQ_CONSUMER_FLOATS);
            tma_store_commit();
            tma_store_wait_read();
            mbarrier_arrive(Barriers::EmptydQ::at(base, consumer));
        },
        [](int) { tma_store_wait_complete(); });  // stores are complete before the next n_block adds
    mbarrier_arrive(dQComplete::at(base, 0));
}
