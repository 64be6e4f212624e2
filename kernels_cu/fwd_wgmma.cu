// Rung 4: persistent, warp-specialised attention forward on Hopper: warpgroup MMA (wgmma), fed by TMA.
//
// A work tile is BLOCK_M query rows of one head. In the producer warpgroup, warp 0 loads K and V (with keys in pages
// warp 3 loads V), warp 1 loads Q, and warp 2 runs the tile scheduler. Each consumer warpgroup computes 64 query rows.
// fwd_wgmma.py defines BLOCK_M, BLOCK_N (keys of a tile) and STAGES as macros, and the size of shared memory.
//
// clang-format off
//   producer      K0  K1 V0  K2 V1  K3 V2 ...  next work tile ...    STAGES stages of K and of V, each with a full and
//                                                                     an empty mbarrier
//   consumer 0    QK1 PV0 | softmax1           | QK2 PV1 | softmax2   time ->
//   consumer 1            | QK1 PV0 | softmax1           | QK2 PV1
//   consumer 2                      | QK1 PV0 | softmax1
//                 ping-pong: while one consumer uses the tensor cores, the others compute exponentials
//
//   shared memory: Q [BLOCK_M / 64] | K [STAGES] | V [STAGES] | bias [STAGES] | O [BLOCK_M / 64] | mbarriers, lists
//                  bias: only with BIAS_TILES; O: all or half of it, or in Q's buffer (epilogue.cuh). With
//                  MERGE_RANGES (key_splits.cuh), between bias and O: the sums over earlier ranges of keys, if they fit
// clang-format on
//
// S = Q K^T reads both operands from shared memory. P stays in registers as the A operand of O += P V; V is MN-major.
// Warp specialisation and ping-pong: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). Q K^T of a key tile and P V
// of the previous one are issued together; softmax starts when both are complete. Softmax during P V (IntraWGOverlap)
// gained 0 ... 16% alone; deferred rescaling gained more and replaced it (experiments/008_hopper).
//
// A masked score is -INF, and its P is 0. With Head::HAS_MASK, if O of one of a warp's 16 rows is not finite,
// non_finite.cuh recomputes all 16. In a ragged batch, rows of the next sequence are out of bounds (tma.cuh).
//
// Building blocks: fwd_tiles.cuh (arguments, shared memory), fwd_load.cuh, fwd_consumer.cuh (waits, turns, drained
// tiles, scores), tile_scheduler.cuh (order of work tiles), n_block_range.cuh (order of key tiles), score_mod.cuh,
// mask.cuh, softmax.cuh, epilogue.cuh. How it works, and where to change it: docs/hopper-forward.md.
#define FALLBACK_INLINE __forceinline__  // non_finite.cuh explains why
#include "fwd_consumer.cuh"
#include "fwd_load.cuh"
#include "key_range_consumer.cuh"  // how the other three kernels from this source differ
#include "tile_scheduler_stream_k.cuh"

// ---- producer warps

// Loads K, V, or both, of all work tiles: one thread, or with LOAD_BY_WARP a warp (fwd_load.cuh).
template <Load LOAD>
__device__ __forceinline__ void load_KV(char* smem, const Arguments& args) {
    unsigned pipe_index = 0;  // index of the work tile's first key tile in the pipelines
    TileLists lists(smem + TILE_LISTS_AT);
    Scheduler::Reader scheduler(smem);
#pragma unroll 1
    while (scheduler.next(/*release_now=*/!SCHEDULE_LATE)) {
        const WorkTileRange work_tile(scheduler.tile, args.score);
        const KeyTileLoader<LOAD> loader(smem, args, work_tile, pipe_index);
        pipe_index += work_tile.load_key_tiles(lists, loader, [&] { scheduler.release(); });
    }
}

// The thread that loads Q of all work tiles, 64 rows for each consumer.
__device__ __forceinline__ void load_Q(char* smem, const Arguments& args) {
    const SmemAddr base = smem_address(smem);
    Scheduler::Reader scheduler(smem);
#pragma unroll 1
    while (scheduler.next()) {
        const WorkTileRange work_tile(scheduler.tile, args.score);
        // A broadcast dimension (stride 0) has size 1 in the tensor map.
        const int h = args.Q.stride_h ? work_tile.h() : 0, b = args.Q.stride_b ? work_tile.b : 0;
        const SeqlenInfo sequence = work_tile.sequence(args.score);
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            TIMELINE(wait_empty_Q);
            mbarrier_wait(EmptyQ::at(base, consumer), scheduler.phase() ^ 1);  // ^ 1: as Pipeline::acquire
            TIMELINE(load_Q);
            if (KEY_SPLITS) load_Q_by_warp(base, args, work_tile, sequence, b, consumer);
            else
                Queries::load(base + consumer * Queries::BYTES, args.Q_map,
                              sequence.tma_query_row(work_tile.row0 + WARPGROUP_ROWS * consumer), h,
                              sequence.tma_query_batch(b), FullQ::at(base, consumer));
        }
    }
}

// The scheduler warp: publishes the block's work tiles, and with a block map the list of key tiles of each.
// publish_all, or publish_stream_k, chooses the order of the work tiles.
__device__ __forceinline__ void schedule_work_tiles(char* smem, const Arguments& args) {
    Scheduler::Writer work_tiles{smem};
    if (STREAM_K) return publish_stream_k(work_tiles, args);
    TileLists lists(smem + TILE_LISTS_AT);
    const unsigned splits = key_splits(args);
    // The order for causal windows is used only with STAGGERED (n_block_range.cuh), which implies a left window bound.
    work_tiles.publish_all</*CAUSAL_WINDOW=*/STAGGERED && CAUSAL>(
        args.score, args.batch_heads * splits, args.H, args.group, args.tile_counter,
        [&](const WorkTile& tile) {
            if (!Head::HAS_BLOCK_MAP) return;
            const WorkTileRange work_tile(tile, args.score);
            const Head head(work_tile.sequence(args.score), work_tile.h());
            if (work_tile.tiles > 0) lists.write(head, work_tile.row0, work_tile.n_blocks);
        },
        splits);
}

// ---- consumer warpgroups

// One consumer warpgroup and its 64 query rows of one work tile. fwd_consumer.cuh has what is not an MMA. j is the
// index of a key tile in the work tile. Inherited members:
//
//   WorkTile (work_tile.cuh)             b, h(), batch_head, row0 (first row of the work tile, PACK_GQA: of the warp)
//   ConsumerTiles (n_block_range.cuh)    head (its Head), warp, consumer, warp_row (first row of the warp's 16),
//                                        own_tiles: how many key tiles the consumer sees (with a block map: at most);
//                                        first_own, last: their first and last j
//   WorkTileConsumer (fwd_consumer.cuh)  args, base, pipe_index (of tile 0), turn,
//                                        turns_end (ping-pong for j < turns_end),
//                                        state: the thread's lane, g, q, and what lasts longer than a work tile
//   KeyRangeConsumer (key_range_consumer.cuh)  what differs between the four kernels, such as begins_key_range
struct ConsumerWarpgroup : KeyRangeConsumer {
    using KeyRangeConsumer::KeyRangeConsumer;

    // All key tiles, except for P V of the last one. In fwd_wgmma they are one range of keys.
    __device__ __forceinline__ void mainloop(SoftmaxState& softmax, FragmentS& S, FragmentP& P) {
#pragma unroll 1
        for (int begin = first_own, end;; begin = end + 1) {
            first_tile(softmax, S, P, begin);
            later_tiles(softmax, S, P, begin);
            end = last_of_range(begin);
            if (end == last) return;
            mma_PV(softmax, P, end);
            wait_PV(softmax, end);
            store_earlier_keys(softmax, end + 1);
        }
    }

    // The key tiles of a range after its first one, `begin`.
    __device__ __forceinline__ void later_tiles(SoftmaxState& softmax, FragmentS& S, FragmentP& P, int begin) {
#pragma unroll 1
        for (int j = begin + 1; j <= last_of_range(begin); ++j) {
            TIMELINE(wait_barrier);
            if (j < turns_end) turn.wait();
            mma_QK(S, j);
            mma_PV(softmax, P, j - 1);
            if (j < turns_end) turn.pass();
            KeyTile tile;
            if (SCORE_MOD_OVERLAPS_PV) {
                tile = masked_scores<1>(S, j);
                wait_PV(softmax, j - 1);
            } else {
                if (EARLY_K_RELEASE) {
                    wgmma_wait<1>();
                    release_K(j);
                    if (j == last) release_Q();
                }
                tile = read_key_tile(j);
                const ElementBits visible_bits = load_element_bits(tile);  // overlaps with the MMAs
                wgmma_wait<0>();
                warpgroup_fence_operand(S);
                warpgroup_fence_operand(softmax.O);
                TIMELINE(softmax);
                release_V(j - 1);
                if (!EARLY_K_RELEASE && !BIAS_TILES) release_K(j);
                if (!EARLY_K_RELEASE && j == last) release_Q();
                score_mod(S, j, tile);
                if (BIAS_TILES) release_K(j);
                mask(S, tile, visible_bits);
            }
            softmax.update<false>(P, S, state.scale_log2);
            apply_dropout(P, head, warp_row, tile.n0);
            if (j < last) wait_K(j + 1);  // no TIMELINE mark here: with a fourth, the kernel is 1% slower in `timeline`
        }
    }

    // Q K^T and softmax of the first key tile of a range.
    __device__ __forceinline__ void first_tile(SoftmaxState& softmax, FragmentS& S, FragmentP& P, int j) {
        TIMELINE(wait_K);
        wait_K(j);
        const bool ping_pong = first_tile_has_turn(j);
        if (ping_pong) turn.wait();
        mma_QK(S, j);
        if (ping_pong) turn.pass();
        const KeyTile first = masked_scores<0>(S, j, begins_key_range(j));
        softmax.update<true>(P, S, state.scale_log2);
        apply_dropout(P, head, warp_row, first.n0);
        if (last > j) wait_K(j + 1);
    }

    // The last P V is peeled: its own copy of the code, outside the loop, needs 40 fewer instructions in a causal
    // kernel than a condition in the loop (+2.7% at D = 128).
    __device__ __forceinline__ void last_PV(SoftmaxState& softmax, FragmentP& P, float (&O_scale)[2]) {
        TIMELINE(multiply);
        mma_PV(softmax, P, last);
        const EarlierFactors factors = merge_stats(softmax);
        finalize(softmax, O_scale);  // overlaps with P V
        fetch_next_work_tile();
        wait_PV(softmax, last);
        merge_O(softmax, factors);
        merge_blocks(softmax, O_scale);
    }

    // S = Q K^T
    __device__ __forceinline__ void mma_QK(FragmentS& S, int j) {
        const Descriptor Q_smem = Queries::k_major(address(base + consumer * Queries::BYTES));
        const Descriptor K_smem = Keys::k_major(address(base + KPipeline::tile_at(pipe_index + j)));
        wgmma_fence();
        TIMELINE(multiply);  // in the command `timeline`, a mark before the fence costs 14 more instructions per tile
#pragma unroll
        for (int step = 0; step < D_PAD / 16; ++step)
            wgmma<Order::K_MAJOR>(S, Q_smem + Queries::k_step(step), K_smem + Keys::k_step(step), step > 0);
        wgmma_commit();
    }

    // O += P V
    __device__ __forceinline__ void mma_PV(SoftmaxState& softmax, const FragmentP& P, int j) {
        wait_V(j);
        clear_invalid_V(j);
        wgmma_fence();
        const Descriptor V_smem = Values::mn_major(address(base + VPipeline::tile_at(pipe_index + j)));
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(softmax.O, P[step], V_smem + Values::mn_step(step),
                                   step > 0 || (j > first_own && !begins_key_range(j)));
        wgmma_commit();
    }

    // O / l to global memory.
    __device__ __forceinline__ void epilogue(const SoftmaxState& softmax, const float (&O_scale)[2]) {
        const SmemAddr O_smem = OBuffer::warp_rows(base, consumer, warp);
        TIMELINE(store);
        if (SEPARATE_O && state.store_lane) tma_store_wait_read();              // the previous O has left the buffer
        if (!SEPARATE_O) named_barrier_sync(CONSUMER_BARRIER + consumer, 128);  // O overwrites Q, which all have read
        __syncwarp();
        if (is_partial()) {  // O, m and l are those of one range of keys
            store_partial(softmax);
            if (!SEPARATE_O && state.store_lane) mbarrier_arrive(EmptyQ::at(base, consumer));
            return;
        }
        // A masked key has P = 0, but 0 * NaN is NaN. store_non_finite then recomputes rows, and stores all 16 of the
        // warp without OBuffer. Rare.
        if (Head::HAS_MASK && __any_sync(0xffffffffu, !softmax.finite())) {
            store_non_finite(softmax, O_scale);
            if (!SEPARATE_O && state.store_lane) mbarrier_arrive(EmptyQ::at(base, consumer));
            return;
        }
        OBuffer::store(softmax, O_scale, O_smem, args.O_warp_map, head, h(), b, warp_row, state.lane, state.store_lane);
        if (!SEPARATE_O && state.store_lane) {
            tma_store_wait_read();
            mbarrier_arrive(EmptyQ::at(base, consumer));
        }
    }

    // The tile's address. Wide heads: from uniform(), a volatile asm, which the compiler does not move out of the loop.
    // Thus the loop recomputes the descriptors; they would not fit in registers.
    static __device__ __forceinline__ SmemAddr address(SmemAddr tile) {
        return D_PAD > 128 || DV_PAD > 128 ? uniform(tile) : tile;
    }
};

// A consumer warpgroup: 64 query rows of each work tile of the block. The steps are called from here, not from one
// member function of ConsumerWarpgroup, and the mainloop has its own `if`, so that the compiler keeps barrier addresses
// and Philox's round keys (dropout) in uniform registers: 5 fewer instructions per key tile.
__device__ __forceinline__ void consume(char* smem, unsigned warp, unsigned lane, const Arguments& args) {
    ConsumerState state(smem, lane, args.score);
    start_ping_pong(warp / 4 - 1);
#pragma unroll 1
    for (state.has_work_tile = state.scheduler.next(); state.has_work_tile;) {
        ConsumerWarpgroup warpgroup(state, args);
        SoftmaxState softmax;
        float O_scale[2];
        wgmma_discard(softmax.O);  // the first P V overwrites it
        warpgroup.drain_first_tiles_and_wait_Q();
        ConsumerWarpgroup::FragmentS S;
        ConsumerWarpgroup::FragmentP P;
        if (warpgroup.own_tiles > 0) warpgroup.mainloop(softmax, S, P);
        if (warpgroup.own_tiles > 0) {  // a second `if`: see above
            warpgroup.last_PV(softmax, P, O_scale);
        } else {
            warpgroup.finalize(softmax, O_scale);
            warpgroup.fetch_next_work_tile();
#pragma unroll
            for (int i = 0; i < DV_PAD / 2; ++i) softmax.O[i] = 0.0f;
        }
        if (warpgroup.last <= warpgroup.first_own)
            warpgroup.release_Q();  // with two tiles or more, the mainloop has released it
        warpgroup.drain_last_tiles();
        warpgroup.epilogue(softmax, O_scale);
    }
    if (state.store_lane) tma_store_wait_read();  // shared memory must outlive the stores
}

#if INVARIANT || !(KEY_SPLITS || STREAM_K)  // the other two have no dynamic order
// Sets the tile counter of a dynamic order to 0; launched before fwd_wgmma. In a ragged batch, fwd_wgmma starts
// meanwhile (programmatic dependent launch): a block's first work tile has index blockIdx.x, and the scheduler warp
// waits for fwd_wgmma_clear before it draws the second one. With a block map, fwd_wgmma waits when it starts.
extern "C" __global__ __launch_bounds__(32) void fwd_wgmma_clear(unsigned* tile_counter,
                                                                 const __grid_constant__ Score score) {
    clear_tile_counter(tile_counter, score);
}
#endif

extern "C" __global__ __launch_bounds__(THREADS, 1) void fwd_wgmma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,      // boxes of 64 rows; KEY_SPLITS: of 16
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows, or PAGE_BOX (fwd_load.cuh)
    const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_warp_map,  // boxes of 16 rows
    const __grid_constant__ TensorMap bias_map,    // boxes of 64 rows, if BIAS_TILES
    int H,
    int batch_heads,  // B * H, or H if RAGGED
    int group,        // H / Hk
    const __grid_constant__ Score score,
    unsigned* tile_counter  // work tiles drawn so far, beyond the first of each block
#if KEY_SPLITS
    ,
    float* partials,  // SplitResults if splits > 1, else EarlierKeys that do not fit in shared memory
    int splits
#elif STREAM_K
    ,
    float* partials, int full_wave_tiles  // StreamKExchange; work tiles that are not split
#endif
) {
    extern __shared__ __align__(1024) char smem[];
    // LONG_SEQUENCES: the next kernel computes the sequences with few queries, on SMs that this one leaves idle
    // (cu_seqlens.cuh). SPLIT_KEYS: fwd_wgmma_combine starts, and waits for the results.
    if (LONG_SEQUENCES || SPLIT_KEYS) griddepcontrol_launch_dependents();
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    if (Head::HAS_BLOCK_MAP) griddepcontrol_wait();  // an earlier entry point writes the block map
    __syncthreads();                                 // the mbarriers are initialised before they are used
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

#if KEY_SPLITS
    const Arguments args = {Q,        K, V,           O,     LSE,   Q_map,        K_map,    V_map, O_warp_map,
                            bias_map, H, batch_heads, group, score, tile_counter, partials, splits};
#elif STREAM_K
    const Arguments args = {Q,        K, V,           O,     LSE,   Q_map,        K_map,    V_map,          O_warp_map,
                            bias_map, H, batch_heads, group, score, tile_counter, partials, full_wave_tiles};
#else
    const Arguments args = {Q,          K,        V, O,           LSE,   Q_map, K_map,       V_map,
                            O_warp_map, bias_map, H, batch_heads, group, score, tile_counter};
#endif

    if (warp < 4) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0 && (LOAD_BY_WARP || elect())) load_KV<LOAD_BY_WARP ? Load::K : Load::K_AND_V>(smem, args);
        else if (warp == 1 && elect()) load_Q(smem, args);
        else if (warp == 2) schedule_work_tiles(smem, args);
        else if (LOAD_BY_WARP && warp == 3) load_KV<Load::V>(smem, args);
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(smem, warp, lane, args);
    TIMELINE(done);
}
