// Rung 4 of the backward, for short sequences: bwd_wgmma with one block per key/value head.
//
// The block visits the n_blocks of its head one after the other. For the first n_block it stores each tile of dQ to dQ_accum, for
// the others it adds to it (TMA reduce-add); after the last one it converts dQ_accum to dQ. dQ_accum stays in L2. There is no
// memset, no semaphore and no postprocess kernel, and the result is deterministic. K and V of the next n_block are loaded during
// the epilogue.
//
// clang-format off
//   warp 0        loads Q and dO per m_block, and K and V of the next n_block as soon as their tiles are free
//   warp 1        loads LSE and delta per m_block
//   warps 2, 3    dQ-store warps: each stores one consumer's dQ; stores of an n_block are complete before those of the next start
//   consumers     as bwd_wgmma with BLOCK_M = 128: dQ of an m_block is computed during the next iteration of the same n_block
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N], in the epilogue dK and dV | dQ |
//                  LSE, delta | mbarriers
// clang-format on
//
// It is faster than bwd_wgmma if Q, dO and dQ_accum of all resident heads (one per SM) fit in L2 (132 heads of 512 rows: 34 MB) and
// there are enough heads for all SMs. H200, float16, B32 H32 S512 D64: 351 TFLOP/s, causal 216 (bwd_wgmma: 317 and 199). S1024:
// 344 (bwd_wgmma: 433).
// Other shapes: experiments/013_hopper_backward.
#define TIMELINE_BRANCH 1
#define FALLBACK_INLINE __forceinline__
#include "bwd_postprocess.cuh"
#include "m_block_range.cuh"
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "swizzle.cuh"
#include "bwd_fragment.cuh"

constexpr unsigned THREADS = 384;
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16;  // columns from HEAD_DIM on are zeros
constexpr unsigned DQ_PART = 64 * D_PAD, DQ_TILE = 2 * DQ_PART;  // floats per consumer, per tile
static_assert(BLOCK_M == 128 && BLOCK_N == 128 && HEAD_DIM <= 64, "each of two consumers owns 64 keys and 64 rows of dQ");
static_assert(HEAD_DIM % 8 == 0, "rows of a tensor map are multiples of 16 bytes");
static_assert(STAGES == 2, "`LoopState` counts tiles modulo 2 * STAGES = 4");
static_assert(Head::LINEAR && !Head::MAPPED && !DROPOUT && !RAGGED, "score options are not supported: use bwd_wgmma");

using SmemLayoutQ = Swizzled<BLOCK_M, D_PAD>;
using SmemLayoutK = Swizzled<BLOCK_N, D_PAD>;
using SmemLayoutPdS = Swizzled<BLOCK_M, BLOCK_N>;  // dS
using SmemLayoutdKV = Swizzled<64, D_PAD>;         // a consumer's dK or dV
using MBlocks = MBlockRange<true, false, false>;

// Shared memory: offsets in bytes.
constexpr unsigned K_AT = 0, V_AT = SmemLayoutK::BYTES, Q_AT = 2 * SmemLayoutK::BYTES, dO_AT = Q_AT + STAGES * SmemLayoutQ::BYTES,
                   dS_AT = dO_AT + STAGES * SmemLayoutQ::BYTES, dQ_AT = dS_AT + 2 * SmemLayoutPdS::BYTES, STATS_AT = dQ_AT + 4 * DQ_TILE,
                   BARRIERS_AT = STATS_AT + STAGES * 8 * BLOCK_M;
static_assert(SMEM_BYTES == BARRIERS_AT + 256, "spec and kernel disagree on shared memory");

// The mbarriers, 8 bytes each.
constexpr unsigned FULL_K = BARRIERS_AT, FULL_V = FULL_K + 8, FULL_Q = FULL_V + 8, EMPTY_Q = FULL_Q + 8 * STAGES,
                   FULL_dO = EMPTY_Q + 8 * STAGES, EMPTY_dO = FULL_dO + 8 * STAGES, FULL_dQ = EMPTY_dO + 8 * STAGES,
                   EMPTY_dQ = FULL_dQ + 16, FULL_dS = EMPTY_dQ + 16, EMPTY_KV = FULL_dS + 16, DQ_COMPLETE = EMPTY_KV + 8;

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
    mbarrier_init(base + EMPTY_KV, 2);     // one thread per consumer
    mbarrier_init(base + DQ_COMPLETE, 2);  // one thread per dQ-store warp
    fence_proxy_async();
}

// Loop state of a consumer, packed into one register, from the top: 2 bits: the number of tiles modulo 4, which determines stage and
// parity; 14 bits: index of the n_block; 16 bits: the number of tiles of this n_block.
class LoopState {
    unsigned count = 0;

  public:
    __device__ __forceinline__ unsigned i() const { return count >> 30; }
    __device__ __forceinline__ unsigned tiles_of_key_tile() const { return count & 0xffff; }
    __device__ __forceinline__ int n0() const { return (count >> 16 & 0x3fff) * BLOCK_N; }
    __device__ __forceinline__ void next() { count += 0x40000001u; }
    __device__ __forceinline__ void next_key_tile() { count = (count & 0xffff0000u) + 0x10000u; }
    __device__ __forceinline__ void make_uniform() { count = uniform(count); }
};

// Postprocess: 16 rows of dQ, loaded from dQ_accum, converted and stored by one warp.
struct dQFragment {
    static constexpr int ITEMS = (D_PAD + 31) / 32;  // per lane: 8 columns of two rows each; adjacent lanes have adjacent columns
    float accum[ITEMS][2][8];

    static __device__ __forceinline__ int item(int n) { return n * 32 + threadIdx.x % 32; }
    static __device__ __forceinline__ int chunk(int n) { return item(n) % (D_PAD / 8); }
    static __device__ __forceinline__ int row(int n) { return item(n) / (D_PAD / 8); }

    // `from` is the start of the warp's part of the tile.
    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int n = 0; n < ITEMS; ++n)
            if (item(n) < D_PAD) load_fragment_rows(accum[n], from + chunk(n) * 512, row(n));
    }
    // Stores query rows row0 .. row0 + 16, scaled; zeros if no_keys. Returns whether all values of the lane are finite.
    __device__ __forceinline__ bool store(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0, float scale, bool no_keys) {
        float zero = 0.0f;
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) {
            if (item(n) >= D_PAD) break;
            for (int k = 0; k < (no_keys ? 16 : 0); ++k) accum[n][k / 8][k % 8] = 0.0f;
            write_dQ_rows(dQ, sequence, h, row0 + row(n), 8 * chunk(n), accum[n], scale, zero);
        }
        return zero == 0.0f;
    }
};

// Non-finite fallback for 16 rows of dQ. Inlined: see non_finite.cuh.
__device__ FALLBACK_INLINE void dQ_non_finite(const View<const dtype>& Q, const View<const dtype>& K, const View<const dtype>& V,
                                             const View<const dtype>& dO, const float* LSE, const float* delta, const View<dtype>& dQ,
                                             int group, const Score& score, int b, int h, int H, int m0) {
    query_gradients_of<16, D_PAD>(Q, K, V, dO, LSE, delta, dQ, group, score, b, h, H, m0, 0);
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma_head(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    float* dQ_accum,                               // (B, H, query tiles, DQ_TILE)
    const __grid_constant__ View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<dtype> dK,        // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<dtype> dV,        // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ TensorMap Q_tile_map,  // boxes of BLOCK_M rows
    const __grid_constant__ TensorMap dO_tile_map,
    const __grid_constant__ TensorMap K_map,       // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap dK_map,      // boxes of 64 rows
    const __grid_constant__ TensorMap dV_map,
    int group,                                     // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // mbarriers are initialised
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y, b = blockIdx.z, H = gridDim.y * group;
    const Head head0(score, b, kv_head * group);
    // There is no block map: the reference is not used.
    const auto m_blocks_of = [&](int n0) { return MBlocks{head0, *reinterpret_cast<const GroupBlockMap*>(smem), group, n0}; };
    const auto dQ_tile = [&](int head, int m0) {
        return dQ_accum + (head0.first_tile<BLOCK_M>(H, kv_head * group + head) + m0 / BLOCK_M) * DQ_TILE;
    };

    if (warp < 4) {
        setmaxnreg_dec<24>();
        // Calls f(i, head of the group, m0, n0) for the i-th tile: all m_blocks of all n_blocks; and end(n0) after each n_block.
        const auto for_each = [&](auto f, auto end) {
            unsigned i = 0;
#pragma unroll 1
            for (int n0 = 0; n0 < head0.Sk; n0 += BLOCK_N) {
                m_blocks_of(n0).for_each([&](unsigned, int head, int m0) { f(i++, head, m0, n0); });
                end(n0);
            }
        };
        if (warp == 0 && elect()) {
            // A dimension with stride 0 (broadcast) has size 1 in the tensor map: its coordinate is 0.
            const auto load_KV = [&](const TensorMap& map, const View<const dtype>& tensor, int n0, unsigned tile, unsigned full) {
                SmemLayoutK::load(base + tile, map, head0.key_box(n0), tensor.stride_h ? kv_head : 0,
                                     head0.key_batch(tensor.stride_b ? b : 0), base + full);
            };
            bool KV_loaded = false;
            const auto load_next_KV = [&](int n0) {  // called after the loads of Q and dO, whose stages are free earlier
                if (KV_loaded) return;
                mbarrier_wait(base + EMPTY_KV, n0 / BLOCK_N % 2 ^ 1);
                load_KV(K_map, K, n0, K_AT, FULL_K);
                load_KV(V_map, V, n0, V_AT, FULL_V);
                KV_loaded = true;
            };
            for_each([&](unsigned i, int head, int m0, int n0) {
                const unsigned stage = stage_of(i);
                const auto load_tile = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty,
                                         unsigned full) {
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + empty + 8 * stage, parity_of(i) ^ 1);
                    TIMELINE(load);
                    SmemLayoutQ::load(base + tile + stage * SmemLayoutQ::BYTES, map, head0.query_box(m0),
                                     tensor.stride_h ? kv_head * group + head : 0, head0.query_batch(tensor.stride_b ? b : 0),
                                     base + full + 8 * stage);
                };
                load_tile(Q_tile_map, Q, Q_AT, EMPTY_Q, FULL_Q);
                load_tile(dO_tile_map, dO, dO_AT, EMPTY_dO, FULL_dO);
                load_next_KV(n0);
            }, [&](int n0) {
                load_next_KV(n0);  // also for n_blocks without visible queries
                KV_loaded = false;
            });
        } else if (warp == 1) {
            for_each([&](unsigned i, int head, int m0, int) {
                const unsigned lane = thread_index_x() % 32;  // recomputed to save a register
                const bool is_LSE = lane < 16;                          // lanes 16 to 31 load delta
                const int row = m0 + lane % 16, rows = head0.Sq - row;  // valid rows from the lane's first row on
                const float* const from = (is_LSE ? LSE : delta) + head0.lse_offset(H, kv_head * group) +
                                          static_cast<long long>(head) * query_rows(score) + row;
                float* const to = reinterpret_cast<float*>(smem + STATS_AT) + (2 * stage_of(i) + !is_LSE) * BLOCK_M + lane % 16;
                TIMELINE(wait_empty);
                mbarrier_wait(base + EMPTY_Q + 8 * stage_of(i), parity_of(i) ^ 1);
                TIMELINE(load_stats);
                load_LSE_or_delta<BLOCK_M>(to, from, rows, is_LSE);
                __syncwarp();  // all lanes have written before lane 0 arrives
                if (lane == 0) mbarrier_arrive(base + FULL_Q + 8 * stage_of(i));
            }, [](int) {});
        } else if (warp >= 2 && elect()) {
            const unsigned consumer = warp - 2;
            for_each([&](unsigned i, int head, int m0, int n0) {
                TIMELINE(wait_dQ);
                mbarrier_wait(base + FULL_dQ + 8 * consumer, i % 2);
                TIMELINE(store_dQ);
                float* const to = dQ_tile(head, m0) + consumer * DQ_PART;
                const SmemAddr from = base + dQ_AT + consumer * 4 * DQ_PART;
                if (n0 == 0) bulk_store(to, from, 4 * DQ_PART);  // no window: if a row has visible keys, one is in n_block 0
                else tma_reduce_add(to, from, 4 * DQ_PART);
                tma_store_commit();
                tma_store_wait_read();
                mbarrier_arrive(base + EMPTY_dQ + 8 * consumer);
            }, [](int) { tma_store_wait(); });  // stores are complete before the next n_block adds
            mbarrier_arrive(base + DQ_COMPLETE);
        }
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<240>();
    const unsigned consumer = warp / 4 - 1;
    // Named barriers: of both consumers, of this one, and for ping-pong.
    const unsigned consumers_barrier = 1, consumer_barrier = 2 + consumer, scheduler_barrier = 4 + consumer,
                   next_scheduler_barrier = 5 - consumer;
    const int key_offset = 64 * consumer;  // first key of the consumer within the tile
    const float exponent = Head::unit_of(score) * Head::LOG2E;
    float dK_rmem[D_PAD / 2], dV_rmem[D_PAD / 2];
    unsigned P[BLOCK_M / 16][4], dS[BLOCK_M / 16][4];

    const auto wait_full = [&](unsigned full, unsigned i) { mbarrier_wait(base + full + 8 * stage_of(i), parity_of(i)); };
    const auto release = [&](unsigned empty, unsigned i) {
        __syncwarp();  // all lanes have read LSE and delta
        if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(i));
    };
    // S^T or dP^T: the consumer's keys times all queries of the tile.
    const auto mma_SdP = [&](float (&C)[BLOCK_M / 2], unsigned keys_at, unsigned queries_at) {
        const Descriptor A = SmemLayoutK::k_major(base + keys_at + key_offset * 128), B = SmemLayoutQ::k_major(base + queries_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < D_PAD / 16; ++step)
            wgmma<Order::K_MAJOR>(C, A + SmemLayoutK::k_step(step), B + SmemLayoutQ::k_step(step), step > 0);
        wgmma_commit();
    };
    // dV += P^T dO or dK += dS^T Q.
    const auto mma_dKV = [&](float (&C)[D_PAD / 2], const unsigned (&A)[BLOCK_M / 16][4], unsigned queries_at) {
        const Descriptor B = SmemLayoutQ::mn_major(base + queries_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step) wgmma<Order::MN_MAJOR>(C, A[step], B + SmemLayoutQ::mn_step(step), true);
        wgmma_commit();
    };
    // 64 rows of dQ = dS K.
    const auto mma_dQ = [&](float (&dQ)[D_PAD / 2], unsigned dS_at) {
        const Descriptor A = SmemLayoutPdS::k_major(base + dS_at + consumer * 8192), B = SmemLayoutK::mn_major(base + K_AT);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(dQ, A + SmemLayoutPdS::k_step(step), B + SmemLayoutK::mn_step(step), step > 0);
        wgmma_commit();
    };
    // Writes dQ of tile i to shared memory. `commit_dQ_dS` then arrives on the full barriers of dQ and dS.
    const auto store_dQ = [&](const float (&dQ)[D_PAD / 2], unsigned i) {
        mbarrier_wait(base + EMPTY_dQ + 8 * consumer, i % 2 ^ 1);
        const SmemAddr to = base + dQ_AT + consumer * 4 * DQ_PART + thread_index_x() % 128 * 16;
#pragma unroll
        for (int k = 0; k < D_PAD / 2; k += 4) store_floats(to + k * 512, dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]);
    };
    const auto commit_dQ_dS = [&](bool dQ, unsigned dS_barrier) {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0 && dQ) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
        if (lane == 0) mbarrier_arrive(base + dS_barrier);
    };
    const auto wait_dS = [&](unsigned i) { mbarrier_wait(base + FULL_dS + 8 * (i % 2), i / 2 % 2); };

    LoopState state;
    int head = 0, m0 = 0;  // of the next tile
    const auto bwd_step = [&] {
        state.make_uniform();
        const bool has_previous = state.tiles_of_key_tile() > 0;  // within this n_block
        const unsigned i = state.i(), stage = stage_of(i);
        const unsigned Q_at = Q_AT + stage * SmemLayoutQ::BYTES, dO_at = dO_AT + stage * SmemLayoutQ::BYTES;
        const unsigned dS_at = dS_AT + i % 2 * SmemLayoutPdS::BYTES;
        // Without a previous tile the product is discarded: any initialised memory that is not being written will do, here K.
        const unsigned previous_dS_at = has_previous ? dS_AT + (i % 2 ^ 1) * SmemLayoutPdS::BYTES : K_AT;
        const float* const stats =  // of the lane's first two queries
            reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + thread_index_x() % 4 * 2;
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[D_PAD / 2];
        TIMELINE(wait_Q);
        wait_full(FULL_Q, i);
        TIMELINE(S);
        mma_SdP(S, K_AT, Q_at);
        wgmma_wait<1>();  // dK of the previous tile
        if (has_previous) release(EMPTY_Q, i - 1);
        TIMELINE(wait_dO);
        wait_full(FULL_dO, i);
        TIMELINE(S);
        mma_SdP(dP, V_AT, dO_at);
        if (has_previous) commit_dQ_dS(state.tiles_of_key_tile() > 1, FULL_dS + 8 * (i % 2 ^ 1));

        wgmma_wait<1>();  // S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(scheduler_barrier, 256);
        TIMELINE(softmax);
        const int first_key = state.n0() + key_offset;
        const Range unmasked = head0.fully_visible_queries<true>(first_key, first_key + 64);
        if ((m0 < unmasked.begin) | (m0 + BLOCK_M > unmasked.end)) {  // also rows from Sq on: their q is 0, and 0 * inf is NaN
            const FragmentCoords coords(m0, first_key);
            mask_fragment<BLOCK_M / 2>(head0, coords, [&](int k) { S[k] = -INF; });
        }
#pragma unroll
        for (int k = 0; k < BLOCK_M / 2; k += 2) {
            const float2 shift = *reinterpret_cast<const float2*>(stats + k / 4 * 8);  // -LSE * log2(e)
            P[k / 8][k / 2 % 4] = pack(ex2(fmaf(S[k], exponent, shift.x)), ex2(fmaf(S[k + 1], exponent, shift.y)));
        }
        named_barrier_arrive(next_scheduler_barrier, 256);
        TIMELINE(dP);
        mma_dKV(dV_rmem, P, dO_at);
        if (has_previous) wait_dS(i - 1);
        mma_dQ(dQ, previous_dS_at);  // discarded in the first iteration: a branch around it would serialise the wgmmas

        wgmma_wait<2>();  // dP^T
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
#pragma unroll
        for (int k = 0; k < BLOCK_M / 2; k += 2) {
            const float2 delta_pair = *reinterpret_cast<const float2*>(stats + BLOCK_M + k / 4 * 8);
            const float2 p = unpack(P[k / 8][k / 2 % 4]);
            dS[k / 8][k / 2 % 4] = pack(p.x * (dP[k] - delta_pair.x), p.y * (dP[k + 1] - delta_pair.y));
        }
        store_transposed<SmemLayoutPdS>(base + dS_at + consumer * SmemLayoutPdS::SLAB_BYTES, warp % 4 * 2, dS);
        mma_dKV(dK_rmem, dS, Q_at);

        TIMELINE(dQ);
        wgmma_wait<1>();  // dV and dQ
        release(EMPTY_dO, i);
        warpgroup_fence_operand(dQ);
        if (has_previous) store_dQ(dQ, i - 1);
        m0 += BLOCK_M;
        m_blocks_of(state.n0()).seek(head, m0);
        state.next();
    };
    const auto mainloop_tail = [&] {  // dQ of the last tile of an n_block
        const unsigned i = state.i();
        commit_dQ_dS(state.tiles_of_key_tile() > 1, FULL_dS + 8 * ((i - 1) % 2));
        float dQ[D_PAD / 2];
        wait_dS(i - 1);
        mma_dQ(dQ, dS_AT + (i - 1) % 2 * SmemLayoutPdS::BYTES);
        wgmma_wait<0>();
        warpgroup_fence_operand(dQ);
        store_dQ(dQ, i - 1);
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
        wgmma_wait<0>();
        warpgroup_fence_operand(dK_rmem);
        warpgroup_fence_operand(dV_rmem);
        release(EMPTY_Q, i - 1);
    };
    // dK and dV are staged in the consumer's own part of dS, so that the next K and V can be loaded meanwhile.
    const auto dKV_staging = [&](bool is_dK) { return dS_AT + !is_dK * SmemLayoutPdS::BYTES + consumer * SmemLayoutPdS::SLAB_BYTES; };
    const auto stage_dKV = [&](bool is_dK, const float (&accum)[D_PAD / 2], float factor) {
#pragma unroll
        for (int k = 0; k < D_PAD / 2; k += 8) {
            unsigned pair[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) pair[e] = pack(accum[k + 2 * e] * factor, accum[k + 2 * e + 1] * factor);
            const unsigned chunk = SmemLayoutdKV::chunk(warp % 4 * 16 + lane % 16, k / 4 + lane / 16);
            stmatrix_x4(base + dKV_staging(is_dK) + chunk, pair[0], pair[1], pair[2], pair[3]);
        }
    };

    if (consumer == 1) named_barrier_arrive(next_scheduler_barrier, 256);  // consumer 0 starts
#pragma unroll 1
    for (; state.n0() < head0.Sk; state.next_key_tile()) {
        if (threadIdx.x % 128 == 0) tma_store_wait_read();
        named_barrier_sync(consumer_barrier, 128);  // TMA has read dK and dV before dS overwrites them
        mbarrier_wait(base + FULL_K, state.n0() / BLOCK_N % 2);
        mbarrier_wait(base + FULL_V, state.n0() / BLOCK_N % 2);
        m_blocks_of(state.n0()).start(head, m0);
#pragma unroll
        for (int k = 0; k < D_PAD / 2; ++k) dK_rmem[k] = dV_rmem[k] = 0.0f;
        if (head < group) {
#pragma unroll 1
            while (head < group) bwd_step();
            mainloop_tail();
        }
        TIMELINE(store);
        // Non-finite fallback (non_finite.cuh): a masked P is 0, but 0 * NaN = NaN; and P is NaN for a row with a large LSE.
        // After this barrier neither consumer reads K and V again.
        const bool non_finite = named_barrier_or(consumers_barrier, 256, !(finite(dK_rmem) && finite(dV_rmem)));
        if (threadIdx.x % 128 == 0) mbarrier_arrive(base + EMPTY_KV);
        if (non_finite) {
            key_gradients_non_finite<BLOCK_N, 8>(Q, K, V, dO, LSE, delta, dK, dV, group, score, b, kv_head, H, state.n0(), warp - 4);
        } else {
            stage_dKV(false, dV_rmem, 1.0f);
            stage_dKV(true, dK_rmem, score.scale);
            fence_proxy_async();
            named_barrier_sync(consumer_barrier, 128);  // all four warps have written dK and dV before the TMA store
            if (threadIdx.x % 128 == 0) {
                const int row = head0.key_row_box(state.n0() + key_offset), batch = head0.key_row_batch(b);
                tma_store(dV_map, 0, row, kv_head, batch, base + dKV_staging(false));
                tma_store(dK_map, 0, row, kv_head, batch, base + dKV_staging(true));
                tma_store_commit();
            }
        }
    }

    mbarrier_wait(base + DQ_COMPLETE, 0);  // the postprocess starts when dQ_accum is complete
    constexpr int TILES_PER_PASS = 4;       // m_blocks whose loads overlap
    const int tiles = (head0.Sq + BLOCK_M - 1) / BLOCK_M, row0 = 64 * consumer + warp % 4 * 16;
#pragma unroll 1
    for (int first = 0; first < group * tiles; first += TILES_PER_PASS) {
        dQFragment rows[TILES_PER_PASS];
#pragma unroll
        for (int t = 0; t < TILES_PER_PASS; ++t) {
            const int tile = min(first + t, group * tiles - 1);
            rows[t].load(dQ_tile(tile / tiles, tile % tiles * BLOCK_M) + consumer * DQ_PART + warp % 4 * 128);
        }
#pragma unroll
        for (int t = 0; t < TILES_PER_PASS; ++t) {
            if (first + t >= group * tiles) break;
            const int h = kv_head * group + (first + t) / tiles, m0 = (first + t) % tiles * BLOCK_M;
            const Range keys = head0.keys(m0, m0 + BLOCK_M);
            const bool rows_finite = rows[t].store(dQ, SeqlenInfo(score, b), h, m0 + row0, score.scale, keys.begin >= keys.end);
            if (!__all_sync(0xffffffffu, rows_finite))  // NaN or inf: a masked key or a large LSE may be the cause
                dQ_non_finite(Q, K, V, dO, LSE, delta, dQ, group, score, b, h, H, m0 + row0);
        }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // TMA has read shared memory before the block exits
    TIMELINE(done);
}
