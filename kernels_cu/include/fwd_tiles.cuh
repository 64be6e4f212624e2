// What the warps of fwd_wgmma share: registers per thread, tile layouts, shared memory, mbarriers, arguments. Names
// that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include "bias_tiles.cuh"
#include "block_sparse.cuh"
#include "epilogue.cuh"
#include "n_block_range.cuh"
#include "pipeline.cuh"
#include "swizzle.cuh"
#include "tile_scheduler.cuh"

constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // padded with zeros
// Registers per thread for setmaxnreg. To read a block map, the scheduler warp needs more; three or four consumers
// leave none for it.
constexpr bool MORE_PRODUCER_REGISTERS = Head::HAS_BLOCK_MAP && CONSUMERS < 3;
constexpr int PRODUCER_REGISTERS = MORE_PRODUCER_REGISTERS ? 72 : CONSUMERS >= 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS = MORE_PRODUCER_REGISTERS ? 216 : CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : 232;
static_assert(PRODUCER_REGISTERS % 8 == 0 && CONSUMER_REGISTERS % 8 == 0 &&
                  128 * (PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) <= 65536,
              "setmaxnreg: multiples of 8, and an SM has 65536 registers");
static_assert(BLOCK_M % WARPGROUP_ROWS == 0 && CONSUMERS <= 4,
              "BLOCK_M is 64, 128, 192 or 256: 64 rows for each consumer");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "BLOCK_N is a multiple of 16 (wgmma steps), at most 256");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0,
              "head dimensions are multiples of 8: TMA needs rows of a multiple of 16 bytes");

// ---- shared memory: the tiles, then the mbarriers

using Queries = Swizzled<WARPGROUP_ROWS, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Values = Swizzled<BLOCK_N, DV_PAD>;
using Outputs = Swizzled<WARPGROUP_ROWS, DV_PAD>;

constexpr unsigned K_AT = CONSUMERS * Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES;
using Bias = BiasTiles<V_AT + STAGES * Values::BYTES>;
// MERGE_RANGES: for each row, O in fp32, m and l of its earlier keys (key_splits.cuh), in shared memory if they fit.
constexpr unsigned EARLIER_AT = Bias::END, EARLIER_BYTES = (BLOCK_M * (DV_PAD * 4 + 8) + 1023) / 1024 * 1024;
constexpr bool EARLIER_IN_SMEM =
    MERGE_RANGES && Outputs::SLABS <= Queries::SLABS && fits_in_smem(EARLIER_AT + EARLIER_BYTES);
using OBuffer = OutputBuffer<Outputs, Queries, CONSUMERS, EARLIER_AT + (EARLIER_IN_SMEM ? EARLIER_BYTES : 0)>;
constexpr bool SEPARATE_O = OBuffer::SEPARATE;
constexpr unsigned BARRIERS_AT = OBuffer::END;
static_assert(SMEM_BYTES == BARRIERS_AT + BARRIER_BYTES, "spec and kernel disagree on shared memory");

using KPipeline = TilePipeline<Keys, K_AT, BARRIERS_AT>;
using VPipeline = TilePipeline<Values, V_AT, KPipeline::END>;
using FullQ = BarrierArray<VPipeline::END, CONSUMERS>;
using EmptyQ = BarrierArray<FullQ::END, CONSUMERS>;
using Scheduler = SchedulerPipeline<EmptyQ::END>;
using KeyTileEntries = StageEntries<Scheduler::END, STAGES>;  // used with a block map
constexpr unsigned TILE_LISTS_AT = (KeyTileEntries::END + 7) / 8 * 8;
static_assert(TILE_LISTS_AT + TileLists::BYTES <= SMEM_BYTES, "barriers and lists must fit in BARRIER_BYTES");

// Whether the lanes of two warps load K and V, instead of one thread (fwd_load.cuh). LOAD_THREADS: those that load K, V
// and Q; each releases the work tile itself.
constexpr bool LOAD_BY_WARP = PAGE_SIZE;
constexpr unsigned LOAD_THREADS = LOAD_BY_WARP ? 2 * 32 + 1 : 2;

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    init_QKV_barriers<KPipeline, VPipeline, FullQ, EmptyQ>(base, CONSUMERS);
    Scheduler::init_barriers(base, LOAD_THREADS + 128 * CONSUMERS);  // readers: load threads and all consumers
    if (Head::HAS_BLOCK_MAP) TileLists::init_barriers(base + TILE_LISTS_AT);
    fence_proxy_async();
}

struct Arguments {  // parameters of fwd_wgmma
    const View<const dtype>&Q, &K, &V;
    const View<dtype>& O;
    float* LSE;
    const TensorMap &Q_map, &K_map, &V_map, &O_warp_map, &bias_map;
    int H, batch_heads, group;
    const Score& score;
    unsigned* tile_counter;
#if KEY_SPLITS
    float* partials;
    int splits;
#elif STREAM_K
    float* partials;
    int full_wave_tiles;
#endif
};
