// Rung 4 of the backward: dQ, dK and dV on Hopper's warpgroup MMA (wgmma), fed by tensor-map copies (TMA).
//
// A block owns BLOCK_N keys, whose K and V stay in shared memory and whose dK and dV stay in registers, and walks the query
// tiles that see them. One warpgroup serves, a warp for each service; two consume, and have its registers. Scores are computed
// transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T leave the accumulators as A operands (bwd_mma's idea).
//
// clang-format off
//   warp 0        requests K, V once; Q, dO a tile         STAGES tiles of Q and of dO, each with two mbarriers: full, empty
//   warp 1        LSE and delta a tile, ready for use
//   warps 2, 3    send a consumer's dQ from shared memory to be added in L2
//   consumers     S = K Q | dP = V dO | dV += P dO | dQ = dS K | dK += dS Q       (time ->, of one query tile)
//     tensor      S1  dP1           dQ0  dV1  dK1  S2  dP2           dQ1  dV2 ...   what a warpgroup has queued
//     other           | P1   dS1 |      dQ0 out        | P2   dS2 |      dQ1 out    what it does meanwhile; while one has its
//                                                                                   turn, | |, the other's products are under way
//
//   BLOCK_N = 128: a consumer owns 64 keys. P^T and dS^T stay in its registers; dS also goes to shared memory for dQ, of
//     which a consumer computes 64 rows, or, where a tile has but 64, half of the columns, when the other's dS is there too:
//     during the next tile.
//   BLOCK_N = 64 (HEAD_DIM > 128): consumers share the keys. Each computes P^T and dS^T for half of the queries, both go to
//     shared memory, and each has half of the columns of dK, dV and dQ. No turns: S1 dP1 dV1 dQ1 dK1, dV as soon as P is there.
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | P, dS, two of each [BLOCK_M][BLOCK_N] | dQ |
//                  bias [STAGES][BLOCK_M][BLOCK_N], where there is one | LSE, delta | mbarriers | what concerns it of a block map
// clang-format on
//
// A bias comes and goes with Q, a tile of it by TMA as it lies, queries along rows; S^T's own order is ldmatrix's transposed.
//
// What of an option does not depend on a dot product, dropout's bits and a mask's, is found out while S^T is multiplied,
// and not in a consumer's turn; causality, windows and lengths cost something at the ends of a walk alone.
//
// dQ sums over blocks: its tiles are added to fp32 memory by reductions that L2 carries out, in an order of its own, so that
// the last bits of dQ differ from run to run (dK and dV do not); DETERMINISTIC, which makes of this file the kernel bwd_wgmma_deterministic, in the
// order of the keys, up or down (dq_semaphore.cuh), so that they do not. Up to D = 128 the first to come stores (FIRST_BLOCK_STORES), and nothing but
// counters has to be zero before: zeros are written, and fetched to be added to, at the speed of memory. dQ_accum holds the accumulators as the
// lanes hold them; `bwd_wgmma_postprocess` puts them in order, scaled. Who does what is FlashAttention-3's (Shah et al. 2024, arXiv:2407.08608).
// What was tried, with numbers: experiments/013_hopper_backward.
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#else
#define bwd_wgmma bwd_wgmma_deterministic
#define bwd_wgmma_postprocess bwd_wgmma_deterministic_postprocess
#endif
#define TIMELINE_BRANCH 1  // marks of other blocks are a jump each: experiments/018_timeline
#define FALLBACK_INLINE __forceinline__
#include "bwd_postprocess.cuh"
#include "dq_semaphore.cuh"
#include "m_block_range.cuh"
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "swizzle.cuh"
#include "bwd_fragment.cuh"

constexpr unsigned THREADS = 384;

constexpr bool SHARED_KEYS = BLOCK_N == 64;
constexpr bool LATE_DQ = !SHARED_KEYS;                                // a tile's dQ is multiplied during the next one, in turns
// Whether a consumer that sees nothing of a block's first tile passes it over: with dropout that is slower.
constexpr bool PASSES = LATE_DQ && Head::LAST && !DROPOUT;
// In order: whose turn is next is asked while numbers are under way, with one fence for what is told and what is seen. Where a tile is
// brief, as at D = 96, 8% faster; of 128 queries a tile 0.7% slower.
constexpr bool SEMAPHORE_AHEAD = DETERMINISTIC && LATE_DQ && BLOCK_M == 64;
constexpr bool BIAS_TILES = BIAS & 8;
// What is not seen is hidden in P, not in S: ptxas packs derivatives behind the next branch, and both of a pair beside S spill.
constexpr bool HIDE_LATE = Head::HAS_DERIVATIVE;
constexpr int LOOKS = DROPOUT ? 4 : 16;       // so many at once at a mask: of all the loads would spill
// Whether a block's first key is kept in a register: with dropout, else it spills; and where there is room for it.
constexpr bool KEPT_N0 = RAGGED || DROPOUT || DETERMINISTIC || SHARED_KEYS;
constexpr int D_PAD = SHARED_KEYS ? 256 : (HEAD_DIM + 15) / 16 * 16;  // the columns from HEAD_DIM on are zeros
constexpr int COLS = SHARED_KEYS ? 128 : D_PAD;                       // of dK and dV, of a consumer
constexpr int QUERIES = SHARED_KEYS ? BLOCK_M / 2 : BLOCK_M;          // of P^T and dS^T, of a consumer
constexpr int HALF = SHARED_KEYS ? 128 : HEAD_DIM > 64 ? 64 : HEAD_DIM > 32 ? 32 : 16;  // of the columns of a row of dQ
constexpr int DQ_COLS = BLOCK_M == 128 ? D_PAD : HALF;                    // of 64 rows of dQ, of a consumer
// Of the second consumer's columns those that are not zeros throughout.
constexpr int DQ_COLS_2 = BLOCK_M == 128 || SHARED_KEYS || D_PAD <= HALF ? DQ_COLS : D_PAD - HALF;
constexpr unsigned DQ_SHARE = 64 * DQ_COLS, DQ_TILE = 2 * DQ_SHARE;       // numbers
// Registers: else the consumers spill, or, where keys are shared, who walks by a map.
constexpr bool FEW_SERVE = BLOCK_M == 128 || (COLS > 96 && !(SHARED_KEYS && Head::MAPPED));
constexpr int LOAD_WARP_REGISTERS = FEW_SERVE ? 24 : 40, CONSUMER_REGISTERS = FEW_SERVE ? 240 : 232;
static_assert(SHARED_KEYS ? HEAD_DIM > 128 && BLOCK_M == 64 : BLOCK_N == 128 && HEAD_DIM <= 128,
              "64 keys, or half the columns, for each of two consumers");
static_assert(BLOCK_M == 64 || (BLOCK_M == 128 && HEAD_DIM <= 64), "more queries are more registers than there are");
static_assert(QUERIES <= 64 || !Head::ELEMENT_MASK, "a bit for each element of a lane");
static_assert(!BIAS || BIAS_TILES, "a bias that tensor maps cannot copy: bwd_mma is faster");
static_assert(!BIAS || BLOCK_M == 64, "boxes of the bias have 64 rows");
static_assert(HEAD_DIM_V <= HEAD_DIM, "V and dO have room for as many columns as K and Q");
static_assert(!DETERMINISTIC || !(RAGGED || Head::MAPPED), "who comes before whom is known of ranges alone");
static_assert(HEAD_DIM % 8 == 0, "a tensor map's rows are multiples of 16 bytes");

using Queries = Swizzled<BLOCK_M, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // P, dS, the bias
// Each block begins at its own diagonal also where no mask says so: those of a head, which begin together, do not meet.
constexpr bool ROUND = COUNTED && !DETERMINISTIC && !Head::FIRST && !Head::LAST && !Head::MAPPED;
using Walk = MBlockRange<KEPT_N0, ROUND, ABREAST, TURNS>;

// Shared memory, in bytes from its beginning.
constexpr unsigned K_AT = 0, V_AT = Keys::BYTES, Q_AT = 2 * Keys::BYTES, dO_AT = Q_AT + STAGES * Queries::BYTES,
                   dS_AT = dO_AT + STAGES * Queries::BYTES, P_AT = dS_AT + 2 * Pairs::BYTES,
                   dQ_AT = P_AT + (SHARED_KEYS ? 2 * Pairs::BYTES : 0), BIAS_AT = dQ_AT + (SHARED_KEYS ? 0 : 4 * DQ_TILE),
                   BIAS_BYTES = BIAS_TILES ? Pairs::BYTES : 0, STATS_AT = BIAS_AT + STAGES * BIAS_BYTES,
                   BARRIERS_AT = STATS_AT + STAGES * 8 * BLOCK_M;
constexpr unsigned MAP_AT = BARRIERS_AT + 256;
static_assert(SMEM_BYTES == MAP_AT + (Head::MAPPED ? sizeof(GroupBlockMap) : 0), "spec and kernel disagree on shared memory");

// The mbarriers, 8 bytes each.
constexpr unsigned FULL_K = BARRIERS_AT, FULL_V = FULL_K + 8, FULL_Q = FULL_V + 8, EMPTY_Q = FULL_Q + 8 * STAGES,
                   FULL_dO = EMPTY_Q + 8 * STAGES, EMPTY_dO = FULL_dO + 8 * STAGES, FULL_dQ = EMPTY_dO + 8 * STAGES,
                   EMPTY_dQ = FULL_dQ + 16, FULL_dS = EMPTY_dQ + 16;
constexpr unsigned WORK_TILE_AT = FULL_dS + 16;  // the block's piece: its number, or what was dealt
static_assert(WORK_TILE_AT + 32 <= MAP_AT, "the mbarriers and the claim have 256 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    mbarrier_init(base + FULL_K, 1);
    mbarrier_init(base + FULL_V, 1);
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(base + FULL_Q + 8 * stage, 2);   // the rows; LSE and delta
        mbarrier_init(base + EMPTY_Q + 8 * stage, 8);  // a lane of each consumer warp
        mbarrier_init(base + FULL_dO + 8 * stage, 1);
        mbarrier_init(base + EMPTY_dO + 8 * stage, 8);
    }
    for (unsigned consumer = 0; consumer < 2; ++consumer) {
        mbarrier_init(base + FULL_dQ + 8 * consumer, 4);
        mbarrier_init(base + EMPTY_dQ + 8 * consumer, 1);
        mbarrier_init(base + FULL_dS + 8 * consumer, 8);
    }
    fence_proxy_async();
}

template <bool B>
struct Constant {
    static constexpr bool value = B;
};

// A bias of a warp's 16 keys as P^T lies, from rows of queries in shared memory: store_transposed the other way.
__device__ __forceinline__ void fetch_pairs(unsigned (&pairs)[QUERIES / 16][4], SmemAddr rows, unsigned chunk) {
    const unsigned lane = thread_index_x() % 32;
#pragma unroll
    for (int step = 0; step < QUERIES / 16; ++step)
        ldmatrix_x4_trans(pairs[step], rows + Pairs::chunk(16 * step + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    float* dQ_accum,                               // (B, H, query tiles, DQ_TILE) behind counters; see dq_semaphore.cuh
    const __grid_constant__ View<dtype> dK,        // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<dtype> dV,        // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ TensorMap Q_tile_map,  // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap dO_tile_map,
    const __grid_constant__ TensorMap K_map,       // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dK_map,      // boxes of 64 rows
    const __grid_constant__ TensorMap dV_map,
    int B, int Hk,
    int group,                                     // H / Hk
    const __grid_constant__ Score score,
    const __grid_constant__ TensorMap bias_map,    // boxes of 64 rows, where BIAS_TILES
    const int* pieces) {                           // as bwd_wgmma_scheduler has found them, where RAGGED
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    GroupBlockMap& map = *reinterpret_cast<GroupBlockMap*>(smem + MAP_AT);
    if (threadIdx.x == 0) {
        init_barriers(base);
        if (DETERMINISTIC) *reinterpret_cast<unsigned*>(smem + WORK_TILE_AT) = atomicAdd(reinterpret_cast<unsigned*>(dQ_accum), 1u);
    }
    if (Head::MAPPED) {
        const WorkTileRange own(0, Hk, B);
        if (own.b < B) map.fill<THREADS / 32>(own.sequence(score), own.kv_head * group, group, own.key_tile * BLOCK_N);
    }
    griddepcontrol_wait();
#if RAGGED
    if (threadIdx.x / 32 == 1) {
        const int *const from = pieces + 8 * (blockIdx.y * gridDim.x + blockIdx.x), lane = threadIdx.x % 32;
        if (lane < 8) reinterpret_cast<int*>(smem + WORK_TILE_AT)[lane] = from[lane];
    }
#endif
    __syncthreads();  // the mbarriers, and the map or the claim, are there before anybody uses them
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const auto claimed = [&] {
#if RAGGED
        return WorkTileRange(*reinterpret_cast<const volatile WorkTile*>(smem + WORK_TILE_AT));
#else
        return WorkTileRange(DETERMINISTIC ? uniform(*reinterpret_cast<volatile unsigned*>(smem + WORK_TILE_AT)) : 0, Hk, B);
#endif
    };
#if RAGGED
    if (threadIdx.x / 32 == 3) {  // the block that follows on this SM finds its piece in L1: mostly it is one of these 128
        const unsigned next = blockIdx.y * gridDim.x + blockIdx.x + 64 + 4 * (threadIdx.x % 32);
        prefetch_L1(pieces + 8 * min(next, gridDim.x * gridDim.y - 1));
    }
#endif
    const WorkTileRange piece = claimed();
    if ((RAGGED && piece.b < 0) || (ABREAST && piece.b >= B)) return;  // surplus
    const int kv_head = piece.kv_head, b = piece.b, H = Hk * group;
    const Head head0(piece.sequence(score), kv_head * group);
    const Walk walk{head0, map, group, piece.key_tile * BLOCK_N, piece.down};
    const auto tile_number = [&](int head, int m0) {
        return head0.first_tile<BLOCK_M>(H, kv_head * group + head) + m0 / BLOCK_M;
    };
    const auto dQ_tile = [&](int head, int m0) {
        const long long all = static_cast<long long>(B) * H * query_tiles<BLOCK_M>(score);
        return dQ_accum + sums_at(all) + tile_number(head, m0) * DQ_TILE;
    };
    const auto added = [&](int head, int m0, unsigned consumer) {  // pieces, so far
        return reinterpret_cast<unsigned*>(dQ_accum) + ADDED + 2 * tile_number(head, m0) + consumer;
    };

    if (warp < 4) {
        setmaxnreg_dec<LOAD_WARP_REGISTERS>();
        if (warp == 0 && elect()) {
            // A stride of 0 is a dimension of size 1 to a tensor map.
            const auto request_keys = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned full) {
                Keys::load(base + tile, map, head0.key_box(walk.n0()), tensor.stride_h ? kv_head : 0,
                              head0.key_batch(tensor.stride_b ? b : 0), base + full);
            };
            walk.for_each([&](unsigned i, int head, int m0) {
                const unsigned stage = stage_of(i);
                const auto request = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty,
                                         unsigned full) {
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + empty + 8 * stage, parity_of(i) ^ 1);
                    TIMELINE(load);
                    Queries::load(base + tile + stage * Queries::BYTES, map, head0.query_box(m0),
                                     tensor.stride_h ? kv_head * group + head : 0, head0.query_batch(tensor.stride_b ? b : 0),
                                     base + full + 8 * stage, full == FULL_Q ? BIAS_BYTES : 0);
                };
                if (i == 0) request_keys(K_map, K, K_AT, FULL_K);
                if (i == 0 && Head::MAPPED) request_keys(V_map, V, V_AT, FULL_V);  // later would be spills
                request(Q_tile_map, Q, Q_AT, EMPTY_Q, FULL_Q);
#if BIAS
                Pairs::load_part(base + BIAS_AT + stage * BIAS_BYTES, bias_map, walk.n0(), m0,
                           score.bias.stride_h ? kv_head * group + head : 0, score.bias.stride_b ? b : 0,
                           base + FULL_Q + 8 * stage);
#endif
                if (i == 0 && !Head::MAPPED) request_keys(V_map, V, V_AT, FULL_V);
                request(dO_tile_map, dO, dO_AT, EMPTY_dO, FULL_dO);
            });
            TIMELINE(done);
        } else if (warp == 1) {
            walk.for_each([&](unsigned i, int head, int m0) {
                TIMELINE(wait_empty);
                const unsigned lane = thread_index_x() % 32;  // asked again: registers are few
                const bool of_LSE = lane < 16;                          // the other half: delta
                const int row = m0 + lane % 16, rows = head0.Sq - row;  // from the lane's first on
                const float* const from = (of_LSE ? LSE : delta) + head0.lse_offset(H, kv_head * group) +
                                          static_cast<long long>(head) * query_rows(score) + row;
                float* const to = reinterpret_cast<float*>(smem + STATS_AT) + (2 * stage_of(i) + !of_LSE) * BLOCK_M + lane % 16;
                mbarrier_wait(base + EMPTY_Q + 8 * stage_of(i), parity_of(i) ^ 1);
                TIMELINE(load_stats);
                float x[BLOCK_M / 16];  // all loads before the first store: none waits for another
#pragma unroll
                for (int t = 0; t < BLOCK_M; t += 16) x[t / 16] = t < rows ? from[t] : of_LSE ? -INF : 0.0f;
#pragma unroll
                for (int t = 0; t < BLOCK_M; t += 16)
                    to[t] = !of_LSE || x[t / 16] == -INF ? x[t / 16] : -x[t / 16] * Head::LOG2E;  // sees no key: P is 0
                bool large = false;
#pragma unroll
                for (int t = 0; t < BLOCK_M; t += 16) large |= fabsf(x[t / 16]) > Head::LARGE_LSE;
                if (large && of_LSE) {  // or there is -INF
#pragma unroll
                    for (int t = 0; t < BLOCK_M; t += 16)
                        if (Head::is_large(x[t / 16])) to[t] = NOT_A_NUMBER;
                }
                __syncwarp();  // written before the arrival says so
                if (lane == 0) mbarrier_arrive(base + FULL_Q + 8 * stage_of(i));
            });
            TIMELINE(done);
        } else if ((!SHARED_KEYS || DETERMINISTIC) && warp >= 2 && elect()) {
            bool admitted = false;  // to add to the tile that is next
            walk.for_each([&](unsigned i, int head, int m0) {
                const unsigned consumer = (Head::MAPPED ? thread_index_x() / 32 : warp) - 2;  // asked again, or it would be spilled
                TIMELINE(wait_dQ);  // first for its turn in memory, while there is nothing to send yet
                if (DETERMINISTIC && !(SEMAPHORE_AHEAD && admitted)) counter_wait(added(head, m0, consumer), piece.before(head0, m0));
                if (SHARED_KEYS) {  // the consumer adds by itself, when it may
                    mbarrier_arrive(base + EMPTY_dQ + 8 * consumer);
                    mbarrier_wait(base + FULL_dQ + 8 * consumer, i % 2);
                } else {
                    // Mostly somebody has: then the counter need not be asked when the numbers are there.
                    const bool stored = SEMAPHORE_EARLY && counter_reached(added(head, m0, consumer), STORED);
                    mbarrier_wait(base + FULL_dQ + 8 * consumer, i % 2);
                    TIMELINE(send_dQ);
                    float* const to = dQ_tile(head, m0) + consumer * DQ_SHARE;
                    const SmemAddr from = base + dQ_AT + consumer * 4 * DQ_SHARE;
                    bool first = DETERMINISTIC && piece.before(head0, m0) == 0;
                    if (FIRST_BLOCK_STORES && !stored) {  // asked with the numbers at hand, so that whoever is first does not wait
                        const unsigned before = counter_fetch_add(added(head, m0, consumer));
                        first = before == 0;
                        if (!first && before < STORED) counter_wait(added(head, m0, consumer), STORED);
                    }
                    const unsigned bytes = 4 * 64 * (consumer ? DQ_COLS_2 : DQ_COLS);
                    if (first) bulk_store(to, from, bytes);
                    else tma_reduce_add(to, from, bytes);
                    tma_store_commit();
                    tma_store_wait_read();
                    mbarrier_arrive(base + EMPTY_dQ + 8 * consumer);
                    if (DETERMINISTIC && !SEMAPHORE_AHEAD) tma_store_wait();
                    if (SEMAPHORE_AHEAD) {
                        int next_head = head, next_m0 = walk.next(m0);
                        walk.find(next_head, next_m0);
                        if (next_head == group) next_head = head, next_m0 = m0;
                        const unsigned arrived = counter_load(added(next_head, next_m0, consumer));
                        tma_store_wait();
                        counter_arrive_acquire(added(head, m0, consumer));
                        admitted = arrived >= piece.before(head0, next_m0);
                    }
                    if (FIRST_BLOCK_STORES && first) {
                        tma_store_wait();
                        counter_arrive(added(head, m0, consumer), STORED);
                    }
                }
                if (DETERMINISTIC && !SEMAPHORE_AHEAD) counter_arrive(added(head, m0, consumer));
            });
            TIMELINE(done);
        }
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const unsigned consumer = warp / 4 - 1, both = 1, own_barrier = 2 + consumer, turn = 4 + consumer, next_turn = 5 - consumer;
    const int own_keys = SHARED_KEYS ? 0 : 64 * consumer, own_queries = SHARED_KEYS ? QUERIES * consumer : 0;  // first, of the tile
    const float exponent = Head::unit_of(score) * Head::LOG2E;
    float dK_rmem[COLS / 2], dV_rmem[COLS / 2];
    unsigned P[QUERIES / 16][4], dS[QUERIES / 16][4];

    const auto await = [&](unsigned full, unsigned i) { mbarrier_wait(base + full + 8 * stage_of(i), parity_of(i)); };
    // One lane arrives for its warp. PTX's memory model: bar.warp.sync orders what the lanes have read before it with what lane 0
    // does after it, whose arrival releases and whose waiter acquires; the order is transitive. compute-sanitizer's racecheck
    // (CUDA 13.0) follows only the thread that arrives, and reports the other lanes' reads: wrongly. The CPU backend's tool
    // `thread` knows __syncwarp, is silent with it and reports these very reads without (tests/verify/test_sanitize.py).
    const auto release = [&](unsigned empty, unsigned i) {
        __syncwarp();  // all lanes have read LSE and delta
        if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(i));
    };
    // S^T or dP^T: the consumer's keys times its queries. Of V and dO the columns beyond their width are zeros, as dV's are then.
    const auto multiply_rows = [&](float (&C)[QUERIES / 2], unsigned keys_at, unsigned queries_at) {
        const SmemAddr smem_ = COLS > 96 ? uniform(base) : base;  // else descriptors are kept in registers, more than there are
        const Descriptor A = Keys::k_major(smem_ + keys_at + own_keys * 128);
        const Descriptor B = Queries::k_major(smem_ + queries_at + own_queries * 128);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ((keys_at == V_AT ? HEAD_DIM_V : HEAD_DIM) + 15) / 16; ++step)
            wgmma<Order::K_MAJOR>(C, A + Keys::k_step(step), B + Queries::k_step(step), step > 0);
        wgmma_commit();
    };
    // dV += P^T dO or dK += dS^T Q: all queries of the tile, by registers or from shared memory.
    const auto add_rows = [&](float (&C)[COLS / 2], const unsigned (&A)[QUERIES / 16][4], unsigned A_at, unsigned queries_at,
                              bool accumulate) {
        const Descriptor A_smem = Pairs::mn_major(base + A_at);
        const Descriptor B = Queries::mn_major(base + queries_at + (SHARED_KEYS ? consumer * 2 * Queries::SLAB_BYTES : 0));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step)
            if constexpr (SHARED_KEYS)
                wgmma<Order::MN_MAJOR, Order::MN_MAJOR>(C, A_smem + Pairs::mn_step(step), B + Queries::mn_step(step),
                                                       accumulate || step > 0);
            else
                wgmma<Order::MN_MAJOR>(C, A[step], B + Queries::mn_step(step), accumulate || step > 0);
        wgmma_commit();
    };
    // 64 rows of dQ = dS K.
    const auto multiply_dQ = [&](float (&dQ)[DQ_COLS / 2], unsigned dS_at) {
        const Descriptor A = Pairs::k_major(base + dS_at + (BLOCK_M == 128 ? consumer * 8192 : 0));
        const unsigned columns_at = DQ_COLS < 64 ? DQ_COLS * 2 : DQ_COLS / 64 * Keys::SLAB_BYTES;  // of the second consumer
        const Descriptor B = Keys::mn_major(base + K_AT + (BLOCK_M == 128 ? 0 : consumer * columns_at));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(dQ, A + Pairs::k_step(step), B + Keys::mn_step(step), step > 0);
        wgmma_commit();
    };
    const auto pair_bits_at = [&](SmemAddr tile) {
        return tile + (SHARED_KEYS ? own_queries * 128 : consumer * Pairs::SLAB_BYTES);
    };

    // dK or dV of the consumer leaves: 64 keys, all columns or half of them, by way of `tile`, which nobody reads any more.
    bool non_finite = false;
    const auto leave = [&](auto layout, SmemAddr tile, const TensorMap& map, const float (&sums)[COLS / 2], float factor) {
        non_finite |= !finite(sums);
#pragma unroll
        for (int k = 0; k < COLS / 2; k += 8) {
            unsigned pair[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) pair[e] = pack(sums[k + 2 * e] * factor, sums[k + 2 * e + 1] * factor);
            stmatrix_x4(tile + layout.chunk(warp % 4 * 16 + lane % 16, k / 4 + lane / 16), pair[0], pair[1], pair[2], pair[3]);
        }
        fence_proxy_async();
        named_barrier_sync(own_barrier, 128);  // it is whole before it is sent
        const WorkTileRange done = claimed();          // asked again, or it would be kept all the time
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int slab = 0; slab < (COLS + 63) / 64; ++slab)
                tma_store(map, (slab + (SHARED_KEYS ? consumer * 2 : 0)) * 64, head0.key_row_box(walk.n0() + own_keys), done.kv_head,
                         head0.key_row_batch(done.b), tile + slab * layout.SLAB_BYTES);
            tma_store_commit();
        }
    };
    const auto leave_dV = [&] {  // where V was, of which a consumer reads its own keys alone
        const unsigned tile = SHARED_KEYS ? consumer * 2 * Keys::SLAB_BYTES : own_keys * 128;
        leave(Keys{}, base + V_AT + tile, dV_map, dV_rmem, Head::dropout_factor(score));
    };
    const auto leave_dK = [&](unsigned i) {  // where Q or dO was in the stage that an i-th tile would have
        const unsigned tile = SHARED_KEYS ? Q_AT + consumer * 2 * Queries::SLAB_BYTES : consumer ? dO_AT : Q_AT;
        leave(Queries{}, base + tile + stage_of(i) * Queries::BYTES, dK_map, dK_rmem, score.scale);
    };

    int head, m0;  // of the tile that is next
    walk.start(head, m0);
    if (head == group) {
#pragma unroll
        for (int k = 0; k < COLS / 2; ++k) dK_rmem[k] = dV_rmem[k] = 0.0f;
        leave_dV();
        leave_dK(0);
    } else {
        mbarrier_wait(base + FULL_K, 0);
        if (!LATE_DQ) mbarrier_wait(base + FULL_V, 0);  // else in the first tile
        unsigned i = 0;
        if (LATE_DQ && consumer == 1) named_barrier_arrive(next_turn, 256);  // consumer 0 begins
        // dQ of the i-th tile leaves the registers; `publish` tells whoever waits for it, and for dS, when it is there.
        const auto store_dQ = [&](const float (&dQ)[DQ_COLS / 2], unsigned i, float* to, bool stored) {
            if (SHARED_KEYS) {
                TIMELINE(send_dQ);
                const auto add = [&](auto stores) {  // two rows without a branch
#pragma unroll
                    for (int k = 0; k < DQ_COLS / 2; k += 4) {
                        const float sums[4] = {dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]};
                        if constexpr (stores.value) store_floats(to + k * 128, sums);
                        else add_floats(to + k * 128, sums);
                    }
                };
                if (stored) add(Constant<true>{});
                else add(Constant<false>{});
                if (DETERMINISTIC) {
                    __syncwarp();  // all lanes have added
                    if (lane == 0) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
                }
            } else {
                mbarrier_wait(base + EMPTY_dQ + 8 * consumer, i % 2 ^ 1);
                const SmemAddr at = base + dQ_AT + consumer * 4 * DQ_SHARE + thread_index_x() % 128 * 16;
#pragma unroll
                for (int k = 0; k < DQ_COLS / 2; k += 4) store_floats(at + k * 512, dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]);
            }
        };
        const auto publish = [&](bool dQ, unsigned dS_barrier) {
            if (SHARED_KEYS) return;
            fence_proxy_async();
            __syncwarp();  // all lanes have written
            if (lane == 0 && dQ) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
            if (lane == 0) mbarrier_arrive(base + dS_barrier);
        };
        const auto await_dS = [&](unsigned i) { mbarrier_wait(base + FULL_dS + 8 * (i % 2), i / 2 % 2); };
        unsigned passed = 0;  // tiles of which nothing is in dK and dV
        const auto step = [&](auto first) {
            constexpr bool FIRST = first.value;
            const bool begun = LATE_DQ ? !FIRST : i > 0;                // a tile went before
            const bool summed = PASSES && !FIRST ? i > passed : begun;  // and is in dK and dV
            const unsigned stage = stage_of(i), Q_at = Q_AT + stage * Queries::BYTES, dO_at = dO_AT + stage * Queries::BYTES;
            const unsigned dS_at = dS_AT + i % 2 * Pairs::BYTES, P_at = P_AT + i % 2 * Pairs::BYTES;
            const unsigned dS_before = dS_AT + (i % 2 ^ 1) * Pairs::BYTES;
            const float* const stats =  // of the lane's first queries
                reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + own_queries + thread_index_x() % 4 * 2;
            float S[QUERIES / 2], dP[QUERIES / 2], dQ[DQ_COLS / 2];
            TIMELINE(wait_Q);
            await(FULL_Q, i);
            TIMELINE(S);
            multiply_rows(S, K_AT, Q_at);
            wgmma_wait<1>();  // for dK of the tile before
            if (begun) release(EMPTY_Q, i - 1);
            TIMELINE(wait_dO);
            if (LATE_DQ && FIRST) mbarrier_wait(base + FULL_V, 0);
            await(FULL_dO, i);
            TIMELINE(S);
            multiply_rows(dP, V_AT, dO_at);
            if (begun) publish(i > 1, FULL_dS + 8 * (i % 2 ^ 1));

            // What does not depend on a dot product is found out while these are under way.
            const Head bound(score, b, kv_head * group + head);
            const int first_query = m0 + own_queries, first_key = walk.n0() + own_keys;
            unsigned kept[(QUERIES + 63) / 64] = {};  // a bit for each element of P, those of a register 16 bits apart
            const auto pair_kept = [&](int step, int k) { return kept[step / 4] >> (step % 4 * 4 + k) & 0x10001u; };
#pragma unroll
            for (int begin = 0; begin < (DROPOUT ? QUERIES : 0); begin += 64) {
#pragma unroll
                for (int step = 0; step < (QUERIES < 64 ? QUERIES : 64) / 16; ++step) {
                    Head::Kept block[1];
                    bound.keep_along_keys(block, first_query + begin + 16 * step, first_key + warp % 4 * 16);
                    unsigned bits = 0;
#pragma unroll
                    for (int k = 0; k < 4; ++k) bits |= block[0].mask(k) & 0x10001u << k;
                    kept[begin / 64] |= bits << 4 * step;
                }
            }
            unsigned seen = 0;  // a bit for each element of S^T, where it takes a look into memory
            const bool scattered = !walk.whole(head, m0);
            if (scattered) {
                if constexpr (Head::BY_PAIR) {  // a lane fetches the bits of a query row, or two, and the warp's 16 keys
                    const unsigned lane = thread_index_x() % 32;
                    unsigned rows[2][1] = {};
#pragma unroll
                    for (int i = 0; i < QUERIES / 32; ++i)
                        bound.pair_bits<16>(rows[i], first_query + 32 * i + lane, first_key + warp % 4 * 16);
#pragma unroll
                    for (int k = 0; k < 16; k += k % 4 ? 3 : 1) {  // of rows k / 4 * 8 + k % 2, and 32 more
                        const unsigned from = k / 4 * 8 + k % 2 + lane % 4 * 2;
                        const unsigned bits = __shfl_sync(0xffffffffu, rows[0][0] | rows[1][0] << 16, from) >> lane / 4;
                        seen |= (bits & 1) << k | (bits >> 8 & 1) << (k + 2) | (bits >> 16 & 1) << (k + 16) | (bits >> 24 & 1) << (k + 18);
                    }
                } else {
                    const Place place(first_query, first_key);
#pragma unroll LOOKS
                    for (int k = 0; k < QUERIES / 2; ++k) {  // without a branch: one load does not wait for the other
                        const int i = min(place.at(k).query_row(), head0.Sq - 1), j = min(place.at(k).key_col(), head0.Sk - 1);
                        seen |= static_cast<unsigned>(bound.mask_allows(i, j)) << k;
                    }
                }
            }

            unsigned shift[QUERIES / 16][4];  // the bias, as S^T lies
            if (BIAS_TILES) fetch_pairs(shift, pair_bits_at(base + BIAS_AT + stage * BIAS_BYTES), warp % 4 * 2);

            wgmma_wait<1>();  // for S^T
            warpgroup_fence_operand(S);
            TIMELINE(wait_barrier);
            if (LATE_DQ) named_barrier_sync(turn, 256);
            TIMELINE(softmax);
            const Place place(first_query, walk.n0() + own_keys);
            unsigned derivative[QUERIES / 16][4];  // of x: 16 bits are as good as those of dS
#pragma unroll
            for (int k = 0; k < (Head::LINEAR ? 0 : QUERIES / 2); k += 2) {
                const ScoreIndex at0 = place.at(k), at1 = place.at(k + 1);
                const float2 bias = BIAS_TILES ? unpack(shift[k / 8][k / 2 % 4]) : float2{};
                if (Head::HAS_DERIVATIVE) {
                    const Dual x0 = bound.raw_dual(S[k], at0, bias.x), x1 = bound.raw_dual(S[k + 1], at1, bias.y);
                    S[k] = x0.value, S[k + 1] = x1.value;
                    derivative[k / 8][k / 2 % 4] = pack(x0.derivative, x1.derivative);
                } else {
                    S[k] = bound.raw(S[k], at0, bias.x), S[k + 1] = bound.raw(S[k + 1], at1, bias.y);
                }
            }
            const auto hide_all_unseen = [&](auto hide) {
                if (scattered) {
#pragma unroll
                    for (int k = 0; k < QUERIES / 2; ++k)
                        if (!(seen >> k & 1)) hide(k);
                }
                const Range whole = head0.fully_visible_queries<true>(walk.n0() + own_keys, walk.n0() + own_keys + 64);
                if ((first_query < whole.begin) | (first_query + QUERIES > whole.end)) {  // also rows from Sq on: 0 * inf is NaN
                    mask_fragment<QUERIES / 2>(head0, place, hide);
                }
            };
            if constexpr (!HIDE_LATE) hide_all_unseen([&](int k) { S[k] = -INF; });
#pragma unroll
            for (int k = 0; k < QUERIES / 2; k += 2) {
                const float2 shift = *reinterpret_cast<const float2*>(stats + k / 4 * 8);
                P[k / 8][k / 2 % 4] = pack(ex2(fmaf(S[k], exponent, shift.x)), ex2(fmaf(S[k + 1], exponent, shift.y)));
            }
            if constexpr (HIDE_LATE) hide_all_unseen([&](int k) { P[k / 8][k / 2 % 4] &= k % 2 ? 0xffffu : 0xffff0000u; });
            const auto drop = [&](unsigned (&left)[QUERIES / 16][4]) {
#pragma unroll
                for (int k = 0; k < QUERIES / 4; ++k)
                    left[k / 4][k % 4] = DROPOUT ? P[k / 4][k % 4] & pair_kept(k / 4, k % 4) * 0xffffu : P[k / 4][k % 4];
            };
            if (SHARED_KEYS) {
                unsigned left[QUERIES / 16][4];
                drop(left);
                store_transposed<Pairs>(pair_bits_at(base + P_at), warp % 4 * 2, left);
                fence_proxy_async();
                named_barrier_sync(both, 256);  // P is whole before it is multiplied
            }
            TIMELINE(dP);
            if (!LATE_DQ) add_rows(dV_rmem, P, P_at, dO_at, summed);
            wgmma_wait<!LATE_DQ>();  // for dP^T
            warpgroup_fence_operand(dP);
            TIMELINE(dS);
#pragma unroll
            for (int k = 0; k < QUERIES / 2; k += 2) {
                const float2 row_delta = *reinterpret_cast<const float2*>(stats + BLOCK_M + k / 4 * 8);
                const float2 p = unpack(P[k / 8][k / 2 % 4]);
                const unsigned pair = pair_kept(k / 8, k / 2 % 4);
                const float dP0 = bound.apply_dropout(dP[k], pair & 1), dP1 = bound.apply_dropout(dP[k + 1], pair >> 16);
                float dS0 = p.x * (dP0 - row_delta.x), dS1 = p.y * (dP1 - row_delta.y);
                if (Head::HAS_DERIVATIVE) {
                    const float2 dx = unpack(derivative[k / 8][k / 2 % 4]);
                    dS0 *= dx.x, dS1 *= dx.y;
                }
                dS[k / 8][k / 2 % 4] = pack(dS0, dS1);
            }
            if (LATE_DQ) {
                if (BLOCK_M == 128) named_barrier_arrive(next_turn, 256);  // each measured to be better where it stands
                if (!FIRST) await_dS(i - 1);  // then nobody multiplies what dS replaces any more
                store_transposed<Pairs>(pair_bits_at(base + dS_at), warp % 4 * 2, dS);
                if (BLOCK_M == 64) named_barrier_arrive(next_turn, 256);
                if (!FIRST) multiply_dQ(dQ, dS_before);
                if (DROPOUT) drop(P);  // dS is made of P before anything is dropped
                add_rows(dV_rmem, P, P_at, dO_at, summed);
            } else {
                store_transposed<Pairs>(pair_bits_at(base + dS_at), warp % 4 * 2, dS);
                fence_proxy_async();
                named_barrier_sync(both, 256);  // dS is whole before it is multiplied
                multiply_dQ(dQ, dS_at);
            }
            add_rows(dK_rmem, dS, dS_at, Q_at, summed);

            TIMELINE(dQ);
            const auto dO_read = [&] {
                wgmma_wait<1>();  // for dV, and for dQ
                release(EMPTY_dO, i);
            };
            const auto sums_to = [&] {  // the lane's
                return SHARED_KEYS ? dQ_tile(head, m0) + consumer * DQ_SHARE + warp % 4 * 128 + threadIdx.x % 32 * 4 : nullptr;
            };
            float* const to = SHARED_KEYS && DETERMINISTIC ? pin_address(sums_to()) : nullptr;  // while products are under way
            const bool stored = SHARED_KEYS && DETERMINISTIC && piece.before(head0, m0) == 0;
            if (SHARED_KEYS && DETERMINISTIC) {
                TIMELINE(wait_dQ);
                mbarrier_wait(base + EMPTY_dQ + 8 * consumer, i % 2);
            }
            if (!LATE_DQ) dO_read();
            if (!LATE_DQ || !FIRST) {
                wgmma_wait<1 + LATE_DQ>();
                warpgroup_fence_operand(dQ);
                store_dQ(dQ, i - LATE_DQ, DETERMINISTIC ? to : sums_to(), stored);
            }
            if (LATE_DQ) dO_read();
            m0 = walk.next(m0);
            walk.find(head, m0);
            ++i;
        };
        // With a last key the block's first tile may end before its queries see the second consumer's keys: nothing to multiply, and
        // no turn.
        const auto pass_over = [&] {
            mbarrier_wait(base + FULL_V, 0);
            await(FULL_Q, 0);
            await(FULL_dO, 0);
            const unsigned zeros[QUERIES / 16][4] = {};
            store_transposed<Pairs>(pair_bits_at(base + dS_AT), warp % 4 * 2, zeros);
            release(EMPTY_dO, 0);
            m0 = walk.next(m0);
            walk.find(head, m0);
            i = passed = 1;
        };
        if (LATE_DQ) {
            if (PASSES && head0.queries(walk.n0() + own_keys, walk.n0() + own_keys + 64).begin >= m0 + BLOCK_M) pass_over();
            else step(Constant<true>{});
            wgmma_wait<0>();  // or the compiler would lose its way
            warpgroup_fence_operand(dK_rmem);
            warpgroup_fence_operand(dV_rmem);
        }
#pragma unroll 1
        while (head < group) step(Constant<false>{});
        TIMELINE(store);
        publish(i > 1, FULL_dS + 8 * ((i - 1) % 2));
        warpgroup_fence_operand(dV_rmem);  // has been waited for in the last step
        const auto clear = [&](float (&sums)[COLS / 2]) {  // where nothing has been added
#pragma unroll
            for (int k = 0; k < COLS / 2; ++k)
                if (PASSES && i == passed) sums[k] = 0.0f;
        };
        clear(dV_rmem);
        if (LATE_DQ) {
            float dQ[DQ_COLS / 2];
            await_dS(i - 1);  // then nobody multiplies the tile before that one any more
            multiply_dQ(dQ, dS_AT + (i - 1) % 2 * Pairs::BYTES);
            leave_dV();
            wgmma_wait<0>();
            warpgroup_fence_operand(dQ);
            warpgroup_fence_operand(dK_rmem);
            clear(dK_rmem);
            store_dQ(dQ, i - 1, nullptr, false);
            fence_proxy_async();
            __syncwarp();  // all lanes have written
            if (lane == 0) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
        } else {
            leave_dV();
            wgmma_wait<0>();
            warpgroup_fence_operand(dK_rmem);
        }
        leave_dK(i);
    }

    // A masked P is 0, but 0 * NaN brings a query's numbers to keys that it does not see; of a large LSE P is NaN. Both are rare.
    if (named_barrier_or(both, 256, non_finite)) {
        if (threadIdx.x % 128 == 0) tma_store_wait();  // what has been sent is in its place, to be written once more
        named_barrier_sync(both, 256);
        const WorkTileRange done = claimed();
        return key_gradients_non_finite<BLOCK_N, 8>(Q, K, V, dO, LSE, delta, dK, dV, group, score, done.b, done.kv_head, H, walk.n0(),
                                                    thread_index_x() / 32 - 4);  // asked again: else the main loop has more instructions
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // shared memory lives as long as the block
    TIMELINE(done);
}

// Who works on which keys of a ragged batch, the longest pieces first (tile_scheduler.cuh): a warp finds a piece. Found by the blocks
// that work on them, each would begin a microsecond later. Launched before delta, which is computed meanwhile; clears the counters.
extern "C" __global__ __launch_bounds__(256) void bwd_wgmma_scheduler(
    int* pieces,  // eight numbers each
    float* dQ_accum,
    int counters,  // of dQ_accum
    int Hk,
    int group,    // H / Hk
    const __grid_constant__ Score score) {
#if RAGGED
    static_assert(sizeof(WorkTile) == 32, "eight numbers");
    griddepcontrol_launch_dependents();
    for (int i = blockIdx.x * 256 + threadIdx.x; COUNTED && i < counters; i += gridDim.x * 256)
        reinterpret_cast<unsigned*>(dQ_accum)[i] = 0;
    const unsigned number = blockIdx.x * 8 + threadIdx.x / 32;
    if (number >= key_offsets(score).tiles<BLOCK_N>() * Hk) return;
    const WorkTile dealt = LongestFirst<KeyTiles>(score).work_tile(number, Hk, group);
    if (threadIdx.x % 32 == 0) reinterpret_cast<WorkTile*>(pieces)[number] = dealt;
#endif
}

// dQ = scale * dQ_accum: every warp puts into order what the consumers' warps of its index have added.
extern "C" __global__ __launch_bounds__(256, 2) void bwd_wgmma_postprocess(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    const float* dQ_accum,                         // as bwd_wgmma has left it
    const __grid_constant__ View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    int group,                                     // H / Hk
    const __grid_constant__ Score score) {
    griddepcontrol_wait();
    const RowTile own = query_tile_by_warp<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && own.invalid()) return;
    const SeqlenInfo sequence(score, own.b);
    const int h = blockIdx.y, consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row0 = own.row0 + (BLOCK_M == 128 ? 64 * consumer : 0) + 16 * warp;
    const int col0 = BLOCK_M == 128 ? 0 : DQ_COLS * consumer;
    const long long tile = (static_cast<long long>(blockIdx.z) * gridDim.y + h) * gridDim.x + blockIdx.x;
    const long long tiles = static_cast<long long>(gridDim.x) * gridDim.y * gridDim.z;
    const float* from = dQ_accum + sums_at(tiles) + tile * DQ_TILE + consumer * DQ_SHARE + warp * 128;
    const Range keys = Head(score, own.b, h).keys(own.row0, own.row0 + BLOCK_M);
    const unsigned* const added = reinterpret_cast<const unsigned*>(dQ_accum) + ADDED + 2 * tile + consumer;
    const bool untouched = DETERMINISTIC ? keys.begin >= keys.end : FIRST_BLOCK_STORES && *added == 0;  // nobody sees these rows
    const bool non_finite = DQ_COLS_2 < DQ_COLS && consumer == 1
                            ? write_dQ_fragments<16, DQ_COLS_2, 512>(dQ, sequence, h, row0, col0, lane, from, score.scale, untouched)
                            : write_dQ_fragments<16, DQ_COLS, 512>(dQ, sequence, h, row0, col0, lane, from, score.scale, untouched);
    if (non_finite)
        query_gradients_non_finite<16, DQ_COLS>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, col0);
}
