// Rung 4 of the backward, for small head dimensions (HEAD_DIM <= 64): bwd_wgmma with persistent blocks.
//
// A work tile is an n_block of a key/value head: dK and dV of its keys stay in registers during the loop over m_blocks.
// In bwd_wgmma 7000 ... 10000 cycles, the time of two m_blocks, pass between the last wgmma of a block and the first
// one of the next block on the SM. Here the m_blocks of consecutive work tiles form one mainloop. K is double-buffered:
// the last dQ of a work tile is computed in the first iteration of the next work tile. dV and dK are staged and stored
// like dQ, while the other consumer computes. All iterations run the same code, because ptxas would serialise the
// wgmmas of two loop bodies.
//
// clang-format off
//   warp 0        tile scheduler: fetches and publishes work tiles; loads Q and dO per m_block, K and V with the first
//                 m_block
//   warp 1        loads LSE and delta per m_block
//   warps 2, 3    store warps: each stores one consumer's staging buffer, which contains dQ, dV or dK. The first block
//                 that arrives at the semaphore of a dQ tile stores it, the others add (dq_semaphore.cuh)
//   consumers     as bwd_wgmma with BLOCK_M = 128, but a turn of the ping-pong includes the store of dS
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N] | staging [2] | LSE, delta |
//                  second K [BLOCK_N] | mbarriers, work tiles, `StagedStore` descriptions
// clang-format on
//
// Load and store warps have 24 registers (setmaxnreg). If they spill, ptxas adds register copies to the consumers'
// loops, too. So these warps read a published value (`Published`: one in shared memory that one warp has written for
// others) again instead of keeping it.
#define DETERMINISTIC 0  // for dq_semaphore.cuh
#define TIMELINE_BRANCH 1
#define FALLBACK_INLINE __forceinline__
#include "bwd_epilogue.cuh"
#include "bwd_load.cuh"
#include "bwd_wgmma_steps.cuh"
#include "bwd_postprocess.cuh"
#include "dq_semaphore.cuh"
#include "non_finite.cuh"
#include "tile_scheduler_bwd_persistent.cuh"

constexpr unsigned DQ_CONSUMER_FLOATS = 64 * D_PAD,
                   DQ_TILE_FLOATS = 2 * DQ_CONSUMER_FLOATS;  // floats per consumer, per tile
static_assert(BLOCK_M == 128 && BLOCK_N == 128 && HEAD_DIM <= 64,
              "each of two consumers owns 64 keys and 64 rows of dQ");
static_assert(!Head::HAS_SCORE_MOD && !Head::ELEMENT_MASK && !Head::HAS_BLOCK_MAP && !DROPOUT && !RAGGED,
              "masks must be ranges: use bwd_wgmma for other options");

constexpr unsigned STAGING_BYTES =
    4 * DQ_CONSUMER_FLOATS > SmemLayoutdKV::BYTES ? 4 * DQ_CONSUMER_FLOATS : SmemLayoutdKV::BYTES;

// Shared memory: offsets in bytes.
constexpr unsigned K_AT = 0, V_AT = SmemLayoutK::BYTES, Q_AT = 2 * SmemLayoutK::BYTES,
                   dO_AT = Q_AT + STAGES * SmemLayoutQ::BYTES, dS_AT = dO_AT + STAGES * SmemLayoutQ::BYTES,
                   STAGING_AT = dS_AT + 2 * SmemLayoutPdS::BYTES, STATS_AT = STAGING_AT + 2 * STAGING_BYTES,
                   SECOND_K_OFFSET = STATS_AT + STAGES * STATS_BYTES,
                   BARRIERS_AT = SECOND_K_OFFSET + SmemLayoutK::BYTES;
static_assert(SECOND_K_OFFSET % 1024 == 0, "tiles are aligned to 1024 bytes");
static_assert(SMEM_BYTES == BARRIERS_AT + 1024, "spec and kernel disagree on shared memory");
using TileOffsets = BwdTileOffsets<Q_AT, dO_AT, dS_AT>;

// Description of one use of the staging buffers. A consumer stages dQ of the previous m_block in each iteration, and dV
// and then dK after the last m_block of a work tile. A description contains the m_block of the iteration, not the
// previous one, whose dQ is staged; the store warp remembers it. For work tiles with m_blocks 0, 1 and 2, 3:
//
//   iteration            staged            description    store warp
//   m_block 0            dS = 0 times K    m_block 0      stores nothing, remembers m_block 0
//   m_block 1            dQ of m_block 0   m_block 1      stores or adds it in m_block 0, remembers m_block 1
//   end of work tile     dV, then dK       dV, then dK    stores them
//   m_block 2            dQ of m_block 1   m_block 2      stores or adds it in m_block 1, remembers m_block 2
//   ...
//   end of the block     dQ of m_block 3   LAST_DQ        stores or adds it in m_block 3, ends
struct StagedStore {
    int m0, n0, h, b;                                     // h: query head; for dV and dK the key/value head
    static constexpr int dV = -1, dK = -2, LAST_DQ = -3;  // values of m0; LAST_DQ: dQ of the block's last m_block
};
constexpr unsigned STAGING_SLOTS = 16;  // ring buffer of descriptions: warp 0 is at most eight ahead of the store warps
constexpr int NEEDS_MASK = 1,
              LAST_M_BLOCK = 2;  // flags of an m_block: the mask hides some elements; it is the last of the work tile

using EmptyK = BarrierArray<BARRIERS_AT, 2>;  // per K buffer: both consumers have read it
using EmptyV = BarrierArray<EmptyK::END, 1>;
using Barriers = BwdBarriers<EmptyV::END>;  // FulldQ and EmptydQ are the barriers of the staging buffers
using QPipeline = Barriers::QPipeline;
using dOPipeline = Barriers::dOPipeline;
using WorkTilePipeline = Pipeline<Barriers::END, 2>;  // published work tiles
static_assert(STAGES == 2, "STAGING_SLOTS is for two stages");

using WorkTiles = Published<PersistentWorkTile, WorkTilePipeline::END, 2>;
// Per consumer: whether it writes dK and dV itself (non-finite fallback); the store warp then must not store them.
using NonFinite = Published<int, WorkTiles::END, 2>;
using Flags = Published<int, NonFinite::END, STAGES * 2>;  // per stage and consumer
using StagedStores = Published<StagedStore, Flags::END, STAGING_SLOTS>;
static_assert(StagedStores::END <= SMEM_BYTES, "mbarriers and published values have 1024 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    mbarrier_init(EmptyV::at(base, 0), 8);
    Barriers::init_stages(base);
    for (unsigned i = 0; i < 2; ++i) {
        mbarrier_init(EmptyK::at(base, i), 8);
        Barriers::init_dQ_dS(base, i);
        mbarrier_init(WorkTilePipeline::full(base, i), 1);
        mbarrier_init(WorkTilePipeline::empty(base, i), 9);  // one lane of warp 1 and of each consumer warp
    }
    fence_proxy_async();
}

extern __shared__ __align__(1024) char smem[];
__device__ __forceinline__ volatile PersistentWorkTile& work_tile_slot(unsigned tile_index) {
    return WorkTiles::at(smem, tile_index % 2);
}
__device__ __forceinline__ volatile StagedStore& staged_store(unsigned n) {
    return StagedStores::at(smem, n % STAGING_SLOTS);
}
__device__ __forceinline__ volatile int& flags_of(unsigned i, unsigned consumer) {
    return Flags::at(smem, 2 * stage_of(i) + consumer);
}

// Index in dQ_accum of a consumer's part of a dQ tile; tiles: how many there are.
__device__ __forceinline__ long long dQ_index(long long tiles, long long tile, unsigned consumer) {
    return accumulators_index(tiles) + tile * DQ_TILE_FLOATS + consumer * DQ_CONSUMER_FLOATS;
}

// LoadWarp, load_stats and StoreWarp: warps 0, 1, and 2 and 3.
#include "bwd_load_store_persistent.cuh"

// ConsumerWarpgroup: the consumers.
#include "bwd_consumer_persistent.cuh"

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma_persistent(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta,
    float* dQ_accum,  // tile counter, semaphores, (B, H, m_blocks, DQ_TILE_FLOATS): see dq_semaphore.cuh
    const __grid_constant__ View<dtype> dK, const __grid_constant__ View<dtype> dV,
    const __grid_constant__ TensorMap Q_tile_map, const __grid_constant__ TensorMap dO_tile_map,
    const __grid_constant__ TensorMap K_map, const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dK_map, const __grid_constant__ TensorMap dV_map, int B, int Hk, int group,
    const __grid_constant__ Score score) {
    const BwdParams params{Q,           K,     V,     dO,     LSE,    delta, dQ_accum, dK,    dV,   Q_tile_map,
                           dO_tile_map, K_map, V_map, dK_map, dV_map, B,     Hk,       group, score};
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // mbarriers are initialised
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (warp < 4) {
        setmaxnreg_dec<24>();
        if (warp == 0 && elect()) {
            LoadWarp load_warp{params, base};
#pragma unroll 1
            for (;; ++load_warp.tile_index) {
                const PersistentWorkTile work_tile = load_warp.fetch_work_tile();
                load_warp.publish(work_tile);
                if (work_tile.b < 0) break;
                load_warp.load_work_tile();
            }
            TIMELINE(done);
        } else if (warp == 1) load_stats(params, base);
        else if (warp >= 2 && elect()) StoreWarp{params, base, warp - 2}.run();
        return;
    }
    setmaxnreg_inc<240>();
    float dK_rmem[D_PAD / 2], dV_rmem[D_PAD / 2];
    ConsumerWarpgroup consumer(params, base, warp, lane, dK_rmem, dV_rmem);
    consumer.start();
#pragma unroll 1
    for (;; ++consumer.tile_index) {
        WorkTilePipeline::wait(base, consumer.tile_index);
        const volatile PersistentWorkTile& work_tile = work_tile_slot(consumer.tile_index);
        if (static_cast<int>(uniform(work_tile.b)) < 0) break;
        bool more = consumer.begin(work_tile);
#pragma unroll 1
        while (more) more = !consumer.bwd_step();
        consumer.finish_dKV();
        // Non-finite fallback (non_finite.cuh): a masked P is 0, but 0 * NaN = NaN; and P is NaN for a row with a large
        // LSE.
        const bool non_finite = named_barrier_or(consumer_barrier(consumer.consumer), CONSUMER_THREADS,
                                                 !all_finite(dV_rmem) || !all_finite(dK_rmem));
        consumer.epilogue(work_tile, non_finite);
        __syncwarp();  // all lanes have read the work tile
        if (lane == 0) WorkTilePipeline::release(base, opaque(consumer.tile_index));
    }
    consumer.stage_last_dQ();
    TIMELINE(done);
}

// dQ = scale * dQ_accum. Each warp converts what the consumer warps with the same index have stored or added, in all
// blocks.
extern "C" __global__ __launch_bounds__(256, 2) void bwd_wgmma_persistent_postprocess(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta, const float* dQ_accum, const __grid_constant__ View<dtype> dQ, int group,
    const __grid_constant__ Score score) {
    const SeqlenInfo sequence(score, blockIdx.z);
    const int h = blockIdx.y, consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row0 = blockIdx.x * BLOCK_M + 64 * consumer + 16 * warp;
    const long long tile = (static_cast<long long>(blockIdx.z) * gridDim.y + h) * gridDim.x + blockIdx.x;
    const long long tiles = static_cast<long long>(gridDim.x) * gridDim.y * gridDim.z;
    const float* from = dQ_accum + dQ_index(tiles, tile, consumer) + warp * DQ_FRAGMENT_FLOATS;
    const bool no_keys =  // no block has arrived
        reinterpret_cast<const unsigned*>(dQ_accum)[semaphore_index(tile, consumer)] == 0;
    if (write_dQ_fragments<16, D_PAD, DQ_CHUNK_FLOATS>(dQ, sequence, h, row0, 0, lane, from, score.scale, no_keys))
        query_gradients_non_finite<16, D_PAD>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, 0);
}
