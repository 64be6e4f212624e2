// Rung 4: decoding on Hopper's warpgroup MMA (wgmma), fed by TMA: few queries of many keys, and so many heads that nobody need share a head's keys.
//
// The query heads that share a key/value head are rows of one tile ("packed"), as in fwd_decode. Keys, then columns of V, are the 64 rows
// of wgmma, and packed rows its N: few of them waste nothing. A block stays on its SM and takes one piece of work after the other, the keys
// of one head; two blocks share an SM. What a grid loses where one block has a piece more than another is 2% (H200, 512 heads of 8192 keys, also
// for a kernel that only reads): as many blocks as there is room for, each with as many pieces as any other.
//
// clang-format off
//   a warp of its own requests   K0 V0 K1 V1 ... and on into the next piece       STAGES tiles of K and of V, each with two mbarriers:
//                                                                                 full (TMA arrived), empty (used)
//   a warpgroup                  P^T -> shared memory | S^T = K Q^T of the next tile | O^T += V^T P^T     of 64 keys, tile after tile
//
//   shared memory: Q | P [2], where O leaves | K [STAGES] | V [STAGES] | numbers of each row, of each warp and of all | mbarriers
// clang-format on
//
// S^T of the next tile is asked for before O^T of this one, so that P of the next is computed while O^T grows: 0.64 us a tile for 0.74, which
// counts where a block is behind all others, in the last 10 us of a launch above all (512 heads of 8192 keys: 0.3%, and 0.3% for three stages).
//
// fwd_decode's warps walk keys of their own and merge what each has summed up, 4 us at the end of a head in which its multiprocessor asks for
// nothing. Here there is nothing to merge, and the next head's keys are under way meanwhile.
//
// As in fwd_wgmma no maximum is taken on the way: a tile is exponentiated under the maximum m of the first one, and where P comes out too large
// m is raised and the tile's scores are computed again, for which K is still there. All four warps raise it together, since each has columns of
// O of all rows: the barrier that says that P is there carries the vote. What was tried, with numbers: experiments/020_decode.
#define FALLBACK_INLINE __forceinline__
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "swizzle.cuh"
#include "bwd_fragment.cuh"

constexpr unsigned CONSUMERS = 128, THREADS = CONSUMERS + 32;  // threads
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // the columns beyond are zeros
constexpr int N = BLOCK_M / 2;         // a thread's accumulators of S^T, and of 64 columns of O^T
constexpr int OWN_ROWS = BLOCK_M / 4;  // packed rows that these are of
using Queries = Swizzled<BLOCK_M, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Values = Swizzled<BLOCK_N, DV_PAD>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // P; and 64 columns of O
constexpr bool AHEAD = BLOCK_M <= 32;      // S^T of the next tile before O^T of this one: 64 rows spill, and hold on to V for too long
constexpr float P_SUM_LIMIT = 16384.0f;           // of P: fp16 holds it
constexpr float SCORE_LIMIT = 3e38f;
constexpr unsigned ALL_CONSUMERS = 1, BARRIERS_THERE = 2;  // named barriers
static_assert(BLOCK_M % 16 == 0 && BLOCK_N == 64, "64 keys are the rows of S^T");
static_assert(Values::SLABS <= 2, "O finds room where P was");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "a tensor map's rows are multiples of 16 bytes");

// Shared memory, in bytes from its beginning.
constexpr unsigned P_AT = Queries::BYTES, K_AT = P_AT + 2 * Pairs::BYTES, V_AT = K_AT + STAGES * Keys::BYTES,
                   NUMBERS_AT = V_AT + STAGES * Values::BYTES, BARRIERS_AT = NUMBERS_AT + 5 * 4 * BLOCK_M;
constexpr unsigned FULL_K = BARRIERS_AT, EMPTY_K = FULL_K + 8 * STAGES, FULL_V = EMPTY_K + 8 * STAGES, EMPTY_V = FULL_V + 8 * STAGES;
static_assert(SMEM_BYTES == BARRIERS_AT + 32 * STAGES, "spec and kernel disagree on shared memory");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(base + FULL_K + 8 * stage, 1);
        mbarrier_init(base + FULL_V + 8 * stage, 1);
        mbarrier_init(base + EMPTY_K + 8 * stage, 4);  // a lane of each warp
        mbarrier_init(base + EMPTY_V + 8 * stage, 4);
    }
    fence_proxy_async();
}

// Which of the thread's rows element k of S^T, or of O^T, is of; and which row of the tile the r-th of them is, of lanes 4 g + q.
__device__ constexpr int own_row(int k) { return k / 4 * 2 + k % 2; }
__device__ __forceinline__ int row_of(int r, int q) { return r / 2 * 8 + r % 2 + 2 * q; }

template <bool DIFFERENCES>
struct Differences {
    static constexpr bool YES = DIFFERENCES;
};

// A piece of work: packed rows row0 .. rows_end of key/value head h, and the key tiles that some of them sees.
struct WorkTileRange {
    int row0, rows_end, h, b, begin, tiles;
    int group, first_query, first_head;  // of the tile's first row: its query, and its head within the group
    __device__ __forceinline__ WorkTileRange(int number, int row_tiles, int Hk, int group, const Score& score) : group(group) {
        row0 = number % row_tiles * BLOCK_M, h = number / row_tiles % Hk, b = number / row_tiles / Hk;
        first_query = row0 / group, first_head = row0 % group;
        const Head any(score, b, h * group);
        rows_end = min(row0 + BLOCK_M, any.Sq * group);
        const Range keys = any.keys(first_query, end_of_queries());
        begin = keys.begin / BLOCK_N;
        tiles = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
    }
    __device__ __forceinline__ int number(int row_tiles, int Hk) const { return (b * Hk + h) * row_tiles + row0 / BLOCK_M; }
    __device__ __forceinline__ int end_of_queries() const { return query(rows_end - 1 - row0) + 1; }
    // The first key of the j-th tile: backwards, so that those that not all rows see come first.
    __device__ __forceinline__ int first_key(int j) const { return (begin + tiles - 1 - j) * BLOCK_N; }
    // Of row `row` of the tile: its query, and its head. A whole division is 30 instructions; so few rows are divided right in fp32.
    __device__ __forceinline__ int query(int row) const { return first_query + queries_on(row); }
    __device__ __forceinline__ int head(int row) const { return h * group + first_head + row - queries_on(row) * group; }
    __device__ __forceinline__ bool has(int row) const { return row0 + row < rows_end; }

  private:
    __device__ __forceinline__ int queries_on(int row) const {
        return static_cast<int>((first_head + row + 0.5f) * reciprocal(static_cast<float>(group)));
    }
};

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void fwd_decode_wgmma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    int B,
    int H,
    int Hk,
    int group,                                    // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int row_tiles = (score.Sq * group + BLOCK_M - 1) / BLOCK_M, pieces = row_tiles * Hk * B;
    unsigned used = 0;  // tiles that went through the ring

    if (warp == CONSUMERS / 32) {
        const bool asks = elect();  // at once: the mbarriers are its own doing, and it waits for nobody
        if (asks) init_barriers(base);
        __syncwarp();  // they are there before this warp says so
        named_barrier_arrive(BARRIERS_THERE, THREADS);
        if (!asks) return;
#pragma unroll 1
        for (int number = blockIdx.x; number < pieces; number += gridDim.x) {
            const WorkTileRange piece(number, row_tiles, Hk, group, score);
            // A stride of 0 is a dimension of size 1 to a tensor map.
            const auto request = [&](auto tiles, const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty,
                                     unsigned full, int j) {
                const unsigned stage = stage_of(used);
                mbarrier_wait(base + empty + 8 * stage, parity_of(used) ^ 1);
                tiles.load(base + tile + stage * tiles.BYTES, map, piece.first_key(j), tensor.stride_h ? piece.h : 0,
                              tensor.stride_b ? piece.b : 0, base + full + 8 * stage);
            };
#pragma unroll 1
            for (int j = 0; j < piece.tiles; ++j, ++used) {
                request(Keys(), K_map, K, K_AT, EMPTY_K, FULL_K, j);
                request(Values(), V_map, V, V_AT, EMPTY_V, FULL_V, j);
            }
        }
        return;
    }

    const float exponent = Head::unit_of(score) * Head::LOG2E;
    const int g = lane / 4, q = lane % 4;
    float* const numbers = reinterpret_cast<float*>(smem + NUMBERS_AT);  // [4][BLOCK_M]
    float* const maxima = numbers + 4 * BLOCK_M;                        // [BLOCK_M]
    const auto barrier = [] { named_barrier_sync(ALL_CONSUMERS, CONSUMERS); };
    // Q of a piece, 16 bytes of a row at a time; rows and columns that there are not become zeros.
    const auto request_Q = [&](const WorkTileRange& piece) {
        const SeqlenInfo sequence(score, piece.b);
#pragma unroll 1
        for (int i = threadIdx.x; i < BLOCK_M * Queries::SLABS * 8; i += CONSUMERS) {
            const int row = i / (Queries::SLABS * 8), chunk = i % (Queries::SLABS * 8);
            const bool there = piece.has(row) && chunk * 8 < HEAD_DIM;
            const int own = there ? row : 0;
            cp_async_16(base + Queries::chunk(row, chunk), sequence.query(Q, piece.head(own), piece.query(own)) + (there ? 8 * chunk : 0),
                        there);
        }
        cp_async_commit();
    };

    WorkTileRange piece(blockIdx.x, row_tiles, Hk, group, score);
    request_Q(piece);
    named_barrier_sync(BARRIERS_THERE, THREADS);  // before anybody uses the mbarriers
#pragma unroll 1
    for (;;) {
        const Head any(score, piece.b, piece.h * group);  // of the piece's heads, which see the same
        const Range whole = any.fully_visible_keys(piece.first_query, piece.end_of_queries());
        float m[OWN_ROWS], l[OWN_ROWS];  // m: a raw score, the same in all lanes that have the row; l: this thread's part of the sum
        float S[N], O_own[Values::SLABS][N];
#pragma unroll
        for (int r = 0; r < OWN_ROWS; ++r) m[r] = -INF, l[r] = 0.0f;
        bool large = false;  // whether some m is: then m is raised at each tile, and P is of S - m. The same in all warps
#pragma unroll
        for (int i = 0; i < Values::SLABS * N; ++i) O_own[i / N][i % N] = 0.0f;
        const auto tell = [&](float* to, const float (&own)[OWN_ROWS]) {
#pragma unroll
            for (int r = 0; r < OWN_ROWS; ++r) to[row_of(r, q)] = own[r];
        };
        const auto multiply_O = [&](int r, float factor) {  // of the thread's r-th row
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab)
                for (int half = 0; half < 2; ++half) O_own[slab][r / 2 * 4 + r % 2 + 2 * half] *= factor;
        };
        // Moves m up to the maxima of S, and rescales what was accumulated under the old one.
        const auto rescale = [&] {
            float tops[OWN_ROWS];
#pragma unroll
            for (int r = 0; r < OWN_ROWS; ++r) tops[r] = fmaxf(S[r / 2 * 4 + r % 2], S[r / 2 * 4 + r % 2 + 2]);
#pragma unroll 1
            for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
                for (int r = 0; r < OWN_ROWS; ++r) tops[r] = fmaxf(tops[r], __shfl_xor_sync(0xffffffffu, tops[r], lanes));
            if (g == 0) tell(numbers + warp * BLOCK_M, tops);
            barrier();
#pragma unroll
            for (int r = 0; r < OWN_ROWS; ++r) {
                float top = m[r];
                for (int w = 0; w < 4; ++w) top = fmaxf(top, numbers[w * BLOCK_M + row_of(r, q)]);
                const float alpha = m[r] == top ? 1.0f : ex2((m[r] - top) * exponent);  // equal infinities: not NaN
                m[r] = top, l[r] *= alpha, multiply_O(r, alpha);
            }
            large = false;
#pragma unroll
            for (int r = 0; r < OWN_ROWS; ++r) large |= Head::is_large(m[r], exponent);
            large = __any_sync(0xffffffffu, large);
        };

        const auto finish_scores = [&](int key) {  // raw scores of dot products, -INF where a row does not see
            const int column = opaque(q);            // so that nothing of it is kept over the loop
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const int row = row_of(own_row(k), column);
                const Head head(any, piece.head(row));
                const ScoreIndex at(piece.query(row), key, 0, k / 2 % 2 * 8);
                S[k] = head.visible(at.query_row(), at.key_col()) ? head.raw(S[k], at) : -INF;
            }
        };
        const auto kept = [&](int k, float x, int key) {  // what dropout leaves of an element of P
            if (!DROPOUT) return x;
            const int row = row_of(own_row(k), opaque(q));
            return Head(any, piece.head(row)).keep(piece.query(row), key + k / 2 % 2 * 8) ? x : 0.0f;
        };

        // Of the i-th tile that goes through the ring: S^T, begun; O^T, begun to grow; and a stage, free again.
        const auto multiply_K = [&](unsigned i) {
            mbarrier_wait(base + FULL_K + 8 * stage_of(i), parity_of(i));
            const Descriptor K_smem = Keys::k_major(base + K_AT + stage_of(i) * Keys::BYTES), Q_smem = Queries::k_major(base);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < D_PAD / 16; ++step)
                wgmma<Order::K_MAJOR>(S, K_smem + Keys::k_step(step), Q_smem + Queries::k_step(step), step > 0);
            wgmma_commit();
        };
        const auto multiply_V = [&](unsigned i) {
            mbarrier_wait(base + FULL_V + 8 * stage_of(i), parity_of(i));
            const Descriptor P_smem = Pairs::k_major(base + P_AT + i % 2 * Pairs::BYTES);
            wgmma_fence();
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab) {
                const Descriptor V_smem = Values::mn_major(base + V_AT + stage_of(i) * Values::BYTES + slab * Values::SLAB_BYTES);
#pragma unroll
                for (int step = 0; step < BLOCK_N / 16; ++step)
                    wgmma<Order::K_MAJOR, Order::MN_MAJOR>(O_own[slab], V_smem + Values::mn_step(step), P_smem + Pairs::k_step(step), true);
            }
            wgmma_commit();
        };
        const auto release = [&](unsigned empty, unsigned i) {
            if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(i));
        };
        const auto multiplied_K = [&] {
            wgmma_wait<0>();
            warpgroup_fence_operand(S);
        };
        const auto multiplied_V = [&] {
            wgmma_wait<0>();
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab) warpgroup_fence_operand(O_own[slab]);
        };

        cp_async_wait<0>();
        fence_proxy_async();
        barrier();  // Q is there; nobody reads the last piece's O any more
        if (AHEAD && piece.tiles > 0) {
            multiply_K(uniform(used));
            multiplied_K();
        }
#pragma unroll 1
        for (int j = 0; j < piece.tiles; ++j, ++used) {
            const unsigned now = uniform(used);
            const int n0 = piece.first_key(j), key = n0 + static_cast<int>(warp) * 16 + g;
            const auto exponentiate = [&](auto of_differences) {  // to shared memory; whether some P is too large
                float most = 0.0f;
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    // Of a row that saw no key yet FAR: then P is 0 where S = -INF, and too much everywhere else.
                    const float top = m[own_row(k)];
                    if constexpr (of_differences.YES) S[k] = ex2((S[k] - (top == -INF ? 0.0f : top)) * exponent);
                    else S[k] = ex2(fmaf(S[k], exponent, fminf(-top * exponent, SCORE_LIMIT)));
                    most = fmaxf(most, S[k]);
                }
                unsigned pairs[BLOCK_M / 16][4];
#pragma unroll
                for (int k = 0; k < N; k += 2) pairs[k / 8][k / 2 % 4] = pack(kept(k, S[k], key), kept(k + 1, S[k + 1], key));
                store_transposed<Pairs>(base + P_AT + now % 2 * Pairs::BYTES, warp * 2, pairs);
                fence_proxy_async();
                return most > P_SUM_LIMIT;
            };
            if (!AHEAD) {
                multiply_K(now);
                multiplied_K();
            }
            const bool edge = !Head::LINEAR || (Head::FIRST && n0 < whole.begin) || n0 + BLOCK_N > whole.end;
            if (edge) finish_scores(key);
            const bool exceeds = exponentiate(Differences<false>()) || large;
            if (AHEAD) {
                multiplied_V();  // of the tile before
                if (j > 0) release(EMPTY_V, now - 1);
            }
            if (named_barrier_or(ALL_CONSUMERS, CONSUMERS, exceeds)) {
                multiply_K(now);
                multiplied_K();
                if (edge) finish_scores(key);
                rescale();
                exponentiate(Differences<true>());  // now P is 1 at most
                barrier();
            }
            release(EMPTY_K, now);
#pragma unroll
            for (int k = 0; k < N; ++k) l[own_row(k)] += S[k];
            if (AHEAD && j + 1 < piece.tiles) multiply_K(now + 1);
            multiply_V(now);
            if (AHEAD) {
                wgmma_wait<1>();  // for S alone
                warpgroup_fence_operand(S);
            } else {
                multiplied_V();
                release(EMPTY_V, now);
            }
        }
        if (AHEAD) {
            multiplied_V();
            if (piece.tiles > 0) release(EMPTY_V, used - 1);
        }

        const int number = piece.number(row_tiles, Hk) + gridDim.x;
        const bool more = number < pieces;
        WorkTileRange next = piece;
        if (more) {
            next = WorkTileRange(number, row_tiles, Hk, group, score);
            request_Q(next);  // every warp has read this one's: it said so with the last P
        }
        bool non_finite = false;
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab) non_finite |= !finite(O_own[slab]);
#pragma unroll 1
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int r = 0; r < OWN_ROWS; ++r) l[r] += __shfl_xor_sync(0xffffffffu, l[r], lanes);
        if (g == 0) tell(numbers + warp * BLOCK_M, l);
        if (warp == 0 && g == 1) tell(maxima, m);  // for LSE
        // The sums are there, and nobody multiplies P any more. A masked key's P is 0, but 0 * NaN brings its value to rows that do not see
        // it. Seldom, and then worth the time.
        if (named_barrier_or(ALL_CONSUMERS, CONSUMERS, Head::HIDES && non_finite)) {
#pragma unroll 1
            for (int row = warp; piece.has(row); row += CONSUMERS / 32)
                attend_non_finite<1, 1>(Q, K, V, O, LSE, group, score, piece.b, piece.head(row), H, piece.query(row), 0);
        } else {
            const auto total = [&](const Head& head, int row, float m) {
                float sum = 0.0f;
                for (int w = 0; w < 4; ++w) sum += numbers[w * BLOCK_M + row];
                return head.finalize<!NATURAL, APPROXIMATE>(m, sum);
            };
            const auto head_of = [&](int row) { return Head(any, piece.has(row) ? piece.head(row) : piece.h * group); };
#pragma unroll
            for (int r = 0; r < OWN_ROWS; ++r) multiply_O(r, total(SINK ? head_of(row_of(r, q)) : any, row_of(r, q), m[r]).inverse);
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab) {
                unsigned pairs[BLOCK_M / 16][4];
#pragma unroll
                for (int k = 0; k < N; k += 2) pairs[k / 8][k / 2 % 4] = pack(O_own[slab][k], O_own[slab][k + 1]);
                store_transposed<Pairs>(base + P_AT + slab * Pairs::BYTES, warp * 2, pairs);
            }
            barrier();
#pragma unroll
            for (int first = 0; first < BLOCK_M * Values::SLABS * 8; first += CONSUMERS) {
                const int i = first + threadIdx.x, row = i / (Values::SLABS * 8), chunk = i % (Values::SLABS * 8);
                if (!piece.has(row) || chunk * 8 >= HEAD_DIM_V) continue;
                const char* const from = smem + P_AT + chunk / 8 * Pairs::BYTES + Pairs::chunk(row, chunk % 8);
                *reinterpret_cast<uint4*>(any.query(O, piece.head(row), piece.query(row)) + 8 * chunk) = *reinterpret_cast<const uint4*>(from);
            }
            if (const int row = threadIdx.x; row < BLOCK_M && piece.has(row)) {  // a thread a row
                const Head head = head_of(row);
                LSE[head.lse_offset(H, piece.head(row)) + piece.query(row)] = total(head, row, maxima[row]).lse;
            }
        }
        if (!more) return;
        piece = next;
    }
}
