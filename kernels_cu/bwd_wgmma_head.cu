// Rung 4 of the backward, for short rows: bwd_wgmma with a block a key/value head, not a block a tile of keys.
//
// The block takes its head's key tiles one after the other. Of a query tile's dQ the first keys store their part, the next ones add
// to it, and after the last the block puts it into order itself, all in L2: nothing has to be zero before, nobody waits for another
// block, no entry follows, and the same bits come every time. The next K and V are on their way while dK and dV leave.
//
// clang-format off
//   warp 0        requests Q, dO a tile, and K, V of the next keys when nobody needs those before
//   warp 1        LSE and delta a tile, ready for use
//   warps 2, 3    send a consumer's dQ to L2; those of the next keys after those of these have come
//   consumers     as bwd_wgmma's of 128 queries: a tile's dQ is multiplied during the next one, of the same keys
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N], between keys dK and dV | dQ |
//                  LSE, delta | mbarriers
// clang-format on
//
// It pays while the heads that run at one time lie in L2 with Q, dO and dQ, and fill the SMs: 132 of 512 rows are 34 MB. On an H200, float16,
// B32 H32 S512 D64: 351 TFLOP/s, causal 216, where bwd_wgmma has 317 and 199; 160 heads 212 for 258; S1024 344 for 433. More of it:
// experiments/013_hopper_backward.
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
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16;  // the columns from HEAD_DIM on are zeros
constexpr unsigned DQ_SHARE = 64 * D_PAD, DQ_TILE = 2 * DQ_SHARE;  // numbers, of a consumer and of both
static_assert(BLOCK_M == 128 && BLOCK_N == 128 && HEAD_DIM <= 64, "64 keys, and 64 rows of dQ, for each of two consumers");
static_assert(HEAD_DIM % 8 == 0, "a tensor map's rows are multiples of 16 bytes");
static_assert(STAGES == 2, "`Progress` counts tiles to 4");
static_assert(Head::LINEAR && !Head::MAPPED && !DROPOUT && !RAGGED, "plain problems");

using Queries = Swizzled<BLOCK_M, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // dS
using Rows = Swizzled<64, D_PAD>;          // of dK or dV, a consumer's
using Walk = MBlockRange<true, false, false>;

// Shared memory, in bytes from its beginning.
constexpr unsigned K_AT = 0, V_AT = Keys::BYTES, Q_AT = 2 * Keys::BYTES, dO_AT = Q_AT + STAGES * Queries::BYTES,
                   dS_AT = dO_AT + STAGES * Queries::BYTES, dQ_AT = dS_AT + 2 * Pairs::BYTES, STATS_AT = dQ_AT + 4 * DQ_TILE,
                   BARRIERS_AT = STATS_AT + STAGES * 8 * BLOCK_M;
static_assert(SMEM_BYTES == BARRIERS_AT + 256, "spec and kernel disagree on shared memory");

// The mbarriers, 8 bytes each.
constexpr unsigned FULL_K = BARRIERS_AT, FULL_V = FULL_K + 8, FULL_Q = FULL_V + 8, EMPTY_Q = FULL_Q + 8 * STAGES,
                   FULL_dO = EMPTY_Q + 8 * STAGES, EMPTY_dO = FULL_dO + 8 * STAGES, FULL_dQ = EMPTY_dO + 8 * STAGES,
                   EMPTY_dQ = FULL_dQ + 16, FULL_dS = EMPTY_dQ + 16, EMPTY_KEYS = FULL_dS + 16, SUMMED = EMPTY_KEYS + 8;

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
    mbarrier_init(base + EMPTY_KEYS, 2);  // a consumer each
    mbarrier_init(base + SUMMED, 2);      // who sends dQ
    fence_proxy_async();
}

// How far a consumer has come, in one register, since there is none to spare: tiles in all, by 4, which is what stages and parities
// ask of them; which keys; tiles of these keys.
class Progress {
    unsigned count = 0;  // 2 bits, 14 and 16

  public:
    __device__ __forceinline__ unsigned i() const { return count >> 30; }
    __device__ __forceinline__ unsigned of_keys() const { return count & 0xffff; }
    __device__ __forceinline__ int n0() const { return (count >> 16 & 0x3fff) * BLOCK_N; }
    __device__ __forceinline__ void next() { count += 0x40000001u; }
    __device__ __forceinline__ void next_keys() { count = (count & 0xffff0000u) + 0x10000u; }
    __device__ __forceinline__ void make_uniform() { count = uniform(count); }
};

// dQ of 16 rows of a query tile on its way from dQ_accum to its place, by a warp.
struct SemaphoreOrder {
    static constexpr int ITEMS = (D_PAD + 31) / 32;  // of a lane: 8 columns of two rows each, neighbours side by side
    float sums[ITEMS][2][8];

    static __device__ __forceinline__ int item(int n) { return n * 32 + threadIdx.x % 32; }
    static __device__ __forceinline__ int chunk(int n) { return item(n) % (D_PAD / 8); }
    static __device__ __forceinline__ int row(int n) { return item(n) / (D_PAD / 8); }

    // From where the warp's sums begin.
    __device__ __forceinline__ void fetch(const float* from) {
#pragma unroll
        for (int n = 0; n < ITEMS; ++n)
            if (item(n) < D_PAD) load_fragment_rows(sums[n], from + chunk(n) * 512, row(n));
    }
    // Of query rows row0 .. row0 + 16, scaled; zeros of rows that nobody has added to. Returns whether all of the lane's are finite.
    __device__ __forceinline__ bool put(const View<dtype>& dQ, const SeqlenInfo& sequence, int h, int row0, float scale, bool untouched) {
        float zero = 0.0f;
#pragma unroll
        for (int n = 0; n < ITEMS; ++n) {
            if (item(n) >= D_PAD) break;
            for (int k = 0; k < (untouched ? 16 : 0); ++k) sums[n][k / 8][k % 8] = 0.0f;
            write_dQ_rows(dQ, sequence, h, row0 + row(n), 8 * chunk(n), sums[n], scale, zero);
        }
        return zero == 0.0f;
    }
};

// dQ of 16 rows, whatever the inputs hold. In line: non_finite.cuh says why.
__device__ FALLBACK_INLINE void query_gradients(const View<const dtype>& Q, const View<const dtype>& K, const View<const dtype>& V,
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
    __syncthreads();  // the mbarriers are there before anybody uses them
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y, b = blockIdx.z, H = gridDim.y * group;
    const Head head0(score, b, kv_head * group);
    const auto walk_from = [&](int n0) { return Walk{head0, *reinterpret_cast<const GroupBlockMap*>(smem), group, n0}; };  // there is no map
    const auto dQ_tile = [&](int head, int m0) {
        return dQ_accum + (head0.first_tile<BLOCK_M>(H, kv_head * group + head) + m0 / BLOCK_M) * DQ_TILE;
    };

    if (warp < 4) {
        setmaxnreg_dec<24>();
        // Calls f(i, head of the group, m0, n0) with each query tile of each tile of keys, i counting, and end(n0) after each of these.
        const auto for_each = [&](auto f, auto end) {
            unsigned i = 0;
#pragma unroll 1
            for (int n0 = 0; n0 < head0.Sk; n0 += BLOCK_N) {
                walk_from(n0).for_each([&](unsigned, int head, int m0) { f(i++, head, m0, n0); });
                end(n0);
            }
        };
        if (warp == 0 && elect()) {
            // A stride of 0 is a dimension of size 1 to a tensor map.
            const auto request_keys = [&](const TensorMap& map, const View<const dtype>& tensor, int n0, unsigned tile, unsigned full) {
                Keys::load(base + tile, map, head0.key_box(n0), tensor.stride_h ? kv_head : 0, head0.key_batch(tensor.stride_b ? b : 0),
                              base + full);
            };
            bool requested = false;
            const auto request_next_keys = [&](int n0) {  // behind Q and dO, which have room before K and V have
                if (requested) return;
                mbarrier_wait(base + EMPTY_KEYS, n0 / BLOCK_N % 2 ^ 1);
                request_keys(K_map, K, n0, K_AT, FULL_K);
                request_keys(V_map, V, n0, V_AT, FULL_V);
                requested = true;
            };
            for_each([&](unsigned i, int head, int m0, int n0) {
                const unsigned stage = stage_of(i);
                const auto request = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty,
                                         unsigned full) {
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + empty + 8 * stage, parity_of(i) ^ 1);
                    TIMELINE(load);
                    Queries::load(base + tile + stage * Queries::BYTES, map, head0.query_box(m0),
                                     tensor.stride_h ? kv_head * group + head : 0, head0.query_batch(tensor.stride_b ? b : 0),
                                     base + full + 8 * stage);
                };
                request(Q_tile_map, Q, Q_AT, EMPTY_Q, FULL_Q);
                request(dO_tile_map, dO, dO_AT, EMPTY_dO, FULL_dO);
                request_next_keys(n0);
            }, [&](int n0) {
                request_next_keys(n0);  // also those that no query sees
                requested = false;
            });
        } else if (warp == 1) {
            for_each([&](unsigned i, int head, int m0, int) {
                const unsigned lane = thread_index_x() % 32;  // asked again: registers are few
                const bool of_LSE = lane < 16;                          // the other half: delta
                const int row = m0 + lane % 16, rows = head0.Sq - row;  // from the lane's first on
                const float* const from = (of_LSE ? LSE : delta) + head0.lse_offset(H, kv_head * group) +
                                          static_cast<long long>(head) * query_rows(score) + row;
                float* const to = reinterpret_cast<float*>(smem + STATS_AT) + (2 * stage_of(i) + !of_LSE) * BLOCK_M + lane % 16;
                TIMELINE(wait_empty);
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
            }, [](int) {});
        } else if (warp >= 2 && elect()) {
            const unsigned consumer = warp - 2;
            for_each([&](unsigned i, int head, int m0, int n0) {
                TIMELINE(wait_dQ);
                mbarrier_wait(base + FULL_dQ + 8 * consumer, i % 2);
                TIMELINE(send_dQ);
                float* const to = dQ_tile(head, m0) + consumer * DQ_SHARE;
                const SmemAddr from = base + dQ_AT + consumer * 4 * DQ_SHARE;
                if (n0 == 0) bulk_store(to, from, 4 * DQ_SHARE);  // every row that sees a key sees one of the first
                else tma_reduce_add(to, from, 4 * DQ_SHARE);
                tma_store_commit();
                tma_store_wait_read();
                mbarrier_arrive(base + EMPTY_dQ + 8 * consumer);
            }, [](int) { tma_store_wait(); });  // the next keys add to what has come
            mbarrier_arrive(base + SUMMED);
        }
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<240>();
    const unsigned consumer = warp / 4 - 1, both = 1, own_barrier = 2 + consumer, turn = 4 + consumer, next_turn = 5 - consumer;
    const int own_keys = 64 * consumer;  // the first, of the tile
    const float exponent = Head::unit_of(score) * Head::LOG2E;
    float dK_rmem[D_PAD / 2], dV_rmem[D_PAD / 2];
    unsigned P[BLOCK_M / 16][4], dS[BLOCK_M / 16][4];

    const auto await = [&](unsigned full, unsigned i) { mbarrier_wait(base + full + 8 * stage_of(i), parity_of(i)); };
    const auto release = [&](unsigned empty, unsigned i) {
        __syncwarp();  // all lanes have read LSE and delta
        if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(i));
    };
    // S^T or dP^T: the consumer's keys times all queries of the tile.
    const auto multiply_rows = [&](float (&C)[BLOCK_M / 2], unsigned keys_at, unsigned queries_at) {
        const Descriptor A = Keys::k_major(base + keys_at + own_keys * 128), B = Queries::k_major(base + queries_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < D_PAD / 16; ++step)
            wgmma<Order::K_MAJOR>(C, A + Keys::k_step(step), B + Queries::k_step(step), step > 0);
        wgmma_commit();
    };
    // dV += P^T dO or dK += dS^T Q.
    const auto add_rows = [&](float (&C)[D_PAD / 2], const unsigned (&A)[BLOCK_M / 16][4], unsigned queries_at) {
        const Descriptor B = Queries::mn_major(base + queries_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step) wgmma<Order::MN_MAJOR>(C, A[step], B + Queries::mn_step(step), true);
        wgmma_commit();
    };
    // 64 rows of dQ = dS K.
    const auto multiply_dQ = [&](float (&dQ)[D_PAD / 2], unsigned dS_at) {
        const Descriptor A = Pairs::k_major(base + dS_at + consumer * 8192), B = Keys::mn_major(base + K_AT);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(dQ, A + Pairs::k_step(step), B + Keys::mn_step(step), step > 0);
        wgmma_commit();
    };
    // dQ of the i-th tile leaves the registers; `publish` tells whoever waits for it, and for dS, when it is there.
    const auto store_dQ = [&](const float (&dQ)[D_PAD / 2], unsigned i) {
        mbarrier_wait(base + EMPTY_dQ + 8 * consumer, i % 2 ^ 1);
        const SmemAddr to = base + dQ_AT + consumer * 4 * DQ_SHARE + thread_index_x() % 128 * 16;
#pragma unroll
        for (int k = 0; k < D_PAD / 2; k += 4) store_floats(to + k * 512, dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]);
    };
    const auto publish = [&](bool dQ, unsigned dS_barrier) {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0 && dQ) mbarrier_arrive(base + FULL_dQ + 8 * consumer);
        if (lane == 0) mbarrier_arrive(base + dS_barrier);
    };
    const auto await_dS = [&](unsigned i) { mbarrier_wait(base + FULL_dS + 8 * (i % 2), i / 2 % 2); };

    Progress progress;
    int head = 0, m0 = 0;  // of the tile that is next
    const auto step = [&] {
        progress.make_uniform();
        const bool begun = progress.of_keys() > 0;  // a tile of these keys went before
        const unsigned i = progress.i(), stage = stage_of(i);
        const unsigned Q_at = Q_AT + stage * Queries::BYTES, dO_at = dO_AT + stage * Queries::BYTES;
        const unsigned dS_at = dS_AT + i % 2 * Pairs::BYTES;
        const unsigned dS_before = begun ? dS_AT + (i % 2 ^ 1) * Pairs::BYTES : K_AT;  // or what nobody writes to
        const float* const stats =  // of the lane's first queries
            reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + thread_index_x() % 4 * 2;
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[D_PAD / 2];
        TIMELINE(wait_Q);
        await(FULL_Q, i);
        TIMELINE(S);
        multiply_rows(S, K_AT, Q_at);
        wgmma_wait<1>();  // for dK of the tile before
        if (begun) release(EMPTY_Q, i - 1);
        TIMELINE(wait_dO);
        await(FULL_dO, i);
        TIMELINE(S);
        multiply_rows(dP, V_AT, dO_at);
        if (begun) publish(progress.of_keys() > 1, FULL_dS + 8 * (i % 2 ^ 1));

        wgmma_wait<1>();  // for S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(turn, 256);
        TIMELINE(softmax);
        const int first_key = progress.n0() + own_keys;
        const Range whole = head0.fully_visible_queries<true>(first_key, first_key + 64);
        if ((m0 < whole.begin) | (m0 + BLOCK_M > whole.end)) {  // also rows from Sq on: 0 * inf is NaN
            const Place place(m0, first_key);
            mask_fragment<BLOCK_M / 2>(head0, place, [&](int k) { S[k] = -INF; });
        }
#pragma unroll
        for (int k = 0; k < BLOCK_M / 2; k += 2) {
            const float2 shift = *reinterpret_cast<const float2*>(stats + k / 4 * 8);
            P[k / 8][k / 2 % 4] = pack(ex2(fmaf(S[k], exponent, shift.x)), ex2(fmaf(S[k + 1], exponent, shift.y)));
        }
        named_barrier_arrive(next_turn, 256);
        TIMELINE(dP);
        add_rows(dV_rmem, P, dO_at);
        if (begun) await_dS(i - 1);
        multiply_dQ(dQ, dS_before);  // for nothing, if none went before: two kinds of tiles in a loop would serialise wgmma

        wgmma_wait<2>();  // for dP^T
        warpgroup_fence_operand(dP);
        TIMELINE(dS);
#pragma unroll
        for (int k = 0; k < BLOCK_M / 2; k += 2) {
            const float2 row_delta = *reinterpret_cast<const float2*>(stats + BLOCK_M + k / 4 * 8);
            const float2 p = unpack(P[k / 8][k / 2 % 4]);
            dS[k / 8][k / 2 % 4] = pack(p.x * (dP[k] - row_delta.x), p.y * (dP[k + 1] - row_delta.y));
        }
        store_transposed<Pairs>(base + dS_at + consumer * Pairs::SLAB_BYTES, warp % 4 * 2, dS);
        add_rows(dK_rmem, dS, Q_at);

        TIMELINE(dQ);
        wgmma_wait<1>();  // for dV and dQ
        release(EMPTY_dO, i);
        warpgroup_fence_operand(dQ);
        if (begun) store_dQ(dQ, i - 1);
        m0 += BLOCK_M;
        walk_from(progress.n0()).find(head, m0);
        progress.next();
    };
    const auto finish_tiles = [&] {  // dQ of the last
        const unsigned i = progress.i();
        publish(progress.of_keys() > 1, FULL_dS + 8 * ((i - 1) % 2));
        float dQ[D_PAD / 2];
        await_dS(i - 1);
        multiply_dQ(dQ, dS_AT + (i - 1) % 2 * Pairs::BYTES);
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
    // Where the consumer's dK or dV waits to be sent: there only it writes dS, and the next K and V come meanwhile.
    const auto rows_at = [&](bool of_K) { return dS_AT + !of_K * Pairs::BYTES + consumer * Pairs::SLAB_BYTES; };
    const auto store_rows = [&](bool of_K, const float (&sums)[D_PAD / 2], float factor) {
#pragma unroll
        for (int k = 0; k < D_PAD / 2; k += 8) {
            unsigned pair[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) pair[e] = pack(sums[k + 2 * e] * factor, sums[k + 2 * e + 1] * factor);
            const unsigned chunk = Rows::chunk(warp % 4 * 16 + lane % 16, k / 4 + lane / 16);
            stmatrix_x4(base + rows_at(of_K) + chunk, pair[0], pair[1], pair[2], pair[3]);
        }
    };

    if (consumer == 1) named_barrier_arrive(next_turn, 256);  // consumer 0 begins
#pragma unroll 1
    for (; progress.n0() < head0.Sk; progress.next_keys()) {
        if (threadIdx.x % 128 == 0) tma_store_wait_read();
        named_barrier_sync(own_barrier, 128);  // dK and dV have left shared memory before dS comes there
        mbarrier_wait(base + FULL_K, progress.n0() / BLOCK_N % 2);
        mbarrier_wait(base + FULL_V, progress.n0() / BLOCK_N % 2);
        walk_from(progress.n0()).start(head, m0);
#pragma unroll
        for (int k = 0; k < D_PAD / 2; ++k) dK_rmem[k] = dV_rmem[k] = 0.0f;
        if (head < group) {
#pragma unroll 1
            while (head < group) step();
            finish_tiles();
        }
        TIMELINE(store);
        // A masked P is 0, but 0 * NaN brings a query's numbers to keys that it does not see; of a large LSE P is NaN. Both are rare.
        const bool non_finite = named_barrier_or(both, 256, !(finite(dK_rmem) && finite(dV_rmem)));  // all have used K and V
        if (threadIdx.x % 128 == 0) mbarrier_arrive(base + EMPTY_KEYS);
        if (non_finite) {
            key_gradients_non_finite<BLOCK_N, 8>(Q, K, V, dO, LSE, delta, dK, dV, group, score, b, kv_head, H, progress.n0(), warp - 4);
        } else {
            store_rows(false, dV_rmem, 1.0f);
            store_rows(true, dK_rmem, score.scale);
            fence_proxy_async();
            named_barrier_sync(own_barrier, 128);  // the consumer's part is whole before it is sent
            if (threadIdx.x % 128 == 0) {
                const int row = head0.key_row_box(progress.n0() + own_keys), batch = head0.key_row_batch(b);
                tma_store(dV_map, 0, row, kv_head, batch, base + rows_at(false));
                tma_store(dK_map, 0, row, kv_head, batch, base + rows_at(true));
                tma_store_commit();
            }
        }
    }

    mbarrier_wait(base + SUMMED, 0);  // and then dQ is put into order
    constexpr int AT_ONCE = 4;        // query tiles, so that loads overlap
    const int tiles = (head0.Sq + BLOCK_M - 1) / BLOCK_M, row0 = 64 * consumer + warp % 4 * 16;
#pragma unroll 1
    for (int first = 0; first < group * tiles; first += AT_ONCE) {
        SemaphoreOrder rows[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            const int tile = min(first + t, group * tiles - 1);
            rows[t].fetch(dQ_tile(tile / tiles, tile % tiles * BLOCK_M) + consumer * DQ_SHARE + warp % 4 * 128);
        }
#pragma unroll
        for (int t = 0; t < AT_ONCE; ++t) {
            if (first + t >= group * tiles) break;
            const int h = kv_head * group + (first + t) / tiles, m0 = (first + t) % tiles * BLOCK_M;
            const Range keys = head0.keys(m0, m0 + BLOCK_M);
            const bool fine = rows[t].put(dQ, SeqlenInfo(score, b), h, m0 + row0, score.scale, keys.begin >= keys.end);
            if (!__all_sync(0xffffffffu, fine))  // NaN or inf of keys that some of these rows do not see, or a large LSE
                query_gradients(Q, K, V, dO, LSE, delta, dQ, group, score, b, h, H, m0 + row0);
        }
    }
    if (threadIdx.x % 128 == 0) tma_store_wait_read();  // shared memory lives as long as the block
    TIMELINE(done);
}
