// Rung 4 of the backward, for short sequences: bwd_wgmma with one block per key/value head.
//
// The block visits the n_blocks of its head one after the other. In n_block 0 it stores each dQ tile to dQ_accum, in
// later n_blocks it adds (TMA reduce-add): without a window, every row that sees a key sees one in n_block 0. After the
// last n_block it converts dQ_accum, which is still in L2, to dQ. There is no memset, no semaphore and no postprocess
// kernel, and the result is deterministic. K and V of the next n_block are loaded during the epilogue.
//
// clang-format off
//   warp 0        loads Q and dO per m_block, and K and V of the next n_block as soon as their tiles are free
//   warp 1        loads LSE and delta per m_block
//   warps 2, 3    dQ-store warps: each stores one consumer's dQ; stores of an n_block are complete before those of the
//                 next one start
//   consumers     tiles as in bwd_wgmma with BLOCK_M = 128. The wgmmas are S1 dP1 dV1 dQ0 dK1 S2 ...; a turn of the
//                 ping-pong is P alone. dQ of an m_block is computed in the next iteration of the same n_block.
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N], in the epilogue dK and dV |
//                  dQ | LSE, delta | mbarriers
// clang-format on
//
// It is faster than bwd_wgmma if Q, dO and dQ_accum of all resident heads (one per SM) fit in L2 (132 heads of 512
// rows: 35 MB) and there are enough heads for all SMs. H200, float16, B32 H32 S512 D64: 351 TFLOP/s, causal 216
// (bwd_wgmma: 317 and 199). S1024: 344 (bwd_wgmma: 433). Other shapes: experiments/013_hopper_backward.
#define DETERMINISTIC 0  // for bwd_tiles.cuh
#define TIMELINE_BRANCH 1
#define FALLBACK_INLINE __forceinline__
#include "bwd_epilogue.cuh"
#include "bwd_load.cuh"
#include "bwd_wgmma_steps.cuh"
#include "bwd_postprocess.cuh"
#include "m_block_range.cuh"
#include "non_finite.cuh"

constexpr unsigned DQ_CONSUMER_FLOATS = 64 * D_PAD,
                   DQ_TILE_FLOATS = 2 * DQ_CONSUMER_FLOATS;  // floats per consumer, per tile
static_assert(BLOCK_M == 128 && BLOCK_N == 128 && HEAD_DIM <= 64,
              "each of two consumers owns 64 keys and 64 rows of dQ");
static_assert(STAGES == 2, "`LoopState` counts m_blocks modulo 2 * STAGES = 4");
static_assert(!Head::HAS_SCORE_MOD && !Head::ELEMENT_MASK && !Head::HAS_BLOCK_MAP && !WINDOW && !KEY_LENGTHS &&
                  !DROPOUT && !RAGGED && HEAD_DIM_V == HEAD_DIM,
              "only causal and scale are supported, and HEAD_DIM_V must be HEAD_DIM: use bwd_wgmma");
static_assert(!Head::HAS_LEFT_BOUND, "n_block 0 stores dQ of all rows that see a key: no row's keys may begin later");

using MBlocks = MBlockRange<true, false>;

// Shared memory: offsets in bytes.
constexpr unsigned K_AT = 0, V_AT = SmemLayoutK::BYTES, Q_AT = 2 * SmemLayoutK::BYTES,
                   dO_AT = Q_AT + STAGES * SmemLayoutQ::BYTES, dS_AT = dO_AT + STAGES * SmemLayoutQ::BYTES,
                   dQ_AT = dS_AT + 2 * SmemLayoutPdS::BYTES, STATS_AT = dQ_AT + 4 * DQ_TILE_FLOATS,
                   BARRIERS_AT = STATS_AT + STAGES * STATS_BYTES;
static_assert(SMEM_BYTES == BARRIERS_AT + 256, "spec and kernel disagree on shared memory");
using TileOffsets = BwdTileOffsets<Q_AT, dO_AT, dS_AT>;

using FullK = BarrierArray<BARRIERS_AT, 1>;
using FullV = BarrierArray<FullK::END, 1>;
using Barriers = BwdBarriers<FullV::END>;
using QPipeline = Barriers::QPipeline;
using dOPipeline = Barriers::dOPipeline;
using EmptyKV = BarrierArray<Barriers::END, 1>;    // both consumers have read K and V
using dQComplete = BarrierArray<EmptyKV::END, 1>;  // dQ_accum of the head is complete

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    mbarrier_init(FullK::at(base, 0), 1);
    mbarrier_init(FullV::at(base, 0), 1);
    Barriers::init_stages(base);
    for (unsigned consumer = 0; consumer < 2; ++consumer) Barriers::init_dQ_dS(base, consumer);
    mbarrier_init(EmptyKV::at(base, 0), 2);     // one thread per consumer
    mbarrier_init(dQComplete::at(base, 0), 2);  // one thread per dQ-store warp
    fence_proxy_async();
}

// Non-finite fallback for 16 rows of dQ. Inlined: see non_finite.cuh.
__device__ FALLBACK_INLINE void dQ_non_finite(const View<const dtype>& Q, const View<const dtype>& K,
                                              const View<const dtype>& V, const View<const dtype>& dO, const float* LSE,
                                              const float* delta, const View<dtype>& dQ, int group, const Score& score,
                                              int b, int h, int H, int m0) {
    query_gradients_of<16, D_PAD>(Q, K, V, dO, LSE, delta, dQ, group, score, b, h, H, m0, 0);
}

extern __shared__ __align__(1024) char smem[];

// The key/value head of a block, and the loops over its tiles.
struct HeadBlock {
    const BwdParams& params;
    const SmemAddr base;  // of smem
    const Head& head0;    // first query head of the group
    const int kv_head, b, group, H;

    // There is no block map: the reference is not used.
    __device__ __forceinline__ MBlocks m_blocks_of(int n0) const {
        return {head0, *reinterpret_cast<const GroupBlockMap*>(smem), group, n0};
    }
    __device__ __forceinline__ float* dQ_tile(int head, int m0) const {
        return params.dQ_accum + (head0.first_tile<BLOCK_M>(H, kv_head * group + head) + m0 / BLOCK_M) * DQ_TILE_FLOATS;
    }
    // Calls f(i, head of the group, m0, n0) for the i-th m_block, over all n_blocks, and end(n0) after each n_block.
    template <class F, class End>
    __device__ __forceinline__ void for_each(F f, End end) const {
        unsigned i = 0;
#pragma unroll 1
        for (int n0 = 0; n0 < head0.Sk; n0 += BLOCK_N) {
            m_blocks_of(n0).for_each([&](unsigned, int head, int m0) { f(i++, head, m0, n0); });
            end(n0);
        }
    }
};

// load_tiles, load_stats and store_dQ_tiles: warps 0, 1, and 2 and 3.
#include "bwd_load_store_head.cuh"

// ConsumerWarpgroup: the consumers.
#include "bwd_consumer_head.cuh"

// dQ = scale * dQ_accum: 64 rows of each m_block of the head.
__device__ __forceinline__ void postprocess(const HeadBlock& block, const View<dtype>& dQ, unsigned consumer,
                                            unsigned warp) {
    const BwdParams& params = block.params;
    mbarrier_wait(dQComplete::at(block.base, 0), 0);  // the postprocess starts when dQ_accum is complete
    constexpr int TILES_PER_PASS = 4;                 // m_blocks whose loads overlap
    const int tiles = (block.head0.Sq + BLOCK_M - 1) / BLOCK_M, row0 = 64 * consumer + warp % 4 * 16;
#pragma unroll 1
    for (int first = 0; first < block.group * tiles; first += TILES_PER_PASS) {
        dQFragment<D_PAD, DQ_CHUNK_FLOATS> rows[TILES_PER_PASS];
#pragma unroll
        for (int t = 0; t < TILES_PER_PASS; ++t) {
            const int tile = min(first + t, block.group * tiles - 1);
            rows[t].load(block.dQ_tile(tile / tiles, tile % tiles * BLOCK_M) + consumer * DQ_CONSUMER_FLOATS +
                         warp % 4 * DQ_FRAGMENT_FLOATS);
        }
#pragma unroll
        for (int t = 0; t < TILES_PER_PASS; ++t) {
            if (first + t >= block.group * tiles) break;
            const int h = block.kv_head * block.group + (first + t) / tiles, m0 = (first + t) % tiles * BLOCK_M;
            const Range keys = block.head0.keys(m0, m0 + BLOCK_M);
            const bool rows_finite = rows[t].store(dQ, SeqlenInfo(params.score, block.b), h, m0 + row0,
                                                   params.score.scale, keys.begin >= keys.end);
            if (!__all_sync(0xffffffffu, rows_finite))  // NaN or inf: a masked key or a large LSE may be the cause
                dQ_non_finite(params.Q, params.K, params.V, params.dO, params.LSE, params.delta, dQ, block.group,
                              params.score, block.b, h, block.H, m0 + row0);
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma_head(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<const dtype> dO, const float* LSE,
    const float* delta,
    float* dQ_accum,  // (B, H, m_blocks, DQ_TILE_FLOATS)
    const __grid_constant__ View<dtype> dQ, const __grid_constant__ View<dtype> dK,
    const __grid_constant__ View<dtype> dV, const __grid_constant__ TensorMap Q_tile_map,
    const __grid_constant__ TensorMap dO_tile_map, const __grid_constant__ TensorMap K_map,
    const __grid_constant__ TensorMap V_map, const __grid_constant__ TensorMap dK_map,
    const __grid_constant__ TensorMap dV_map, int group, const __grid_constant__ Score score) {
    const int kv_head = blockIdx.y, b = blockIdx.z, Hk = gridDim.y, H = Hk * group;
    const BwdParams params{Q,           K,     V,     dO,     LSE,    delta, dQ_accum, dK,    dV,   Q_tile_map,
                           dO_tile_map, K_map, V_map, dK_map, dV_map, 0,     Hk,       group, score};
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // mbarriers are initialised
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const Head head0(score, b, kv_head * group);
    const HeadBlock block{params, base, head0, kv_head, b, group, H};

    if (warp < 4) {
        setmaxnreg_dec<24>();
        if (warp == 0 && elect()) load_tiles(block);
        else if (warp == 1) load_stats(block);
        else if (warp >= 2 && elect()) store_dQ_tiles(block, warp - 2);
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<240>();
    float dK_rmem[D_PAD / 2], dV_rmem[D_PAD / 2];
    ConsumerWarpgroup consumer(block, warp, lane, dK_rmem, dV_rmem);
    if (consumer.consumer == 1) named_barrier_arrive(scheduler_barrier(0), BOTH_CONSUMERS);  // consumer 0 starts
#pragma unroll 1
    for (; consumer.state.n0() < head0.Sk; consumer.state.next_n_block()) {
        consumer.begin_n_block();
        if (consumer.head < group) {
#pragma unroll 1
            while (consumer.head < group) consumer.bwd_step();
            consumer.mainloop_tail();
        }
        consumer.epilogue();
    }
    postprocess(block, dQ, consumer.consumer, warp);
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // TMA has read shared memory before the block exits
    TIMELINE(done);
}
