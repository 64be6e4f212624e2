// The load and store warps of bwd_wgmma_persistent, included by bwd_wgmma_persistent.cu. They have 24 registers: they
// read a published value again instead of keeping it.
#pragma once

// Warp 0, one thread: publishes work tiles and staged stores, and loads Q, dO, K and V.
struct LoadWarp {
    const BwdParams& params;
    const SmemAddr base;
    // Counts: work tiles with visible queries; work tiles; staged stores; m_blocks.
    unsigned nonempty_tiles = 0, tile_index = 0, staged_count = 0, i = 0;

    // The tile counter is read late, when consumers are at most STAGES m_blocks behind, for load balance.
    __device__ __forceinline__ PersistentWorkTile fetch_work_tile() const {
        const unsigned number =
            tile_index ? grid_size_x() + atomicAdd(reinterpret_cast<unsigned*>(params.dQ_accum), 1u) : block_index_x();
        return work_tile_of(number, params.score, params.Hk, params.B);
    }
    // Publishes the work tile; if it has no m_blocks, also its stores of dV and dK; after the last work tile, LAST_DQ.
    __device__ __forceinline__ void publish(const PersistentWorkTile& work_tile) {
        WorkTilePipeline::acquire(base, tile_index);
        work_tile.publish(work_tile_slot(tile_index));
        if (work_tile.b < 0) staged_store(staged_count).m0 = StagedStore::LAST_DQ;
        else if (work_tile.begin >= work_tile.end) publish_dKV_stores(staged_count);
        mbarrier_arrive(WorkTilePipeline::full(base, tile_index % 2));
    }
    __device__ __forceinline__ void publish_store(unsigned n, int m0, int h) {
        volatile StagedStore& entry = staged_store(n);
        entry.m0 = m0;
        entry.n0 = work_tile_slot(tile_index).n_block * BLOCK_N;
        entry.h = h;
        entry.b = work_tile_slot(tile_index).b;
    }
    // Published before the last m_block of the work tile is loaded, or with the work tile if it has no m_blocks.
    __device__ __forceinline__ void publish_dKV_stores(unsigned n) {
#pragma unroll 1
        for (int kind = StagedStore::dV; kind >= StagedStore::dK; --kind)
            publish_store(n++, kind, work_tile_slot(tile_index).kv_head);
    }

    // Loads Q and dO of each m_block, K and V with the first one.
    __device__ __forceinline__ void load_work_tile() {
        const volatile PersistentWorkTile& work_tile = work_tile_slot(tile_index);
        bool first = true;
        MBlockLoop m_block(work_tile, params.group);
#pragma unroll 1
        while (m_block.head < params.group) {
            TIMELINE(wait_empty);
            QPipeline::acquire(base, i);
            publish_store(staged_count, m_block.m0, work_tile.kv_head * params.group + m_block.head);
            m_block.next(work_tile);
            if (m_block.head == params.group) publish_dKV_stores(staged_count + 1);
            if (first) mbarrier_wait(EmptyK::at(base, nonempty_tiles % 2), nonempty_tiles / 2 % 2 ^ 1);
            load_tile(params.Q_tile_map, params.Q, Q_AT, params.K_map, params.K, nonempty_tiles % 2 * SECOND_K_OFFSET,
                      QPipeline::full(base, stage_of(i)), first, work_tile);
            TIMELINE(wait_empty);
            dOPipeline::acquire(base, i);
            if (first) mbarrier_wait(EmptyV::at(base, 0), nonempty_tiles % 2 ^ 1);
            load_tile(params.dO_tile_map, params.dO, dO_AT, params.V_map, params.V, V_AT,
                      dOPipeline::full(base, stage_of(i)), first, work_tile);
            nonempty_tiles += first;
            first = false;
            ++staged_count;
            ++i;
        }
        staged_count += 2;  // dV and dK
    }
    // Loads Q or dO, with K or V in the first m_block. A dimension with stride 0 (broadcast) has size 1 in the tensor
    // map: its coordinate is 0.
    __device__ __forceinline__ void load_tile(const TensorMap& map, const View<const dtype>& tensor, unsigned stages_at,
                                              const TensorMap& keys_map, const View<const dtype>& keys,
                                              unsigned keys_at, SmemAddr full, bool first,
                                              const volatile PersistentWorkTile& work_tile) const {
        TIMELINE(load);
        const volatile StagedStore& entry = staged_store(staged_count);
        SmemLayoutQ::load(base + stages_at + stage_of(i) * SmemLayoutQ::BYTES, map, entry.m0,
                          tensor.stride_h ? entry.h : 0, tensor.stride_b ? entry.b : 0, full,
                          first ? SmemLayoutK::BYTES : 0);
        if (first)
            SmemLayoutK::load_part(base + keys_at, keys_map, 0, entry.n0, keys.stride_h ? work_tile.kv_head : 0,
                                   keys.stride_b ? entry.b : 0, full);
    }
};

// Warp 1: loads LSE and delta per m_block, and publishes its flags for each consumer.
__device__ __forceinline__ void load_stats(const BwdParams& params, SmemAddr base) {
    unsigned i = 0;
#pragma unroll 1
    for (unsigned tile_index = 0;; ++tile_index) {
        WorkTilePipeline::wait(base, tile_index);
        const volatile PersistentWorkTile& work_tile = work_tile_slot(tile_index);
        if (static_cast<int>(uniform(work_tile.b)) < 0) break;
        MBlockLoop m_block(work_tile, params.group);
#pragma unroll 1
        while (m_block.head < params.group) {
            TIMELINE(wait_empty);
            const unsigned lane = thread_index_x() % 32;  // recomputed to save a register
            const int m0 = m_block.m0, row = m0 + lane;
            const int rows = params.score.Sq - row;  // valid rows from the lane's first row on
            const unsigned query_head =
                (work_tile.b * opaque(params.Hk) + work_tile.kv_head) * params.group + m_block.head;
            const unsigned long long from =
                static_cast<unsigned long long>(query_head) * static_cast<unsigned>(params.score.Sq) + row;
            const unsigned to = STATS_AT + 4 * (2 * stage_of(i) * BLOCK_M + lane);
            QPipeline::acquire(base, i);
            TIMELINE(load_stats);
            load_LSE_and_delta_async(smem, to, params.LSE + from, params.delta + from, rows);
            // Used by lanes 0 and 1, for consumers 0 and 1. Rows from Sq on are masked, too: their q is 0, and 0 * inf
            // is NaN.
            const volatile Range& fully_visible = work_tile.fully_visible[lane % 2];
            const int flags = (m0 < fully_visible.begin) | (m0 + BLOCK_M > fully_visible.end) ? NEEDS_MASK : 0;
            m_block.next(work_tile);
            if (lane < 2) flags_of(i, lane) = flags | (m_block.head < params.group ? 0 : LAST_M_BLOCK);
            __syncwarp();  // all lanes have written before lane 0 arrives
            if (lane == 0) mbarrier_arrive(QPipeline::full(base, stage_of(i)));
            ++i;
        }
        __syncwarp();  // all lanes have read the work tile
        if (thread_index_x() % 32 == 0) WorkTilePipeline::release(base, opaque(tile_index));
    }
    TIMELINE(done);
}

// Warps 2 and 3, one thread each: store what a consumer has staged.
struct StoreWarp {
    const BwdParams& params;
    const SmemAddr base;
    const unsigned consumer;

    __device__ __forceinline__ void run() const {
        const SmemAddr from = base + STAGING_AT + consumer * STAGING_BYTES;
        int previous_dQ_tile = -1;  // of the m_block of the previous description, whose dQ is staged now; -1: none
        wait_staging(0);            // the consumer's first commit has no data
        release_staging();
#pragma unroll 1
        for (unsigned n = 0;; ++n) {
            // Read while the consumer stages dQ: usually another block has stored already.
            const bool already_stored = previous_dQ_tile >= 0 && is_stored(previous_dQ_tile);
            wait_staging(n + 1);
            const volatile StagedStore& entry = staged_store(n);
            const int kind = entry.m0;
            unsigned* first_store = nullptr;  // semaphore to signal if this block stores, instead of adding
            if (kind == StagedStore::dV || kind == StagedStore::dK) {
                if (!NonFinite::at(smem, consumer))
                    tma_store(kind == StagedStore::dV ? params.dV_map : params.dK_map, 0, entry.n0 + 64 * consumer,
                              entry.h, entry.b, from);
            } else {
                if (previous_dQ_tile >= 0) first_store = store_or_add(previous_dQ_tile, from, already_stored);
                if (kind >= 0)
                    previous_dQ_tile =
                        (entry.b * opaque(params.Hk) * params.group + entry.h) * query_tiles<BLOCK_M>(params.score) +
                        kind / BLOCK_M;
            }
            release_staging();
            if (first_store) signal_first_store(first_store);
            if (kind == StagedStore::LAST_DQ) break;
        }
        TIMELINE(done);
    }
    __device__ __forceinline__ unsigned* dQ_semaphore(int tile) const {
        return reinterpret_cast<unsigned*>(params.dQ_accum) + semaphore_index(tile, consumer);
    }
    __device__ __forceinline__ bool is_stored(int tile) const {
        return counter_reached(dQ_semaphore(tile), FIRST_STORED);
    }
    // Stores or adds the staged dQ. Returns the tile's semaphore if this block stores, otherwise nullptr.
    __device__ __forceinline__ unsigned* store_or_add(int tile, SmemAddr from, bool already_stored) const {
        unsigned* const semaphore = dQ_semaphore(tile);
        const long long tiles =
            static_cast<long long>(params.B) * params.Hk * params.group * query_tiles<BLOCK_M>(params.score);
        float* const to = params.dQ_accum + dQ_index(tiles, tile, consumer);
        if (!already_stored && arrive_first(semaphore)) {
            bulk_store(to, from, 4 * DQ_CONSUMER_FLOATS);
            return semaphore;
        }
        tma_reduce_add(to, from, 4 * DQ_CONSUMER_FLOATS);
        return nullptr;
    }
    __device__ __forceinline__ void wait_staging(unsigned n) const {
        TIMELINE(wait_dQ);
        mbarrier_wait(Barriers::FulldQ::at(base, consumer), n % 2);
        TIMELINE(store_dQ);
    }
    __device__ __forceinline__ void release_staging() const {
        tma_store_commit();
        tma_store_wait_read();
        mbarrier_arrive(Barriers::EmptydQ::at(base, consumer));
    }
};
