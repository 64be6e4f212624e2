// What the warps of bwd_wgmma share: the parts of the two consumers, registers per thread, shared memory, mbarriers and
// the values of the block's work tile. Names that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include "bwd_combine_group.cuh"
#include "bwd_tiles.cuh"
#include "dq_semaphore.cuh"
#include "m_block_range.cuh"
#include "tile_scheduler_bwd.cuh"

// Both consumers work on the same 64 keys; each owns half of the columns of dK, dV and dQ.
constexpr bool SPLIT_HEAD_DIM = BLOCK_N == 64;
constexpr bool BIAS_TILES = BIAS_HAS_TENSOR_MAP;  // the bias has a tensor map
// Whether the mask is applied to P instead of S: true with a score modification whose derivative is not 1. Reason: with
// a mask of S, ptxas packs the derivatives to 16 bits after the mask's branch. S and 32-bit derivatives are then live
// at the same time, and registers spill. Also with dropout and an element mask, where fewer registers spill.
constexpr bool MASKS_P = Head::HAS_DERIVATIVE || (DROPOUT && Head::ELEMENT_MASK);
// Whether n0, the block's first key, is kept in a register. Otherwise n0 is computed from blockIdx on each use, to save
// the register. RAGGED, DETERMINISTIC: blockIdx does not determine n0. DROPOUT: with the computation, registers spill.
// SPLIT_HEAD_DIM: there are registers to spare.
constexpr bool N0_IN_REGISTER = RAGGED || DROPOUT || DETERMINISTIC || SPLIT_HEAD_DIM;
constexpr int DK_COLS = SPLIT_HEAD_DIM ? 128 : D_PAD;  // columns of dK per consumer
// Columns of dQ that consumer 0 computes if BLOCK_M = 64.
constexpr int DQ_SPLIT_COLS = SPLIT_HEAD_DIM  ? 128
                              : NARROW_V      ? D_PAD / 2
                              : HEAD_DIM > 64 ? 64
                              : HEAD_DIM > 32 ? 32
                                              : 16;
constexpr int DQ_COLS = BLOCK_M == 128 ? D_PAD : DQ_SPLIT_COLS;  // columns of a consumer's 64 rows of dQ
// The number of columns of consumer 1's dQ that contain data; its other columns are padding. If all are padding (D_PAD
// <= DQ_SPLIT_COLS), the number of all its columns, so that no size is 0.
constexpr int DQ_COLS_OF_CONSUMER_1 =
    BLOCK_M == 128 || SPLIT_HEAD_DIM || D_PAD <= DQ_SPLIT_COLS ? DQ_COLS : D_PAD - DQ_SPLIT_COLS;
constexpr unsigned DQ_CONSUMER_FLOATS = 64 * DQ_COLS,
                   DQ_TILE_FLOATS = 2 * DQ_CONSUMER_FLOATS;  // floats per consumer, per tile
// Registers per thread (setmaxnreg). FEW_LOAD_REGISTERS: cases in which consumers would spill with 232 registers. With
// a block map and SPLIT_HEAD_DIM, consumers nevertheless have 232 registers: the load warps would spill with 24.
constexpr bool FEW_LOAD_REGISTERS = BLOCK_M == 128 || (DK_COLS > 96 && !(SPLIT_HEAD_DIM && Head::HAS_BLOCK_MAP));
constexpr int LOAD_WARP_REGISTERS = FEW_LOAD_REGISTERS ? 24 : 40, CONSUMER_REGISTERS = FEW_LOAD_REGISTERS ? 240 : 232;
static_assert(
    SPLIT_HEAD_DIM ? HEAD_DIM > 128 && BLOCK_M == 64 : BLOCK_N == 128,
    "BLOCK_N is 128 or, beyond HEAD_DIM 128, 64: a consumer has 64 keys, or half of the columns of dK and dV");
static_assert(BLOCK_M == 64 || (BLOCK_M == 128 && HEAD_DIM <= 64),
              "BLOCK_M is 64 or, up to HEAD_DIM 64, 128: a larger tile exceeds the register file");
static_assert(!BIAS || BIAS_TILES, "this bias has no tensor map: use bwd_mma");
static_assert(!BIAS || BLOCK_M == 64, "TMA boxes of the bias have 64 rows");
static_assert(!BIAS || HEAD_DIM <= 128, "a bias exceeds shared memory beyond HEAD_DIM 128: use bwd_mma");
static_assert(!DETERMINISTIC || !(RAGGED || Head::HAS_BLOCK_MAP),
              "DETERMINISTIC supports no block map (semaphore targets are computed from ranges) and no ragged batch");

// If FIRST_BLOCK_STORES, without causality, window and block map, each block starts its m_block loop at row n0 (its
// first key's index) and wraps around. The blocks of a head, which start together, then work on different dQ tiles and
// rarely wait for a first store. Blocks with n0 >= Sq start at row 0.
constexpr bool ROTATED = FIRST_BLOCK_STORES && !Head::HAS_LEFT_BOUND && !Head::HAS_RIGHT_BOUND && !Head::HAS_BLOCK_MAP;
#if STREAM_K
using MBlocks = PartOfMBlocks;
static_assert(!(RAGGED || DETERMINISTIC || SPLIT_GROUP || Head::HAS_LEFT_BOUND || Head::HAS_RIGHT_BOUND ||
                Head::HAS_BLOCK_MAP),
              "all work tiles are equally long");
#else
using MBlocks = MBlockRange<N0_IN_REGISTER, ROTATED, BwdWorkTile, ALTERNATING>;
#endif

// Shared memory: offsets in bytes.
extern __shared__ __align__(1024) char smem[];
constexpr unsigned K_AT = 0, V_AT = SmemLayoutK::BYTES, Q_AT = V_AT + SmemLayoutV::BYTES,
                   dO_AT = Q_AT + STAGES * SmemLayoutQ::BYTES, dS_AT = dO_AT + DO_STAGES * SmemLayoutdO::BYTES,
                   P_AT = dS_AT + 2 * SmemLayoutPdS::BYTES,
                   dQ_AT = P_AT + (SPLIT_HEAD_DIM ? 2 * SmemLayoutPdS::BYTES : 0),
                   BIAS_AT = dQ_AT + (STORES_HALF_DQ || NARROW_V ? 4 * DQ_CONSUMER_FLOATS
                                      : SPLIT_HEAD_DIM           ? 0
                                                                 : 4 * DQ_TILE_FLOATS),
                   BIAS_BYTES = BIAS ? SmemLayoutPdS::BYTES : 0, STATS_AT = BIAS_AT + STAGES * BIAS_BYTES,
                   BARRIERS_AT = STATS_AT + STAGES * STATS_BYTES, MAP_AT = BARRIERS_AT + 256;
static_assert(SMEM_BYTES == MAP_AT + (Head::HAS_BLOCK_MAP ? sizeof(GroupBlockMap) : 0),
              "spec and kernel disagree on shared memory");
using TileOffsets = BwdTileOffsets<Q_AT, dO_AT, dS_AT>;

using FullK = BarrierArray<BARRIERS_AT, 1>;
using FullV = BarrierArray<FullK::END, 1>;
using Barriers = BwdBarriers<FullV::END>;
using QPipeline = Barriers::QPipeline;
using dOPipeline = Barriers::dOPipeline;
constexpr unsigned WORK_TILE_AT = Barriers::END;  // see fetch_tile_number
constexpr unsigned SEED_AT = WORK_TILE_AT + 32;   // dropout's seed
static_assert(SEED_AT + 8 <= MAP_AT, "mbarriers, the work tile and the seed have 256 bytes");

__device__ __forceinline__ volatile unsigned long long& seed_in_smem() {
    return *reinterpret_cast<volatile unsigned long long*>(smem + SEED_AT);
}

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    mbarrier_init(FullK::at(base, 0), 1);
    mbarrier_init(FullV::at(base, 0), 1);
    Barriers::init_stages(base);
    for (unsigned consumer = 0; consumer < 2; ++consumer) Barriers::init_dQ_dS(base, consumer);
    fence_proxy_async();
}

// STREAM_K: the block's work tile, or its part of one.
__device__ __forceinline__ volatile WorkTilePart& part_of_block() {
    return *reinterpret_cast<volatile WorkTilePart*>(smem + WORK_TILE_AT);
}

// heads: query heads per work tile.
__device__ __forceinline__ MBlocks m_blocks_of(const BwdWorkTile& work_tile, const Head& head0,
                                               const GroupBlockMap& map, int heads) {
#if STREAM_K
    return MBlocks(part_of_block(), heads, head0.Sq);
#else
    return MBlocks{head0, map, heads, work_tile.n_block * BLOCK_N, work_tile.descending};
#endif
}

// Values that all warps of a block use.
struct BwdBlock {
    const BwdParams& params;
    const SmemAddr base;  // of smem
    const BwdWorkTile& work_tile;
    const Head& head0;  // first query head of the work tile; SPLIT_GROUP: the only one
    const MBlocks& m_blocks;
    const int work_head;  // of work_tile
    const int b, heads_per_work_tile, H;
    const unsigned warp, lane;

    __device__ __forceinline__ int first_head() const { return work_head * heads_per_work_tile; }
    // Index, accumulators and semaphore (dq_semaphore.cuh) of the dQ tile of the m_block at row m0, for query head
    // `head` of the work tile.
    __device__ __forceinline__ long long dQ_tile_index(int head, int m0) const {
        return head0.first_tile<BLOCK_M>(H, work_head * heads_per_work_tile + head) + m0 / BLOCK_M;
    }
    __device__ __forceinline__ float* dQ_tile(int head, int m0) const {
        const long long total_tiles = static_cast<long long>(params.B) * H * query_tiles<BLOCK_M>(params.score);
        return params.dQ_accum + accumulators_index(total_tiles) + dQ_tile_index(head, m0) * DQ_TILE_FLOATS;
    }
    __device__ __forceinline__ unsigned* dQ_semaphore(int head, int m0, unsigned consumer) const {
        return reinterpret_cast<unsigned*>(params.dQ_accum) + semaphore_index(dQ_tile_index(head, m0), consumer);
    }
    __device__ __forceinline__ int semaphore_target(int m0) const { return work_tile.semaphore_target(head0, m0); }
    // The head of K and V that the work tile reads.
    __device__ __forceinline__ int kv_head() const { return SPLIT_GROUP ? work_head / params.group : work_head; }
    // Read from shared memory in each iteration. Read from global memory, which takes longer, ptxas scheduled the
    // random numbers after the wait for S^T instead of before it; kept in registers, some registers spilled.
    __device__ __forceinline__ unsigned long long dropout_seed() const { return DROPOUT ? seed_in_smem() : 0; }
    // After the mainloop: reads the work tile again, so that it does not take registers in the mainloop.
    __device__ __forceinline__ BwdWorkTile reload_work_tile() const {
        return load_work_tile(smem + WORK_TILE_AT, work_tile_heads(params.Hk, params.group));
    }
    // STREAM_K: slot of the block's part of a work tile; < 0: the block has all of it.
    __device__ __forceinline__ int slot() const { return STREAM_K ? part_of_block().slot : -1; }
    // SPLIT_GROUP, STREAM_K: where a slab of the partial dK or dV of the reloaded work tile begins
    // (bwd_combine_group.cuh).
    __device__ __forceinline__ float* partial(const BwdWorkTile& reloaded, Gradient gradient, int key_offset,
                                              int slab) const {
        const long long tile = first_n_block<BLOCK_N>(reloaded.sequence(params.score)) + reloaded.n_block;
        const long long number = STREAM_K ? slot() : tile * H + reloaded.work_head;
        return params.dKV_partials + partial_index(number, gradient, key_offset, slab);
    }
};

// Address of -LSE * log2(e) of the first two queries of the lane in a fragment that begins at query `first` of the
// tile. Their delta is BLOCK_M floats after it.
__device__ __forceinline__ const float* stats_of(unsigned stage, int first) {
    return reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + first + thread_index_x() % 4 * 2;
}
