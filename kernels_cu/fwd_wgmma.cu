// Rung 4: persistent, warp-specialised attention forward on Hopper: warpgroup MMA (wgmma), fed by TMA.
//
// A work tile is BLOCK_M query rows of one head. Warp 0 loads K and V, warp 1 loads Q, and warp 2 runs the tile
// scheduler. Each consumer warpgroup computes 64 query rows.
//
// clang-format off
//   producer      K0  K1 V0  K2 V1  K3 V2 ...  next work tile ...    STAGES stages of K and of V, each with a full and
//                                                                     an empty mbarrier
//   consumer 0    QK1 PV0 | softmax1           | QK2 PV1 | softmax2   time ->
//   consumer 1            | QK1 PV0 | softmax1           | QK2 PV1
//   consumer 2                      | QK1 PV0 | softmax1
//                 ping-pong: while one consumer uses the tensor cores, the others compute exponentials
//
//   shared memory: Q [BLOCK_M / 64] | K [STAGES] | V [STAGES] | O [BLOCK_M / 64], all or half of it | mbarriers
// clang-format on
//
// S = Q K^T reads both operands from shared memory. P stays in registers as the A operand of O += P V; V is MN-major.
// Warp specialisation and ping-pong are those of FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
//
// Deferred rescaling: P = exp2((S - m) scale log2 e) uses the maximum m of the row's first tile. Only if the sum of a
// tile's P exceeds P_SUM_LIMIT is m raised, O rescaled, and P computed again from S. The result is the same up to
// rounding; the maximum leaves the critical path (+5% at D = 64, +9% at D = 128). FlashAttention-4 also skips most
// rescales. With ALiBi and a causal mask, the last keys of a row have the largest biases, so with ALiBi the key tiles
// are visited in descending order (not with a block map, whose lists ascend).
//
// In a ragged batch, rows of a TMA box beyond the end of the sequence are out of bounds, so no row of the next sequence
// is read or written. A masked score is -INF, and its P is 0. If O of a warp's 16 rows is not finite, non_finite.cuh
// recomputes these rows. In the mainloop, one wait covers Q K^T of a tile and P V of the previous tile. The last P V
// has a wait of its own: LSE and 1 / l are computed, and the next work tile is fetched, while it runs.
//
// Names that end in _AT are offsets in shared memory, in bytes. Measurements: experiments/008_hopper, 014_scores,
// 016_ragged.
#define FALLBACK_INLINE __forceinline__
#include "pipeline.cuh"
#include "mask_wgmma.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"
#include "tile_scheduler.cuh"
#include "block_sparse.cuh"
#include "bias_tiles.cuh"
#include "epilogue.cuh"
#include "n_block_range.cuh"
#include "ping_pong.cuh"

constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // padded with zeros
// The scheduler warp needs more registers to read a block map; three consumers leave none for it.
constexpr bool READS_BLOCK_MAP = Head::MAPPED && CONSUMERS < 3;
constexpr int PRODUCER_REGISTERS = READS_BLOCK_MAP ? 72 : CONSUMERS >= 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = READS_BLOCK_MAP ? 216 : CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : 232;
static_assert(BLOCK_M % 64 == 0 && CONSUMERS <= 4, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "BLOCK_N is a multiple of 16 (wgmma steps), at most 256");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "TMA requires rows of a multiple of 16 bytes");

using Queries = Swizzled<64, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Values = Swizzled<BLOCK_N, DV_PAD>;
using Outputs = Swizzled<64, DV_PAD>;

// Release K after Q K^T instead of after P V, so that the next K tile loads during P V: up to +1% with two consumers.
// With three, the additional wait costs 0.5%, because another consumer uses the tensor cores meanwhile.
constexpr bool EARLY_K_RELEASE = CONSUMERS != 3 && !Head::MAPPED && !BIAS_TILES;
// Offsets in shared memory, in bytes.
constexpr unsigned K_AT = CONSUMERS * Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES;
using Bias = BiasTiles<V_AT + STAGES * Values::BYTES>;
constexpr unsigned O_AT = Bias::END;
using OBuffer = OutputBuffer<Outputs, Queries, CONSUMERS, Bias::END>;
constexpr bool SEPARATE_O = OBuffer::SEPARATE;
constexpr unsigned BARRIERS_AT = OBuffer::END;
static_assert(SMEM_BYTES == BARRIERS_AT + 1024, "spec and kernel disagree on shared memory");

// The mbarriers: pipelines of K and of V; a full and an empty one for each consumer's Q; the scheduler's.
using KPipeline = TilePipeline<Keys, K_AT, BARRIERS_AT>;
using VPipeline = TilePipeline<Values, V_AT, KPipeline::END>;
using FullQ = BarrierArray<VPipeline::END, CONSUMERS>;
using EmptyQ = BarrierArray<FullQ::END, CONSUMERS>;
using Scheduler = SchedulerPipeline<EmptyQ::END>;
using KeyTileEntries = StageEntries<Scheduler::END, STAGES>;  // with a block map
constexpr unsigned TILE_LISTS_AT = (KeyTileEntries::END + 7) / 8 * 8;
static_assert(TILE_LISTS_AT + TileLists::BYTES <= SMEM_BYTES, "barriers and lists must fit in 1024 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(KPipeline::full(base, stage), 1);
        mbarrier_init(VPipeline::full(base, stage), 1);
        mbarrier_init(KPipeline::empty(base, stage), 4 * CONSUMERS);  // one lane of each consumer warp
        mbarrier_init(VPipeline::empty(base, stage), 4 * CONSUMERS);
    }
    for (unsigned consumer = 0; consumer < CONSUMERS; ++consumer) {
        mbarrier_init(FullQ::at(base, consumer), 1);
        mbarrier_init(EmptyQ::at(base, consumer), 4);
    }
    Scheduler::init_barriers(base, 2 + 128 * CONSUMERS);  // the two load threads and all consumer threads
    if (Head::MAPPED) TileLists::init_barriers(base + TILE_LISTS_AT);
    fence_proxy_async();
}

// The thread that loads K and V of all work tiles, in the order of use: K of key tile j before V of key tile j - 1.
__device__ __forceinline__ void load_KV(char* smem, const View<const dtype>& K, const View<const dtype>& V,
                                        const TensorMap& K_map, const TensorMap& V_map, const TensorMap& bias_map,
                                        int group, const Score& score) {
    const SmemAddr base = smem_address(smem);
    unsigned pipe_index = 0;  // index in the pipeline of the work tile's first key tile
    TileLists lists(smem + TILE_LISTS_AT);
    Scheduler::Consumer scheduler(smem);
#pragma unroll 1
    while (scheduler.next(!SCHEDULE_LATE)) {
        const WorkTileRange work_tile(scheduler.tile, score);
        const int h = work_tile.h() / group, b = work_tile.b;
        const SeqlenInfo sequence = work_tile.sequence(score);
        // A broadcast dimension (stride 0) has size 1 in the tensor map: its coordinate is 0.
        const auto load_K = [&](int j, int n0, unsigned entry) {
            const unsigned i = pipe_index + j, stage = stage_of(i);
            TIMELINE(wait_empty);
            KPipeline::acquire(base, i);
            TIMELINE(load);
            if (Head::MAPPED) KeyTileEntries::entry(smem, stage) = entry;
            KPipeline::load(base, i, K_map, sequence.key_box(n0), K.stride_h ? h : 0,
                            sequence.key_batch(K.stride_b ? b : 0), Bias::STAGE_BYTES);
            if (BIAS_TILES)
                Bias::load(base, stage, bias_map, score, work_tile.h(), b, work_tile.row0, n0,
                           KPipeline::full(base, stage));
        };
        const auto load_V = [&](int j, int n0) {
            const unsigned i = pipe_index + j;
            TIMELINE(wait_empty);
            VPipeline::acquire(base, i);
            TIMELINE(load);
            VPipeline::load(base, i, V_map, sequence.key_box(n0), V.stride_h ? h : 0,
                            sequence.key_batch(V.stride_b ? b : 0));
        };
        pipe_index += work_tile.load_key_tiles(lists, load_K, load_V, [&] { scheduler.release(); });
    }
}

// The thread that loads Q of all work tiles, 64 rows for each consumer.
__device__ __forceinline__ void load_Q(char* smem, const View<const dtype>& Q, const TensorMap& Q_map,
                                       const Score& score) {
    const SmemAddr base = smem_address(smem);
    Scheduler::Consumer scheduler(smem);
#pragma unroll 1
    while (scheduler.next()) {
        const WorkTileRange work_tile(scheduler.tile, score);
        const int h = Q.stride_h ? work_tile.h() : 0, b = Q.stride_b ? work_tile.b : 0;
        const SeqlenInfo sequence = work_tile.sequence(score);
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            TIMELINE(wait_empty_Q);
            mbarrier_wait(EmptyQ::at(base, consumer), scheduler.phase() ^ 1);
            TIMELINE(load_Q);
            Queries::load(base + consumer * Queries::BYTES, Q_map, sequence.query_box(work_tile.row0 + 64 * consumer),
                          h, sequence.query_batch(b), FullQ::at(base, consumer));
        }
    }
}

// The scheduler warp: publishes the block's work tiles, and with a block map the list of key tiles of each.
__device__ __forceinline__ void schedule_work_tiles(char* smem, unsigned heads, unsigned H, unsigned group,
                                                    unsigned* tile_counter, const Score& score) {
    Scheduler::SchedulerProducer producer{smem};
#if RAGGED || BLOCK_MAP
    TileLists lists(smem + TILE_LISTS_AT);
#if RAGGED
    const LongestFirst<QueryTiles> order(score);
#else
    const LongestFirst<QueryTiles> order(score, H);
#endif
    producer.produce_all(order, heads, group, tile_counter, [&](const WorkTile& tile) {
        if (!Head::MAPPED) return;
        const WorkTileRange work_tile(tile, score);
        const Head head(work_tile.sequence(score), work_tile.h());
        if (work_tile.tiles > 0) lists.write(head, work_tile.row0, work_tile.range);
    });
#else
    if (!elect()) return;
    const auto publish = [&](unsigned tile, unsigned head) { producer.publish(WorkTile(tile * BLOCK_M, head, H)); };
    if constexpr (STAGGERED && CAUSAL) for_each_window_work_tile(score, query_tiles<BLOCK_M>(score), heads, publish);
    else for_each_work_tile<true>(query_tiles<BLOCK_M>(score), heads, publish);
    producer.publish(WorkTile());  // invalid: no more work tiles
#endif
}

// A consumer warpgroup: the mainloop and the epilogue of all work tiles, 64 query rows of each.
__device__ __forceinline__ void consumer_warpgroup(char* smem, unsigned warp, unsigned lane, const View<const dtype>& Q,
                                                   const View<const dtype>& K, const View<const dtype>& V,
                                                   const View<dtype>& O, float* LSE, const TensorMap& O_warp_map, int H,
                                                   int group, const Score& score) {
    const bool store_lane = lane == 0;
    const float exponent = Head::unit_of(score) * Head::LOG2E;
    const int g = lane / 4, q = lane % 4;
    unsigned next_pipe_index = 0;  // index in the pipeline of the next work tile's first key tile
    int tiles_to_skip = 0;         // STAGGERED: last tiles of the previous work tile, which only other consumers see
    // The last consumer arrives at the first one's warp scheduler barrier, so that the first one has the first turn.
    start_ping_pong(warp / 4 - 1);

    Scheduler::Consumer scheduler(smem);
#pragma unroll 1
    for (bool more = scheduler.next(); more;) {
        // Values from shared memory are uniform over the warp, which the compiler does not know. With uniform() it
        // keeps addresses and descriptors in uniform registers: 60 instead of 84 instructions per key tile (D = 128,
        // causal).
        const SmemAddr base = uniform(smem_address(smem));
        const unsigned warp = uniform(threadIdx.x / 32), consumer = warp / 4 - 1, pipe_index = uniform(next_pipe_index);
        const WorkTileRange work_tile(uniform(scheduler.tile), score);
        const unsigned phase = scheduler.phase();
        const WarpSchedulerBarrier turn(consumer);
        // Each warp stores its 16 rows of O by itself.
        const SmemAddr O_smem = OBuffer::warp_rows(base, consumer, warp);
        const int m0 = work_tile.row0 + 64 * consumer;  // first row of the warpgroup
        const int first_row = m0 + warp % 4 * 16;       // first row of the warp
        const Head head(work_tile.sequence(score), work_tile.h());
        const Range own = n_block_range(head, m0, m0 + 64);  // key tiles that the warpgroup sees
        const int tiles = Head::MAPPED ? work_tile.tiles : m0 < head.Sq ? own.end - own.begin : 0;
        const int first_own = work_tile.first_own_tile(own, tiles);
        // Index of the last key tile. With a block map it is unknown until the tile with LAST_TILE arrives.
        int last = Head::MAPPED && tiles > 0 ? 0x7fffffff : first_own + tiles - 1;
        // Keys that all rows of the warp see.
        const Range fully_visible = head.fully_visible_keys<Head::MAPPED>(first_row, first_row + 16);
        const int scheduled_end = ping_pong_end(head, work_tile, first_own);
        SoftmaxState softmax;
        float S[BLOCK_N / 2];
        unsigned P[BLOCK_N / 16][4];
        // Wide heads: recompute the descriptors, which would not fit in registers.
        const auto address = [](SmemAddr tile) { return D_PAD > 128 || DV_PAD > 128 ? uniform(tile) : tile; };
        const auto mma_QK = [&](int j) {
            const Descriptor Q_smem = Queries::k_major(address(base + consumer * Queries::BYTES));
            const Descriptor K_smem = Keys::k_major(address(base + K_AT + stage_of(pipe_index + j) * Keys::BYTES));
            wgmma_fence();
            TIMELINE(multiply);  // before the fence, it would cost 14 more instructions per key tile
#pragma unroll
            for (int step = 0; step < D_PAD / 16; ++step)
                wgmma<Order::K_MAJOR>(S, Q_smem + Queries::k_step(step), K_smem + Keys::k_step(step), step > 0);
            wgmma_commit();
        };
        const auto wait_K = [&](int j) { KPipeline::wait(base, pipe_index + j); };
        const auto wait_V = [&](int j) { VPipeline::wait(base, pipe_index + j); };
        const auto release_K = [&](int j) { if (lane == 0) KPipeline::release(base, pipe_index + j); };
        const auto release_V = [&](int j) { if (lane == 0) VPipeline::release(base, pipe_index + j); };
        const auto release_Q = [&] { if (SEPARATE_O && lane == 0) mbarrier_arrive(EmptyQ::at(base, consumer)); };
        const auto mma_PV = [&](int j) {
            wait_V(j);
            wgmma_fence();
            const Descriptor V_smem = Values::mn_major(address(base + V_AT + stage_of(pipe_index + j) * Values::BYTES));
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; ++step)
                wgmma<Order::MN_MAJOR>(softmax.O, P[step], V_smem + Values::mn_step(step), step > 0 || j > first_own);
            wgmma_commit();
        };
        const auto wait_mma = [&] {
            wgmma_wait<0>();
            warpgroup_fence_operand(S);
            warpgroup_fence_operand(softmax.O);
        };
        const auto read_key_tile = [&](int j) -> KeyTile {  // must be called before K is released
            if (!Head::MAPPED) return {work_tile.keys_at(j), !Head::ELEMENT_MASK};
            // uniform: all lanes have read the word before one lane releases K.
            const unsigned word = uniform(KeyTileEntries::entry(smem, stage_of(pipe_index + j)));
            if (word & LAST_TILE) last = j;
            return {static_cast<int>(word / (2 * LAST_TILE)) * BLOCK_N, (word >> consumer & 1) != 0};
        };
        const auto load_pair_mask = [&](KeyTile tile) {
            PairMask visible_bits;
            if (Head::BY_PAIR) visible_bits.load(head, first_row + g, tile.n0, tile.fully_visible);
            return visible_bits;
        };
        // S becomes the raw scores (score_mod.cuh), -INF where masked.
        const auto score_mod_and_mask = [&](int j, KeyTile tile, PairMask pair_mask) {
            const int n0 = tile.n0, column = n0 + 2 * q, row = first_row + g;
            const auto at = [&](int i) { return ScoreIndex(row, column, i / 2 % 2 * 8, i / 4 * 8 + i % 2); };
            if (BIAS_TILES) {
                Bias::score_mod(S, head, base, stage_of(pipe_index + j), consumer, row, column, warp, lane);
                release_K(j);
            }
#pragma unroll
            for (int i = 0; i < (Head::LINEAR || BIAS_TILES ? 0 : BLOCK_N / 2); ++i) S[i] = head.raw(S[i], at(i));
            apply_mask(S, head, row, n0, q, fully_visible, tile.fully_visible, pair_mask);
        };
        // Skips a key tile that only other consumers see. This consumer still takes part in the barriers, which count
        // the arrivals of all consumers.
        const auto skip_tile = [&](int j) {
            if (!STAGGERED && j > 0 && j < scheduled_end) {
                turn.wait();
                turn.pass();
            }
            wait_K(j);
            release_K(j);
            wait_V(j);
            release_V(j);
        };

        wgmma_discard(softmax.O);  // the first P V overwrites it
        if (STAGGERED) {
#pragma unroll 1
            for (int j = -tiles_to_skip; j < 0; ++j) skip_tile(j);
        }
        TIMELINE(wait_Q);
        mbarrier_wait(FullQ::at(base, consumer), phase);
#pragma unroll 1
        for (int j = 0; j < first_own; ++j) skip_tile(j);
        if (tiles > 0) {
            TIMELINE(wait_K);
            wait_K(first_own);
            // Ping-pong starts with the second key tile of the work tile.
            const bool ping_pong = !STAGGERED && first_own > 0 && first_own < scheduled_end;
            if (ping_pong) turn.wait();
            mma_QK(first_own);
            if (ping_pong) turn.pass();
            const KeyTile first = read_key_tile(first_own);
            const PairMask visible_bits = load_pair_mask(first);
            wgmma_wait<0>();
            warpgroup_fence_operand(S);
            TIMELINE(softmax);
            if (!BIAS_TILES) release_K(first_own);
            score_mod_and_mask(first_own, first, visible_bits);
            softmax.update<true>(P, S, exponent);
            apply_dropout(P, head, first_row, first.n0);
            if (last > first_own) wait_K(first_own + 1);
#pragma unroll 1
            for (int j = first_own + 1; j <= last; ++j) {
                TIMELINE(wait_barrier);
                if (j < scheduled_end) turn.wait();
                mma_QK(j);
                mma_PV(j - 1);
                if (j < scheduled_end) turn.pass();
                if (EARLY_K_RELEASE) {
                    wgmma_wait<1>();
                    release_K(j);
                    if (j == last) release_Q();
                }
                const KeyTile tile = read_key_tile(j);
                const PairMask visible_bits = load_pair_mask(tile);  // overlaps with the MMAs
                wait_mma();
                TIMELINE(softmax);
                release_V(j - 1);
                if (!EARLY_K_RELEASE && !BIAS_TILES) release_K(j);
                if (!EARLY_K_RELEASE && j == last) release_Q();
                score_mod_and_mask(j, tile, visible_bits);
                softmax.update<false>(P, S, exponent);
                apply_dropout(P, head, first_row, tile.n0);
                if (j < last) wait_K(j + 1);  // no TIMELINE mark: a fourth mark in the loop costs 1% of time
            }
        }
        const int visited_tiles = Head::MAPPED ? last + 1 : work_tile.tiles;
        float inverse_l[2];
        const auto finalize_row_stats = [&] {  // overlaps with the last P V: LSE, 1 / l, the next work tile
            finalize_rows(softmax, head, LSE, work_tile.head, first_row + g, q, inverse_l);
            if (!SCHEDULE_LATE || last + 1 >= visited_tiles) more = scheduler.next();
        };
        // The last P V has its own copy of the code, outside the loop: 40 fewer instructions in a causal kernel, +2.7%
        // at D = 128.
        if (tiles > 0) {
            TIMELINE(multiply);
            mma_PV(last);
            finalize_row_stats();
            wgmma_wait<0>();
            warpgroup_fence_operand(softmax.O);
            release_V(last);
        } else {
            finalize_row_stats();
#pragma unroll
            for (int i = 0; i < DV_PAD / 2; ++i) softmax.O[i] = 0.0f;
        }
        if (last <= first_own) release_Q();
        // At most STAGES tiles: after the block's last work tile they are not skipped, so their stages are never
        // released, and the producer must not wait for these stages.
        tiles_to_skip = STAGGERED ? min(visited_tiles - last - 1, static_cast<int>(STAGES)) : 0;
#pragma unroll 1
        for (int j = last + 1; j < visited_tiles - tiles_to_skip; ++j) skip_tile(j);
        if (SCHEDULE_LATE && last + 1 < visited_tiles) more = scheduler.next();
        next_pipe_index += visited_tiles;

        TIMELINE(store);
        if (SEPARATE_O && store_lane) tma_store_wait_read();         // the previous O has left the buffer
        if (!SEPARATE_O) named_barrier_sync(CONSUMER_BARRIER + consumer, 128);  // all four warps have read Q
        __syncwarp();
        // A masked key has P = 0, but 0 * NaN is NaN: rows that are not finite are recomputed. Rare.
        if (Head::HIDES && __any_sync(0xffffffffu, !softmax.finite())) {
            attend_non_finite<16, 1>(Q, K, V, O, LSE, group, score, work_tile.b, work_tile.h(), H, first_row, 0);
            if (!SEPARATE_O && store_lane) mbarrier_arrive(EmptyQ::at(base, consumer));
            continue;
        }
        OBuffer::store(softmax, inverse_l, O_smem, O_warp_map, head, work_tile.h(), work_tile.b, first_row,
                       lane, store_lane);
        if (!SEPARATE_O && store_lane) {
            tma_store_wait_read();
            mbarrier_arrive(EmptyQ::at(base, consumer));
        }
    }
    if (store_lane) tma_store_wait_read();  // shared memory must outlive the stores

}

// Clears the tile counter. Programmatic dependent launch: fwd_wgmma starts meanwhile and waits before its first
// atomicAdd.
extern "C" __global__ __launch_bounds__(32) void fwd_wgmma_clear(unsigned* tile_counter,
                                                                 const __grid_constant__ Score score) {
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) *tile_counter = 0;
#if RAGGED
    const int b = threadIdx.x;  // prefetch the first offsets, which all blocks read at once
    if (b <= score.sequences) {
        prefetch_L2(score.cu_seqlens_q + b * score.cu_seqlens_q_stride_b);
        prefetch_L2(score.cu_seqlens_k + b * score.cu_seqlens_k_stride_b);
    }
#endif
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void fwd_wgmma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,      // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_warp_map, // boxes of 16 rows
    const __grid_constant__ TensorMap bias_map,   // boxes of 64 rows, if BIAS_TILES
    int H,
    int heads,                                    // B * H
    int group,                                    // H / Hk
    const __grid_constant__ Score score,
    unsigned* tile_counter) {                     // work tiles drawn so far, beyond the first of each block
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    if (Head::MAPPED) griddepcontrol_wait();  // the previous kernel writes the block map
    __syncthreads();  // the mbarriers are initialised before they are used
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    if (warp < 4) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0 && elect()) load_KV(smem, K, V, K_map, V_map, bias_map, group, score);
        else if (warp == 1 && elect()) load_Q(smem, Q, Q_map, score);
        else if (warp == 2) schedule_work_tiles(smem, heads, H, group, tile_counter, score);
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consumer_warpgroup(smem, warp, lane, Q, K, V, O, LSE, O_warp_map, H, group, score);
    TIMELINE(done);
}
