// Rung 4 of the backward, for narrow heads: bwd_wgmma with blocks that stay on their SM and take one piece after the other.
//
// A piece is a tile of keys of a key/value head: dK and dV of its keys stay in registers while all query tiles that see them pass. A
// block that ends and the one after it are 7000 ... 10000 cycles apart, the time of two query tiles. Here the tiles of one piece follow
// those of the one before as if they were one walk: two pieces' K have a place, so that the last dQ of a piece is multiplied in
// the first tile of the next, as in every tile that of the tile before; and dV and dK leave by the way that dQ leaves, while the
// other consumer multiplies. No tile is another kind of tile than the others: ptxas takes what is under way of two kinds apart.
//
// clang-format off
//   warp 0        claims pieces, and tells the others; requests Q, dO a tile, and K, V with the first ones of a piece
//   warp 1        LSE and delta a tile, ready for use
//   warps 2, 3    send what a consumer ships, from one place in shared memory: a dQ, or the gradients of the keys
//   consumers     as bwd_wgmma's of 128 queries
//
//   shared memory: K, V [BLOCK_N] | Q, dO [STAGES][BLOCK_M] | dS [2][BLOCK_M][BLOCK_N] | shipments | LSE, delta | another K |
//                  mbarriers, and what is told
// clang-format on
//
// Registers of the servers are 24, and who spills one has copies in the consumers' loops: what is told is read again each time, not kept.
// More of it: experiments/013_hopper_backward.
#define DETERMINISTIC 0
#define TIMELINE_BRANCH 1
#define FALLBACK_INLINE __forceinline__
#include "bwd_postprocess.cuh"
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "swizzle.cuh"
#include "bwd_fragment.cuh"

constexpr unsigned THREADS = 384;
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16;                   // the columns from HEAD_DIM on are zeros
constexpr unsigned DQ_SHARE = 64 * D_PAD, DQ_TILE = 2 * DQ_SHARE;  // numbers, of a consumer and of both
constexpr int SUMS_AT = 32;                                        // numbers of dQ_accum, of which the first counts pieces
static_assert(BLOCK_M == 128 && BLOCK_N == 128 && HEAD_DIM <= 64, "64 keys, and 64 rows of dQ, for each of two consumers");
static_assert(HEAD_DIM_V <= HEAD_DIM, "V and dO have room for as many columns as K and Q");
static_assert(HEAD_DIM % 8 == 0, "a tensor map's rows are multiples of 16 bytes");
static_assert(Head::LINEAR && !Head::ELEMENT_MASK && !Head::MAPPED && !DROPOUT && !RAGGED, "what is seen is told by ranges");

using Queries = Swizzled<BLOCK_M, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // dS
using Gradients = Swizzled<64, D_PAD>;     // dK or dV of a consumer
constexpr unsigned STAGING_BYTES = 4 * DQ_SHARE > Gradients::BYTES ? 4 * DQ_SHARE : Gradients::BYTES;

// Shared memory, in bytes from its beginning.
constexpr unsigned K_AT = 0, V_AT = Keys::BYTES, Q_AT = 2 * Keys::BYTES, dO_AT = Q_AT + STAGES * Queries::BYTES,
                   dS_AT = dO_AT + STAGES * Queries::BYTES, STAGING_AT = dS_AT + 2 * Pairs::BYTES, STATS_AT = STAGING_AT + 2 * STAGING_BYTES,
                   OTHER_K = STATS_AT + STAGES * 8 * BLOCK_M, BARRIERS_AT = OTHER_K + Keys::BYTES;
static_assert(OTHER_K % 1024 == 0, "tiles are aligned to 1024 bytes");
static_assert(SMEM_BYTES == BARRIERS_AT + 1024, "spec and kernel disagree on shared memory");

// A block's piece, as it is told: its keys, its walk over query rows, and which of these see all of a consumer's 64 keys.
struct WorkTileRange {
    int key_tile, kv_head, b;  // b < 0: there is none
    int begin, end;            // rows of the first tile of a head; behind the last one
    Range whole[2];
};
// What a consumer ships, in order: with each tile, told here, dQ of the tile before; after the last tile of a piece dV and dK.
struct StagedStore {
    int m0, n0, h, b;                                   // h of the queries; of gradients, of the keys
    static constexpr int dV = -1, dK = -2, LAST = -3;  // in place of m0; LAST: dQ of the block's last tile
};
constexpr unsigned STAGING_SLOTS = 16;        // in the ring: they are told up to eight ahead of who sends them
constexpr int IN_PART = 1, LAST_TILE = 2;  // flags: not all queries see all of a consumer's keys; the piece's last tile

// The mbarriers, 8 bytes each, and what is told.
constexpr unsigned EMPTY_K = BARRIERS_AT, EMPTY_V = EMPTY_K + 16, FULL_Q = EMPTY_V + 8, EMPTY_Q = FULL_Q + 8 * STAGES,
                   FULL_dO = EMPTY_Q + 8 * STAGES, EMPTY_dO = FULL_dO + 8 * STAGES, FULL_STAGING = EMPTY_dO + 8 * STAGES,
                   EMPTY_STAGING = FULL_STAGING + 16, FULL_dS = EMPTY_STAGING + 16, FULL_TILE = FULL_dS + 16, EMPTY_TILE = FULL_TILE + 16,
                   TILES_AT = EMPTY_TILE + 16, NON_FINITE_AT = TILES_AT + 2 * sizeof(WorkTileRange), FLAGS_AT = NON_FINITE_AT + 8,
                   STAGING_SLOTS_AT = FLAGS_AT + STAGES * 8;
static_assert(STAGING_SLOTS_AT + STAGING_SLOTS * sizeof(StagedStore) <= SMEM_BYTES, "the mbarriers and what is told have 1024 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    mbarrier_init(base + EMPTY_V, 8);
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(base + FULL_Q + 8 * stage, 2);   // the rows; LSE, delta and flags
        mbarrier_init(base + EMPTY_Q + 8 * stage, 8);  // a lane of each consumer warp
        mbarrier_init(base + FULL_dO + 8 * stage, 1);
        mbarrier_init(base + EMPTY_dO + 8 * stage, 8);
    }
    for (unsigned i = 0; i < 2; ++i) {
        mbarrier_init(base + EMPTY_K + 8 * i, 8);
        mbarrier_init(base + FULL_STAGING + 8 * i, 4);
        mbarrier_init(base + EMPTY_STAGING + 8 * i, 1);
        mbarrier_init(base + FULL_dS + 8 * i, 8);
        mbarrier_init(base + FULL_TILE + 8 * i, 1);
        mbarrier_init(base + EMPTY_TILE + 8 * i, 9);  // a lane of warp 1 and of each consumer warp
    }
    fence_proxy_async();
}

// The number-th piece. With a last key (causal) the first keys of a head are the longest piece: the heads of a section come side by
// side, as in dq_semaphore.cuh, a round of blocks in each section, or of short rows half of one.
__device__ __forceinline__ WorkTileRange work_tile_at(unsigned number, const Score& score, unsigned Hk, unsigned B) {
    const unsigned key_tiles = (opaque(score.Sk) + BLOCK_N - 1) / BLOCK_N, heads = opaque(Hk) * B;
    unsigned width = 1;  // of a section
    if (Head::LAST) {
        const unsigned round = key_tiles > 4 ? BLOCKS : (BLOCKS + 1) / 2;
        const unsigned sections = min(max((heads * key_tiles + round / 2) / round, 1u), heads);
        width = (heads + sections - 1) / sections;
    }
    const unsigned first = number / (width * key_tiles) * width, own = min(width, max(heads, first + 1) - first);
    const unsigned place = number - first * key_tiles, head = first + place % own;
    WorkTileRange piece{static_cast<int>(place / own), static_cast<int>(head % Hk), head < heads ? static_cast<int>(head / Hk) : -1};
    if (piece.b < 0) return piece;
    const SeqlenInfo sequence(score, piece.b);
    const Head bound(sequence, 0);  // which keys are seen does not depend on the head
    const int n0 = piece.key_tile * BLOCK_N;
    const Range seen = bound.queries(n0, n0 + BLOCK_N);
    piece.begin = seen.begin / BLOCK_M * BLOCK_M, piece.end = seen.end;
    for (int consumer = 0; consumer < 2; ++consumer)
        piece.whole[consumer] = bound.fully_visible_queries<true>(n0 + 64 * consumer, n0 + 64 * consumer + 64);
    return piece;
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void bwd_wgmma_persistent(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    float* dQ_accum,                               // (B, H, query tiles, DQ_TILE), as the lanes hold them, behind SUMS_AT numbers; zeros
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
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are there before anybody uses them
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    const auto slot = [&](unsigned round) -> volatile WorkTileRange& { return reinterpret_cast<volatile WorkTileRange*>(smem + TILES_AT)[round % 2]; };
    const auto staged = [&](unsigned n) -> volatile StagedStore& {
        return reinterpret_cast<volatile StagedStore*>(smem + STAGING_SLOTS_AT)[n % STAGING_SLOTS];
    };
    const auto flags_of = [&](unsigned i, unsigned consumer) -> volatile int& {
        return reinterpret_cast<volatile int*>(smem + FLAGS_AT)[2 * stage_of(i) + consumer];
    };
    // Whether a consumer's gradients are not to be sent, since it writes others by itself.
    const auto non_finite_flags = [&](unsigned consumer) -> volatile int& { return reinterpret_cast<volatile int*>(smem + NON_FINITE_AT)[consumer]; };
    const auto await_piece = [&](unsigned round) { mbarrier_wait(base + FULL_TILE + 8 * (round % 2), round / 2 % 2); };
    const auto leave_piece = [&](unsigned round) { mbarrier_arrive(base + EMPTY_TILE + 8 * (opaque(round) % 2)); };
    // A piece's walk: head of the group and row of the first tile, or head = group; of the next one.
    const auto start = [&](unsigned round, int& head, int& m0) {
        const volatile WorkTileRange& piece = slot(round);
        m0 = piece.begin, head = m0 < piece.end ? 0 : group;
    };
    const auto next = [&](unsigned round, int& head, int& m0) {
        const volatile WorkTileRange& piece = slot(round);
        m0 += BLOCK_M;
        if (m0 >= piece.end) ++head, m0 = piece.begin;
    };

    if (warp < 4) {
        setmaxnreg_dec<24>();
        if (warp == 0 && elect()) {
            unsigned i = 0, staged_count = 0, seen = 0;  // tiles; shipments that are told; pieces that somebody sees
#pragma unroll 1
            for (unsigned round = 0;; ++round) {
                const auto tell = [&](unsigned n, int m0, int h) {
                    volatile StagedStore& told = staged(n);
                    told.m0 = m0;
                    told.n0 = slot(round).key_tile * BLOCK_N;
                    told.h = h;
                    told.b = slot(round).b;
                };
                // With the piece's last tile, or with the piece where nobody sees it: before an mbarrier says that this is there.
                const auto announce_dKV = [&](unsigned n) {
#pragma unroll 1
                    for (int what = StagedStore::dV; what >= StagedStore::dK; --what) tell(n++, what, slot(round).kv_head);
                };
                {  // Claimed late, so that long pieces find blocks that are done: the consumers are STAGES tiles behind.
                    const unsigned number = round ? grid_size_x() + atomicAdd(reinterpret_cast<unsigned*>(dQ_accum), 1u) : block_index_x();
                    const WorkTileRange piece = work_tile_at(number, score, Hk, B);
                    mbarrier_wait(base + EMPTY_TILE + 8 * (round % 2), round / 2 % 2 ^ 1);
                    volatile WorkTileRange& told = slot(round);
                    told.key_tile = piece.key_tile;
                    told.kv_head = piece.kv_head;
                    told.b = piece.b;
                    told.begin = piece.begin;
                    told.end = piece.end;
                    for (int consumer = 0; consumer < 2; ++consumer) {
                        told.whole[consumer].begin = piece.whole[consumer].begin;
                        told.whole[consumer].end = piece.whole[consumer].end;
                    }
                    if (piece.b < 0) staged(staged_count).m0 = StagedStore::LAST;
                    else if (piece.begin >= piece.end) announce_dKV(staged_count);
                    mbarrier_arrive(base + FULL_TILE + 8 * (round % 2));
                    if (piece.b < 0) break;
                }
                const volatile WorkTileRange& piece = slot(round);
                bool first = true;
                int head, m0;
                start(round, head, m0);
#pragma unroll 1
                while (head < group) {
                    // Queries, and keys with the first ones. A stride of 0 is a dimension of size 1 to a tensor map.
                    const auto request = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, const TensorMap& keys_map,
                                             const View<const dtype>& keys, unsigned keys_tile, unsigned full) {
                        TIMELINE(load);
                        const volatile StagedStore& told = staged(staged_count);
                        Queries::load(base + tile + stage_of(i) * Queries::BYTES, map, told.m0, tensor.stride_h ? told.h : 0,
                                         tensor.stride_b ? told.b : 0, base + full + 8 * stage_of(i), first ? Keys::BYTES : 0);
                        if (first)
                            Keys::load_part(base + keys_tile, keys_map, 0, told.n0, keys.stride_h ? piece.kv_head : 0, keys.stride_b ? told.b : 0,
                                      base + full + 8 * stage_of(i));
                    };
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + EMPTY_Q + 8 * stage_of(i), parity_of(i) ^ 1);
                    tell(staged_count, m0, piece.kv_head * group + head);
                    next(round, head, m0);
                    if (head == group) announce_dKV(staged_count + 1);
                    if (first) mbarrier_wait(base + EMPTY_K + seen % 2 * 8, seen / 2 % 2 ^ 1);
                    request(Q_tile_map, Q, Q_AT, K_map, K, seen % 2 * OTHER_K, FULL_Q);
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + EMPTY_dO + 8 * stage_of(i), parity_of(i) ^ 1);
                    if (first) mbarrier_wait(base + EMPTY_V, seen % 2 ^ 1);
                    request(dO_tile_map, dO, dO_AT, V_map, V, V_AT, FULL_dO);
                    seen += first;
                    first = false;
                    ++staged_count;
                    ++i;
                }
                staged_count += 2;  // dV and dK
            }
            TIMELINE(done);
        } else if (warp == 1) {
            unsigned i = 0;
#pragma unroll 1
            for (unsigned round = 0;; ++round) {
                await_piece(round);
                const volatile WorkTileRange& piece = slot(round);
                if (static_cast<int>(uniform(piece.b)) < 0) break;
                int head, m0;
                start(round, head, m0);
#pragma unroll 1
                while (head < group) {
                    TIMELINE(wait_empty);
                    const unsigned lane = thread_index_x() % 32;  // asked again: registers are few
                    const int row = m0 + lane, rows = score.Sq - row;  // from the lane's first on
                    const unsigned own = (piece.b * opaque(Hk) + piece.kv_head) * group + head;
                    const unsigned long long from = static_cast<unsigned long long>(own) * static_cast<unsigned>(score.Sq) + row;
                    const unsigned to = STATS_AT + 4 * (2 * stage_of(i) * BLOCK_M + lane);
                    mbarrier_wait(base + EMPTY_Q + 8 * stage_of(i), parity_of(i) ^ 1);
                    TIMELINE(load_stats);
                    // By cp.async, which takes no registers: of loads ptxas, which has few, puts each behind the store of the one before.
#pragma unroll
                    for (int t = 0; t < BLOCK_M; t += 32) {
                        cp_async_4(base + to + 4 * t, LSE + from + t, t < rows);
                        cp_async_4(base + to + 4 * (BLOCK_M + t), delta + from + t, t < rows);
                    }
                    cp_async_commit();
                    cp_async_wait<0>();
#pragma unroll
                    for (int t = 0; t < BLOCK_M; t += 32) {
                        float& x = reinterpret_cast<float*>(smem + to)[t];
                        const float lse = x;
                        x = t < rows && lse != -INF ? -lse * Head::LOG2E : -INF;  // sees no key: P is 0
                        if (Head::is_large(lse)) x = NOT_A_NUMBER;
                    }
                    const volatile Range& whole = piece.whole[lane % 2];  // of consumer `lane`
                    const int flags = (m0 < whole.begin) | (m0 + BLOCK_M > whole.end) ? IN_PART : 0;  // also rows from Sq on: 0 * inf is NaN
                    next(round, head, m0);
                    if (lane < 2) flags_of(i, lane) = flags | (head < group ? 0 : LAST_TILE);
                    __syncwarp();  // written before the arrival says so
                    if (lane == 0) mbarrier_arrive(base + FULL_Q + 8 * stage_of(i));
                    ++i;
                }
                __syncwarp();  // all lanes have read the piece
                if (thread_index_x() % 32 == 0) leave_piece(round);
            }
            TIMELINE(done);
        } else if (warp >= 2 && elect()) {
            const unsigned consumer = warp - 2;
            const SmemAddr from = base + STAGING_AT + consumer * STAGING_BYTES;
            int held = -1;  // the tile of dQ that comes with the next tile; with the block's first one none
            const auto await_ship = [&](unsigned n) {
                TIMELINE(wait_dQ);
                mbarrier_wait(base + FULL_STAGING + 8 * consumer, n % 2);
                TIMELINE(send_dQ);
            };
            const auto left = [&] {
                tma_store_commit();
                tma_store_wait_read();
                mbarrier_arrive(base + EMPTY_STAGING + 8 * consumer);
            };
            await_ship(0);  // nothing
            left();
#pragma unroll 1
            for (unsigned n = 0;; ++n) {
                await_ship(n + 1);
                const volatile StagedStore& told = staged(n);
                const int what = told.m0;
                if (what == StagedStore::dV || what == StagedStore::dK) {
                    if (!non_finite_flags(consumer))
                        tma_store(what == StagedStore::dV ? dV_map : dK_map, 0, told.n0 + 64 * consumer, told.h, told.b, from);
                } else {
                    if (held >= 0) tma_reduce_add(dQ_accum + SUMS_AT + static_cast<unsigned long long>(held) * DQ_TILE + consumer * DQ_SHARE, from,
                                             4 * DQ_SHARE);
                    if (what >= 0) held = (told.b * opaque(Hk) * group + told.h) * query_tiles<BLOCK_M>(score) + what / BLOCK_M;
                }
                left();
                if (what == StagedStore::LAST) break;
            }
            TIMELINE(done);
        }
        return;
    }

    setmaxnreg_inc<240>();
    const unsigned consumer = warp / 4 - 1, own_barrier = 2 + consumer, turn = 4 + consumer, next_turn = 5 - consumer;
    const int own_keys = 64 * consumer;  // first, of the piece's
    const float exponent = Head::unit_of(score) * Head::LOG2E;
    const SmemAddr stage_store = base + STAGING_AT + consumer * STAGING_BYTES;
    float dK_rmem[D_PAD / 2], dV_rmem[D_PAD / 2];
    unsigned P[BLOCK_M / 16][4], dS[BLOCK_M / 16][4];
    // Tiles, of all pieces; what has been shipped, the first of it nothing; whose keys, and those of the tile before: pieces that
    // somebody sees.
    unsigned i = 0, staged_count = 1, keys = ~0u, keys_before = ~0u;

    const auto await = [&](unsigned full, unsigned i) { mbarrier_wait(base + full + 8 * stage_of(i), parity_of(i)); };
    const auto release = [&](unsigned empty, unsigned i, bool held) {
        __syncwarp();  // all lanes have read LSE and delta
        if (lane == 0 && held) mbarrier_arrive(base + empty + 8 * stage_of(i));
    };
    const auto K_of = [&](unsigned keys) { return K_AT + keys % 2 * OTHER_K; };
    // S^T or dP^T: the consumer's keys times the queries. Of V and dO the columns beyond their width are zeros, as dV's are then.
    const auto multiply_rows = [&](float (&C)[BLOCK_M / 2], int columns, unsigned keys_at, unsigned queries_at) {
        const Descriptor A = Keys::k_major(base + keys_at + own_keys * 128), B = Queries::k_major(base + queries_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < (columns + 15) / 16; ++step)
            wgmma<Order::K_MAJOR>(C, A + Keys::k_step(step), B + Queries::k_step(step), step > 0);
        wgmma_commit();
    };
    // dV += P^T dO or dK += dS^T Q: all queries of the tile.
    const auto add_rows = [&](float (&C)[D_PAD / 2], const unsigned (&A)[BLOCK_M / 16][4], unsigned queries_at) {
        const Descriptor B = Queries::mn_major(base + queries_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_M / 16; ++step) wgmma<Order::MN_MAJOR>(C, A[step], B + Queries::mn_step(step), true);
        wgmma_commit();
    };
    // 64 rows of dQ = dS K.
    const auto multiply_dQ = [&](float (&dQ)[D_PAD / 2], unsigned dS_at) {
        const Descriptor A = Pairs::k_major(base + dS_at + consumer * 8192), B = Keys::mn_major(base + K_of(keys_before));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(dQ, A + Pairs::k_step(step), B + Keys::mn_step(step), step > 0);
        wgmma_commit();
    };

    // What leaves the registers goes by way of one place: when what went before has left it, and is then told.
    const auto await_ship = [&] { mbarrier_wait(base + EMPTY_STAGING + 8 * consumer, staged_count++ % 2 ^ 1); };
    const auto announce_staged = [&] {
        fence_proxy_async();
        __syncwarp();  // all lanes have written
        if (lane == 0) mbarrier_arrive(base + FULL_STAGING + 8 * consumer);
    };
    const auto stage_dQ = [&](const float (&dQ)[D_PAD / 2]) {
        await_ship();
        const SmemAddr to = stage_store + thread_index_x() % 128 * 16;
#pragma unroll
        for (int k = 0; k < D_PAD / 2; k += 4) store_floats(to + k * 512, dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]);
    };
    const auto stage_dKV = [&](const float (&sums)[D_PAD / 2], float factor) {
        await_ship();
#pragma unroll
        for (int k = 0; k < D_PAD / 2; k += 8) {
            unsigned pair[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) pair[e] = pack(sums[k + 2 * e] * factor, sums[k + 2 * e + 1] * factor);
            stmatrix_x4(stage_store + Gradients::chunk(warp % 4 * 16 + lane % 16, k / 4 + lane / 16), pair[0], pair[1], pair[2], pair[3]);
        }
    };
    // dS of the tile before, and what was shipped last, are told in the next tile, and after the last one.
    const auto publish = [&] {
        announce_staged();
        if (lane == 0) mbarrier_arrive(base + FULL_dS + 8 * (i % 2));
    };
    const auto await_dS = [&] { mbarrier_wait(base + FULL_dS + 8 * (i % 2), i / 2 % 2); };

    // Returns whether it was the piece's last tile.
    const auto step = [&] {
        const unsigned stage = stage_of(i), Q_at = Q_AT + stage * Queries::BYTES, dO_at = dO_AT + stage * Queries::BYTES;
        const unsigned dS_at = dS_AT + i % 2 * Pairs::BYTES, dS_before = dS_AT + (i % 2 ^ 1) * Pairs::BYTES;
        const float* const stats =  // of the lane's first queries
            reinterpret_cast<const float*>(smem + STATS_AT) + stage * 2 * BLOCK_M + thread_index_x() % 4 * 2;
        float S[BLOCK_M / 2], dP[BLOCK_M / 2], dQ[D_PAD / 2];
        TIMELINE(wait_Q);
        await(FULL_Q, i);
        TIMELINE(S);
        const unsigned told = flags_of(i, consumer);
        multiply_rows(S, HEAD_DIM, K_of(keys), Q_at);
        const unsigned flags = uniform(told);  // here: later, in a turn, it is too dear
        wgmma_wait<1>();                       // for dK of the tile before
        release(EMPTY_Q, i - 1, i > 0);
        TIMELINE(wait_dO);
        await(FULL_dO, i);
        TIMELINE(S);
        multiply_rows(dP, HEAD_DIM_V, V_AT, dO_at);
        publish();

        wgmma_wait<1>();  // for S^T
        warpgroup_fence_operand(S);
        TIMELINE(wait_barrier);
        named_barrier_sync(turn, 256);
        TIMELINE(softmax);
        if (flags & IN_PART) {
            const volatile StagedStore& own = staged(staged_count - 1);
            const Place place(own.m0, own.n0 + own_keys);
            const Head bound(score, own.b, 0);
            mask_fragment<BLOCK_M / 2>(bound, place, [&](int k) { S[k] = -INF; });
        }
#pragma unroll
        for (int k = 0; k < BLOCK_M / 2; k += 2) {
            const float2 shift = *reinterpret_cast<const float2*>(stats + k / 4 * 8);
            P[k / 8][k / 2 % 4] = pack(ex2(fmaf(S[k], exponent, shift.x)), ex2(fmaf(S[k + 1], exponent, shift.y)));
        }
        TIMELINE(dP);
        wgmma_wait<0>();  // for dP^T
        warpgroup_fence_operand(dP);
        if (lane == 0 && flags & LAST_TILE) mbarrier_arrive(base + EMPTY_V);
        TIMELINE(dS);
#pragma unroll
        for (int k = 0; k < BLOCK_M / 2; k += 2) {
            const float2 row_delta = *reinterpret_cast<const float2*>(stats + BLOCK_M + k / 4 * 8);
            const float2 p = unpack(P[k / 8][k / 2 % 4]);
            dS[k / 8][k / 2 % 4] = pack(p.x * (dP[k] - row_delta.x), p.y * (dP[k + 1] - row_delta.y));
        }
        await_dS();  // then nobody multiplies what this one replaces any more
        store_transposed<Pairs>(base + dS_at + consumer * Pairs::SLAB_BYTES, warp % 4 * 2, dS);
        named_barrier_arrive(next_turn, 256);
        multiply_dQ(dQ, dS_before);
        add_rows(dV_rmem, P, dO_at);
        add_rows(dK_rmem, dS, Q_at);

        TIMELINE(dQ);
        wgmma_wait<2>();  // for dQ
        warpgroup_fence_operand(dQ);
        if (lane == 0 && keys_before != keys) mbarrier_arrive(base + EMPTY_K + keys_before % 2 * 8);
        keys_before = keys;
        stage_dQ(dQ);
        wgmma_wait<1>();  // for dV
        release(EMPTY_dO, i, true);
        ++i;
        return (flags & LAST_TILE) != 0;
    };

    const unsigned zeros[BLOCK_M / 16][4] = {};  // dS of the tile before the first one
    store_transposed<Pairs>(base + dS_AT + Pairs::BYTES + consumer * Pairs::SLAB_BYTES, warp % 4 * 2, zeros);
    if (consumer == 1) named_barrier_arrive(next_turn, 256);  // consumer 0 begins
#pragma unroll 1
    for (unsigned round = 0;; ++round) {
        await_piece(round);
        if (static_cast<int>(uniform(slot(round).b)) < 0) break;
        const bool seen = static_cast<int>(uniform(slot(round).begin)) < static_cast<int>(uniform(slot(round).end));
#pragma unroll
        for (int k = 0; k < D_PAD / 2; ++k) dK_rmem[k] = dV_rmem[k] = 0.0f;
        keys += seen;
        if (i == 0) keys_before = keys;
        bool more = seen;
#pragma unroll 1
        while (more) more = !step();
        TIMELINE(store);
        wgmma_wait<0>();
        warpgroup_fence_operand(dK_rmem);
        warpgroup_fence_operand(dV_rmem);
        // A masked P is 0, but 0 * NaN brings a query's numbers to keys that it does not see; of a large LSE P is NaN. Both are rare.
        const bool non_finite = named_barrier_or(own_barrier, 128, !finite(dV_rmem) || !finite(dK_rmem));
        announce_staged();
        stage_dKV(dV_rmem, 1.0f);
        // Not before: until dV's place is free the dK of the piece before, which nobody's tile may have told yet, is not sent.
        if (threadIdx.x % 128 == 0) non_finite_flags(consumer) = non_finite;
        announce_staged();
        stage_dKV(dK_rmem, score.scale);  // told by the next tile, or after the last one
        if (non_finite)
            key_gradients_non_finite<64, 4>(Q, K, V, dO, LSE, delta, dK, dV, group, score, slot(round).b, slot(round).kv_head, Hk * group,
                                            slot(round).key_tile * BLOCK_N + own_keys, warp % 4);
        __syncwarp();  // all lanes have read the piece
        if (lane == 0) leave_piece(round);
    }
    float dQ[D_PAD / 2];  // of the last tile
    publish();
    await_dS();
    multiply_dQ(dQ, dS_AT + (i % 2 ^ 1) * Pairs::BYTES);
    wgmma_wait<0>();
    warpgroup_fence_operand(dQ);
    stage_dQ(dQ);
    announce_staged();
    TIMELINE(done);
}

// dQ = scale * dQ_accum: every warp puts into order what the consumers' warps of its index have added.
extern "C" __global__ __launch_bounds__(256, 2) void bwd_wgmma_persistent_postprocess(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    const float* dQ_accum,                         // as bwd_wgmma_persistent has left it
    const __grid_constant__ View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    int group,                                     // H / Hk
    const __grid_constant__ Score score) {
    const SeqlenInfo sequence(score, blockIdx.z);
    const int h = blockIdx.y, consumer = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int row0 = blockIdx.x * BLOCK_M + 64 * consumer + 16 * warp;
    const long long tile = (static_cast<long long>(blockIdx.z) * gridDim.y + h) * gridDim.x + blockIdx.x;
    const float* from = dQ_accum + SUMS_AT + tile * DQ_TILE + consumer * DQ_SHARE + warp * 128;
    if (write_dQ_fragments<16, D_PAD, 512>(dQ, sequence, h, row0, 0, lane, from, score.scale))
        query_gradients_non_finite<16, D_PAD>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, 0);
}
