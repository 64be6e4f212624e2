// Rung 4 for float8: persistent, warp-specialised attention forward on Hopper: wgmma of 8 bits (k = 32), fed by TMA.
//
// As fwd_wgmma (docs/hopper-forward.md): one producer warpgroup, and consumer warpgroups of 64 query rows each. What 8
// bits change:
//
// clang-format off
//   producer, warp 0       K0 V0 Q  K1 V1  K2 V2 ...       one thread runs the tile scheduler and loads Q, K and V
//             warps 1..3            Vt0         Vt1  ...   transpose V in shared memory: V -> Vt, K-major for P V
//   consumer 0             O += P0 Vt0, S1 = Q K1^T | softmax1                      | O += P1 Vt1, S2 = Q K2^T
//   consumer 1                                      | O += P0 Vt0, S1 = Q K1^T | softmax1          time ->
//
//   shared memory: Q [BLOCK_M / 64] | K [STAGES] | V [STAGES] | Vt [STAGES] | mbarriers
// clang-format on
//
// Vt: wgmma of 8 bits reads both operands K-major (transpose_V.cuh). Long sums: the tensor cores accumulate O over
// MMA_SUM_KEYS keys at a time (partial_O.cuh). Deferred rescaling: softmax_fp8.cuh.
#define TIMELINE_BRANCH 1  // needs fewer registers (timeline.cuh)
#define FALLBACK_INLINE __forceinline__
#include "fp8_hopper.cuh"
#include "fragment_fp8.cuh"
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "softmax_fp8.cuh"
#include "stream_k.cuh"
#include "swizzle.cuh"
#include "tile_scheduler_fp8.cuh"
#include "timeline.cuh"
#include "transpose_V.cuh"

constexpr int CONSUMERS = BLOCK_M / WARPGROUP_ROWS;
constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
constexpr int D_PAD = (HEAD_DIM + 31) / 32 * 32;  // padded with zeros
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
constexpr unsigned TRANSPOSE_WARPS = 3;
constexpr bool PING_PONG = CONSUMERS > 1;
static_assert(BLOCK_M % WARPGROUP_ROWS == 0 && CONSUMERS <= 3, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N <= 256, "a tile of whole wgmma steps");
static_assert((STAGES & STAGES - 1) == 0, "pipe_index keeps the work tile's parity in its highest bit");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "a tensor map's rows are multiples of 16 bytes");

constexpr int MMA_SUM_TILES = MMA_SUM_KEYS / BLOCK_N;  // after so many key tiles O is added to a partial O

using Queries = Swizzled<WARPGROUP_ROWS, D_PAD, 1>;
using Keys = Swizzled<BLOCK_N, D_PAD, 1>;
using Values = Swizzled<BLOCK_N, HEAD_DIM_V, 1>;
using Transposed = Swizzled<HEAD_DIM_V, BLOCK_N, 1>;

// Offsets in shared memory, in bytes.
constexpr unsigned K_AT = CONSUMERS * Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES;
constexpr unsigned VT_AT = V_AT + STAGES * Values::BYTES;
constexpr unsigned VT_BYTES = (Transposed::BYTES + 1023) / 1024 * 1024, BARRIERS_AT = VT_AT + STAGES * VT_BYTES;
static_assert(Transposed::SLAB_BYTES % 1024 == 0, "a swizzled slab begins at a multiple of 1024 bytes");
static_assert(SMEM_BYTES == BARRIERS_AT + 1024, "spec and kernel disagree on shared memory");

// The mbarriers: pipelines of K, V and Vt; one stage of Q per consumer.
using KPipeline = Pipeline<BARRIERS_AT>;
using VPipeline = Pipeline<KPipeline::END>;
using VtPipeline = Pipeline<VPipeline::END>;
using FullQ = BarrierArray<VtPipeline::END, CONSUMERS>;
using EmptyQ = BarrierArray<FullQ::END, CONSUMERS>;
constexpr unsigned HAS_TILE_AT = EmptyQ::END;  // per stage of V: 1 if it holds a tile, 0 at the end
constexpr unsigned TILE_INFO_AT = (HAS_TILE_AT + 4 * STAGES + 15) / 16 * 16;  // per consumer: two work tiles
static_assert(TILE_INFO_AT + 64 * CONSUMERS <= SMEM_BYTES, "the barriers must fit in 1024 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(KPipeline::full(base, stage), 1);
        mbarrier_init(VPipeline::full(base, stage), 1);
        mbarrier_init(VtPipeline::full(base, stage), TRANSPOSE_WARPS);
        mbarrier_init(KPipeline::empty(base, stage), 4 * CONSUMERS);  // one lane of each warp that reads it
        mbarrier_init(VPipeline::empty(base, stage), TRANSPOSE_WARPS);
        mbarrier_init(VtPipeline::empty(base, stage), 4 * CONSUMERS);
    }
    for (unsigned consumer = 0; consumer < CONSUMERS; ++consumer) {
        mbarrier_init(FullQ::at(base, consumer), 1);
        mbarrier_init(EmptyQ::at(base, consumer), 4);
    }
    fence_proxy_async();
}

// Named barriers; 0 is __syncthreads. A turn has 256 threads: the consumer that waits, and the one before it.
__device__ __forceinline__ unsigned consumer_barrier(unsigned consumer) { return 1 + consumer; }  // of its 128 threads
__device__ __forceinline__ unsigned warp_scheduler_barrier(unsigned consumer) { return 4 + consumer; }
constexpr unsigned TURN_THREADS = 2 * 128;

__device__ __forceinline__ TileInfo& tile_info(char* smem, unsigned consumer, unsigned parity) {
    return reinterpret_cast<TileInfo*>(smem + TILE_INFO_AT)[2 * consumer + parity];
}

// load_work_tiles and transpose_tiles: the producer warpgroup.
#include "fwd_load_fp8.cuh"

// The arguments of the kernel that the consumers use, which are in constant memory (__grid_constant__).
struct Arguments {
    const View<const dtype>&Q, &K;
    const View<const dtype_v>& V;
    const View<dtype_o>& O;
    float* const LSE;
    const int H, group;
    const Score& score;
    float* const partials;
};

// ConsumerWarpgroup: the mainloop over the key tiles of a work tile.
#include "fwd_consumer_fp8.cuh"

using StreamK = StreamKExchange<Fp8SoftmaxState, THREADS - 128>;

// Rows warpgroup_row .. warpgroup_row + 63 of O and LSE; stream-K: unless a later block finalizes the work tile.
__device__ __forceinline__ void epilogue(Fp8SoftmaxState& softmax, const TileInfo& info, int warpgroup_row,
                                         float scale_log2, unsigned warp, unsigned lane, const Arguments& args) {
    const unsigned consumer = warp / 4 - 1;
    const StreamK stream_k{args.partials, consumer, /*first_slot=*/gridDim.x};
    if (SPLITS_LAST_WAVE && info.split.end * BLOCK_N < args.score.Sk) {  // the next block has key tiles, too
        stream_k.publish(softmax, info.block, consumer_barrier(consumer), warp % 4 == 0 && lane == 0);
        return;
    }
    if (SPLITS_LAST_WAVE && info.split.begin > 0) stream_k.merge(softmax, info.first, info.block, scale_log2);

    const Head head(args.score, info.b, info.h);
    // A masked key has P = 0, but 0 * NaN is NaN: if a row is not finite, or has very large scores, all 64 are
    // recomputed. Rare.
    if (named_barrier_or(consumer_barrier(consumer), 128,
                         !softmax.finite() || softmax.large(head.softmax_scale * Head::LOG2E)))
        attend_non_finite<WARPGROUP_ROWS, 4>(args.Q, args.K, args.V, args.O, args.LSE, args.group, args.score, info.b,
                                             info.h, args.H, warpgroup_row, warp % 4);
    else store_O_and_LSE(softmax, info, head, args.O, args.LSE, args.H, lane % 4);
}

// A consumer warpgroup: 64 query rows of each work tile of the block.
__device__ __forceinline__ void consume(char* smem, SmemAddr base, unsigned warp, unsigned lane,
                                        const Arguments& args) {
    const unsigned consumer = warp / 4 - 1;
    unsigned pipe_index = 0;  // see ConsumerWarpgroup
    if (PING_PONG && consumer == CONSUMERS - 1)
        named_barrier_arrive(warp_scheduler_barrier(0), TURN_THREADS);  // consumer 0 starts

#pragma unroll 1
    for (;;) {
        mbarrier_wait(FullQ::at(base, consumer), pipe_index >> 31);
        const TileInfo& info = tile_info(smem, consumer, pipe_index >> 31);
        if (info.b < 0) break;
        ConsumerWarpgroup warpgroup(args, base, warp, lane, pipe_index, info);
        const int tiles = warpgroup.tiles, pipeline_tiles = warpgroup.work_tile.tiles;
        Fp8SoftmaxState softmax;
        warpgroup.drain_tiles(0, warpgroup.first_own);
        if (tiles > 0) warpgroup.mainloop(softmax);
        if (tiles <= 0) warpgroup.release_Q();
        warpgroup.drain_tiles(warpgroup.first_own + max(tiles, 0), pipeline_tiles);
        const TileInfo epilogue_info = tile_info(smem, consumer, pipe_index >> 31);  // read again: saves registers
        pipe_index = pipe_index + pipeline_tiles ^ 1u << 31;                         // the other phase of Q's barriers
        if (warpgroup.has_rows())
            epilogue(softmax, epilogue_info, warpgroup.warpgroup_row, warpgroup.scale_log2, warp, lane, args);
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void fwd_wgmma_fp8(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,    // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,        // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,        // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map, int H,
    int batch_heads,  // B * H
    int group,        // H / Hk
    const __grid_constant__ Score score,
    int full_wave_tiles,  // work tiles that are not split (stream-K)
    float* partials) {    // per block: four counters, O; stream-K: partial O
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are initialised before they are used
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    if (warp < 4) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0 && elect()) {
            load_work_tiles(smem, base, Q, K, V, Q_map, K_map, V_map, batch_heads, H, group, full_wave_tiles, partials,
                            score);
        } else if (warp >= 4 - TRANSPOSE_WARPS) {
            transpose_tiles(smem, base, warp, lane);
        }
        TIMELINE(done);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(smem, base, warp, lane, Arguments{Q, K, V, O, LSE, H, group, score, partials});
    TIMELINE(done);
}
