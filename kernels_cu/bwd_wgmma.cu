// Rung 4 of the backward: dQ, dK and dV on Hopper's warpgroup MMA (wgmma), fed by TMA.
//
// A block owns BLOCK_N keys. K and V stay in shared memory, dK and dV in registers; the mainloop visits the m_blocks that
// attend to these keys. One warpgroup holds the load and store warps, two warpgroups are consumers. The kernel computes
// S^T = K Q^T and dP^T = V dO^T, so that the accumulators of P^T and dS^T are in the layout of an A operand.
//
// clang-format off
//   warp 0        loads K and V once, Q and dO per m_block     STAGES tiles of Q and of dO, each with a full and an empty mbarrier
//   warp 1        loads LSE and delta per m_block
//   warps 2, 3    dQ-store warps: add one consumer's dQ from shared memory to dQ_accum in L2 (TMA reduce-add)
//   consumers     S^T = K Q^T | dP^T = V dO^T | dV += P^T dO | dK += dS^T Q | dQ = dS K
//     wgmmas      S1  dP1           dQ0  dV1  dK1  S2  dP2           dQ1  dV2 ...   of one consumer, BLOCK_N = 128; S1: m_block 1
//     others          | P1   dS1 |      store dQ0      | P2   dS2 |      store dQ1  its other instructions; | P dS | is executed by
//                                                                                   one consumer at a time (ping-pong)
//
//   BLOCK_N = 128: a consumer owns 64 keys. P^T and dS^T stay in registers. dS is also written to shared memory, for dQ of all
//     128 keys in the next iteration: a consumer computes 64 rows of dQ, or, if BLOCK_M = 64, a part of its columns.
//   BLOCK_N = 64 (HEAD_DIM > 128): a consumer computes P^T and dS^T of half of the queries and stores both in shared memory.
//     It owns half of the columns of dK, dV and dQ. No ping-pong, no delay of dQ: the wgmmas are S1 dP1 dV1 dQ1 dK1 S2 ...
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N] | P, as dS, if BLOCK_N = 64 |
//                  dQ, if BLOCK_N = 128 | bias [STAGES][BLOCK_M][BLOCK_N] | LSE, delta | mbarriers | block map of the keys
// clang-format on
//
// Blocks add to dQ_accum in any order, so the last bits of dQ vary between runs; those of dK and dV do not. With DETERMINISTIC
// (bwd_wgmma_deterministic) a semaphore orders the additions (dq_semaphore.cuh). dQ_accum has the layout of the accumulator
// registers; `bwd_wgmma_postprocess` converts and scales it. Warp roles: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#else
#define bwd_wgmma bwd_wgmma_deterministic
#define bwd_wgmma_postprocess bwd_wgmma_deterministic_postprocess
#endif
#define TIMELINE_BRANCH 1  // blocks that are not recorded branch over each mark: experiments/018_timeline
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

// Both consumers work on the same 64 keys; each owns half of the columns of dK, dV and dQ.
constexpr bool SPLIT_HEAD_DIM = BLOCK_N == 64;
// dQ of an m_block is computed during the next iteration, and the consumers alternate (ping-pong).
constexpr bool DELAYED_DQ = !SPLIT_HEAD_DIM;
// A consumer skips the first m_block if the mask hides it from all of its keys. Not with dropout, where this is slower.
constexpr bool SKIPS_FIRST_TILE = DELAYED_DQ && Head::LAST && !DROPOUT;
// A dQ-store warp reads the semaphore of its next tile while the store of dQ is in flight; one fence then serves as release of
// this tile and as acquire of the next (counter_arrive_acquire). 8% faster at D = 96; 0.7% slower at BLOCK_M = 128, where
// iterations are longer.
constexpr bool SEMAPHORE_PREFETCH = DETERMINISTIC && DELAYED_DQ && BLOCK_M == 64;
constexpr bool BIAS_TILES = BIAS & 8;  // the bias has a tensor map
// With a score modification that has a derivative, the mask is applied to P, otherwise to S. If it were applied to S, ptxas would
// pack the derivatives only after the mask's branch: until then they need twice as many registers, beside S, and spill.
constexpr bool MASKS_P = Head::HAS_DERIVATIVE;
constexpr int MASK_UNROLL = DROPOUT ? 4 : 16;  // mask loads in flight; with more, registers spill
// Keeps the block's first key in a register: recomputing it spills with dropout. The other cases have registers to spare.
constexpr bool N0_IN_REGISTER = RAGGED || DROPOUT || DETERMINISTIC || SPLIT_HEAD_DIM;
constexpr int D_PAD = SPLIT_HEAD_DIM ? 256 : (HEAD_DIM + 15) / 16 * 16;  // columns from HEAD_DIM on are zeros
constexpr int DKV_COLS = SPLIT_HEAD_DIM ? 128 : D_PAD;                   // columns of dK and dV per consumer
constexpr int CONSUMER_M = SPLIT_HEAD_DIM ? BLOCK_M / 2 : BLOCK_M;       // queries of P^T and dS^T per consumer
// Columns of dQ that consumer 0 computes if BLOCK_M = 64.
constexpr int DQ_SPLIT_COLS = SPLIT_HEAD_DIM ? 128 : HEAD_DIM > 64 ? 64 : HEAD_DIM > 32 ? 32 : 16;
constexpr int DQ_COLS = BLOCK_M == 128 ? D_PAD : DQ_SPLIT_COLS;  // columns of a consumer's 64 rows of dQ
// Columns of consumer 1 that contain data; its other columns are padding.
constexpr int DQ_COLS_2 = BLOCK_M == 128 || SPLIT_HEAD_DIM || D_PAD <= DQ_SPLIT_COLS ? DQ_COLS : D_PAD - DQ_SPLIT_COLS;
constexpr unsigned DQ_PART = 64 * DQ_COLS, DQ_TILE = 2 * DQ_PART;  // floats per consumer, per tile
// setmaxnreg. FEW_LOAD_REGISTERS: cases in which consumers spill with 232 registers. With a block map and SPLIT_HEAD_DIM they do
// not get more, because the load warps spill with 24.
constexpr bool FEW_LOAD_REGISTERS = BLOCK_M == 128 || (DKV_COLS > 96 && !(SPLIT_HEAD_DIM && Head::MAPPED));
constexpr int LOAD_WARP_REGISTERS = FEW_LOAD_REGISTERS ? 24 : 40, CONSUMER_REGISTERS = FEW_LOAD_REGISTERS ? 240 : 232;
static_assert(SPLIT_HEAD_DIM ? HEAD_DIM > 128 && BLOCK_M == 64 : BLOCK_N == 128 && HEAD_DIM <= 128,
              "BLOCK_N is 128 up to HEAD_DIM 128 and 64 beyond: 64 keys or 128 columns of dK and dV per consumer");
static_assert(BLOCK_M == 64 || (BLOCK_M == 128 && HEAD_DIM <= 64), "BLOCK_M = 128 exceeds the register file beyond HEAD_DIM 64");
static_assert(CONSUMER_M <= 64 || !Head::ELEMENT_MASK, "the mask has 32 bits per lane, one per element");
static_assert(!BIAS || BIAS_TILES, "this bias has no tensor map: use bwd_mma");
static_assert(!BIAS || BLOCK_M == 64, "TMA boxes of the bias have 64 rows");
static_assert(HEAD_DIM_V <= HEAD_DIM, "V and dO use the tiles of K and Q: HEAD_DIM_V must not exceed HEAD_DIM");
static_assert(!DETERMINISTIC || !(RAGGED || Head::MAPPED),
              "DETERMINISTIC supports neither a block map nor a ragged batch: semaphore targets are computed from ranges");
static_assert(HEAD_DIM % 8 == 0, "rows of a tensor map are multiples of 16 bytes");

using SmemLayoutQ = Swizzled<BLOCK_M, D_PAD>;
using SmemLayoutK = Swizzled<BLOCK_N, D_PAD>;
using SmemLayoutPdS = Swizzled<BLOCK_M, BLOCK_N>;  // P, dS, the bias
// Without a mask each block starts its m_block loop at row n0 (its first key's index) and wraps around, so that the blocks of a
// head, which start together, do not add to the same dQ tile.
constexpr bool ROTATED = HAS_SEMAPHORES && !DETERMINISTIC && !Head::FIRST && !Head::LAST && !Head::MAPPED;
using MBlocks = MBlockRange<N0_IN_REGISTER, ROTATED, L2_HEAD_GROUPS, ALTERNATING>;

// Shared memory: offsets in bytes.
constexpr unsigned K_AT = 0, V_AT = SmemLayoutK::BYTES, Q_AT = 2 * SmemLayoutK::BYTES, dO_AT = Q_AT + STAGES * SmemLayoutQ::BYTES,
                   dS_AT = dO_AT + STAGES * SmemLayoutQ::BYTES, P_AT = dS_AT + 2 * SmemLayoutPdS::BYTES,
                   dQ_AT = P_AT + (SPLIT_HEAD_DIM ? 2 * SmemLayoutPdS::BYTES : 0), BIAS_AT = dQ_AT + (SPLIT_HEAD_DIM ? 0 : 4 * DQ_TILE),
                   BIAS_BYTES = BIAS_TILES ? SmemLayoutPdS::BYTES : 0, STATS_AT = BIAS_AT + STAGES * BIAS_BYTES,
                   BARRIERS_AT = STATS_AT + STAGES * 8 * BLOCK_M;
constexpr unsigned MAP_AT = BARRIERS_AT + 256;
static_assert(SMEM_BYTES == MAP_AT + (Head::MAPPED ? sizeof(GroupBlockMap) : 0), "spec and kernel disagree on shared memory");

// The mbarriers, 8 bytes each.
constexpr unsigned FULL_K = BARRIERS_AT, FULL_V = FULL_K + 8, FULL_Q = FULL_V + 8, EMPTY_Q = FULL_Q + 8 * STAGES,
                   FULL_dO = EMPTY_Q + 8 * STAGES, EMPTY_dO = FULL_dO + 8 * STAGES, FULL_dQ = EMPTY_dO + 8 * STAGES,
                   EMPTY_dQ = FULL_dQ + 16, FULL_dS = EMPTY_dQ + 16;
constexpr unsigned WORK_TILE_AT = FULL_dS + 16;  // the block's ticket from the tile counter if DETERMINISTIC, its WorkTile if RAGGED
static_assert(WORK_TILE_AT + 32 <= MAP_AT, "mbarriers and the work tile have 256 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    mbarrier_init(base + FULL_K, 1);
    mbarrier_init(base + FULL_V, 1);
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(base + FULL_Q + 8 * stage, 2);   // arrivals: the TMA load; LSE and delta
        mbarrier_init(base + EMPTY_Q + 8 * stage, 8);  // one lane per consumer warp
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
struct BoolConstant {
    static constexpr bool value = B;
};

// Loads the bias of a warp's 16 keys in the layout of P^T from shared memory, which has a row per query: the inverse of
// store_transposed.
__device__ __forceinline__ void load_bias_fragment(unsigned (&bias)[CONSUMER_M / 16][4], SmemAddr rows, unsigned chunk) {
    const unsigned lane = thread_index_x() % 32;
#pragma unroll
    for (int step = 0; step < CONSUMER_M / 16; ++step)
        ldmatrix_x4_trans(bias[step], rows + SmemLayoutPdS::chunk(16 * step + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    float* dQ_accum,                               // semaphores, then (B, H, query tiles, DQ_TILE): dq_semaphore.cuh
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
    const __grid_constant__ TensorMap bias_map,    // boxes of 64 rows; only if BIAS_TILES
    const int* work_tiles) {                       // output of bwd_wgmma_scheduler; only if RAGGED
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    GroupBlockMap& map = *reinterpret_cast<GroupBlockMap*>(smem + MAP_AT);
    if (threadIdx.x == 0) {
        init_barriers(base);
        if (DETERMINISTIC) *reinterpret_cast<unsigned*>(smem + WORK_TILE_AT) = atomicAdd(reinterpret_cast<unsigned*>(dQ_accum), 1u);
    }
    if (Head::MAPPED) {
        const BwdWorkTile work_tile(0, Hk, B);
        if (work_tile.b < B)
            map.fill<THREADS / 32>(work_tile.sequence(score), work_tile.kv_head * group, group, work_tile.key_tile * BLOCK_N);
    }
    griddepcontrol_wait();
#if RAGGED
    if (threadIdx.x / 32 == 1) {
        const int *const from = work_tiles + 8 * (blockIdx.y * gridDim.x + blockIdx.x), lane = threadIdx.x % 32;
        if (lane < 8) reinterpret_cast<int*>(smem + WORK_TILE_AT)[lane] = from[lane];
    }
#endif
    __syncthreads();  // mbarriers, block map and work tile are initialised
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const auto load_work_tile = [&] {
#if RAGGED
        return BwdWorkTile(*reinterpret_cast<const volatile WorkTile*>(smem + WORK_TILE_AT));
#else
        return BwdWorkTile(DETERMINISTIC ? uniform(*reinterpret_cast<volatile unsigned*>(smem + WORK_TILE_AT)) : 0, Hk, B);
#endif
    };
#if RAGGED
    // Prefetches the work tile of the next block on this SM, which is usually one of these 128: four per lane, a line of L1.
    if (threadIdx.x / 32 == 3) {
        const unsigned next = blockIdx.y * gridDim.x + blockIdx.x + 64 + 4 * (threadIdx.x % 32);
        prefetch_L1(work_tiles + 8 * min(next, gridDim.x * gridDim.y - 1));
    }
#endif
    const BwdWorkTile work_tile = load_work_tile();
    if ((RAGGED && work_tile.b < 0) || (L2_HEAD_GROUPS && work_tile.b >= B)) return;  // invalid work tile
    const int kv_head = work_tile.kv_head, b = work_tile.b, H = Hk * group;
    const Head head0(work_tile.sequence(score), kv_head * group);
    const MBlocks m_blocks{head0, map, group, work_tile.key_tile * BLOCK_N, work_tile.descending};
    const auto dQ_tile_index = [&](int head, int m0) {
        return head0.first_tile<BLOCK_M>(H, kv_head * group + head) + m0 / BLOCK_M;
    };
    const auto dQ_tile = [&](int head, int m0) {
        const long long total_tiles = static_cast<long long>(B) * H * query_tiles<BLOCK_M>(score);
        return dQ_accum + accumulators_at(total_tiles) + dQ_tile_index(head, m0) * DQ_TILE;
    };
    const auto dQ_semaphore = [&](int head, int m0, unsigned consumer) {  // number of work tiles that have added
        return reinterpret_cast<unsigned*>(dQ_accum) + SEMAPHORES_AT + 2 * dQ_tile_index(head, m0) + consumer;
    };

    if (warp < 4) {
        setmaxnreg_dec<LOAD_WARP_REGISTERS>();
        if (warp == 0 && elect()) {
            // A dimension with stride 0 (broadcast) has size 1 in the tensor map: its coordinate is 0.
            const auto load_KV = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned full) {
                SmemLayoutK::load(base + tile, map, head0.key_box(m_blocks.n0()), tensor.stride_h ? kv_head : 0,
                              head0.key_batch(tensor.stride_b ? b : 0), base + full);
            };
            m_blocks.for_each([&](unsigned i, int head, int m0) {
                const unsigned stage = stage_of(i);
                const auto load_tile = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty,
                                         unsigned full) {
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + empty + 8 * stage, parity_of(i) ^ 1);
                    TIMELINE(load);
                    SmemLayoutQ::load(base + tile + stage * SmemLayoutQ::BYTES, map, head0.query_box(m0),
                                     tensor.stride_h ? kv_head * group + head : 0, head0.query_batch(tensor.stride_b ? b : 0),
                                     base + full + 8 * stage, full == FULL_Q ? BIAS_BYTES : 0);
                };
                if (i == 0) load_KV(K_map, K, K_AT, FULL_K);
                if (i == 0 && Head::MAPPED) load_KV(V_map, V, V_AT, FULL_V);  // with a block map, loading V later spills
                load_tile(Q_tile_map, Q, Q_AT, EMPTY_Q, FULL_Q);
#if BIAS
                SmemLayoutPdS::load_part(base + BIAS_AT + stage * BIAS_BYTES, bias_map, m_blocks.n0(), m0,
                           score.bias.stride_h ? kv_head * group + head : 0, score.bias.stride_b ? b : 0,
                           base + FULL_Q + 8 * stage);
#endif
                if (i == 0 && !Head::MAPPED) load_KV(V_map, V, V_AT, FULL_V);
                load_tile(dO_tile_map, dO, dO_AT, EMPTY_dO, FULL_dO);
            });
            TIMELINE(done);
        } else if (warp == 1) {
            m_blocks.for_each([&](unsigned i, int head, int m0) {
                TIMELINE(wait_empty);
                const unsigned lane = thread_index_x() % 32;  // recomputed to save a register
                const bool is_LSE = lane < 16;                          // lanes 16 to 31 load delta
                const int row = m0 + lane % 16, rows = head0.Sq - row;  // valid rows from the lane's first row on
                const float* const from = (is_LSE ? LSE : delta) + head0.lse_offset(H, kv_head * group) +
                                          static_cast<long long>(head) * query_rows(score) + row;
                float* const to = reinterpret_cast<float*>(smem + STATS_AT) + (2 * stage_of(i) + !is_LSE) * BLOCK_M + lane % 16;
                mbarrier_wait(base + EMPTY_Q + 8 * stage_of(i), parity_of(i) ^ 1);
                TIMELINE(load_stats);
                load_LSE_or_delta<BLOCK_M>(to, from, rows, is_LSE);
                __syncwarp();  // all lanes have written before lane 0 arrives
                if (lane == 0) mbarrier_arrive(base + FULL_Q + 8 * stage_of(i));
            });
            TIMELINE(done);
        } else if ((!SPLIT_HEAD_DIM || DETERMINISTIC) && warp >= 2 && elect()) {
            bool semaphore_reached = false;  // of the next tile
            m_blocks.for_each([&](unsigned i, int head, int m0) {
                // Recomputed with a block map, where keeping it spills.
                const unsigned consumer = (Head::MAPPED ? thread_index_x() / 32 : warp) - 2;
                TIMELINE(wait_dQ);  // wait for the semaphore while the consumer computes dQ
                if (DETERMINISTIC && !(SEMAPHORE_PREFETCH && semaphore_reached))
                    counter_wait(dQ_semaphore(head, m0, consumer), work_tile.semaphore_target(head0, m0));
                if (SPLIT_HEAD_DIM) {  // the consumer adds to dQ_accum itself; EMPTY_dQ signals that the semaphore is reached
                    mbarrier_arrive(base + EMPTY_dQ + 8 * consumer);
                    mbarrier_wait(base + FULL_dQ + 8 * consumer, i % 2);
                } else {
                    // Usually another block has stored already; reading the counter early hides its latency.
                    const bool already_stored = SEMAPHORE_EARLY && counter_reached(dQ_semaphore(head, m0, consumer), FIRST_STORED);
                    mbarrier_wait(base + FULL_dQ + 8 * consumer, i % 2);
                    TIMELINE(store_dQ);
                    float* const to = dQ_tile(head, m0) + consumer * DQ_PART;
                    const SmemAddr from = base + dQ_AT + consumer * 4 * DQ_PART;
                    bool first = DETERMINISTIC && work_tile.semaphore_target(head0, m0) == 0;
                    // The counter is incremented only when dQ is ready, so that the first block never waits.
                    if (FIRST_BLOCK_STORES && !already_stored) {
                        const unsigned arrived_before = counter_fetch_add(dQ_semaphore(head, m0, consumer));
                        first = arrived_before == 0;
                        if (!first && arrived_before < FIRST_STORED) counter_wait(dQ_semaphore(head, m0, consumer), FIRST_STORED);
                    }
                    const unsigned bytes = 4 * 64 * (consumer ? DQ_COLS_2 : DQ_COLS);
                    if (first) bulk_store(to, from, bytes);
                    else tma_reduce_add(to, from, bytes);
                    tma_store_commit();
                    tma_store_wait_read();
                    mbarrier_arrive(base + EMPTY_dQ + 8 * consumer);
                    if (DETERMINISTIC && !SEMAPHORE_PREFETCH) tma_store_wait();
                    if (SEMAPHORE_PREFETCH) {
                        int next_head = head, next_m0 = m_blocks.next(m0);
                        m_blocks.seek(next_head, next_m0);
                        if (next_head == group) next_head = head, next_m0 = m0;
                        const unsigned semaphore_value = counter_load(dQ_semaphore(next_head, next_m0, consumer));
                        tma_store_wait();
                        counter_arrive_acquire(dQ_semaphore(head, m0, consumer));
                        semaphore_reached = semaphore_value >= work_tile.semaphore_target(head0, next_m0);
                    }
                    if (FIRST_BLOCK_STORES && first) {
                        tma_store_wait();
                        counter_arrive(dQ_semaphore(head, m0, consumer), FIRST_STORED);
                    }
                }
                if (DETERMINISTIC && !SEMAPHORE_PREFETCH) counter_arrive(dQ_semaphore(head, m0, consumer));
            });
            TIMELINE(done);
        }
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const unsigned consumer = warp / 4 - 1;
    // Named barriers: of both consumers, of this one, and for ping-pong.
    const unsigned consumers_barrier = 1, consumer_barrier = 2 + consumer, scheduler_barrier = 4 + consumer,
                   next_scheduler_barrier = 5 - consumer;
    // First key and first query of the consumer within the tile.
    const int key_offset = SPLIT_HEAD_DIM ? 0 : 64 * consumer, query_offset = SPLIT_HEAD_DIM ? CONSUMER_M * consumer : 0;
    const float exponent = Head::unit_of(score) * Head::LOG2E;
    float dK_rmem[DKV_COLS / 2], dV_rmem[DKV_COLS / 2];
    unsigned P[CONSUMER_M / 16][4], dS[CONSUMER_M / 16][4];

    const auto wait_full = [&](unsigned full, unsigned i) { mbarrier_wait(base + full + 8 * stage_of(i), parity_of(i)); };
    // Lane 0 arrives for its warp. All lanes' reads precede the producer's next write: __syncwarp orders them before the arrival (a
    // release), which the producer's wait acquires, and PTX's causality order is transitive. racecheck (CUDA 13.0) considers only
    // the arriving thread and reports false hazards; the race detector of the CPU backend models __syncwarp
    // (tests/verify/test_sanitize.py).
    const auto release = [&](unsigned empty, unsigned i) {
        __syncwarp();  // all lanes have read LSE and delta
        if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(i));
    };
    // S^T or dP^T: the consumer's keys times its queries. Columns of V and dO from HEAD_DIM_V on are zeros, so those of dV are, too.
    const auto mma_SdP = [&](float (&C)[CONSUMER_M / 2], unsigned keys_at, unsigned queries_at) {
        const SmemAddr tile_base = DKV_COLS > 96 ? uniform(base) : base;  // not uniform, the descriptors would stay in registers and spill
        const Descriptor A = SmemLayoutK::k_major(tile_base + keys_at + key_offset * 128);
        const Descriptor B = SmemLayoutQ::k_major(tile_base + queries_at + query_offset * 128);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ((keys_at == V_AT ? HEAD_DIM_V : HEAD_DIM) + 15) / 16; ++step)
            wgmma<Order::K_MAJOR>(C, A + SmemLayoutK::k_step(step), B + SmemLayoutQ::k_step(step), step > 0);
        wgmma_commit();
    };
    // dV += P^T dO or dK += dS^T Q, over all queries of the tile; A from registers, or from shared memory if SPLIT_HEAD_DIM.
    const auto mma_dKV = [&](float (&C)[DKV_COLS / 2], const unsigned (&A)[CONSUMER_M / 16][4], unsigned A_at, unsigned queries_at,
                              bool accumulate) {
        const Descriptor A_smem = SmemLayoutPdS::mn_major(base + A_at);
        const Descriptor B = SmemLayoutQ::mn_major(base + queries_at + (SPLIT_HEAD_DIM ? consumer * 2 * SmemLayoutQ::SLAB_BYTES : 0));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step)
            if constexpr (SPLIT_HEAD_DIM)
                wgmma<Order::MN_MAJOR, Order::MN_MAJOR>(C, A_smem + SmemLayoutPdS::mn_step(step), B + SmemLayoutQ::mn_step(step),
                                                       accumulate || step > 0);
            else
                wgmma<Order::MN_MAJOR>(C, A[step], B + SmemLayoutQ::mn_step(step), accumulate || step > 0);
        wgmma_commit();
    };
    // 64 rows of dQ = dS K.
    const auto mma_dQ = [&](float (&dQ)[DQ_COLS / 2], unsigned dS_at) {
        const Descriptor A = SmemLayoutPdS::k_major(base + dS_at + (BLOCK_M == 128 ? consumer * 8192 : 0));
        const unsigned columns_at = DQ_COLS < 64 ? DQ_COLS * 2 : DQ_COLS / 64 * SmemLayoutK::SLAB_BYTES;  // bytes to consumer 1's
        const Descriptor B = SmemLayoutK::mn_major(base + K_AT + (BLOCK_M == 128 ? 0 : consumer * columns_at));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(dQ, A + SmemLayoutPdS::k_step(step), B + SmemLayoutK::mn_step(step), step > 0);
        wgmma_commit();
    };
    const auto consumer_PdS = [&](SmemAddr tile) {
        return tile + (SPLIT_HEAD_DIM ? query_offset * 128 : consumer * SmemLayoutPdS::SLAB_BYTES);
    };

    // Epilogue: stores the consumer's dK or dV (64 keys, all columns or half of them) by TMA. `tile` is free shared memory for staging.
    bool non_finite = false;
    const auto store_dKV = [&](auto layout, SmemAddr tile, const TensorMap& map, const float (&accum)[DKV_COLS / 2], float factor) {
        non_finite |= !finite(accum);
#pragma unroll
        for (int k = 0; k < DKV_COLS / 2; k += 8) {
            unsigned pair[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) pair[e] = pack(accum[k + 2 * e] * factor, accum[k + 2 * e + 1] * factor);
            stmatrix_x4(tile + layout.chunk(warp % 4 * 16 + lane % 16, k / 4 + lane / 16), pair[0], pair[1], pair[2], pair[3]);
        }
        fence_proxy_async();
        named_barrier_sync(consumer_barrier, 128);  // all four warps have written the tile before the TMA store
        const BwdWorkTile reloaded = load_work_tile();  // read again: keeping it would take registers in the mainloop
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int slab = 0; slab < (DKV_COLS + 63) / 64; ++slab)
                tma_store(map, (slab + (SPLIT_HEAD_DIM ? consumer * 2 : 0)) * 64, head0.key_row_box(m_blocks.n0() + key_offset),
                          reloaded.kv_head, head0.key_row_batch(reloaded.b), tile + slab * layout.SLAB_BYTES);
            tma_store_commit();
        }
    };
    // Staged in V: the other consumer reads other rows of V, or, if SPLIT_HEAD_DIM, has read V before the last barrier.
    const auto store_dV = [&] {
        const unsigned tile = SPLIT_HEAD_DIM ? consumer * 2 * SmemLayoutK::SLAB_BYTES : key_offset * 128;
        store_dKV(SmemLayoutK{}, base + V_AT + tile, dV_map, dV_rmem, Head::dropout_factor(score));
    };
    // i: number of tiles. Staged in the stage that tile i would use: in Q, or, unless SPLIT_HEAD_DIM, consumer 1 in dO.
    const auto store_dK = [&](unsigned i) {
        const unsigned tile = SPLIT_HEAD_DIM ? Q_AT + consumer * 2 * SmemLayoutQ::SLAB_BYTES : consumer ? dO_AT : Q_AT;
        store_dKV(SmemLayoutQ{}, base + tile + stage_of(i) * SmemLayoutQ::BYTES, dK_map, dK_rmem, score.scale);
    };

    int head, m0;  // of the next tile
    m_blocks.start(head, m0);
    if (head == group) {
#pragma unroll
        for (int k = 0; k < DKV_COLS / 2; ++k) dK_rmem[k] = dV_rmem[k] = 0.0f;
        store_dV();
        store_dK(0);
    } else {
        mbarrier_wait(base + FULL_K, 0);
        if (!DELAYED_DQ) mbarrier_wait(base + FULL_V, 0);  // with DELAYED_DQ the first iteration waits
        unsigned i = 0;
        if (DELAYED_DQ && consumer == 1) named_barrier_arrive(next_scheduler_barrier, 256);  // consumer 0 starts
        // Writes dQ of tile i to shared memory, or to dQ_accum if SPLIT_HEAD_DIM. `commit_dQ_dS` then arrives on the
        // full barriers of dQ and dS. `to`: address in dQ_accum; `store`: store rather than add.
        const auto store_dQ = [&](const float (&dQ)[DQ_COLS / 2], unsigned i, float* to, bool store) {
            if (SPLIT_HEAD_DIM) {
                TIMELINE(store_dQ);
                const auto write_dQ = [&](auto stores) {  // a compile-time flag: no branch in the loop
#pragma unroll
                    for (int k = 0; k < DQ_COLS / 2; k += 4) {
                        const float accum[4] = {dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]};
                        if constexpr (stores.value) store_floats(to + k * 128, accum);
                        else add_floats(to + k * 128, accum);
                    }
                };
                if (store) write_dQ(BoolConstant<true>{});
                else write_dQ(BoolConstant<false>{});
                if (DETERMINISTIC) {
                    __syncwarp();  // all lanes have added
                    if (lane == 0) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
                }
            } else {
                mbarrier_wait(base + EMPTY_dQ + 8 * consumer, i % 2 ^ 1);
                const SmemAddr at = base + dQ_AT + consumer * 4 * DQ_PART + thread_index_x() % 128 * 16;
#pragma unroll
                for (int k = 0; k < DQ_COLS / 2; k += 4) store_floats(at + k * 512, dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]);
            }
        };
        const auto commit_dQ_dS = [&](bool dQ, unsigned dS_barrier) {
            if (SPLIT_HEAD_DIM) return;
            fence_proxy_async();
            __syncwarp();  // all lanes have written
            if (lane == 0 && dQ) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
            if (lane == 0) mbarrier_arrive(base + dS_barrier);
        };
        const auto wait_dS = [&](unsigned i) { mbarrier_wait(base + FULL_dS + 8 * (i % 2), i / 2 % 2); };
        unsigned skipped_tiles = 0;  // 1 if the consumer skips the first tile: dK and dV do not contain it
        const auto bwd_step = [&](auto first_iteration) {
            constexpr bool FIRST = first_iteration.value;
            const bool has_previous = DELAYED_DQ ? !FIRST : i > 0;
            const bool accumulates = SKIPS_FIRST_TILE && !FIRST ? i > skipped_tiles : has_previous;  // dK and dV contain an earlier tile
            const unsigned stage = stage_of(i), Q_at = Q_AT + stage * SmemLayoutQ::BYTES, dO_at = dO_AT + stage * SmemLayoutQ::BYTES;
            const unsigned dS_at = dS_AT + i % 2 * SmemLayoutPdS::BYTES, P_at = P_AT + i % 2 * SmemLayoutPdS::BYTES;
            const unsigned previous_dS_at = dS_AT + (i % 2 ^ 1) * SmemLayoutPdS::BYTES;
            const float* const stats =  // of the lane's first two queries
                reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + query_offset + thread_index_x() % 4 * 2;
            float S[CONSUMER_M / 2], dP[CONSUMER_M / 2], dQ[DQ_COLS / 2];
            TIMELINE(wait_Q);
            wait_full(FULL_Q, i);
            TIMELINE(S);
            mma_SdP(S, K_AT, Q_at);
            wgmma_wait<1>();  // dK of the previous tile
            if (has_previous) release(EMPTY_Q, i - 1);
            TIMELINE(wait_dO);
            if (DELAYED_DQ && FIRST) mbarrier_wait(base + FULL_V, 0);
            wait_full(FULL_dO, i);
            TIMELINE(S);
            mma_SdP(dP, V_AT, dO_at);
            if (has_previous) commit_dQ_dS(i > 1, FULL_dS + 8 * (i % 2 ^ 1));

            // Dropout and mask bits do not depend on S and are computed while the wgmmas run.
            const Head bound(score, b, kv_head * group + head);
            const int first_query = m0 + query_offset, first_key = m_blocks.n0() + key_offset;
            // Dropout: one bit per element of P; the bits of the two elements of a register are 16 bits apart.
            unsigned keep_bits[(CONSUMER_M + 63) / 64] = {};
            const auto keep_pair = [&](int step, int k) { return keep_bits[step / 4] >> (step % 4 * 4 + k) & 0x10001u; };
#pragma unroll
            for (int begin = 0; begin < (DROPOUT ? CONSUMER_M : 0); begin += 64) {
#pragma unroll
                for (int step = 0; step < (CONSUMER_M < 64 ? CONSUMER_M : 64) / 16; ++step) {
                    Head::Kept block[1];
                    bound.keep_along_keys(block, first_query + begin + 16 * step, first_key + warp % 4 * 16);
                    unsigned bits = 0;
#pragma unroll
                    for (int k = 0; k < 4; ++k) bits |= block[0].mask(k) & 0x10001u << k;
                    keep_bits[begin / 64] |= bits << 4 * step;
                }
            }
            unsigned visible_bits = 0;  // one bit per element of S^T: the elementwise mask (Head::ELEMENT_MASK)
            const bool elementwise_mask = !m_blocks.fully_visible(head, m0);
            if (elementwise_mask) {
                if constexpr (Head::BY_PAIR) {  // a lane loads one or two query rows: the bits of the warp's 16 keys
                    const unsigned lane = thread_index_x() % 32;
                    unsigned rows[2][1] = {};
#pragma unroll
                    for (int i = 0; i < CONSUMER_M / 32; ++i)
                        bound.pair_bits<16>(rows[i], first_query + 32 * i + lane, first_key + warp % 4 * 16);
#pragma unroll
                    for (int k = 0; k < 16; k += k % 4 ? 3 : 1) {  // k = 0, 1, 4, 5, 8 ...: rows k / 4 * 8 + k % 2 and 32 more
                        const unsigned from = k / 4 * 8 + k % 2 + lane % 4 * 2;
                        const unsigned bits = __shfl_sync(0xffffffffu, rows[0][0] | rows[1][0] << 16, from) >> lane / 4;
                        visible_bits |= (bits & 1) << k | (bits >> 8 & 1) << (k + 2) | (bits >> 16 & 1) << (k + 16) |
                                        (bits >> 24 & 1) << (k + 18);
                    }
                } else {
                    const FragmentCoords coords(first_query, first_key);
#pragma unroll MASK_UNROLL
                    for (int k = 0; k < CONSUMER_M / 2; ++k) {  // clamped indices instead of a branch, so that the loads overlap
                        const int i = min(coords.at(k).query_row(), head0.Sq - 1), j = min(coords.at(k).key_col(), head0.Sk - 1);
                        visible_bits |= static_cast<unsigned>(bound.mask_allows(i, j)) << k;
                    }
                }
            }

            unsigned packed_bias[CONSUMER_M / 16][4];  // in the layout of S^T
            if (BIAS_TILES) load_bias_fragment(packed_bias, consumer_PdS(base + BIAS_AT + stage * BIAS_BYTES), warp % 4 * 2);

            wgmma_wait<1>();  // S^T
            warpgroup_fence_operand(S);
            TIMELINE(wait_barrier);
            if (DELAYED_DQ) named_barrier_sync(scheduler_barrier, 256);
            TIMELINE(softmax);
            const FragmentCoords coords(first_query, m_blocks.n0() + key_offset);
            unsigned derivative[CONSUMER_M / 16][4];  // of the score modification; two packed 16-bit values, as dS
#pragma unroll
            for (int k = 0; k < (Head::LINEAR ? 0 : CONSUMER_M / 2); k += 2) {
                const ScoreIndex at0 = coords.at(k), at1 = coords.at(k + 1);
                const float2 bias = BIAS_TILES ? unpack(packed_bias[k / 8][k / 2 % 4]) : float2{};
                if (Head::HAS_DERIVATIVE) {
                    const Dual x0 = bound.raw_dual(S[k], at0, bias.x), x1 = bound.raw_dual(S[k + 1], at1, bias.y);
                    S[k] = x0.value, S[k + 1] = x1.value;
                    derivative[k / 8][k / 2 % 4] = pack(x0.derivative, x1.derivative);
                } else {
                    S[k] = bound.raw(S[k], at0, bias.x), S[k + 1] = bound.raw(S[k + 1], at1, bias.y);
                }
            }
            const auto apply_mask = [&](auto mask_element) {
                if (elementwise_mask) {
#pragma unroll
                    for (int k = 0; k < CONSUMER_M / 2; ++k)
                        if (!(visible_bits >> k & 1)) mask_element(k);
                }
                const Range unmasked = head0.fully_visible_queries<true>(m_blocks.n0() + key_offset, m_blocks.n0() + key_offset + 64);
                // Rows from Sq on are masked, too: their q is 0, and 0 * inf is NaN.
                if ((first_query < unmasked.begin) | (first_query + CONSUMER_M > unmasked.end)) {
                    mask_fragment<CONSUMER_M / 2>(head0, coords, mask_element);
                }
            };
            if constexpr (!MASKS_P) apply_mask([&](int k) { S[k] = -INF; });
#pragma unroll
            for (int k = 0; k < CONSUMER_M / 2; k += 2) {
                const float2 shift = *reinterpret_cast<const float2*>(stats + k / 4 * 8);  // -LSE * log2(e)
                P[k / 8][k / 2 % 4] = pack(ex2(fmaf(S[k], exponent, shift.x)), ex2(fmaf(S[k + 1], exponent, shift.y)));
            }
            if constexpr (MASKS_P) apply_mask([&](int k) { P[k / 8][k / 2 % 4] &= k % 2 ? 0xffffu : 0xffff0000u; });
            const auto drop_P = [&](unsigned (&P_dropped)[CONSUMER_M / 16][4]) {
#pragma unroll
                for (int k = 0; k < CONSUMER_M / 4; ++k)
                    P_dropped[k / 4][k % 4] = DROPOUT ? P[k / 4][k % 4] & keep_pair(k / 4, k % 4) * 0xffffu : P[k / 4][k % 4];
            };
            if (SPLIT_HEAD_DIM) {
                unsigned P_dropped[CONSUMER_M / 16][4];
                drop_P(P_dropped);
                store_transposed<SmemLayoutPdS>(consumer_PdS(base + P_at), warp % 4 * 2, P_dropped);
                fence_proxy_async();
                named_barrier_sync(consumers_barrier, 256);  // both consumers have written P
            }
            TIMELINE(dP);
            if (!DELAYED_DQ) mma_dKV(dV_rmem, P, P_at, dO_at, accumulates);
            wgmma_wait<!DELAYED_DQ>();  // dP^T
            warpgroup_fence_operand(dP);
            TIMELINE(dS);
#pragma unroll
            for (int k = 0; k < CONSUMER_M / 2; k += 2) {
                const float2 delta_pair = *reinterpret_cast<const float2*>(stats + BLOCK_M + k / 4 * 8);
                const float2 p = unpack(P[k / 8][k / 2 % 4]);
                const unsigned pair = keep_pair(k / 8, k / 2 % 4);
                const float dP0 = bound.apply_dropout(dP[k], pair & 1), dP1 = bound.apply_dropout(dP[k + 1], pair >> 16);
                float dS0 = p.x * (dP0 - delta_pair.x), dS1 = p.y * (dP1 - delta_pair.y);
                if (Head::HAS_DERIVATIVE) {
                    const float2 dx = unpack(derivative[k / 8][k / 2 % 4]);
                    dS0 *= dx.x, dS1 *= dx.y;
                }
                dS[k / 8][k / 2 % 4] = pack(dS0, dS1);
            }
            if (DELAYED_DQ) {
                if (BLOCK_M == 128) named_barrier_arrive(next_scheduler_barrier, 256);  // at BLOCK_M = 128 faster here, at 64 below
                if (!FIRST) wait_dS(i - 1);  // both consumers have read the dS that this one overwrites
                store_transposed<SmemLayoutPdS>(consumer_PdS(base + dS_at), warp % 4 * 2, dS);
                if (BLOCK_M == 64) named_barrier_arrive(next_scheduler_barrier, 256);
                if (!FIRST) mma_dQ(dQ, previous_dS_at);
                if (DROPOUT) drop_P(P);  // after dS, which needs P before dropout
                mma_dKV(dV_rmem, P, P_at, dO_at, accumulates);
            } else {
                store_transposed<SmemLayoutPdS>(consumer_PdS(base + dS_at), warp % 4 * 2, dS);
                fence_proxy_async();
                named_barrier_sync(consumers_barrier, 256);  // both consumers have written dS
                mma_dQ(dQ, dS_at);
            }
            mma_dKV(dK_rmem, dS, dS_at, Q_at, accumulates);

            TIMELINE(dQ);
            const auto release_dO = [&] {
                wgmma_wait<1>();  // dV and dQ
                release(EMPTY_dO, i);
            };
            const auto dQ_lane_address = [&] {  // address of the lane's first accumulator
                return SPLIT_HEAD_DIM ? dQ_tile(head, m0) + consumer * DQ_PART + warp % 4 * 128 + threadIdx.x % 32 * 4 : nullptr;
            };
            float* const to = SPLIT_HEAD_DIM && DETERMINISTIC ? pin_address(dQ_lane_address()) : nullptr;  // while the wgmmas run
            const bool store = SPLIT_HEAD_DIM && DETERMINISTIC && work_tile.semaphore_target(head0, m0) == 0;
            if (SPLIT_HEAD_DIM && DETERMINISTIC) {
                TIMELINE(wait_dQ);
                mbarrier_wait(base + EMPTY_dQ + 8 * consumer, i % 2);
            }
            if (!DELAYED_DQ) release_dO();
            if (!DELAYED_DQ || !FIRST) {
                wgmma_wait<1 + DELAYED_DQ>();
                warpgroup_fence_operand(dQ);
                store_dQ(dQ, i - DELAYED_DQ, DETERMINISTIC ? to : dQ_lane_address(), store);
            }
            if (DELAYED_DQ) release_dO();
            m0 = m_blocks.next(m0);
            m_blocks.seek(head, m0);
            ++i;
        };
        // With a causal mask the first tile may end above the diagonal of consumer 1's keys, hidden from all of them: consumer 1 skips
        // the tile, and the ping-pong barriers of this iteration.
        const auto skip_tile = [&] {
            mbarrier_wait(base + FULL_V, 0);
            wait_full(FULL_Q, 0);
            wait_full(FULL_dO, 0);
            const unsigned zeros[CONSUMER_M / 16][4] = {};
            store_transposed<SmemLayoutPdS>(consumer_PdS(base + dS_AT), warp % 4 * 2, zeros);
            release(EMPTY_dO, 0);
            m0 = m_blocks.next(m0);
            m_blocks.seek(head, m0);
            i = skipped_tiles = 1;
        };
        if (DELAYED_DQ) {
            const int first_key = m_blocks.n0() + key_offset;
            if (SKIPS_FIRST_TILE && head0.queries(first_key, first_key + 64).begin >= m0 + BLOCK_M) skip_tile();
            else bwd_step(BoolConstant<true>{});
            wgmma_wait<0>();  // no wgmma is in flight when the loop starts: otherwise ptxas serialises the loop's wgmmas
            warpgroup_fence_operand(dK_rmem);
            warpgroup_fence_operand(dV_rmem);
        }
#pragma unroll 1
        while (head < group) bwd_step(BoolConstant<false>{});
        TIMELINE(store);
        commit_dQ_dS(i > 1, FULL_dS + 8 * ((i - 1) % 2));
        warpgroup_fence_operand(dV_rmem);  // the last iteration has waited for it
        const auto zero_unless_accumulated = [&](float (&accum)[DKV_COLS / 2]) {  // if every tile was skipped
#pragma unroll
            for (int k = 0; k < DKV_COLS / 2; ++k)
                if (SKIPS_FIRST_TILE && i == skipped_tiles) accum[k] = 0.0f;
        };
        zero_unless_accumulated(dV_rmem);
        if (DELAYED_DQ) {
            float dQ[DQ_COLS / 2];
            wait_dS(i - 1);  // both consumers have written dS and read the previous one
            mma_dQ(dQ, dS_AT + (i - 1) % 2 * SmemLayoutPdS::BYTES);
            store_dV();
            wgmma_wait<0>();
            warpgroup_fence_operand(dQ);
            warpgroup_fence_operand(dK_rmem);
            zero_unless_accumulated(dK_rmem);
            store_dQ(dQ, i - 1, nullptr, false);
            fence_proxy_async();
            __syncwarp();  // all lanes have written
            if (lane == 0) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
        } else {
            store_dV();
            wgmma_wait<0>();
            warpgroup_fence_operand(dK_rmem);
        }
        store_dK(i);
    }

    // Non-finite fallback (non_finite.cuh): a masked P is 0, but 0 * NaN = NaN; and P is NaN for a row with a large LSE.
    if (named_barrier_or(consumers_barrier, 256, non_finite)) {
        if (threadIdx.x % 128 == 0) tma_store_wait();  // the TMA stores are complete before the fallback overwrites dK and dV
        named_barrier_sync(consumers_barrier, 256);
        const BwdWorkTile reloaded = load_work_tile();
        // The warp index is recomputed to save a register.
        return key_gradients_non_finite<BLOCK_N, 8>(Q, K, V, dO, LSE, delta, dK, dV, group, score, reloaded.b, reloaded.kv_head, H,
                                                    m_blocks.n0(), thread_index_x() / 32 - 4);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // TMA has read shared memory before the block exits
    TIMELINE(done);
}

// Writes the work tiles of a ragged batch, longest first (tile_scheduler.cuh), one per warp, and clears the tile counter and the
// semaphores. Without this entry point each block of bwd_wgmma would search for its own work tile, 1 us. It is launched before
// bwd_preprocess and overlaps with it.
extern "C" __global__ __launch_bounds__(256) void bwd_wgmma_scheduler(
    int* work_tiles,  // 8 ints each
    float* dQ_accum,
    int counters,  // elements before the accumulators in dQ_accum: tile counter, semaphores
    int Hk,
    int group,    // H / Hk
    const __grid_constant__ Score score) {
#if RAGGED
    static_assert(sizeof(WorkTile) == 32, "a WorkTile is 8 ints");
    griddepcontrol_launch_dependents();
    for (int i = blockIdx.x * 256 + threadIdx.x; HAS_SEMAPHORES && i < counters; i += gridDim.x * 256)
        reinterpret_cast<unsigned*>(dQ_accum)[i] = 0;
    const unsigned number = blockIdx.x * 8 + threadIdx.x / 32;
    if (number >= key_offsets(score).tiles<BLOCK_N>() * Hk) return;
    const WorkTile work_tile = LongestFirst<KeyTiles>(score).work_tile(number, Hk, group);
    if (threadIdx.x % 32 == 0) reinterpret_cast<WorkTile*>(work_tiles)[number] = work_tile;
#endif
}

// dQ = scale * dQ_accum. Each warp converts what the consumer warps with the same index have added, in all blocks of bwd_wgmma.
extern "C" __global__ __launch_bounds__(256, 2) void bwd_wgmma_postprocess(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    const float* dQ_accum,                         // output of bwd_wgmma
    const __grid_constant__ View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    int group,                                     // H / Hk
    const __grid_constant__ Score score) {
    griddepcontrol_wait();
    const RowTile tile_rows = query_tile_by_warp<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile_rows.invalid()) return;
    const SeqlenInfo sequence(score, tile_rows.b);
    const int h = blockIdx.y, consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row0 = tile_rows.row0 + (BLOCK_M == 128 ? 64 * consumer : 0) + 16 * warp;
    const int col0 = BLOCK_M == 128 ? 0 : DQ_COLS * consumer;
    const long long tile = (static_cast<long long>(blockIdx.z) * gridDim.y + h) * gridDim.x + blockIdx.x;
    const long long tiles = static_cast<long long>(gridDim.x) * gridDim.y * gridDim.z;
    const float* from = dQ_accum + accumulators_at(tiles) + tile * DQ_TILE + consumer * DQ_PART + warp * 128;
    const Range keys = Head(score, tile_rows.b, h).keys(tile_rows.row0, tile_rows.row0 + BLOCK_M);
    const unsigned* const dQ_semaphore = reinterpret_cast<const unsigned*>(dQ_accum) + SEMAPHORES_AT + 2 * tile + consumer;
    // No block has written this tile of dQ_accum: dQ is 0.
    const bool no_keys = DETERMINISTIC ? keys.begin >= keys.end : FIRST_BLOCK_STORES && *dQ_semaphore == 0;
    const bool non_finite = DQ_COLS_2 < DQ_COLS && consumer == 1
                            ? write_dQ_fragments<16, DQ_COLS_2, 512>(dQ, sequence, h, row0, col0, lane, from, score.scale, no_keys)
                            : write_dQ_fragments<16, DQ_COLS, 512>(dQ, sequence, h, row0, col0, lane, from, score.scale, no_keys);
    if (non_finite)
        query_gradients_non_finite<16, DQ_COLS>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, col0);
}
