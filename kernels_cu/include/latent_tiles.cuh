// Tiles of fwd_latent_wgmma: shared memory, pipelines and barriers; the rows and keys of a block; loads of K. Names
// that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include <cluster.cuh>  // angle brackets: the CPU backend has its own
#include "pipeline.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

// split_kv.cuh: the key tiles of a block are not divided further.
constexpr int WARPS = 1;
constexpr bool CLUSTER_DIVIDES_KEYS = false;
// Two row tiles of the same keys are a cluster. Each block has the half of O with the number of its rank, for both.
constexpr bool PAIR = CLUSTER == 2;
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
static_assert(!PAIR || STAGES == 5, "HalfStage: three stages for the block's half of V, two for the other one");
static_assert(V_SLABS <= 8, "half of O is at most 256 columns, the widest wgmma");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a key tile is in one page");

constexpr unsigned REST_STAGES = 2, P_AT = STAGES * Half::BYTES, P_END = P_AT + 2 * PTile::BYTES;
constexpr unsigned PEER_P_AT = P_END, REST_AT = PEER_P_AT + (CLUSTER - 1) * 2 * PTile::BYTES;  // the peer's P
constexpr unsigned Q_AT = REST_AT + REST_STAGES * Rest::BYTES;
constexpr unsigned ALPHA_AT = Q_AT + Queries::BYTES, PEER_ALPHA_AT = ALPHA_AT + 2 * 4 * BLOCK_M;
constexpr unsigned SUMS_AT = ALPHA_AT + CLUSTER * 2 * 4 * BLOCK_M;  // of the block's rows, then the peer's
constexpr unsigned VOTES_AT = SUMS_AT + CLUSTER * 8 * BLOCK_M, BARRIERS_AT = VOTES_AT + (PAIR ? 64 : 0);
using HalfPipeline = Pipeline<BARRIERS_AT, STAGES>;  // left half of keys 0, right half, left half of keys 1, ...
using RestPipeline = Pipeline<HalfPipeline::END, REST_STAGES>;
using PPipeline = Pipeline<RestPipeline::END, 2>;
using NearlyDone = BarrierArray<PPipeline::END, 2>;  // Q K^T of a key tile, except for its last slab: the turn of the
                                                     // late P V of the previous one
using PeerFullP = BarrierArray<NearlyDone::END, PAIR ? 2 : 0>;
using FullQ = BarrierArray<PeerFullP::END, 1>;  // all rows of Q have arrived
using ReadQ = BarrierArray<FullQ::END, 1>;      // and have been read
static_assert(SMEM_BYTES == ReadQ::END, "spec and kernel disagree on shared memory");

// Rows of Q on their way to registers and to Q_AT, where the last stages of V and P will be: row r begins at q_row(r),
// and those of a block with few rows occupy no stage of V. With few columns of V also where the rest of K will be. An
// odd number of 16-byte units avoids bank conflicts.
constexpr unsigned Q_ROW_BYTES = 16 * (HEAD_DIM / 8 | 1), ROWS_OF_Q = (BLOCK_M * Q_ROW_BYTES + 127) / 128 * 128;
constexpr unsigned Q_ROWS_END = P_END > ROWS_OF_Q ? P_END : ROWS_OF_Q;
static_assert(Q_ROWS_END <= Q_AT, "some warps read rows of Q when others store to Q_AT");
static_assert(!PAIR || Q_ROWS_END == P_END, "the peer may write its P before Q has been read");
__device__ __forceinline__ SmemAddr q_row(SmemAddr base, int r) { return base + Q_ROWS_END - (r + 1) * Q_ROW_BYTES; }

// Named barriers: all warps (P V of both halves are complete, m and l are stored; not in a pair); those of the left and
// right half of O, in a pair both warpgroups of O; those of S.
constexpr unsigned BLOCK_BARRIER = 1, HALF_BARRIER = 2, SCORE_BARRIER = 4;

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(HalfPipeline::full(base, stage), 1);
        // One lane of each warp that reads it last: of O, also of the peer's rows; or of S.
        mbarrier_init(HalfPipeline::empty(base, stage), PAIR && stage % 2 == 0 ? 8 : 4);
    }
    for (unsigned stage = 0; stage < REST_STAGES; ++stage) {
        mbarrier_init(RestPipeline::full(base, stage), 1);
        mbarrier_init(RestPipeline::empty(base, stage), 4);
    }
    for (unsigned stage = 0; stage < 2; ++stage) {
        mbarrier_init(PPipeline::full(base, stage), 4);
        mbarrier_init(PPipeline::empty(base, stage), 8);  // both halves, PAIR: of which the peer has one
        mbarrier_init(NearlyDone::at(base, stage), 4);
        if (PAIR) mbarrier_init(PeerFullP::at(base, stage), 1);
    }
    mbarrier_init(FullQ::at(base, 0), 4);
    mbarrier_init(ReadQ::at(base, 0), 4);
    if (PAIR) fence_mbarrier_init();
    fence_proxy_async();
}

// The rank of the other block of the cluster.
__device__ __forceinline__ unsigned peer_rank() { return cluster_cta_rank() ^ 1; }

// The stage of the left (half 0) or right half of V of key tile j, and its phase. PAIR: stages 0, 2, 4 have the half of
// the block's O, the others, which S releases, the other half.
struct HalfStage {
    unsigned stage, parity;
    __device__ __forceinline__ HalfStage(unsigned j, unsigned half) {
        const bool own = half == cluster_cta_rank();
        if (!PAIR) stage = stage_of(2 * j + half), parity = parity_of(2 * j + half);
        else if (own) stage = 2 * stage_of<3>(j), parity = parity_of<3>(j);
        else stage = 2 * stage_of<2>(j) + 1, parity = parity_of<2>(j);
    }
    __device__ __forceinline__ SmemAddr at(SmemAddr base) const { return base + stage * Half::BYTES; }
    __device__ __forceinline__ void acquire(SmemAddr base) const {
        mbarrier_wait(HalfPipeline::empty(base, stage), parity ^ 1);
    }
    __device__ __forceinline__ void wait(SmemAddr base) const {
        mbarrier_wait(HalfPipeline::full(base, stage), parity);
    }
    __device__ __forceinline__ void release(SmemAddr base) const { mbarrier_arrive(HalfPipeline::empty(base, stage)); }
};

// The rows and keys of a block: packed rows row0 .. rows_end - 1 of key/value head `kv_head`, and key tiles `first` ..
// first + tiles - 1. The blocks of a cluster have adjacent rows and the same key tiles.
struct BlockTile {
    const SeqlenInfo seqlen;
    const int kv_head, group;
    int row0, rows_end;
    const Head head0;  // all heads of the group have its mask
    Range fully_visible;
    int first, tiles;

    __device__ __forceinline__ BlockTile(const Score& score, const Split& split, int row_tile, int kv_head, int group)
        : seqlen(score, split.b), kv_head(kv_head), group(group), row0(row_tile * BLOCK_M),
          rows_end(min(row0 + BLOCK_M, seqlen.Sq * group)), head0(seqlen, kv_head * group) {
        const int cluster_row0 = row_tile / CLUSTER * CLUSTER * BLOCK_M;
        const int cluster_rows_end = min(cluster_row0 + CLUSTER * BLOCK_M, seqlen.Sq * group);
        const int i0 = cluster_row0 / group, i1 = (cluster_rows_end - 1) / group + 1;  // queries
        const Range keys = head0.keys(i0, i1);
        fully_visible = head0.fully_visible_keys(i0, i1);
        const int begin = keys.begin / BLOCK_N, all = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
        const int per_split = (all + split.splits - 1) / split.splits, skipped = min(split.split * per_split, all);
        first = begin + skipped, tiles = min(per_split, all - skipped);
    }
    // The same keys, and the rows of the other block of the cluster.
    __device__ __forceinline__ BlockTile of_peer() const {
        BlockTile other = *this;
        other.row0 += cluster_cta_rank() ? -BLOCK_M : BLOCK_M;
        other.rows_end = min(other.row0 + BLOCK_M, seqlen.Sq * group);
        return other;
    }
    __device__ __forceinline__ int n0(int j) const { return (first + j) * BLOCK_N; }
    __device__ __forceinline__ int rows() const { return rows_end - row0; }
    __device__ __forceinline__ bool has(int row) const { return row < rows(); }
    __device__ __forceinline__ PackedRow row(int r) const { return PackedRow(row0 + r, kv_head, group); }
};

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
    // Loads the left or right half of V of key tile j, when its stage is empty.
    __device__ __forceinline__ void load_half(unsigned j, unsigned half, KeyAddress from) const {
        if (static_cast<int>(j) >= tile.tiles) return;
        const HalfStage to(j, half);
        to.acquire(base);
        load<Half, HalfPipeline>(base, to.stage, half * HALF_COLUMNS, from);
    }
    // Loads the rest of key tile j.
    __device__ __forceinline__ void load_rest(unsigned j, KeyAddress from) const {
        if (REST_SLABS == 0 || static_cast<int>(j) >= tile.tiles) return;
        RestPipeline::acquire(base, j);
        load<Rest, RestPipeline>(base + REST_AT, stage_of<REST_STAGES>(j), DV_PAD, from);
    }
    // Fills all stages. A loop: a kernel's code is read from memory when it starts, so there should be little of it.
    __device__ __forceinline__ void load_first() const {
#pragma unroll 1
        for (unsigned stage = 0; stage < STAGES; ++stage) {
            const unsigned j = stage / 2;
            const KeyAddress from = address(j);
            if (stage % 2 == 0 && j < REST_STAGES) {
                wait_for_Q(REST_AT + j * Rest::BYTES, Rest::BYTES);
                load_rest(j, from);
            }
            wait_for_Q(stage * Half::BYTES, Half::BYTES);
            load_half(j, stage % 2 ^ cluster_cta_rank(), from);
        }
    }

  private:
    // Waits until the rows of Q that occupy any of these bytes have been read.
    __device__ __forceinline__ void wait_for_Q(unsigned at, unsigned bytes) const {
        const int end = Q_ROWS_END, begin = end - tile.rows() * static_cast<int>(Q_ROW_BYTES);
        const bool overlap = begin < static_cast<int>(at + bytes) && end > static_cast<int>(at);
        if (overlap) mbarrier_wait(ReadQ::at(base, 0), 0);
    }
    template <class Box, class BoxPipeline>
    __device__ __forceinline__ void load(SmemAddr stages, unsigned stage, int column, KeyAddress from) const {
        const SmemAddr full = BoxPipeline::full(base, stage);
        mbarrier_arrive_expect_tx(full, Box::BYTES);
        Box::load_part(stages + stage * Box::BYTES, K_map, column, static_cast<int>(from.row), h,
                       broadcast ? 0 : from.batch_or_page, full);
    }
};

// Called by all threads of a block, or of a pair, after their last product: P V is then complete, and m and l are
// stored. Returns whether any thread of O's warpgroups has the vote `mine`.
__device__ __forceinline__ bool vote_at_end(char* smem, unsigned warp, int lane, bool mine) {
    if constexpr (!PAIR) return named_barrier_or(BLOCK_BARRIER, ALL_THREADS, mine);
    unsigned* const votes = reinterpret_cast<unsigned*>(smem + VOTES_AT);  // of the block's eight warps, of the peer's
    const bool any = __any_sync(0xffffffffu, mine);
    if (lane == 0 && warp < 8) {
        votes[warp] = any;
        map_shared_rank(votes, peer_rank())[8 + warp] = any;
    }
    __syncwarp();
    cluster_sync();
    bool found = false;
#pragma unroll
    for (int i = 0; i < 16; ++i) found |= votes[i] != 0;
    return found;
}
