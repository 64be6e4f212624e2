// What the wgmma backward kernels have in common: arguments, tile layouts, mbarriers and named barriers.
#pragma once
#include "pipeline.cuh"
#include "score_mod.cuh"
#include "swizzle.cuh"

constexpr unsigned THREADS = 384;  // a warpgroup of load and store warps, and two consumer warpgroups
// Whether a consumer owns 64 keys although HEAD_DIM > 128: dK and dV of 64 keys fit into its registers because V is
// narrower than K (bwd_consumer_narrow_v.cuh).
constexpr bool NARROW_V = HEAD_DIM > 128 && BLOCK_N == 128;
// Columns of Q, K, dQ and dK, and of V, dO and dV, in shared memory and registers. Columns from HEAD_DIM and HEAD_DIM_V
// on are zeros.
constexpr int D_PAD = NARROW_V ? 192 : HEAD_DIM > 128 ? 256 : (HEAD_DIM + 15) / 16 * 16;
constexpr int DV_PAD = HEAD_DIM > 128 && HEAD_DIM_V <= 128 ? 128 : D_PAD;
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "rows of a tensor map are multiples of 16 bytes");
static_assert(HEAD_DIM_V <= HEAD_DIM, "the tiles of V and dO are not wider than those of K and Q");
static_assert(!NARROW_V || (HEAD_DIM <= 192 && HEAD_DIM_V <= 128), "wider heads exceed the register file");

// Whether, with BLOCK_N = 64, shared memory has half of dQ instead of more than one stage of dO
// (bwd_consumer_wide.cuh).
constexpr bool STORES_HALF_DQ = BLOCK_N == 64 && !DETERMINISTIC;
constexpr unsigned DO_STAGES = STORES_HALF_DQ ? 1 : STAGES;

using SmemLayoutQ = Swizzled<BLOCK_M, D_PAD>;
using SmemLayoutdO = Swizzled<BLOCK_M, DV_PAD>;
using SmemLayoutK = Swizzled<BLOCK_N, D_PAD>;
using SmemLayoutV = Swizzled<BLOCK_N, DV_PAD>;
using SmemLayoutPdS = Swizzled<BLOCK_M, BLOCK_N>;              // P, dS, the bias
using SmemLayoutdKV = Swizzled<64, D_PAD>;                     // dK or dV of 64 keys
constexpr unsigned STATS_BYTES = 2 * sizeof(float) * BLOCK_M;  // LSE and delta of a stage

// A tile of dQ_accum, floats: [consumer][chunk of 8 columns][warp of the consumer][lane][4]. These are the wgmma
// accumulators of dQ in the order of the registers, so that a consumer stores them without a shuffle. The 4 floats of
// lane 4 * g + q: columns 2 * q and 2 * q + 1 of row g of the warp's 16 rows, then those of row g + 8. Which rows and
// columns of the tile a consumer has: DQ_COLS in bwd_wgmma_tiles.cuh. stage_dQ and bwd_consumer_wide.cuh write this
// layout; write_dQ_fragments, with load_fragment_rows (ptx.cuh), and dQFragment (bwd_postprocess.cuh) read it.
constexpr int DQ_FRAGMENT_FLOATS = 32 * 4;               // of a warp and a chunk: 16 rows x 8 columns
constexpr int DQ_CHUNK_FLOATS = 4 * DQ_FRAGMENT_FLOATS;  // of the four warps of a consumer: 64 rows x 8 columns

// The arguments of the kernels, which are in constant memory (__grid_constant__).
struct BwdParams {
    const View<const dtype>&Q,  // (B, H, Sq, HEAD_DIM)
        &K,                     // (B, Hk, Sk, HEAD_DIM)
        &V,                     // (B, Hk, Sk, HEAD_DIM_V)
        &dO;                    // (B, H, Sq, HEAD_DIM_V)
    const float *LSE, *delta;   // (B, H, Sq), contiguous
    // The accumulators of dQ. Before them: a tile counter and semaphores (dq_semaphore.cuh); in bwd_wgmma_head, and
    // without HAS_SEMAPHORES, nothing.
    float* dQ_accum;
    const View<dtype>&dK,                       // (B, Hk, Sk, HEAD_DIM)
        &dV;                                    // (B, Hk, Sk, HEAD_DIM_V)
    const TensorMap &Q_tile_map, &dO_tile_map;  // boxes of BLOCK_M rows
    const TensorMap &K_map, &V_map;             // boxes of BLOCK_N rows
    const TensorMap &dK_map, &dV_map;           // boxes of 64 rows
    int B, Hk, group;                           // B: batch entries of the tensors, 1 if RAGGED, 0 in
                                                // bwd_wgmma_head, which does not use it; group: H / Hk
    const Score& score;
    float* dKV_partials;  // only if SPLIT_GROUP or STREAM_K: pairs of 16-bit elements (bwd_combine_group.cuh)
};

// The mbarriers of the mainloop, from byte AT of shared memory on. FulldQ and EmptydQ have one barrier per consumer;
// bwd_consumer_wide.cuh, if DETERMINISTIC, uses them to order its own additions to dQ_accum.
template <unsigned AT>
struct BwdBarriers {
    using QPipeline = Pipeline<AT>;  // full: Q (and the bias) by TMA; LSE and delta
    using dOPipeline = Pipeline<QPipeline::END, DO_STAGES>;
    using FulldQ = BarrierArray<dOPipeline::END, 2>;  // a consumer has staged its dQ for the dQ-store warp
    // EmptydQ[c]: the dQ-store warp has read the staged dQ of consumer c. NARROW_V: of consumer c ^ 1, because both
    // stage in the same buffer.
    using EmptydQ = BarrierArray<FulldQ::END, 2>;
    // Both consumers have written dS of an m_block i, and have read dS of m_block i - 1. A consumer arrives in
    // iteration i + 1 (NARROW_V: at the end of iteration i), after wgmma_wait for dQ of i - 1, the last product that
    // reads dS of i - 1. So the barrier is the full barrier of dS i and the empty barrier of dS i - 1, and one
    // fence.proxy.async serves dS and the staged dQ. The barrier of m_block i is FulldS[i % 2] (bwd_wgmma_persistent:
    // FulldS[(i + 1) % 2], see commit_dQ_dS in bwd_consumer_persistent.cuh).
    using FulldS = BarrierArray<EmptydQ::END, 2>;
    static constexpr unsigned END = FulldS::END;

    static __device__ __forceinline__ void init_stages(SmemAddr base) {
        for (unsigned stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(QPipeline::full(base, stage), 2);   // arrivals: the TMA load; LSE and delta
            mbarrier_init(QPipeline::empty(base, stage), 8);  // one lane per consumer warp
            if (stage >= DO_STAGES) continue;
            mbarrier_init(dOPipeline::full(base, stage), 1);
            mbarrier_init(dOPipeline::empty(base, stage), 8);
        }
    }
    // Initialises barrier i, 0 or 1, of each of the three arrays.
    static __device__ __forceinline__ void init_dQ_dS(SmemAddr base, unsigned i) {
        mbarrier_init(FulldQ::at(base, i), 4);   // one lane per warp of the consumer
        mbarrier_init(EmptydQ::at(base, i), 1);  // the dQ-store warp
        mbarrier_init(FulldS::at(base, i), 8);   // one lane per consumer warp
    }
};

// Offsets in shared memory of the tiles of m_block i: the stages of Q at byte Q_TILES and of dO at byte dO_TILES; dS
// of even and of odd m_blocks at byte dS_TILES.
template <unsigned Q_TILES, unsigned dO_TILES, unsigned dS_TILES>
struct BwdTileOffsets {
    const unsigned stage, Q_at, dO_at, dS_at, previous_dS_at;
    explicit __device__ __forceinline__ BwdTileOffsets(unsigned i)
        : stage(stage_of(i)), Q_at(Q_TILES + stage * SmemLayoutQ::BYTES),
          dO_at(dO_TILES + stage_of<DO_STAGES>(i) * SmemLayoutdO::BYTES),
          dS_at(dS_TILES + i % 2 * SmemLayoutPdS::BYTES),
          previous_dS_at(dS_TILES + (i % 2 ^ 1) * SmemLayoutPdS::BYTES) {}
};

// The named barriers; 0 is __syncthreads. `consumer` is 0 or 1.
constexpr unsigned CONSUMERS_BARRIER = 1;  // all threads of both consumers
// Threads of one consumer.
__device__ __forceinline__ unsigned consumer_barrier(unsigned consumer) { return 2 + consumer; }
// Ping-pong: a consumer waits on its own barrier before it computes P and dS (bwd_wgmma_head: P alone), and then
// arrives on the other's.
__device__ __forceinline__ unsigned scheduler_barrier(unsigned consumer) { return 4 + consumer; }
constexpr unsigned CONSUMER_THREADS = 128, BOTH_CONSUMERS = 256;  // threads that sync with or arrive at a named barrier
