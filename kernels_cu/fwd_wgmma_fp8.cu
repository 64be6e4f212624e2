// Rung 4 for float8: persistent, warp-specialised attention forward on Hopper: wgmma of 8 bits (k = 32), fed by TMA.
//
// As fwd_wgmma: one producer warpgroup, and consumer warpgroups of 64 query rows each. What 8 bits change:
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
// Vt: wgmma of 8 bits reads both operands K-major (transpose_V.cuh). Long sums: the tensor cores accumulate O over at
// most SPLIT_KEYS keys (partial_O.cuh). Deferred rescaling: softmax_fp8.cuh.
#define TIMELINE_BRANCH 1  // registers are few
#define FALLBACK_INLINE __forceinline__
#include "fp8_hopper.cuh"
#include "tile_scheduler.cuh"
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "partial_O.cuh"
#include "score_mod.cuh"
#include "softmax_fp8.cuh"
#include "swizzle.cuh"
#include "timeline.cuh"
#include "transpose_V.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;
constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
constexpr int D_PAD = (HEAD_DIM + 31) / 32 * 32;  // padded with zeros
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
constexpr unsigned TRANSPOSE_WARPS = 3;
constexpr bool PING_PONG = CONSUMERS > 1;
// Stream-K: work tiles that do not fill a wave are split by key tiles. Not with options that need registers (spills),
// nor if the work tiles differ in length.
constexpr bool STREAM_K = !Head::HIDES && !RAGGED && Head::LINEAR && !DROPOUT && !(DESCALE & 7);
static_assert(BLOCK_M % 64 == 0 && CONSUMERS <= 3, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N <= 256, "a tile of whole wgmma steps");
static_assert((STAGES & STAGES - 1) == 0, "pipe_index keeps the work tile's parity in its highest bit");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "a tensor map's rows are multiples of 16 bytes");

constexpr int SPLIT_TILES = SPLIT_KEYS / BLOCK_N;  // key tiles that O accumulates in the tensor cores

using Queries = Swizzled<64, D_PAD, 1>;
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
constexpr unsigned FULL_Q = VtPipeline::END, EMPTY_Q = FULL_Q + 8 * CONSUMERS;
constexpr unsigned HAS_TILE_AT = EMPTY_Q + 8 * CONSUMERS;  // per stage of V: 1 if it holds a tile, 0 at the end
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
        mbarrier_init(base + FULL_Q + 8 * consumer, 1);
        mbarrier_init(base + EMPTY_Q + 8 * consumer, 4);
    }
    fence_proxy_async();
}

struct alignas(16) TileInfo {  // a work tile: query rows m0 .. end - 1 of head h of batch entry b; invalid if b < 0
    int b, h, m0, end;
    Range split;    // stream-K: this block's range of key tiles
    int first;      // stream-K, if split.begin > 0: the first block that has key tiles of this work tile
    int continued;  // stream-K: whether the next block has key tiles of this work tile
};
__device__ __forceinline__ TileInfo& tile_info(char* smem, unsigned consumer, unsigned parity) {
    return reinterpret_cast<TileInfo*>(smem + TILE_INFO_AT)[2 * consumer + parity];
}
__device__ __forceinline__ TileInfo uniform(const TileInfo& info) {  // uniform over the warp
    const auto same = [](int x) { return static_cast<int>(uniform(static_cast<unsigned>(x))); };
    return {same(info.b), same(info.h), same(info.m0), same(info.end), {same(info.split.begin), same(info.split.end)}};
}

struct WorkTileRange : TileInfo {  // and the key tiles that it sees
    Range range;
    int tiles;
    __device__ __forceinline__ WorkTileRange(const TileInfo& info, const Score& score)
        : TileInfo(info), range(STREAM_K ? split : n_block_range(Head(score, b, h), m0, end)),
          tiles(range.end - range.begin) {}
    // First key of the j-th key tile in the order of the mainloop.
    __device__ __forceinline__ int keys_at(int j) const {
        return (STREAM_K || Head::FIRST ? range.begin + j : j) * BLOCK_N;
    }
};

// Index j of the first key tile that this consumer's rows see; earlier ones belong to other consumers.
__device__ __forceinline__ int first_own_tile(const WorkTileRange& work_tile, Range own, int tiles) {
    return tiles > 0 && Head::FIRST ? own.begin - work_tile.range.begin : 0;
}

// Calls f(work_tile) with each work tile of the block (static persistent scheduler).
//
// The query tile with fewer than BLOCK_M rows is inefficient: 64 rows take 0.6 of the time of 192. Causal: it is the
// head's first tile, which sees the fewest keys. Otherwise it is the last one, and each wave shifts the blocks by one,
// so that all blocks have the same number of them.
//
// Stream-K: the first full_wave_tiles work tiles are processed whole. The key tiles of the others are divided evenly:
// each block has a range of them, from one work tile or two, and processes the later one first. The last block of a
// work tile finalizes it; by then the other blocks have usually stored their partial O.
template <class F>
__device__ __forceinline__ void for_each_fp8_work_tile(unsigned heads, int H, unsigned full_wave_tiles,
                                                       const Score& score, F f) {
    const unsigned tiles = query_tiles<BLOCK_M>(score);
#if RAGGED
    for_each_work_tile(tiles, heads, [&](unsigned tile, int head) {
        const RowTile tile_rows = query_tile<BLOCK_M>(score, tile, 0);
        if (!tile_rows.invalid())
            f(WorkTileRange({tile_rows.b, head, tile_rows.row0, tile_rows.row0 + BLOCK_M}, score));
    });
#else
    const auto work_tile = [&](int head, int row, Range split = {}, unsigned first = 0, bool continued = false) {
        const int first_block = static_cast<int>(first);
        return WorkTileRange({head / H, head % H, max(row, 0), row + BLOCK_M, split, first_block, continued}, score);
    };
    if constexpr (CAUSAL) {
        const int beyond = tiles * BLOCK_M - (score.Sq + 63) / 64 * 64;
        for_each_work_tile(tiles, heads, [&](unsigned tile, int head) {
            f(work_tile(head, static_cast<int>(tile * BLOCK_M) - beyond));
        });
    } else {
        const int keys = (score.Sk + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
        for (unsigned wave = 0, own = blockIdx.x; wave < full_wave_tiles;
             wave += gridDim.x, own = own + 1 < gridDim.x ? own + 1 : 0)
            if (const unsigned i = wave + own; i < full_wave_tiles)
                f(work_tile(i / tiles, i % tiles * BLOCK_M, {0, keys}));
        const unsigned split_tiles = (heads * tiles - full_wave_tiles) * keys;
        const unsigned begin = blockIdx.x * split_tiles / gridDim.x;
#pragma unroll 1
        for (unsigned end = STREAM_K ? (blockIdx.x + 1) * split_tiles / gridDim.x : 0; end > begin;) {
            const unsigned i = full_wave_tiles + (end - 1) / keys, tile_begin = (end - 1) / keys * keys;
            const unsigned from = max(begin, tile_begin);
            f(work_tile(i / tiles, i % tiles * BLOCK_M,
                        {static_cast<int>(from - tile_begin), static_cast<int>(end - tile_begin)},
                        ((tile_begin + 1) * gridDim.x - 1) / split_tiles, end - tile_begin < keys));
            end = from;
        }
    }
#endif
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void fwd_wgmma_fp8(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,    // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,        // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,        // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    int H,
    int heads,                                      // B * H
    int group,                                      // H / Hk
    const __grid_constant__ Score score,
    int full_wave_tiles,                            // work tiles that are not split (stream-K)
    float* partials) {                              // per block: four counters, O; stream-K: partial O
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are initialised before they are used
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    if (warp < 4) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        unsigned pipe_index = 0, work_tiles = 0;  // key tiles of earlier work tiles; number of these
        unsigned* const has_tile = reinterpret_cast<unsigned*>(smem + HAS_TILE_AT);
        if (warp == 0 && elect()) {
            for_each_fp8_work_tile(heads, H, full_wave_tiles, score, [&](const WorkTileRange& work_tile) {
                const int h = work_tile.h / group, b = work_tile.b;
                const SeqlenInfo sequence(score, b);
                // The tensor map of a broadcast dimension (stride 0) has size 1.
                const auto load = [&](auto tiles, auto pipeline, const TensorMap& map, const auto& tensor,
                                      unsigned tile, int j) {
                    const unsigned i = pipe_index + j, stage = stage_of(i);
                    TIMELINE(wait_empty);
                    pipeline.acquire(base, i);
                    TIMELINE(load);
                    if (tile == V_AT) has_tile[stage] = true;
                    tiles.load(base + tile + stage * tiles.BYTES, map, sequence.key_box(work_tile.keys_at(j)),
                               tensor.stride_h ? h : 0, sequence.key_batch(tensor.stride_b ? b : 0),
                               pipeline.full(base, stage));
                };
                const auto load_KV = [&](int begin, int end) {
#pragma unroll 1
                    for (int j = begin; j < end; ++j) {
                        load(Keys(), KPipeline(), K_map, K, K_AT, j);
                        load(Values(), VPipeline(), V_map, V, V_AT, j);
                    }
                };
                load_KV(0, min(work_tile.tiles, 1));  // does not depend on the release of the previous Q
#pragma unroll 1
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    mbarrier_wait(base + EMPTY_Q + 8 * consumer, work_tiles % 2 ^ 1);
                    tile_info(smem, consumer, work_tiles % 2) = work_tile;
                    Queries::load(base + consumer * Queries::BYTES, Q_map,
                                  sequence.query_box(work_tile.m0 + 64 * consumer), Q.stride_h ? work_tile.h : 0,
                                  sequence.query_batch(Q.stride_b ? b : 0), base + FULL_Q + 8 * consumer);
                }
                ++work_tiles;
                load_KV(1, work_tile.tiles);
                pipe_index += work_tile.tiles;
            });
            VPipeline::acquire(base, pipe_index);
            has_tile[stage_of(pipe_index)] = false;
            mbarrier_arrive(VPipeline::full(base, stage_of(pipe_index)));
#pragma unroll 1
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                mbarrier_wait(base + EMPTY_Q + 8 * consumer, work_tiles % 2 ^ 1);
                tile_info(smem, consumer, work_tiles % 2).b = -1;
                mbarrier_arrive(base + FULL_Q + 8 * consumer);
            }
        } else if (warp >= 4 - TRANSPOSE_WARPS) {
#pragma unroll 1
            for (unsigned i = 0;; ++i) {  // key tiles of all work tiles
                const unsigned stage = stage_of(i);
                TIMELINE(wait_V);
                VPipeline::wait(base, i);
                if (!has_tile[stage]) break;
                TIMELINE(wait_empty);
                VtPipeline::acquire(base, i);
                TIMELINE(transpose);
                transpose_V<TRANSPOSE_WARPS, BLOCK_N, HEAD_DIM_V>(base + V_AT + stage * Values::BYTES,
                                                                  base + VT_AT + stage * VT_BYTES,
                                                                  warp + TRANSPOSE_WARPS - 4);
                fence_proxy_async();
                __syncwarp();  // all lanes have read V and written Vt
                if (lane == 0) {
                    VPipeline::release(base, i);
                    mbarrier_arrive(VtPipeline::full(base, stage));
                }
            }
        }
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const unsigned consumer = warp / 4 - 1, consumer_barrier = 1 + consumer;  // named barrier of 128 threads
    const unsigned scheduler_barrier = 4 + consumer, next_scheduler_barrier = 4 + (consumer + 1) % CONSUMERS;
    const int g = lane / 4, q = lane % 4;
    unsigned pipe_index = 0;  // key tiles of earlier work tiles; the highest bit is the phase of Q's barriers
    if (PING_PONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_scheduler_barrier, 256);  // consumer 0 starts

#pragma unroll 1
    for (;;) {
        mbarrier_wait(base + FULL_Q + 8 * consumer, pipe_index >> 31);
        const TileInfo& info = tile_info(smem, consumer, pipe_index >> 31);
        if (info.b < 0) break;
        const WorkTileRange work_tile(uniform(info), score);
        const int m0 = work_tile.m0 + 64 * consumer, first_row = m0 + warp % 4 * 16;  // of the warpgroup, of the warp
        const Head head(score, work_tile.b, work_tile.h);
        const float exponent = head.unit * Head::LOG2E;
        const Range own = STREAM_K ? work_tile.range : n_block_range(head, m0, m0 + 64);  // seen by the warpgroup
        const int tiles = own.end - own.begin, first_own = first_own_tile(work_tile, own, tiles);
        const Range fully_visible = head.fully_visible_keys(first_row, first_row + 16);  // keys that all rows see
        Fp8SoftmaxState softmax;
        // Wide heads: recompute the descriptors, which would not fit in registers.
        const auto address = [](SmemAddr tile) { return D_PAD > 128 || HEAD_DIM_V > 128 ? uniform(tile) : tile; };
        const auto is_full = [&](auto pipeline, int j) {
            const unsigned i = pipe_index + j;
            return mbarrier_test_wait(pipeline.full(base, stage_of(i)), parity_of(i));
        };
        const auto wait = [&](auto pipeline, int j, unsigned is_full = 0) {
            const unsigned i = pipe_index + j;
            mbarrier_wait_unless(is_full, pipeline.full(base, stage_of(i)), parity_of(i));
        };
        const auto release = [&](auto pipeline, int j) { if (lane == 0) pipeline.release(base, pipe_index + j); };
        const auto mma_QK = [&](float (&S)[BLOCK_N / 2], int j) {
            const Descriptor Q_smem = Queries::k_major(address(base + consumer * Queries::BYTES));
            const Descriptor K_smem = Keys::k_major(address(base + K_AT + stage_of(pipe_index + j) * Keys::BYTES));
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < D_PAD / 32; ++step)
                wgmma8<dtype>(S, Q_smem + Queries::k_step(step), K_smem + Keys::k_step(step), step > 0);
            wgmma_commit();
        };
        const auto mask = [&](float (&S)[BLOCK_N / 2], int j) {  // raw scores of tile j, -INF where masked
            const int n0 = work_tile.keys_at(j), column = n0 + 2 * q, row = first_row + g;
            const auto at = [&](int i) { return ScoreIndex(row, column, i / 2 % 2 * 8, i / 4 * 8 + i % 2); };
#pragma unroll
            for (int i = 0; i < (Head::LINEAR ? 0 : BLOCK_N / 2); ++i) S[i] = head.raw(S[i], at(i));
            if ((!Head::FIRST || fully_visible.begin <= n0) && n0 + BLOCK_N <= fully_visible.end) return;
            if (Head::ELEMENT_MASK) {
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i)
                    if (!head.visible(at(i).query_row(), at(i).key_col())) S[i] = -INF;
                return;
            }
            const Range seen[2] = {head.keys(row, row + 1), head.keys(row + 8, row + 9)};
            const int end[2] = {seen[0].end - column, seen[1].end - column};
            const int begin[2] = {seen[0].begin - column, seen[1].begin - column};
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {
                if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) S[i] = -INF;
                if (Head::FIRST && i / 4 * 8 + i % 2 < begin[i / 2 % 2]) S[i] = -INF;
            }
        };
        const auto apply_dropout = [&](float (&S)[BLOCK_N / 2], int j) {
            Head::Kept kept[BLOCK_N / 16];
            head.keep_along_queries(kept, first_row, work_tile.keys_at(j));
#pragma unroll
            for (int i = 0; i < (DROPOUT ? BLOCK_N / 2 : 0); ++i)
                if (!kept[i / 8].keep(i / 4 % 2 * 2 + i / 2 % 2, i % 2)) S[i] = 0.0f;
        };
        const auto pack_P = [&](unsigned (&P)[BLOCK_N / 32][4], const float (&S)[BLOCK_N / 2]) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) {
                const float* s = S + i / 2 * 8 + i % 2 * 2;  // column blocks 2 k and 2 k + 1, row g or g + 8
                P[i / 4][i % 4] = pack4<dtype_v>(s[0], s[1], s[4], s[5]);
            }
        };
        const auto mma_PV = [&](const unsigned (&P)[BLOCK_N / 32][4], int j, bool accumulate) {
            const Descriptor Vt_smem = Transposed::k_major(address(base + VT_AT + stage_of(pipe_index + j) * VT_BYTES));
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < BLOCK_N / 32; ++step)
                wgmma8<dtype_v>(softmax.O, P[step], Vt_smem + Transposed::k_step(step), step > 0 || accumulate);
            wgmma_commit();
        };
        const auto wait_PV = [&] {
            TIMELINE(wait_PV);
            wgmma_wait<0>();
            TIMELINE(multiply);
            warpgroup_fence_operand(softmax.O);
        };
        // Slot of a block's O in `partials`; stream-K: slot gridDim.x + block is the block's partial O.
        const auto slot_of = [&](unsigned block) {
            return PartialO<HEAD_DIM_V / 2, THREADS - 128>(partials, block);
        };
        const auto slot = slot_of(blockIdx.x);
        const auto warp_scheduler_barrier_sync = [&] { if (PING_PONG) named_barrier_sync(scheduler_barrier, 256); };
        const auto warp_scheduler_barrier_arrive = [&] {
            if (PING_PONG) named_barrier_arrive(next_scheduler_barrier, 256);
        };
        const auto skip_tile = [&](int j) {  // a key tile that only other consumers see
            warp_scheduler_barrier_sync();
            warp_scheduler_barrier_arrive();
            wait(KPipeline(), j);
            release(KPipeline(), j);
            wait(VtPipeline(), j);
            release(VtPipeline(), j);
        };

        if (m0 >= min(head.Sq, work_tile.end)) {  // the warpgroup has no rows in this work tile
            if (lane == 0) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
#pragma unroll 1
            for (int j = 0; j < work_tile.tiles; ++j) skip_tile(j);
            pipe_index = pipe_index + work_tile.tiles ^ 1u << 31;
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < first_own; ++j) skip_tile(j);
        if (tiles > 0) {
            const int last = first_own + tiles - 1;
            float S[BLOCK_N / 2];
            unsigned P[BLOCK_N / 32][4];
            const auto finish_S = [&](int j) {  // waits for Q K^T; raw scores, masked
                TIMELINE(wait_S);
                wgmma_wait<0>();
                TIMELINE(softmax);
                warpgroup_fence_operand(S);
                release(KPipeline(), j);
                if (j == last && lane == 0) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);  // the last read of Q
                mask(S, j);
            };
            const auto convert_P = [&](int j) {  // S -> P in 8 bits
                apply_dropout(S, j);
                pack_P(P, S);
            };
            wait(KPipeline(), first_own);
            mma_QK(S, first_own);
            finish_S(first_own);
            float unused_alpha[2];  // O and l are still 0
            softmax.raise_max(S, exponent, unused_alpha);
            float sums[2][2];
            softmax.exponentiate(S, exponent, sums);
            softmax.add(sums);
            convert_P(first_own);
            unsigned V_full = 0, K_full = 0;  // results of test_wait, issued ahead of the exponentials
#pragma unroll 1
            for (int j = first_own; j < last; ++j) {
                const int tiles_in_O = (j - first_own) % SPLIT_TILES;  // key tiles accumulated in the tensor cores
                if (tiles_in_O == 0 && j > first_own) {
                    if (j - first_own > SPLIT_TILES) slot.add_to(softmax.O, softmax.m, softmax.l, exponent);
                    slot.store(softmax.O, softmax.m);
                }
                TIMELINE(wait_V);
                wait(VtPipeline(), j, V_full);
                TIMELINE(wait_barrier);
                warp_scheduler_barrier_sync();
                TIMELINE(multiply);
                mma_PV(P, j, tiles_in_O > 0);
                TIMELINE(wait_K);
                wait(KPipeline(), j + 1, K_full);
                wait_PV();
                wgmma_discard(S);
                mma_QK(S, j + 1);
                warp_scheduler_barrier_arrive();
                release(VtPipeline(), j);
                finish_S(j + 1);
                if (!CHECK_SUMS && softmax.scores_too_large(S, exponent)) softmax.rescale(S, exponent);
                V_full = is_full(VtPipeline(), j + 1), K_full = is_full(KPipeline(), j + 2);
                softmax.exponentiate(S, exponent, sums);
                if (CHECK_SUMS && softmax.sums_too_large(sums)) softmax.rescale_after_exp(S, sums, exponent);
                softmax.add(sums);
                convert_P(j + 1);
            }
            wait(VtPipeline(), last);
            warp_scheduler_barrier_sync();
            mma_PV(P, last, last > first_own);
            wait_PV();
            warp_scheduler_barrier_arrive();
            release(VtPipeline(), last);
            if (last - first_own > SPLIT_TILES) slot.add_to(softmax.O, softmax.m, softmax.l, exponent);
        }
        if (tiles <= 0 && lane == 0) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
#pragma unroll 1
        for (int j = first_own + max(tiles, 0); j < work_tile.tiles; ++j) skip_tile(j);
        const TileInfo epilogue_info = tile_info(smem, consumer, pipe_index >> 31);  // read again: saves registers
        pipe_index = pipe_index + work_tile.tiles ^ 1u << 31;
        unsigned* const counters = reinterpret_cast<unsigned*>(partials);
        if (STREAM_K && epilogue_info.continued) {
            slot_of(gridDim.x + blockIdx.x).store(softmax.O, softmax.m, softmax.l[0], softmax.l[1]);
            named_barrier_sync(consumer_barrier, 128);
            if (warp % 4 == 0 && lane == 0) counter_arrive(counters + 4 * blockIdx.x + consumer);
            continue;
        }
        if (STREAM_K && epilogue_info.split.begin > 0) {
            float lane_max[2] = {softmax.m[0], softmax.m[1]};
#pragma unroll 1
            for (unsigned block = epilogue_info.first; block < blockIdx.x; ++block) {
                counter_wait(counters + 4 * block + consumer, 1);
                const float4 stored = slot_of(gridDim.x + block).row_stats();
                lane_max[0] = fmaxf(lane_max[0], stored.x), lane_max[1] = fmaxf(lane_max[1], stored.y);
            }
            softmax.rescale_to(lane_max, exponent);
#pragma unroll 1
            for (unsigned block = epilogue_info.first; block < blockIdx.x; ++block)
                slot_of(gridDim.x + block).add_to(softmax.O, softmax.m, softmax.l, exponent);
        }

        const Head scaled(score, epilogue_info.b, epilogue_info.h);
        // A masked key has P = 0, but 0 * NaN is NaN: rows that are not finite, or have very large scores, are
        // recomputed. Rare.
        if (named_barrier_or(consumer_barrier, 128, !softmax.finite() || softmax.large(scaled.unit * Head::LOG2E))) {
            attend_non_finite<64, 4>(Q, K, V, O, LSE, group, score, epilogue_info.b, epilogue_info.h, H, m0, warp % 4);
            continue;
        }
        const int thread = thread_index_x() - 128;  // read again, as is epilogue_info: saves registers
        const int row = epilogue_info.m0 + thread / 32 * 16 + thread % 32 / 4;
        const float sum[2] = {row_sum<4>(softmax.l[0]), row_sum<4>(softmax.l[1])};
        float* const lse = LSE + scaled.lse_offset(H, epilogue_info.h) + row;
        dtype_o* const dst = scaled.query(O, epilogue_info.h, row) + 4 * q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = sum[half] * (1.0f / P_MAX);
            const FinalizedRow final_row = scaled.finalize<!NATURAL, APPROXIMATE>(softmax.m[half], l);
            const float inverse = final_row.inverse * (1.0f / P_MAX);
            if (row + 8 * half >= scaled.Sq) continue;
            if (q == 0) lse[8 * half] = final_row.lse;
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 16; ++i) {  // even columns of each 16 in one block of 8, odd in the next

                const float* o = softmax.O + 8 * i + 2 * half;
                store4(dst + 8 * half * O.stride_s + 16 * i,
                       o[0] * inverse, o[4] * inverse, o[1] * inverse, o[5] * inverse);
            }
        }
    }
    TIMELINE(done);
}
