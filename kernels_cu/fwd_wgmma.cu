// Rung 4: attention forward on Hopper's warpgroup MMA (wgmma), fed by tensor-map copies (TMA).
//
// A block stays on its SM and takes one piece of work after the other: BLOCK_M query rows of one head. One warpgroup
// produces: a warp of it requests K and V tiles, another Q. The others consume, 64 query rows each, and have its registers.
//
// clang-format off
//   producer      K0  K1 V0  K2 V1  K3 V2 ...  and on into the next piece     STAGES tiles of K and of V, each with two
//                                                                             mbarriers: full (TMA arrived), empty (used)
//   consumer 0    QK0 softmax0 | QK1 PV0   softmax1     | QK2 PV1   softmax2 ...      time ->
//   consumer 1                 |   softmax0     QK1 PV0 |   softmax1     QK2 PV1 ...
//                                   \_ PING_PONG: they take turns on the tensor cores; OVERLAP: softmax_j begins when
//                                      QK_j is there, while PV_(j-1) is still computed
//
//   shared memory: Q [BLOCK_M / 64] | K [STAGES] | V [STAGES] | O [BLOCK_M / 64], where there is room | mbarriers
// clang-format on
//
// S = Q K^T reads both operands from shared memory; P goes from the accumulators of S, packed, into O += P V as a register
// operand, and V is read as it lies (MN-major). Pieces are dealt out longest first for causal, back and forth over the
// blocks, heads in sections whose K and V stay in L2 (FlashAttention-3's scheme; Shah et al. 2024, arXiv:2407.08608).
// Scores, lazy maximum and NaN containment are those of fwd_mma.
#include "row_by_row.cuh"
#include "score.cuh"
#include "swizzle.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;
constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16;  // the columns from HEAD_DIM on are zeros
constexpr float LAZY = 8.0f;
constexpr int L2_BYTES = 24 << 20;  // of K and V that a section of heads may have
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 24, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 240;
static_assert(BLOCK_M % 64 == 0 && CONSUMERS <= 3, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "a tile of whole wgmma steps");
static_assert(HEAD_DIM % 8 == 0, "a tensor map's rows are multiples of 16 bytes");

using Queries = Swizzled<64, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;

// Shared memory, in bytes from its beginning.
constexpr unsigned K_AT = CONSUMERS * Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES, O_AT = V_AT + STAGES * Keys::BYTES;
constexpr bool O_APART = O_AT + CONSUMERS * Queries::BYTES + 1024 <= 232448;  // else O leaves through Q's place
constexpr unsigned BARRIERS_AT = O_AT + (O_APART ? CONSUMERS * Queries::BYTES : 0);
static_assert(SMEM_BYTES == BARRIERS_AT + 1024, "spec and kernel disagree on shared memory");

// The mbarriers, 8 bytes each: of each stage, and of each consumer's Q.
constexpr unsigned FULL_K = BARRIERS_AT, EMPTY_K = FULL_K + 8 * STAGES, FULL_V = EMPTY_K + 8 * STAGES,
                   EMPTY_V = FULL_V + 8 * STAGES, FULL_Q = EMPTY_V + 8 * STAGES, EMPTY_Q = FULL_Q + 8 * CONSUMERS;
static_assert(EMPTY_Q + 8 * CONSUMERS <= SMEM_BYTES, "the mbarriers have 1024 bytes");

__device__ __forceinline__ void init_barriers(SmemAddress base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(base + FULL_K + 8 * stage, 1);
        mbarrier_init(base + FULL_V + 8 * stage, 1);
        mbarrier_init(base + EMPTY_K + 8 * stage, 4 * CONSUMERS);  // a lane of each consumer warp
        mbarrier_init(base + EMPTY_V + 8 * stage, 4 * CONSUMERS);
    }
    for (unsigned consumer = 0; consumer < CONSUMERS; ++consumer) {
        mbarrier_init(base + FULL_Q + 8 * consumer, 1);
        mbarrier_init(base + EMPTY_Q + 8 * consumer, 1);
    }
    fence_proxy_async();
}

// The stage and the parity of the i-th tile that goes through a ring of STAGES.
__device__ __forceinline__ unsigned stage_of(unsigned i) { return i % STAGES; }
__device__ __forceinline__ unsigned parity_of(unsigned i) { return i / STAGES % 2; }

struct Piece {  // of work: query rows m0 .. m0 + BLOCK_M of head h, batch entry b, and the key tiles they see
    int m0, h, b, tiles;

    __device__ __forceinline__ Piece(unsigned index, unsigned H, unsigned heads, unsigned group, const Score& score) {
        const unsigned blocks = (score.Sq + BLOCK_M - 1u) / BLOCK_M;
        unsigned head = index / blocks, block = index % blocks;
        if (CAUSAL) {
            const unsigned section = max(L2_BYTES / (4 * HEAD_DIM) / max(score.Sk, 1), 1) * group;  // heads
            const unsigned first = head / section * section, size = min(section, heads - first);
            const unsigned within = index - first * blocks;
            head = first + within % size;
            block = blocks - 1 - within / size;
        }
        m0 = block * BLOCK_M;
        h = head % H;
        b = head / H;
        tiles = (max(score.key_end(m0 + BLOCK_M), 0) + BLOCK_N - 1) / BLOCK_N;
    }
};

// Calls f with each of the block's pieces. Every second round goes backwards, so that no block always has the longest.
template <class F>
__device__ __forceinline__ void for_each_piece(unsigned H, unsigned heads, unsigned group, const Score& score, F f) {
    const unsigned total = (score.Sq + BLOCK_M - 1u) / BLOCK_M * heads;
#pragma unroll 1
    for (unsigned first = 0, place = blockIdx.x; first < total; first += gridDim.x, place = gridDim.x - 1 - place)
        if (first + place < total) f(Piece(first + place, H, heads, group, score));
}

// What a consumer's thread keeps of its two query rows, g and g + 8 of its warp's 16.
struct Rows {
    float O[D_PAD / 2] = {};
    float m[2] = {-INF, -INF}, l[2] = {};  // m: a dot product; l: this lane's part of the sum

    // S becomes exp2 of what exceeds m, and l their sum; returns whether m moved, and then alpha.
    __device__ __forceinline__ bool softmax(float (&S)[BLOCK_N / 2], float exponent, float margin, float (&alpha)[2]) {
        float top[2][2] = {{-INF, -INF}, {-INF, -INF}};  // two of each row: shorter chains
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) top[i / 2 % 2][i % 2] = fmaxf(top[i / 2 % 2][i % 2], S[i]);
        bool exceeds = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half][0] = fmaxf(top[half][0], top[half][1]);
            exceeds |= top[half][0] > m[half] + margin;
        }
        const bool moved = __any_sync(0xffffffffu, exceeds);
        if (moved) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float m_new = fmaxf(m[half], row_max<4>(top[half][0]));
                alpha[half] = m[half] == m_new ? 1.0f : ex2((m[half] - m_new) * exponent);  // equal infinities: not NaN
                m[half] = m_new;
                l[half] *= alpha[half];
            }
        }
        float sum[2][2] = {};
        const float shift[2] = {m[0] == -INF ? 0.0f : -m[0] * exponent, m[1] == -INF ? 0.0f : -m[1] * exponent};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            S[i] = ex2(fmaf(S[i], exponent, shift[i / 2 % 2]));  // a row that saw no key yet: P = 0, not NaN
            sum[i / 2 % 2][i % 2] += S[i];
        }
        l[0] += sum[0][0] + sum[0][1];
        l[1] += sum[1][0] + sum[1][1];
        return moved;
    }
    __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
#pragma unroll
        for (int i = 0; i < D_PAD / 2; ++i) O[i] *= alpha[i / 2 % 2];
    }
    __device__ __forceinline__ bool finite() const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < D_PAD / 2; ++i) zero = fmaf(O[i], 0.0f, zero);
        return zero == 0.0f;
    }
};

__device__ __forceinline__ void pack_probabilities(unsigned (&P)[BLOCK_N / 16][4], const float (&S)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) P[i / 4][i % 4] = pack(S[2 * i], S[2 * i + 1]);
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void fwd_wgmma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,      // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_map,      // boxes of 64 rows
    int H,
    int heads,                                    // B * H
    int group,                                    // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddress base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are there before anybody uses them
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (warp < 4) {
        registers_give_back<PRODUCER_REGISTERS>();
        if (warp == 0 && elect()) {
            unsigned used = 0;  // tiles of earlier pieces
            for_each_piece(H, heads, group, score, [&](const Piece& piece) {
                const int h = piece.h / group;
                // A stride of 0 is a dimension of size 1 to a tensor map.
                const auto request = [&](const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty, unsigned full, int j) {
                    const unsigned i = used + j, stage = stage_of(i);
                    mbarrier_wait(base + empty + 8 * stage, parity_of(i) ^ 1);
                    Keys::request(base + tile + stage * Keys::BYTES, map, j * BLOCK_N, tensor.stride_h ? h : 0,
                                  tensor.stride_b ? piece.b : 0, base + full + 8 * stage);
                };
#pragma unroll 1
                for (int j = 0; j <= piece.tiles; ++j) {  // in the order in which they are used
                    if (j < piece.tiles) request(K_map, K, K_AT, EMPTY_K, FULL_K, j);
                    if (j > 0) request(V_map, V, V_AT, EMPTY_V, FULL_V, j - 1);
                }
                used += piece.tiles;
            });
        } else if (warp == 1 && elect()) {
            unsigned pieces = 0;
            for_each_piece(H, heads, group, score, [&](const Piece& piece) {
                const int h = Q.stride_h ? piece.h : 0, b = Q.stride_b ? piece.b : 0;
#pragma unroll 1
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    mbarrier_wait(base + EMPTY_Q + 8 * consumer, pieces % 2 ^ 1);
                    Queries::request(base + consumer * Queries::BYTES, Q_map, piece.m0 + 64 * consumer, h, b, base + FULL_Q + 8 * consumer);
                }
                ++pieces;
            });
        }
        return;
    }

    registers_take<CONSUMER_REGISTERS>();
    const unsigned consumer = warp / 4 - 1, own_barrier = 1 + consumer;  // of the consumer's own 128 threads
    const unsigned turn = 4 + consumer, next_turn = 4 + (consumer + 1) % CONSUMERS;
    const bool sender = threadIdx.x % 128 == 0;
    const Descriptor Q_smem = Queries::k_major(base + consumer * Queries::BYTES);
    const SmemAddress O_smem = base + (O_APART ? O_AT : 0) + consumer * Queries::BYTES;
    const float exponent = score.scale * 1.4426950408889634f, margin = LAZY / exponent;  // log2(e): e^x = 2^(x log2(e))
    const int g = lane / 4, q = lane % 4;
    unsigned used = 0, pieces = 0;
    if (PING_PONG == 2 && consumer == CONSUMERS - 1) named_barrier_arrive(next_turn, 256);  // consumer 0 begins

    for_each_piece(H, heads, group, score, [&](const Piece& piece) {
        const int first_row = piece.m0 + 64 * consumer + warp % 4 * 16;             // of the warp
        const int whole = max(score.key_all(first_row), 0) / BLOCK_N;               // tiles that its rows see whole
        Rows rows;
        float S[BLOCK_N / 2], alpha[2];
        unsigned P[BLOCK_N / 16][4];
        const auto multiply_QK = [&](int j) {
            const unsigned i = used + j, stage = stage_of(i);
            const Descriptor K_smem = Keys::k_major(base + K_AT + stage * Keys::BYTES);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < D_PAD / 16; ++step)
                wgmma<Order::K_MAJOR>(S, Q_smem + Queries::k_step(step), K_smem + Keys::k_step(step), step > 0);
            wgmma_commit();
        };
        const auto multiply_PV = [&](int j) {
            const unsigned i = used + j, stage = stage_of(i);
            const Descriptor V_smem = Keys::mn_major(base + V_AT + stage * Keys::BYTES);
            mbarrier_wait(base + FULL_V + 8 * stage, parity_of(i));
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < BLOCK_N / 16; ++step)
                wgmma<Order::MN_MAJOR>(rows.O, P[step], V_smem + Keys::mn_step(step), true);
            wgmma_commit();
        };
        const auto hide = [&](int j) {  // what the rows do not see of tile j
            if (j < whole) return;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i)
                if (!score.sees(first_row + i / 2 % 2 * 8 + g, j * BLOCK_N + i / 4 * 8 + 2 * q + i % 2)) S[i] = -INF;
        };
        const auto await_K = [&](int j) { mbarrier_wait(base + FULL_K + 8 * stage_of(used + j), parity_of(used + j)); };
        const auto release_K = [&](int j) { if (lane == 0) mbarrier_arrive(base + EMPTY_K + 8 * stage_of(used + j)); };
        const auto release_V = [&](int j) { if (lane == 0) mbarrier_arrive(base + EMPTY_V + 8 * stage_of(used + j)); };

        mbarrier_wait(base + FULL_Q + 8 * consumer, pieces % 2);
        if (piece.tiles > 0) {
            await_K(0);
            multiply_QK(0);
            wgmma_wait<0>();
            wgmma_settled(S);
            release_K(0);
            hide(0);
            rows.softmax(S, exponent, margin, alpha);
            pack_probabilities(P, S);
            if (piece.tiles > 1) await_K(1);
#pragma unroll 1
            for (int j = 1; j < piece.tiles; ++j) {
                if (PING_PONG == 2) named_barrier_sync(turn, 256);
                multiply_QK(j);
                multiply_PV(j - 1);
                if (PING_PONG == 2) named_barrier_arrive(next_turn, 256);
                if (OVERLAP == 2) {
                    wgmma_wait<1>();
                } else {
                    wgmma_wait<0>();
                    wgmma_settled(rows.O);
                    release_V(j - 1);
                }
                wgmma_settled(S);
                release_K(j);
                hide(j);
                const bool moved = rows.softmax(S, exponent, margin, alpha);
                if (j + 1 < piece.tiles) await_K(j + 1);
                if (OVERLAP == 2) {
                    wgmma_wait<0>();
                    wgmma_settled(rows.O);
                    release_V(j - 1);
                }
                if (moved) rows.rescale(alpha);
                pack_probabilities(P, S);
            }
            multiply_PV(piece.tiles - 1);
            wgmma_wait<0>();
            wgmma_settled(rows.O);
            release_V(piece.tiles - 1);
        }
        used += piece.tiles;
        ++pieces;

        // A masked key's P is 0, but 0 * NaN brings its value to rows that do not see it. Seldom, and then worth the time.
        if (O_APART && sender) send_wait_read();  // the last piece's O
        const bool spoilt = named_barrier_or(own_barrier, 128, CAUSAL && !rows.finite());  // all four warps have used Q
        if (O_APART && sender) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
        if (CAUSAL && spoilt) {
            attend_row_by_row<64, 4>(Q, K, V, O, LSE, group, score, piece.b, piece.h, H, piece.m0 + 64 * consumer, warp % 4);
            if (!O_APART && sender) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
            return;
        }
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = row_sum<4>(rows.l[half]);
            inverse[half] = l == 0.0f ? 0.0f : 1.0f / l;  // a row that sees no key
            const int query_row = first_row + 8 * half + g;
            if (q == 0 && query_row < score.Sq)
                LSE[(static_cast<long long>(piece.b) * H + piece.h) * score.Sq + query_row] =
                    rows.m[half] * score.scale + logf(l);
        }
#pragma unroll
        for (int i = 0; i < D_PAD / 2; i += 8) {
            unsigned pair[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                pair[k] = pack(rows.O[i + 2 * k] * inverse[k % 2], rows.O[i + 2 * k + 1] * inverse[k % 2]);
            stmatrix_x4(O_smem + Queries::chunk(warp % 4 * 16 + lane % 16, i / 4 + lane / 16), pair[0], pair[1], pair[2], pair[3]);
        }
        fence_proxy_async();
        named_barrier_sync(own_barrier, 128);  // the 64 rows of O are whole before they are sent
        if (sender) {
            Queries::send(O_map, piece.m0 + 64 * consumer, piece.h, piece.b, O_smem);
            if (!O_APART) {
                send_wait_read();
                mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
            }
        }
    });
    if (sender) send_wait_read();  // shared memory lives as long as the block
}
