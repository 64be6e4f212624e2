// Tiles of fwd_latent_wgmma: shared memory, pipelines and barriers; the rows and keys of a block; loads of K. Names
// that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include "pipeline.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

constexpr int WARPS = 1, CLUSTER = 1;  // split_kv.cuh: the key tiles of a block are not divided further
constexpr unsigned THREADS = 256;      // of O's warpgroups, which store the result; of a block of the combine kernel
constexpr unsigned ALL_THREADS = 384;  // O's left and right half, S: 128 each
#include "split_epilogue.cuh"

constexpr int O_REGISTERS = 160, S_REGISTERS = 184;    // per thread; 168 at launch
constexpr int V_SLABS = (HEAD_DIM_V + 127) / 128 * 2;  // slabs of 64 columns
constexpr int SLABS = V_SLABS * 64 < HEAD_DIM ? (HEAD_DIM + 63) / 64 : V_SLABS, REST_SLABS = SLABS - V_SLABS;
constexpr int HALF_COLUMNS = 32 * V_SLABS, DV_PAD = 64 * V_SLABS;
constexpr int Q_REGISTER_SLABS = Q_SLABS < SLABS ? Q_SLABS : SLABS;  // the first ones
using Half = Swizzled<BLOCK_N, HALF_COLUMNS>;                        // 64 keys of the left, or right, half of V
using Rest = Swizzled<BLOCK_N, 64 * REST_SLABS>;                     // their columns that are not in V
using Queries = Swizzled<BLOCK_M, 64 * (SLABS - Q_REGISTER_SLABS)>;
using PTile = Swizzled<BLOCK_M, BLOCK_N>;  // P
static_assert(BLOCK_M == 64 && BLOCK_N == 64, "one m64n64 accumulator");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "a tensor map's rows are multiples of 16 bytes");
static_assert(STAGES / 2 == 2, "the left half's thread loads the rest of K, and half a V, of the same key tile");
static_assert(V_SLABS <= 8, "half of O is at most 256 columns, the widest wgmma");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a key tile is in one page");

constexpr unsigned REST_STAGES = 2, P_AT = STAGES * Half::BYTES, P_END = P_AT + 2 * PTile::BYTES;
constexpr unsigned REST_AT = P_END, Q_AT = REST_AT + REST_STAGES * Rest::BYTES;
constexpr unsigned ALPHA_AT = Q_AT + Queries::BYTES, SUMS_AT = ALPHA_AT + 2 * 4 * BLOCK_M;
constexpr unsigned BARRIERS_AT = SUMS_AT + 8 * BLOCK_M;
using HalfPipeline = Pipeline<BARRIERS_AT, STAGES>;  // left half of keys 0, right half, left half of keys 1, ...
using RestPipeline = Pipeline<HalfPipeline::END, REST_STAGES>;
using PPipeline = Pipeline<RestPipeline::END, 2>;
using NearlyDone = BarrierArray<PPipeline::END, 2>;  // Q K^T of a key tile, except for its last slab: the turn of the
                                                     // right half's P V of the previous one
using FullQ = BarrierArray<NearlyDone::END, 1>;  // all rows of Q have arrived
using ReadQ = BarrierArray<FullQ::END, 1>;       // and have been read
static_assert(SMEM_BYTES == ReadQ::END, "spec and kernel disagree on shared memory");

// Rows of Q on their way to registers and to Q_AT, where the last stages of V and P will be: row r begins at q_row(r),
// and those of a block with few rows occupy no stage of V. An odd number of 16-byte units avoids bank conflicts.
constexpr unsigned Q_ROW_BYTES = 16 * (HEAD_DIM / 8 | 1), ROWS_OF_Q = (BLOCK_M * Q_ROW_BYTES + 127) / 128 * 128;
constexpr unsigned Q_ROWS_END = P_END > ROWS_OF_Q ? P_END : ROWS_OF_Q;
__device__ __forceinline__ SmemAddr q_row(SmemAddr base, int r) { return base + Q_ROWS_END - (r + 1) * Q_ROW_BYTES; }

// Named barriers: all warps (P V of both halves are complete, m and l are stored); those of the left and right half
// of O; those of S.
constexpr unsigned BLOCK_BARRIER = 1, HALF_BARRIER = 2, SCORE_BARRIER = 4;

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(HalfPipeline::full(base, stage), 1);
        mbarrier_init(HalfPipeline::empty(base, stage), 4);  // one lane of each warp
    }
    for (unsigned stage = 0; stage < REST_STAGES; ++stage) {
        mbarrier_init(RestPipeline::full(base, stage), 1);
        mbarrier_init(RestPipeline::empty(base, stage), 4);
    }
    for (unsigned stage = 0; stage < 2; ++stage) {
        mbarrier_init(PPipeline::full(base, stage), 4);
        mbarrier_init(PPipeline::empty(base, stage), 8);  // both halves
        mbarrier_init(NearlyDone::at(base, stage), 4);
    }
    mbarrier_init(ReadQ::at(base, 0), 4);
    fence_proxy_async();
}

// The rows and keys of a block: packed rows row0 .. rows_end - 1 of key/value head `kv_head`, and key tiles `first` ..
// first + tiles - 1.
struct BlockTile {
    const SeqlenInfo seqlen;
    const int kv_head, group, row0, rows_end;
    const Head head0;  // all heads of the group have its mask
    Range fully_visible;
    int first, tiles;

    __device__ __forceinline__ BlockTile(const Score& score, const Split& split, int row_tile, int kv_head, int group)
        : seqlen(score, split.b), kv_head(kv_head), group(group), row0(row_tile * BLOCK_M),
          rows_end(min(row0 + BLOCK_M, seqlen.Sq * group)), head0(seqlen, kv_head * group) {
        const int i0 = row0 / group, i1 = (rows_end - 1) / group + 1;  // queries
        const Range keys = head0.keys(i0, i1);
        fully_visible = head0.fully_visible_keys(i0, i1);
        const int begin = keys.begin / BLOCK_N, all = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
        const int per_split = (all + split.splits - 1) / split.splits, skipped = min(split.split * per_split, all);
        first = begin + skipped, tiles = min(per_split, all - skipped);
    }
    __device__ __forceinline__ int n0(int j) const { return (first + j) * BLOCK_N; }
    __device__ __forceinline__ int rows() const { return rows_end - row0; }
    __device__ __forceinline__ bool has(int row) const { return row < rows(); }
    __device__ __forceinline__ PackedRow row(int r) const { return PackedRow(row0 + r, kv_head, group); }
};

// Starts the loads of Q's rows. One warp calls it, before any load of K, which would delay the rows.
__device__ __forceinline__ void start_Q(SmemAddr base, const BlockTile& tile, const View<const dtype>& Q, int lane) {
    const SmemAddr full = FullQ::at(base, 0);
    if (lane == 0) {
        mbarrier_init(full, 1);
        fence_proxy_async();
        mbarrier_arrive_expect_tx(full, tile.rows() * 2 * HEAD_DIM);
    }
    __syncwarp();  // the barrier is initialised
#pragma unroll 1
    for (int r = lane; tile.has(r); r += 32) {
        const PackedRow row = tile.row(r);
        bulk_load(q_row(base, r), tile.seqlen.query(Q, row.h, row.i), 2 * HEAD_DIM, full);
    }
    __syncwarp();
}

// Loads K. One thread of a warpgroup calls it.
struct KeyLoader {
    const SmemAddr base;
    const BlockTile& tile;
    const TensorMap& K_map;
    const int h;
    const bool broadcast;  // over batch entries

    // The tensor map of a broadcast dimension (stride 0) has size 1.
    __device__ __forceinline__ KeyLoader(SmemAddr base, const BlockTile& tile, const View<const dtype>& K,
                                         const TensorMap& K_map)
        : base(base), tile(tile), K_map(K_map), h(K.stride_h ? tile.kv_head : 0), broadcast(K.stride_b == 0) {}

    // The address of key tile j, for the functions below. Paged keys: reads the block table.
    __device__ __forceinline__ KeyAddress address(int j) const {
        return j < tile.tiles ? tile.seqlen.key_address(tile.n0(j)) : KeyAddress{};
    }
    // Loads half a V, when its stage is empty: left halves have even numbers.
    __device__ __forceinline__ void load_half(unsigned number, KeyAddress from) const {
        if (static_cast<int>(number / 2) >= tile.tiles) return;
        HalfPipeline::acquire(base, number);
        load<Half, HalfPipeline>(base, stage_of<STAGES>(number), number % 2 * HALF_COLUMNS, from);
    }
    // Loads the rest of key tile j.
    __device__ __forceinline__ void load_rest(unsigned j, KeyAddress from) const {
        if (REST_SLABS == 0 || static_cast<int>(j) >= tile.tiles) return;
        RestPipeline::acquire(base, j);
        load<Rest, RestPipeline>(base + REST_AT, stage_of<REST_STAGES>(j), DV_PAD, from);
    }
    // Fills all stages.
    __device__ __forceinline__ void load_first() const {
        constexpr unsigned TILES = (STAGES + 1) / 2;
        KeyAddress from[TILES];
#pragma unroll
        for (unsigned j = 0; j < TILES; ++j) from[j] = address(j);  // reads the block table at once
#pragma unroll
        for (unsigned j = 0; j < TILES; ++j) {
            if (j < REST_STAGES) {
                wait_for_Q(REST_AT + j * Rest::BYTES, Rest::BYTES);
                load_rest(j, from[j]);
            }
#pragma unroll
            for (unsigned half = 2 * j; half < min(2 * j + 2, STAGES); ++half) {
                wait_for_Q(half * Half::BYTES, Half::BYTES);
                load_half(half, from[j]);
            }
        }
    }

  private:
    // Waits until the rows of Q that occupy any of these bytes have been read.
    __device__ __forceinline__ void wait_for_Q(unsigned at, unsigned bytes) const {
        const int first = static_cast<int>(Q_ROWS_END) - tile.rows() * static_cast<int>(Q_ROW_BYTES);
        if (at < Q_ROWS_END && static_cast<int>(at + bytes) > first) mbarrier_wait(ReadQ::at(base, 0), 0);
    }
    template <class Box, class BoxPipeline>
    __device__ __forceinline__ void load(SmemAddr stages, unsigned stage, int column, KeyAddress from) const {
        const SmemAddr full = BoxPipeline::full(base, stage);
        mbarrier_arrive_expect_tx(full, Box::BYTES);
        Box::load_part(stages + stage * Box::BYTES, K_map, column, static_cast<int>(from.row), h,
                       broadcast ? 0 : from.batch_or_page, full);
    }
};
