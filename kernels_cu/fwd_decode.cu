// Rung 3 for decoding: few queries and many keys (split-KV, as FlashDecoding; sm_80 and later). The time is the time to
// read K and V.
//
// The query heads of a group are rows of one tile (packed GQA): row r is query r / group, head r % group, so that each
// key is read once for the whole group. The keys of a row tile are split among blocks, and a block's keys among its
// warps. Each warp has its own pipeline of STAGES stages, filled by cp.async or TMA: no block barrier between tiles,
// and STAGES - 1 tiles per warp are always being loaded.
//
// clang-format off
//   split 0                               split 1
//   warp 0  keys   0 .. 15, 64 .. 79, ...        each warp: S^T = K Q^T, P, O^T += V^T P^T of all rows, own m and l
//   warp 1  keys  16 .. 31, 80 .. 95, ...        combined in a fixed order: the warps of a block in shared memory,
//   ...                                          then the splits through `partials` by fwd_decode_combine
//
//   key_lengths: stream-K (split_kv.cuh): a block computes splits of several entries, one after the other
//   cluster: 2 or 4 blocks of a split; each combines a part of the columns, which the others write to its DSMEM
//
//   shared memory: Q [BLOCK_M][D_PAD], at the end own m, l of a cluster's block; with EARLY_START twice
//                  | m, l [WARPS][BLOCK_M][2] | warp 0: stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD], stage 1, ...
//                    (at the end O [BLOCK_M][DV_PAD] in fp32 in a warp's stages) | warp 1 ... | DSMEM: of other ranks
//                  | TMA: barriers [WARPS][STAGES]
// clang-format on
//
// A warp reads the pages of 32 of its key tiles at once (decode_load.cuh). If a tile of 32 keys is in two pages, each
// half has an address; in pages that are no multiple of 16, each key has one. Rescaling is deferred as in fwd_mma.
// float8: a tile of the same size in bytes has twice as many keys (decode_products.cuh).
//
// Measurements: experiments/020_decode, 028_serving.
#ifndef TMA
#define TMA 0  // keys are loaded by cp.async; 1: by TMA
#endif
#ifndef EARLY_STAGES
#define EARLY_STAGES 0  // key tiles of the next split that are loaded before the epilogue (early_stages in the spec)
#endif
constexpr bool CLUSTER_DIVIDES_KEYS = CLUSTER > 1;  // split_kv.cuh
#include <hopper.cuh>                               // angle brackets: the CPU backend has its own
#include "mma_smem.cuh"
#include "non_finite.cuh"
#include "combine.cuh"
#include "cluster.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int KEY_BYTES = sizeof(dtype_k);                           // per element of K and V
constexpr int CHUNK = 16 / KEY_BYTES, Q_CHUNK = 16 / sizeof(dtype);  // elements per 16 bytes
constexpr int STEP_D = 2 * CHUNK;                                    // columns per MMA step of S, and per fragment of V
constexpr int D_PAD = (HEAD_DIM + STEP_D - 1) / STEP_D * STEP_D;     // columns >= HEAD_DIM are zeros
constexpr int DV_PAD = (HEAD_DIM_V + STEP_D - 1) / STEP_D * STEP_D;
constexpr int Q_COLUMNS = D_PAD * sizeof(dtype) / 2, K_COLUMNS = D_PAD * KEY_BYTES / 2,
              V_COLUMNS = DV_PAD * KEY_BYTES / 2;              // of 16 bits
constexpr bool CONVERTS_KEYS = FLOAT8_KEYS && !FLOAT8;         // decode_products.cuh
using QTile = SwizzledRows<Q_COLUMNS, CONVERTS_KEYS ? 2 : 1>;  // QueryLoader
using KTile = SwizzledRows<K_COLUMNS>;
using VTile = SwizzledRows<V_COLUMNS>;
constexpr unsigned K_BYTES = BLOCK_N * KTile::ROW, STAGE = K_BYTES + BLOCK_N * VTile::ROW;
constexpr unsigned O_BYTES = BLOCK_M * DV_PAD * 4, STAGES_BYTES = STAGES * STAGE,
                   RING = STAGES_BYTES > O_BYTES ? STAGES_BYTES : O_BYTES;  // per warp
// EARLY_START: the loads for the next split start before the epilogue. Q has two buffers, and O is in the last stages,
// so that the first EARLY_STAGES tiles can be loaded.
constexpr bool EARLY_START = EARLY_STAGES > 0;
static_assert(!EARLY_START || DYNAMIC_SPLITS, "a block has one split");
static_assert(!EARLY_START || STAGES_BYTES >= O_BYTES + EARLY_STAGES * STAGE, "O overlaps the tiles of the next split");
constexpr unsigned Q_BYTES = BLOCK_M * QTile::ROW, SUMS_AT = (EARLY_START ? 2 : 1) * Q_BYTES,
                   RINGS_AT = SUMS_AT + WARPS * BLOCK_M * 8, DSMEM_AT = RINGS_AT + WARPS * RING,
                   O_AT = EARLY_START ? EARLY_STAGES * STAGE : 0;  // in a warp's stages
// Groups of four columns of O that a block of a cluster combines.
constexpr int RANK_QUADS = (HEAD_DIM_V / 4 + CLUSTER - 1) / CLUSTER;
constexpr unsigned DSMEM_BYTES = (CLUSTER - 1) * BLOCK_M * (16 * RANK_QUADS + 8), BARRIERS_AT = DSMEM_AT + DSMEM_BYTES,
                   BARRIERS_BYTES = TMA * WARPS * STAGES * 8;
// In pages, adjacent rows may be of different heads: a 128-byte line then has rows of blocks that run at the same time
// (D 64, float8 keys: 302 instead of 410 us).
constexpr bool SHARED_LINES = PAGE_SIZE > 0 && (HEAD_DIM * KEY_BYTES < 128 || HEAD_DIM_V * KEY_BYTES < 128);
static_assert((BLOCK_M == 8 || BLOCK_M % 16 == 0) && BLOCK_N % 16 == 0 && STAGES >= 2,
              "a tile consists of whole MMA steps");
// Keys of a tile that have one address: those in the same page, or each for itself. Without pages: all.
constexpr int ADDRESSED = PAGE_SIZE % BLOCK_N == 0 ? BLOCK_N : PAGE_SIZE % 16 == 0 ? 16 : 1;
static_assert(ADDRESSED == BLOCK_N || BLOCK_N <= 32, "two halves with an address, or one lane per key of a tile");
static_assert(SMEM_BYTES == BARRIERS_AT + BARRIERS_BYTES, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % CHUNK == 0 && HEAD_DIM_V % CHUNK == 0, "rows are copied in 16-byte chunks");

#include "decode_epilogue.cuh"  // these use the constants above
#if TMA
#include "decode_load_tma.cuh"
using KeyPipeline = TmaPipeline;
#else
#include "decode_load.cuh"
using KeyPipeline = CpAsyncPipeline;
#endif

using Scheduler = SchedulerOf<StreamScheduler>::Type;
using QueryFactors = RowFactors<BLOCK_M, WARPS, QTile>;
using KOffsets = FragmentOffsets<K_COLUMNS>;
using VOffsets = FragmentOffsets<V_COLUMNS>;

// Calls f(score, head, index) for the scores of a lane. n0: first key.
template <class F>
__device__ __forceinline__ void for_each_score(ScoreTiles& S, const SeqlenInfo& seqlen, int row0, int kv_head,
                                               int group, int n0, F f) {
    const int key = n0 + threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const PackedRow row(row0 + i / 2 * 8 + 2 * q + i % 2, kv_head, group);
        const Head head(seqlen, row.h);
#pragma unroll
        for (int k = 0; k < 2 * KEY_TILES; ++k)
            f(S[k / 2][i / 2][k % 2 * 2 + i % 2], head, ScoreIndex(row.i, key, 0, 8 * k));
    }
}

// By which scores are multiplied in exponents of 2, by row: all equal, unless SCALES_BY_ROW.
constexpr bool SCALES_BY_ROW = DESCALE_Q || DESCALE_K || QueryFactors::IN_SCALE;
__device__ __forceinline__ void scales_of_rows(LaneRows& scales_log2, const SeqlenInfo& seqlen,
                                               const QueryFactors& factors, int row0, int kv_head, int group) {
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const PackedRow row(row0 + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2, kv_head, group);
        const float scale =
            DESCALE_Q || DESCALE_K ? Head(seqlen, row.h).softmax_scale : Head::softmax_scale_of(seqlen.score);
        scales_log2[i / 2][i % 2] = scale * Head::LOG2E * factors.in_scale(i / 2, i % 2);
    }
}

// S becomes P, as B operands; updates m, l and O. masked: some scores may be hidden.
__device__ __forceinline__ void online_softmax(Weights& P, ScoreTiles& S, Softmax& state, const SeqlenInfo& seqlen,
                                               const LaneRows& scales_log2, int row0, int kv_head, int group, int n0,
                                               bool masked) {
    const float margin = __fdividef(RESCALE_THRESHOLD, scales_log2[0][0]);
    const int key = n0 + threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (Head::HAS_SCORE_MOD)
        for_each_score(S, seqlen, row0, kv_head, group, n0,
                       [](float& s, const Head& head, const ScoreIndex& at) { s = head.raw(s, at); });
    if (masked)  // the shuffle, and the divisions by its result (PackedRow), are not moved out of the branch
        for_each_score(S, seqlen, row0, kv_head, __shfl_sync(0xffffffffu, group, 0), n0,
                       [](float& s, const Head& head, const ScoreIndex& at) {
                           if (!head.visible(at.query_row(), at.key_col())) s = -INF;
                       });
    LaneRows lane_max;
    bool exceeds = state.large;
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int rt = i / 2, r = i % 2;
        lane_max[rt][r] = -INF;
#pragma unroll
        for (int k = 0; k < 2 * KEY_TILES; ++k) lane_max[rt][r] = fmaxf(lane_max[rt][r], S[k / 2][rt][k % 2 * 2 + r]);
        exceeds |= SCALES_BY_ROW ? (lane_max[rt][r] - state.m[rt][r]) * scales_log2[rt][r] > RESCALE_THRESHOLD
                                 : lane_max[rt][r] > state.m[rt][r] + margin;
    }
    if (__any_sync(0xffffffffu, exceeds)) state.rescale(S, lane_max, scales_log2);
    state.exponentiate(S, scales_log2);
#pragma unroll
    for (int i = 0; i < KEY_TILES * ROW_TILES * 2; ++i) {
        const int kt = i / (2 * ROW_TILES), rt = i / 2 % ROW_TILES, half = i % 2;
        float p[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const PackedRow row(row0 + 8 * rt + 2 * q + r, kv_head, group);
            p[r] = Head(seqlen, row.h).keep(row.i, key + 16 * kt + 8 * half) ? S[kt][rt][2 * half + r] : 0.0f;
        }
        P[kt][rt][half] = movmatrix_trans(pack_P(p[0], p[1]));
    }
}

// At the end of a block: the kernel of the long sequences precedes this one and may still run.
__device__ __forceinline__ void wait_for_long_sequences() {
    if (SHORT_SEQUENCES) end_after_previous_entry_point();
}

// The key tile from n0, in `stage`.
__device__ __forceinline__ void process_tile(Softmax& state, const SeqlenInfo& seqlen, int row0, int kv_head, int group,
                                             int n0, bool masked, SmemAddr stage, Queries& queries,
                                             const QueryFactors& factors, const LaneRows& scales_log2,
                                             const KOffsets& K_offsets, const VOffsets& V_offsets) {
    ScoreTiles S = {};
    TIMELINE(QK);
    queries.scores(S, stage, K_offsets);
    factors.apply(S);
    Weights P;
    TIMELINE(softmax);
    online_softmax(P, S, state, seqlen, scales_log2, row0, kv_head, group, n0, masked);
    TIMELINE(PV);
    add_products(state.O, P, stage + K_BYTES, V_offsets);
}

// float8 keys, up to 8 rows: up to 16 warps per SM, 128 registers. Otherwise ptxas's own register limit spills 4 to 32
// bytes, which one block per SM raises.
constexpr bool FEW_REGISTERS = BLOCK_M == 8 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128 && CONVERTS_KEYS,
               MORE_REGISTERS =
                   BLOCK_M == 8 || DYNAMIC_SPLITS || SHORT_SEQUENCES || FLOAT8_KEYS || Head::HAS_LEFT_BOUND;
constexpr int LEAST_BLOCKS = FEW_REGISTERS ? 16 / WARPS : MORE_REGISTERS ? 1 : 0;

extern "C" __global__ __launch_bounds__(THREADS, LEAST_BLOCKS) void fwd_decode(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype_k> K,  // (B, Hk, Sk, HEAD_DIM), or (pages, Hk, PAGE_SIZE, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // the same with HEAD_DIM_V columns
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    float* partials,                                // Partials of combine.cuh; not used with one split
    int H,
    int group,   // H / Hk
    int splits,  // per row tile and batch entry; with DYNAMIC_SPLITS blocks that share the keys of all entries
    int entries, const __grid_constant__ Score score,
    const __grid_constant__ TensorMap K_map,  // TMA: boxes of ADDRESSED rows
    const __grid_constant__ TensorMap V_map) {
    extern __shared__ __align__(1024) char smem[];
    TIMELINE(schedule);
    griddepcontrol_launch_dependents();
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y, z = blockIdx.z;
    const SmemAddr base = smem_address(smem), ring = base + RINGS_AT + warp * RING;
    const KOffsets K_offsets = row_offsets<KOffsets>(lane);
    const VOffsets V_offsets = transposed_offsets<VOffsets>(lane);
    KeyPipeline pipeline(K, V, K_map, V_map, kv_head, lane, ring, base + BARRIERS_AT + warp * STAGES * 8);

    Scheduler scheduler(score, entries, splits);
    const auto row_tile_of = [&](const Split& split) {
        return row_tile<BLOCK_M>(score, blockIdx.x / CLUSTER, split.b, group);
    };
    const auto skip_without_rows = [&](Split split) {
        while (RAGGED && !split.invalid() && row_tile_of(split).invalid()) split = scheduler.next(split, z);
        return split;
    };
    const auto load_tiles = [&](const SplitPart& part, int begin, int end) {
#pragma unroll 1
        for (int i = begin; i < end; ++i) pipeline.load(part, part.first + i * WARPS);
    };
    // Loads Q and the first EARLY_STAGES key tiles.
    const auto start = [&](const SplitPart& part, SmemAddr Q_smem) {
        TIMELINE(load_Q);
        pipeline.begin(part);  // first: the page numbers arrive while Q is being loaded
        load_Q(Q_smem, Q, part, kv_head, group);
        load_tiles(part, 0, EARLY_STAGES);
    };
    Split split = skip_without_rows(scheduler.first(z));
    if (EARLY_START && !split.invalid()) start(SplitPart(score, split, row_tile_of(split), kv_head, group, warp), base);
#pragma unroll 1
    for (unsigned Q_at = 0; !split.invalid(); Q_at = EARLY_START ? Q_BYTES - Q_at : 0) {
        const SplitPart part(score, split, row_tile_of(split), kv_head, group, warp);
        cluster_arrive();
        if (!EARLY_START) start(part, base);
        load_tiles(part, EARLY_STAGES, STAGES - 1);
        TIMELINE(wait_Q);
        pipeline.wait_for_Q();
        __syncthreads();  // Q is complete; the results of the previous split have been read
        const QueryFactors factors(smem + Q_at, reinterpret_cast<float2*>(smem + SUMS_AT), warp, lane);
        LaneRows scales_log2;
        scales_of_rows(scales_log2, part.seqlen, factors, part.row0, kv_head, group);
        Queries queries(base + Q_at, lane);
        Softmax state;
        state.reset();
#pragma unroll 1
        for (int j = part.first; j < part.end; j += WARPS, pipeline.advance()) {
            TIMELINE(load);
            pipeline.load(part, j + (STAGES - 1) * WARPS);
            TIMELINE(wait_load);
            pipeline.wait();
            const bool masked = j * BLOCK_N < part.visible_to_all.begin || (j + 1) * BLOCK_N > part.visible_to_all.end;
            process_tile(state, part.seqlen, part.row0, kv_head, group, j * BLOCK_N, masked, pipeline.read_stage,
                         queries, factors, scales_log2, K_offsets, V_offsets);
            __syncwarp();  // all lanes have read the stage before it is loaded again
        }
        pipeline.wait_for_all();
        const Split next = skip_without_rows(scheduler.next(split, z));
        if (EARLY_START && !next.invalid())
            start(SplitPart(score, next, row_tile_of(next), kv_head, group, warp), base + Q_BYTES - Q_at);

        TIMELINE(store);
        const WarpResult result{smem, warp};
        if (Head::HAS_MASK && __any_sync(0xffffffffu, !all_finite<4>(state.O)))
            store_partial_non_finite(Q, K, V, score, part.seqlen.b, part.row0, kv_head, group, part.first, part.end,
                                     result);
        else result.store(state, factors);
        TIMELINE(wait_warps);
        __syncthreads();  // the results of all warps are in shared memory

        cluster_wait();
        const Partials parts(partials, Scheduler::parts(splits, entries),
                             static_cast<long long>(H) * Partials::rows_per_head(score), split);
        const Combine combine{O,       LSE,   parts, split, part.seqlen, smem, part.row0, part.rows_end - part.row0,
                              kv_head, group, H};
        TIMELINE(combine);
        combine.warps(warp, lane);
        if (CLUSTER > 1) {
            cluster_sync();  // the stores of all blocks of the cluster are visible
            combine.ranks();
        }
        pipeline.release_results();
        if (DYNAMIC_SPLITS && EARLY_STAGES < STAGES - 1) __syncthreads();  // the results have been read
        split = next;
    }
    TIMELINE(done);
    wait_for_long_sequences();
}

extern "C" __global__ __launch_bounds__(THREADS) void fwd_decode_combine(
    const __grid_constant__ View<dtype_o> O,  // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                               // (B, H, Sq), contiguous
    float* partials,                          // Partials of combine.cuh
    int H, int splits, int entries, const __grid_constant__ Score score) {
    combine_splits<Scheduler>(O, LSE, partials, H, splits, entries, score);
}
