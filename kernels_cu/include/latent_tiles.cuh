// Tiles of fwd_latent_wgmma: shared memory, pipelines and barriers; the rows and keys of a block; loads of K. Names
// that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include "pipeline.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

constexpr int WARPS = 1;               // split_epilogue.cuh: the key tiles of a block are not divided further
constexpr unsigned THREADS = 256;      // of O's warpgroups, which store the result; of a block of the combine kernel
constexpr unsigned ALL_THREADS = 384;  // O's left and right half, S: 128 each
#include "cluster.cuh"
#include "key_scheduler.cuh"
#include "split_epilogue.cuh"

constexpr int O_REGISTERS = 160, S_REGISTERS = 184;    // per thread; 168 at launch
constexpr int V_SLABS = (HEAD_DIM_V + 127) / 128 * 2;  // slabs of 64 columns
constexpr int SLABS = V_SLABS * 64 < HEAD_DIM ? (HEAD_DIM + 63) / 64 : V_SLABS, REST_SLABS = SLABS - V_SLABS;
constexpr int HALF_COLUMNS = 32 * V_SLABS, DV_PAD = 64 * V_SLABS;
constexpr int Q_REGISTER_SLABS = Q_SLABS < SLABS ? Q_SLABS : SLABS;  // the first ones
using Half = Swizzled<BLOCK_N, HALF_COLUMNS>;                        // 64 keys of the left, or right, half of V
using Rest = Swizzled<BLOCK_N, 64 * REST_SLABS>;                     // their columns that are not in V
using Queries = Swizzled<BLOCK_M, 64 * (SLABS - Q_REGISTER_SLABS)>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // P
static_assert(BLOCK_M == 64 && BLOCK_N == 64, "one m64n64 accumulator");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "a tensor map's rows are multiples of 16 bytes");
static_assert(STAGES / 2 == 2, "the left half's thread loads the rest and the right half of one key tile");
static_assert(V_SLABS <= 8, "half of O is at most 256 columns, the widest wgmma");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a key tile is in one page");

constexpr unsigned REST_STAGES = 2, REST_AT = STAGES * Half::BYTES;
constexpr unsigned P_AT = REST_AT + REST_STAGES * Rest::BYTES, Q_AT = P_AT + 2 * Pairs::BYTES;
constexpr unsigned ALPHA_AT = Q_AT + Queries::BYTES, SUMS_AT = ALPHA_AT + 2 * 4 * BLOCK_M;  // one for each stage of P
constexpr unsigned CURSORS_AT = SUMS_AT + 2 * 8 * BLOCK_M, SCHEDULERS_AT = CURSORS_AT + 2 * 16;
constexpr unsigned BARRIERS_AT = SCHEDULERS_AT + ALL_THREADS / 32 * 32;  // a scheduler for each warp
using HalfPipeline = Pipeline<BARRIERS_AT, STAGES>;  // left half of keys 0, right half, left half of keys 1, ...
using RestPipeline = Pipeline<HalfPipeline::END, REST_STAGES>;
using PPipeline = Pipeline<RestPipeline::END, 2>;
using NearlyDone = BarrierArray<PPipeline::END, 2>;  // Q K^T of a key tile, except for its last slab: the turn of the
                                                     // right half's P V of the previous one
static_assert(SMEM_BYTES == NearlyDone::END, "spec and kernel disagree on shared memory");

// Named barriers: the warps of O (P V of both halves is complete); those of the left and right half of O; those of S.
constexpr unsigned OUTPUT_BARRIER = 1, HALF_BARRIER = 2, SCORE_BARRIER = 4;

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(HalfPipeline::full(base, stage), 1);
        mbarrier_init(HalfPipeline::empty(base, stage), 4 * CLUSTER);  // one lane of each warp
    }
    for (unsigned stage = 0; stage < REST_STAGES; ++stage) {
        mbarrier_init(RestPipeline::full(base, stage), 1);
        mbarrier_init(RestPipeline::empty(base, stage), 4 * CLUSTER);
    }
    for (unsigned stage = 0; stage < 2; ++stage) {
        mbarrier_init(PPipeline::full(base, stage), 4);
        mbarrier_init(PPipeline::empty(base, stage), 8);  // both halves
        mbarrier_init(NearlyDone::at(base, stage), 4);
    }
    fence_proxy_async();
}

// A segment of the key tiles of packed rows row0 .. rows_end - 1 of key/value head `kv_head`.
struct BlockTile {
    const SeqlenInfo seqlen;
    const Segment segment;
    const int kv_head, group, row0, rows_end;
    const Head head0;  // all heads of the group have its mask

    __device__ __forceinline__ BlockTile(const Score& score, const Segment& segment, int group)
        : seqlen(score, segment.b), segment(segment), kv_head(blockIdx.y), group(group), row0(blockIdx.x * BLOCK_M),
          rows_end(min(row0 + BLOCK_M, seqlen.Sq * group)), head0(seqlen, kv_head * group) {}
    __device__ __forceinline__ int first_key(int j) const { return (segment.first + j) * BLOCK_N; }
    __device__ __forceinline__ bool has(int row) const { return row0 + row < rows_end; }
    __device__ __forceinline__ PackedRow row(int r) const { return PackedRow(row0 + r, kv_head, group); }
    __device__ __forceinline__ Range fully_visible_keys() const {
        return head0.fully_visible_keys(row0 / group, (rows_end - 1) / group + 1);
    }
};

// The queries of the cluster of row tile `row_tile`.
__device__ __forceinline__ Range queries_of_tile(const Score& score, int row_tile, int group) {
    const int begin = row_tile / CLUSTER * CLUSTER * BLOCK_M, end = min(begin + CLUSTER * BLOCK_M, score.Sq * group);
    return {begin / group, (end - 1) / group + 1};
}

// Releases a stage of K in all blocks of the cluster: each of them loads a part of the stage for all. By a whole warp.
template <class KPipeline, unsigned DEPTH>
__device__ __forceinline__ void release_K(SmemAddr base, unsigned i, int lane) {
#if CLUSTER > 1
    if (lane < CLUSTER) mbarrier_arrive_cluster(KPipeline::empty(base, stage_of<DEPTH>(i)), lane);
#else
    if (lane == 0) KPipeline::release(base, i);
#endif
}

// The key tile that a thread loads next: it passes through the key tiles of all segments. In shared memory, because the
// warps of O have no registers for it.
struct KeyCursor {
    int at, entry_end, b, shift;  // number in the sequence; the end of its entry; the entry; key tile - at
};

// The scheduler of a warp, in shared memory for the same reason.
__device__ __forceinline__ KeyScheduler& warp_scheduler(char* smem) {
    return reinterpret_cast<KeyScheduler*>(smem + SCHEDULERS_AT)[uniform(thread_index_x() / 32)];
}
// To the next segment. All lanes have read the current one.
__device__ __forceinline__ void next_segment(KeyScheduler& scheduler, const Score& score) {
    __syncwarp();
    if (thread_index_x() % 32 == 0) scheduler.next(score);
    __syncwarp();
}

// Loads K. One thread of a warpgroup calls it.
struct KeyLoader {
    const SmemAddr base;
    const Score& score;
    const KeyScheduler& scheduler;
    KeyCursor& cursor;
    const View<const dtype>& K;
    const TensorMap& K_map;

    __device__ __forceinline__ KeyLoader(SmemAddr base, const Score& score, const View<const dtype>& K,
                                         const TensorMap& K_map, char* smem, int half)
        : base(base), score(score), scheduler(warp_scheduler(smem)),
          cursor(reinterpret_cast<KeyCursor*>(smem + CURSORS_AT)[half]), K(K), K_map(K_map) {}

    // To the part's first key tile.
    __device__ __forceinline__ void begin() const {
        const Range tiles = scheduler.valid() ? scheduler.tiles(score, scheduler.b) : Range{0, 0};
        KeyCursor at = {scheduler.at, scheduler.entry_begin + max(tiles.end - tiles.begin, 1), scheduler.b,
                        tiles.begin - scheduler.entry_begin};
        if (scheduler.valid() && tiles.end == tiles.begin) ++at.at, next_entry(at);
        cursor = at;
    }
    // The address of the next key tile; entry -1: there is none. Paged keys: reads the block table.
    __device__ __forceinline__ KeyAddress next() const {
        KeyCursor at = cursor;
        if (at.at >= scheduler.end || at.b >= scheduler.entries) return {-1, 0};
        const KeyAddress address = SeqlenInfo(score, at.b).key_address((at.at + at.shift) * BLOCK_N);
        if (++at.at == at.entry_end) next_entry(at);
        cursor = at;
        return address;
    }
    // Fills all stages. Then the next key tile is the one that the left half's thread loads next.
    __device__ __forceinline__ void load_first() const {
        constexpr unsigned TILES = (STAGES + 1) / 2;
        KeyAddress from[TILES];
        KeyCursor third = cursor;
#pragma unroll
        for (unsigned j = 0; j < TILES; ++j) {  // reads the block table at once
            if (j == 2) third = cursor;
            from[j] = next();
        }
        if (TILES > 2) cursor = third;
#pragma unroll
        for (unsigned j = 0; j < TILES; ++j) {
            if (j < REST_STAGES) load_rest(j, from[j]);
            load_half(2 * j, from[j]);
            if (2 * j + 1 < STAGES) load_half(2 * j + 1, from[j]);
        }
    }
    // Loads half a V, when its stage is empty: left halves have even numbers.
    __device__ __forceinline__ void load_half(unsigned number, KeyAddress from) const {
        if (from.entry < 0) return;
        HalfPipeline::acquire(base, number);
        load<Half, HalfPipeline>(base, stage_of<STAGES>(number), number % 2 * HALF_COLUMNS, from, 0);
    }
    // Loads the rest of key tile j.
    __device__ __forceinline__ void load_rest(unsigned j, KeyAddress from) const {
        if (REST_SLABS == 0 || from.entry < 0) return;
        RestPipeline::acquire(base, j);
        load<Rest, RestPipeline>(base + REST_AT, stage_of<REST_STAGES>(j), DV_PAD, from, j);
    }

  private:
    // From the end of an entry to the next one that has keys.
    __device__ __forceinline__ void next_entry(KeyCursor& at) const {
#pragma unroll 1
        while (++at.b < scheduler.entries && at.at < scheduler.end) {
            const Range tiles = scheduler.tiles(score, at.b);
            at.shift = tiles.begin - at.at;
            at.entry_end = at.at + max(tiles.end - tiles.begin, 1);
            if (tiles.end > tiles.begin) return;
            ++at.at;
        }
    }
    template <class Box, class BoxPipeline>
    __device__ __forceinline__ void load(SmemAddr stages, unsigned stage, int column, KeyAddress from,
                                         unsigned first_rank) const {
        const SmemAddr full = BoxPipeline::full(base, stage);
        mbarrier_arrive_expect_tx(full, Box::BYTES);
#if CLUSTER > 1
#pragma unroll
        for (int slab = 0; slab < Box::SLABS; ++slab)
            if ((slab + first_rank) % CLUSTER == cluster_cta_rank())
                tma_load_multicast(stages + stage * Box::BYTES + slab * Box::SLAB_BYTES, K_map, column + slab * 64,
                                   static_cast<int>(from.row), K.stride_h ? blockIdx.y : 0,
                                   K.stride_b ? from.entry : 0, full);
        return;
#endif
        // The tensor map of a broadcast dimension (stride 0) has size 1.
        Box::load_part(stages + stage * Box::BYTES, K_map, column, static_cast<int>(from.row),
                       K.stride_h ? blockIdx.y : 0, K.stride_b ? from.entry : 0, full);
    }
};
