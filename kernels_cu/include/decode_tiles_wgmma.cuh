// What the warps of fwd_decode_wgmma share: tile layouts, shared memory, mbarriers, and which rows a thread has.
#pragma once
#include "packed_rows.cuh"
#include "pipeline.cuh"
#include "softmax_rows.cuh"
#include "swizzle.cuh"

constexpr unsigned CONSUMER_THREADS = 128,
                   THREADS = CONSUMER_THREADS + 32;  // the consumer warpgroup; and the load warp
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // padded with zeros
constexpr int ACCUMULATORS = BLOCK_M / 2;  // a thread's accumulators of S^T, and of 64 columns of O^T
using Fragment = QueryColumns<BLOCK_M>;    // of S^T and O^T: columns are packed rows
constexpr int ROWS_PER_THREAD = Fragment::ROWS;
using Queries = Swizzled<BLOCK_M, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Values = Swizzled<BLOCK_N, DV_PAD>;
using PTile = Swizzled<BLOCK_M, BLOCK_N>;  // P; and 64 columns of O
// S^T of the next tile is issued before O^T of this one. With 64 rows and two blocks per SM it spills.
constexpr bool OVERLAP_QK = BLOCK_M <= 32 || BLOCKS_PER_SM == 1;
constexpr float P_LIMIT = 16384.0f;                           // fp16 holds it (max 65504)
constexpr unsigned CONSUMER_BARRIER = 1, BARRIERS_READY = 2;  // named barriers
static_assert(BLOCK_M % 16 == 0 && BLOCK_N == 64, "64 keys are the rows of S^T");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "a tensor map's rows are multiples of 16 bytes");

// Names that end in _AT are offsets in shared memory, in bytes.
constexpr unsigned P_TILES = Values::SLABS > 2 ? Values::SLABS : 2;  // two of P; then O is stored there
constexpr unsigned P_AT = Queries::BYTES, K_AT = P_AT + P_TILES * PTile::BYTES, V_AT = K_AT + STAGES * Keys::BYTES,
                   ROW_STATS_AT = V_AT + STAGES * Values::BYTES, BARRIERS_AT = ROW_STATS_AT + 5 * 4 * BLOCK_M;
using KPipeline = Pipeline<BARRIERS_AT>;
using VPipeline = Pipeline<KPipeline::END>;
static_assert(SMEM_BYTES == BARRIERS_AT + 32 * STAGES, "spec and kernel disagree on shared memory");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(KPipeline::full(base, stage), 1);
        mbarrier_init(VPipeline::full(base, stage), 1);
        mbarrier_init(KPipeline::empty(base, stage), 4);  // one lane of each warp
        mbarrier_init(VPipeline::empty(base, stage), 4);
    }
    fence_proxy_async();
}

// thread_row: the index, among the thread's packed rows, of the row of element k of S^T or O^T. tile_row: the row of
// the tile that is the r-th of lanes 4 g + q.
__device__ constexpr int thread_row(int k) { return Fragment::row(k); }
__device__ __forceinline__ int tile_row(int r, int q) { return r / 2 * 8 + r % 2 + 2 * q; }
