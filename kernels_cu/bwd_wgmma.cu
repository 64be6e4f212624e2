// Rung 4 of the backward: dQ, dK and dV on Hopper's warpgroup MMA (wgmma), fed by TMA.
//
// A block owns BLOCK_N keys. K and V stay in shared memory, dK and dV in registers; the mainloop visits the m_blocks
// that attend to these keys. One warpgroup holds the load and store warps, two warpgroups are consumers. The kernel
// computes S^T = K Q^T and dP^T = V dO^T, so that the accumulators of P^T and dS^T are in the layout of an A operand.
// delta = rowsum(dO * O), from bwd_preprocess.
// clang-format off
//   warp 0      loads K and V once, Q and dO per m_block (STAGES tiles of each, with a full and an empty mbarrier)
//   warp 1      loads LSE and delta per m_block
//   warps 2, 3  dQ-store warps: TMA stores or adds one consumer's dQ from shared memory to dQ_accum
//   consumers   S^T = K Q^T | dP^T = V dO^T | dV += P^T dO | dK += dS^T Q | dQ = dS K       S1: S^T of m_block 1
//     wgmmas    S1  dP1           dQ0  dV1  dK1  S2  dP2           dQ1  dV2 ...   one consumer, HEAD_DIM <= 128
//     others        | P1   dS1 |      stage dQ0      | P2   dS2 |      stage dQ1  its other instructions
//     ping-pong (BLOCK_N = 128): only one consumer at a time is between the bars of | P dS |
//   BLOCK_N = 128: a consumer owns 64 keys; P^T and dS^T stay in registers (bwd_consumer.cuh). HEAD_DIM 129 ... 192
//     with HEAD_DIM_V <= 128: S^T, dP^T and dQ take turns in registers, and the wgmmas are S1 dP1 dV1 dQ0 dK1 S2 ...
//     (bwd_consumer_narrow_v.cuh).
//   BLOCK_N = 64 (other HEAD_DIM > 128, and if the case above spills): a consumer owns half of the queries of P^T and
//     dS^T, and half of the columns of dK, dV and dQ (bwd_consumer_wide.cuh). No ping-pong; the wgmmas are S1 dP1 dV1
//     dQ1 dK1 S2 ... If DETERMINISTIC, consumers add dQ from registers (red.global.add), ordered by warps 2 and 3.
//   shared memory: K, V [BLOCK_N] | Q [STAGES][BLOCK_M] | dO [DO_STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N] |
//                  P [2][BLOCK_M][BLOCK_N] if BLOCK_N = 64 | dQ, unless the consumers add it |
//                  bias [STAGES][BLOCK_M][BLOCK_N] | LSE, delta | mbarriers | block map of the keys
// clang-format on
// The first block that reaches a dQ tile stores, the others add in any order: the last bits of dQ vary between runs,
// those of dK and dV do not (dq_semaphore.cuh). DETERMINISTIC (bwd_wgmma_deterministic): blocks add in the order of
// their work tiles. SPLIT_GROUP (bwd_wgmma_split_group): a work tile has one query head of a group. STREAM_K
// (bwd_wgmma_stream_k): work tiles that do not fill a wave are split by queries (bwd_stream_k.cuh). In the last two,
// bwd_combine_group.cuh adds partial dK and dV. Warp roles: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
// Which header to edit for which change: docs/hopper-backward.md.
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#else
#define bwd_wgmma bwd_wgmma_deterministic
#define bwd_wgmma_postprocess bwd_wgmma_deterministic_postprocess
#endif
#ifdef SPLIT_GROUP
#define bwd_wgmma bwd_wgmma_split_group
#define bwd_wgmma_scheduler bwd_wgmma_split_group_scheduler
#define bwd_wgmma_postprocess bwd_wgmma_split_group_postprocess
#define bwd_wgmma_combine bwd_wgmma_split_group_combine
#endif
#ifdef STREAM_K
#define bwd_wgmma bwd_wgmma_stream_k
#define bwd_wgmma_postprocess bwd_wgmma_stream_k_postprocess
#define bwd_wgmma_combine bwd_wgmma_stream_k_combine
#endif
#define TIMELINE_BRANCH 1                // needs fewer registers (timeline.cuh)
#define FALLBACK_INLINE __forceinline__  // see non_finite.cuh
#include "bwd_combine_group.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_load.cuh"
#include "bwd_wgmma_steps.cuh"
#include "bwd_postprocess.cuh"
#include "bwd_wgmma_tiles.cuh"
#include "dq_semaphore.cuh"
#include "m_block_range.cuh"
#include "non_finite.cuh"
#include "tile_scheduler_bwd.cuh"

// Warp 0: loads K and V once, Q, dO and the bias per m_block.
__device__ __forceinline__ void load_tiles(const BwdBlock& block, const TensorMap& bias_map) {
    const BwdParams& params = block.params;
    const SmemAddr base = block.base;
    const auto load_K = [&] {
        load_key_tile<SmemLayoutK>(base + K_AT, params.K_map, params.K, block.head0, block.b, block.kv_head(),
                                   block.m_blocks.n0(), FullK::at(base, 0));
    };
    const auto load_V = [&] {
        load_key_tile<SmemLayoutV>(base + V_AT, params.V_map, params.V, block.head0, block.b, block.kv_head(),
                                   block.m_blocks.n0(), FullV::at(base, 0));
    };
    block.m_blocks.for_each([&](unsigned i, int head, int m0) {
        const unsigned stage = stage_of(i);
        if (i == 0) load_K();
        if (i == 0 && Head::HAS_BLOCK_MAP) load_V();  // with a block map, registers spill if V is loaded after Q
        TIMELINE(wait_empty);
        QPipeline::acquire(base, i);
        TIMELINE(load);
        load_query_tile<SmemLayoutQ>(base + Q_AT + stage * SmemLayoutQ::BYTES, params.Q_tile_map, params.Q, block.head0,
                                     block.b, block.first_head() + head, m0, QPipeline::full(base, stage), BIAS_BYTES);
#if BIAS
        SmemLayoutPdS::load_part(base + BIAS_AT + stage * BIAS_BYTES, bias_map, block.m_blocks.n0(), m0,
                                 params.score.bias.stride_h ? block.first_head() + head : 0,
                                 params.score.bias.stride_b ? block.b : 0, QPipeline::full(base, stage));
#endif
        if (i == 0 && !Head::HAS_BLOCK_MAP) load_V();
        TIMELINE(wait_empty);
        dOPipeline::acquire(base, i);
        TIMELINE(load);
        const unsigned dO_stage = stage_of<DO_STAGES>(i);
        load_query_tile<SmemLayoutdO>(base + dO_AT + dO_stage * SmemLayoutdO::BYTES, params.dO_tile_map, params.dO,
                                      block.head0, block.b, block.first_head() + head, m0,
                                      dOPipeline::full(base, dO_stage));
    });
    TIMELINE(done);
}

// Warp 1: loads LSE and delta per m_block.
__device__ __forceinline__ void load_stats(const BwdBlock& block) {
    block.m_blocks.for_each([&](unsigned i, int head, int m0) {
        load_LSE_and_delta<QPipeline>(block.params, block.base, reinterpret_cast<float*>(smem + STATS_AT), block.head0,
                                      block.H, block.first_head(), i, head, m0);
    });
    TIMELINE(done);
}

// dQ_warp and ConsumerWarpgroup: warps 2 and 3, and the consumers.
#if BLOCK_N == 64
#include "bwd_consumer_wide.cuh"
#elif HEAD_DIM > 128
#include "bwd_consumer_narrow_v.cuh"
#else
#include "bwd_consumer.cuh"
#endif

// Computes dK and dV of the n_block again if one of their values is not finite (non_finite.cuh). Possible causes: a
// masked P is 0, but 0 * NaN = NaN; and P is NaN for a row with a large LSE. With SPLIT_GROUP, and for a part of a work
// tile (STREAM_K), bwd_wgmma_combine computes them again.
__device__ __forceinline__ void non_finite_fallback(const BwdBlock& block, bool non_finite) {
    const BwdParams& params = block.params;
    if (!SPLIT_GROUP && block.slot() < 0 && named_barrier_or(CONSUMERS_BARRIER, BOTH_CONSUMERS, non_finite)) {
        if (threadIdx.x % 128 == 0)
            tma_store_wait_complete();  // the TMA stores are complete before the fallback overwrites dK and dV
        named_barrier_sync(CONSUMERS_BARRIER, BOTH_CONSUMERS);
        const BwdWorkTile reloaded = block.reload_work_tile();
        // The warp index is recomputed to save a register.
        return key_gradients_non_finite<BLOCK_N, 8>(params.Q, params.K, params.V, params.dO, params.LSE, params.delta,
                                                    params.dK, params.dV, block.heads_per_work_tile, params.score,
                                                    reloaded.b, reloaded.work_head, block.H, block.m_blocks.n0(),
                                                    thread_index_x() / 32 - 4);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // TMA has read shared memory before the block exits
    TIMELINE(done);
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta, float* dQ_accum, const __grid_constant__ View<dtype> dK, const __grid_constant__ View<dtype> dV,
    const __grid_constant__ TensorMap Q_tile_map, const __grid_constant__ TensorMap dO_tile_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dK_map, const __grid_constant__ TensorMap dV_map, int B, int Hk, int group,
    const __grid_constant__ Score score,
    const __grid_constant__ TensorMap bias_map,  // boxes of 64 rows; only if BIAS
    const int* work_tiles,                       // output of bwd_wgmma_scheduler; only if RAGGED
    float* dKV_partials                          // only if SPLIT_GROUP or STREAM_K
#if STREAM_K
    ,
    int full_wave_tiles, int tiles_of_period, int shares_of_period, int inverse
#endif
) {
    const BwdParams params{Q,           K,     V,     dO,     LSE,    delta, dQ_accum, dK,    dV,    Q_tile_map,
                           dO_tile_map, K_map, V_map, dK_map, dV_map, B,     Hk,       group, score, dKV_partials};
    const SmemAddr base = smem_address(smem);
    GroupBlockMap& map = *reinterpret_cast<GroupBlockMap*>(smem + MAP_AT);
    const int heads_per_work_tile = query_heads_per_work_tile(group);
    if (threadIdx.x == 0) {
        init_barriers(base);
        fetch_tile_number(smem + WORK_TILE_AT, dQ_accum);
    }
    if (DROPOUT && threadIdx.x == 64) seed_in_smem() = Head::dropout_seed(score);
#if STREAM_K
    if (threadIdx.x == 32)
        write_work_tile_part(part_of_block(), {full_wave_tiles, tiles_of_period, shares_of_period, inverse}, Hk, B,
                             score);
#endif
    // Programmatic dependent launch: this block can start as soon as all blocks of bwd_preprocess have exited, but
    // their writes are visible only after griddepcontrol_wait. Before griddepcontrol_wait the block reads only what
    // earlier launches have written: the tile counter (only if DETERMINISTIC; zeroed before all entry points), the
    // block map (bwd_preprocess has waited for the kernel that writes it) and dropout's seed (from before the first
    // entry point of the call, which does not overlap with earlier work). After griddepcontrol_wait: delta, work_tiles.
    if (Head::HAS_BLOCK_MAP) {
        // With a block map the kernel is neither DETERMINISTIC nor RAGGED: blockIdx determines the work tile.
        const BwdWorkTile work_tile(0, work_tile_heads(Hk, group));
        if (work_tile.b < B)
            map.fill<THREADS / 32>(work_tile.sequence(score), work_tile.work_head * heads_per_work_tile,
                                   heads_per_work_tile, work_tile.n_block * BLOCK_N);
    }
    griddepcontrol_wait();
    if (RAGGED && threadIdx.x / 32 == 1) copy_work_tile(smem + WORK_TILE_AT, work_tiles);
    __syncthreads();  // mbarriers, block map and work tile are initialised
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (RAGGED && threadIdx.x / 32 == 3) prefetch_next_work_tile(work_tiles);
    const BwdWorkTile work_tile = load_work_tile(smem + WORK_TILE_AT, work_tile_heads(Hk, group));
    // There are more blocks than work tiles in a ragged batch, and in an incomplete L2 head group.
    if ((RAGGED && work_tile.b < 0) || (L2_HEAD_GROUPS && work_tile.b >= B)) return;
    const int work_head = work_tile.work_head, b = work_tile.b, H = Hk * group;
    const Head head0(work_tile.sequence(score), work_head * heads_per_work_tile);
    const MBlocks m_blocks = m_blocks_of(work_tile, head0, map, heads_per_work_tile);
    const BwdBlock block{params, base, work_tile, head0, m_blocks, work_head, b, heads_per_work_tile, H, warp, lane};

    if (warp < 4) {
        setmaxnreg_dec<LOAD_WARP_REGISTERS>();
        if (warp == 0 && elect()) load_tiles(block, bias_map);
        else if (warp == 1) load_stats(block);
        else if (warp >= 2 && elect()) dQ_warp(block, warp);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    ConsumerWarpgroup consumer(block);
    bool non_finite = false;
    if (consumer.head == heads_per_work_tile) {  // no key of the n_block is visible
        zero(consumer.dK), zero(consumer.dV);
        non_finite = consumer.store_dV() | consumer.store_dK();
    } else {
        consumer.first_step();  // waits for K and V; bwd_consumer.cuh: also executes the first m_block
#pragma unroll 1
        while (consumer.head < heads_per_work_tile) consumer.bwd_step();
        non_finite = consumer.epilogue();
    }
    non_finite_fallback(block, non_finite);
}

#if STREAM_K
// STREAM_K: adds the parts' dK and dV of each work tile that is split. A block has 16 keys.
extern "C" __global__ __launch_bounds__(256) void bwd_wgmma_combine(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta, const __grid_constant__ View<dtype> dK, const __grid_constant__ View<dtype> dV, int Hk,
    int group, const __grid_constant__ Score score, const float* dKV_partials, int full_wave_tiles, int tiles_of_period,
    int shares_of_period, int inverse) {
    griddepcontrol_wait();
    const StreamKParts parts{full_wave_tiles, tiles_of_period, shares_of_period, inverse};
    const int split_tile = blockIdx.x / (BLOCK_N / 16), key_tiles = (score.Sk + BLOCK_N - 1) / BLOCK_N,
              tile = full_wave_tiles + split_tile, head = tile / key_tiles;
    const Range slots = parts.slots_of(split_tile);
    const RowTile rows{head / Hk, static_cast<int>(tile % key_tiles * BLOCK_N + blockIdx.x % (BLOCK_N / 16) * 16)};
    add_partials<16>(Q, K, V, dO, LSE, delta, dK, dV, group, score, dKV_partials, rows, head % Hk, Hk * group,
                     slots.begin, slots.end - slots.begin);
}
#endif

#if SPLIT_GROUP
// SPLIT_GROUP: adds the dK and dV of the query heads of each group. A block has 16 keys of a key/value head.
extern "C" __global__ __launch_bounds__(256, 4) void bwd_wgmma_combine(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta, const __grid_constant__ View<dtype> dK, const __grid_constant__ View<dtype> dV, int group,
    const __grid_constant__ Score score, const float* dKV_partials) {
    griddepcontrol_wait();
    combine_group<16>(Q, K, V, dO, LSE, delta, dK, dV, group, score, dKV_partials);
}
#endif

// Writes the work tiles of a ragged batch, longest first (longest_first.cuh), one per warp. If HAS_SEMAPHORES, zeroes
// the semaphores in dQ_accum (and the tile counter before them, not used in a ragged batch; dq_semaphore.cuh).
// Without this entry point each block of bwd_wgmma would search for its own work tile, which takes 1 us. It is launched
// before bwd_preprocess and overlaps with it.
extern "C" __global__ __launch_bounds__(256) void bwd_wgmma_scheduler(
    int* work_tiles,  // 8 ints each
    float* dQ_accum,
    int num_counters,  // at least the number of elements before the accumulators in dQ_accum: tile counter, semaphores
    int Hk,
    int group,  // H / Hk
    const __grid_constant__ Score score) {
#if RAGGED
    static_assert(sizeof(WorkTile) == 32, "a WorkTile is 8 ints");
    griddepcontrol_launch_dependents();
    for (int i = blockIdx.x * 256 + threadIdx.x; HAS_SEMAPHORES && i < num_counters; i += gridDim.x * 256)
        reinterpret_cast<unsigned*>(dQ_accum)[i] = 0;
    const unsigned number = blockIdx.x * 8 + threadIdx.x / 32;
    const int heads = work_tile_heads(Hk, group);
    if (number >= key_offsets(score).tiles<BLOCK_N>() * heads) return;
    const WorkTile work_tile =
        LongestFirst<KeyTileOrder>(score).work_tile(number, heads, query_heads_per_work_tile(group));
    if (threadIdx.x % 32 == 0) reinterpret_cast<WorkTile*>(work_tiles)[number] = work_tile;
#endif
}

// dQ = scale * dQ_accum. A block converts one dQ tile. Its 8 warps correspond to the 8 consumer warps of a block of
// bwd_wgmma: warp w converts the accumulators to which consumer warp w of each block has contributed.
extern "C" __global__ __launch_bounds__(256, 2) void bwd_wgmma_postprocess(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta, const float* dQ_accum, const __grid_constant__ View<dtype> dQ, int group,
    const __grid_constant__ Score score) {
    griddepcontrol_wait();
    const RowTile tile_rows = query_tile_by_warp<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile_rows.invalid()) return;
    const SeqlenInfo sequence(score, tile_rows.b);
    const int h = blockIdx.y, consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row0 = tile_rows.row0 + (BLOCK_M == 128 ? 64 * consumer : 0) + 16 * warp;
    const int col0 = BLOCK_M == 128 ? 0 : DQ_COLS * consumer;
    const long long tile = (static_cast<long long>(blockIdx.z) * gridDim.y + h) * gridDim.x + blockIdx.x;
    const long long tiles = static_cast<long long>(gridDim.x) * gridDim.y * gridDim.z;
    const float* from = dQ_accum + accumulators_index(tiles) + tile * DQ_TILE_FLOATS + consumer * DQ_CONSUMER_FLOATS +
                        warp * DQ_FRAGMENT_FLOATS;
    const Range keys = Head(score, tile_rows.b, h).keys(tile_rows.row0, tile_rows.row0 + BLOCK_M);
    const unsigned* const dQ_semaphore = reinterpret_cast<const unsigned*>(dQ_accum) + semaphore_index(tile, consumer);
    // Whether no key is visible to this tile: dQ is 0, and no block has written the accumulators.
    //   DETERMINISTIC         follows from the range of keys
    //   FIRST_BLOCK_STORES    no block has arrived at the semaphore
    //   without semaphores    false: the accumulators were zeroed before the launch
    const bool no_keys = DETERMINISTIC ? keys.begin >= keys.end : FIRST_BLOCK_STORES && *dQ_semaphore == 0;
    if constexpr (NARROW_V) {  // a consumer owns a slab of dQ and half of the third slab, see mma_own_dQ
        const int third_slab_col = 128 + 32 * consumer;
        const bool non_finite =
            write_dQ_fragments<16, 64, DQ_CHUNK_FLOATS>(dQ, sequence, h, row0, 64 * consumer, lane, from, score.scale,
                                                        no_keys) |
            write_dQ_fragments<16, 32, DQ_CHUNK_FLOATS>(dQ, sequence, h, row0, third_slab_col, lane,
                                                        from + 8 * DQ_CHUNK_FLOATS, score.scale, no_keys);
        if (!non_finite) return;
        query_gradients_non_finite<16, 64>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, 64 * consumer);
        return query_gradients_non_finite<16, 32>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, third_slab_col);
    }
    const bool non_finite = DQ_COLS_OF_CONSUMER_1 < DQ_COLS && consumer == 1
                                ? write_dQ_fragments<16, DQ_COLS_OF_CONSUMER_1, DQ_CHUNK_FLOATS>(
                                      dQ, sequence, h, row0, col0, lane, from, score.scale, no_keys)
                                : write_dQ_fragments<16, DQ_COLS, DQ_CHUNK_FLOATS>(dQ, sequence, h, row0, col0, lane,
                                                                                   from, score.scale, no_keys);
    if (non_finite) query_gradients_non_finite<16, DQ_COLS>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, col0);
}
