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
constexpr int ROWS_PER_THREAD = BLOCK_M / 4;  // packed rows that these are of
using Queries = Swizzled<BLOCK_M, D_PAD>;
using Keys = Swizzled<BLOCK_N, D_PAD>;
using Values = Swizzled<BLOCK_N, DV_PAD>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // P; and 64 columns of O
constexpr bool OVERLAP_QK = BLOCK_M <= 32;      // S^T of the next tile before O^T of this one: 64 rows spill, and hold on to V for too long
constexpr float P_SUM_LIMIT = 16384.0f;           // of P: fp16 holds it
constexpr float SCORE_LIMIT = 3e38f;
constexpr unsigned CONSUMER_BARRIER = 1, BARRIERS_READY = 2;  // named barriers
static_assert(BLOCK_M % 16 == 0 && BLOCK_N == 64, "64 keys are the rows of S^T");
static_assert(Values::SLABS <= 2, "O finds room where P was");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "a tensor map's rows are multiples of 16 bytes");

// Shared memory, in bytes from its beginning.
constexpr unsigned P_AT = Queries::BYTES, K_AT = P_AT + 2 * Pairs::BYTES, V_AT = K_AT + STAGES * Keys::BYTES,
                   ROW_STATS_AT = V_AT + STAGES * Values::BYTES, BARRIERS_AT = ROW_STATS_AT + 5 * 4 * BLOCK_M;
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
        const Head group_head(score, b, h * group);
        rows_end = min(row0 + BLOCK_M, group_head.Sq * group);
        const Range keys = group_head.keys(first_query, end_of_queries());
        begin = keys.begin / BLOCK_N;
        tiles = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
    }
    __device__ __forceinline__ int number(int row_tiles, int Hk) const { return (b * Hk + h) * row_tiles + row0 / BLOCK_M; }
    __device__ __forceinline__ int end_of_queries() const { return query(rows_end - 1 - row0) + 1; }
    // The first key of the j-th tile: backwards, so that those that not all rows see come first.
    __device__ __forceinline__ int first_key(int j) const { return (begin + tiles - 1 - j) * BLOCK_N; }
    // Of row `row` of the tile: its query, and its head. A whole division is 30 instructions; so few rows are divided right in fp32.
    __device__ __forceinline__ int query(int row) const { return first_query + queries_after(row); }
    __device__ __forceinline__ int head(int row) const { return h * group + first_head + row - queries_after(row) * group; }
    __device__ __forceinline__ bool has(int row) const { return row0 + row < rows_end; }

  private:
    __device__ __forceinline__ int queries_after(int row) const {
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
    const int row_tiles = (score.Sq * group + BLOCK_M - 1) / BLOCK_M, work_tiles = row_tiles * Hk * B;
    unsigned next_pipe_index = 0;  // tiles that went through the ring

    if (warp == CONSUMERS / 32) {
        const bool leader = elect();  // at once: the mbarriers are its own doing, and it waits for nobody
        if (leader) init_barriers(base);
        __syncwarp();  // they are there before this warp says so
        named_barrier_arrive(BARRIERS_READY, THREADS);
        if (!leader) return;
#pragma unroll 1
        for (int number = blockIdx.x; number < work_tiles; number += gridDim.x) {
            const WorkTileRange work_tile(number, row_tiles, Hk, group, score);
            // A stride of 0 is a dimension of size 1 to a tensor map.
            const auto load = [&](auto tiles, const TensorMap& map, const View<const dtype>& tensor, unsigned tile, unsigned empty,
                                     unsigned full, int j) {
                const unsigned stage = stage_of(next_pipe_index);
                mbarrier_wait(base + empty + 8 * stage, parity_of(next_pipe_index) ^ 1);
                tiles.load(base + tile + stage * tiles.BYTES, map, work_tile.first_key(j), tensor.stride_h ? work_tile.h : 0,
                              tensor.stride_b ? work_tile.b : 0, base + full + 8 * stage);
            };
#pragma unroll 1
            for (int j = 0; j < work_tile.tiles; ++j, ++next_pipe_index) {
                load(Keys(), K_map, K, K_AT, EMPTY_K, FULL_K, j);
                load(Values(), V_map, V, V_AT, EMPTY_V, FULL_V, j);
            }
        }
        return;
    }

    const float exponent = Head::unit_of(score) * Head::LOG2E;
    const int g = lane / 4, q = lane % 4;
    float* const warp_stats = reinterpret_cast<float*>(smem + ROW_STATS_AT);  // [4][BLOCK_M]
    float* const row_maxima = warp_stats + 4 * BLOCK_M;                        // [BLOCK_M]
    const auto consumer_barrier = [] { named_barrier_sync(CONSUMER_BARRIER, CONSUMERS); };
    // Q of a piece, 16 bytes of a row at a time; rows and columns that there are not become zeros.
    const auto load_Q = [&](const WorkTileRange& work_tile) {
        const SeqlenInfo sequence(score, work_tile.b);
#pragma unroll 1
        for (int i = threadIdx.x; i < BLOCK_M * Queries::SLABS * 8; i += CONSUMERS) {
            const int row = i / (Queries::SLABS * 8), chunk = i % (Queries::SLABS * 8);
            const bool valid = work_tile.has(row) && chunk * 8 < HEAD_DIM;
            const int stats = valid ? row : 0;
            cp_async_16(base + Queries::chunk(row, chunk), sequence.query(Q, work_tile.head(stats), work_tile.query(stats)) + (valid ? 8 * chunk : 0),
                        valid);
        }
        cp_async_commit();
    };

    WorkTileRange work_tile(blockIdx.x, row_tiles, Hk, group, score);
    load_Q(work_tile);
    named_barrier_sync(BARRIERS_READY, THREADS);  // before anybody uses the mbarriers
#pragma unroll 1
    for (;;) {
        const Head group_head(score, work_tile.b, work_tile.h * group);  // of the piece's heads, which see the same
        const Range fully_visible = group_head.fully_visible_keys(work_tile.first_query, work_tile.end_of_queries());
        float m[ROWS_PER_THREAD], l[ROWS_PER_THREAD];  // m: a raw score, the same in all lanes that have the row; l: this thread's part of the sum
        float S[N], O_acc[Values::SLABS][N];
#pragma unroll
        for (int r = 0; r < ROWS_PER_THREAD; ++r) m[r] = -INF, l[r] = 0.0f;
        bool large = false;  // whether some m is: then m is raised at each tile, and P is of S - m. The same in all warps
#pragma unroll
        for (int i = 0; i < Values::SLABS * N; ++i) O_acc[i / N][i % N] = 0.0f;
        const auto store_row_stats = [&](float* to, const float (&stats)[ROWS_PER_THREAD]) {
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r) to[row_of(r, q)] = stats[r];
        };
        const auto scale_O = [&](int r, float factor) {  // of the thread's r-th row
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab)
                for (int half = 0; half < 2; ++half) O_acc[slab][r / 2 * 4 + r % 2 + 2 * half] *= factor;
        };
        // Moves m up to the maxima of S, and rescales what was accumulated under the old one.
        const auto rescale = [&] {
            float lane_max[ROWS_PER_THREAD];
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r) lane_max[r] = fmaxf(S[r / 2 * 4 + r % 2], S[r / 2 * 4 + r % 2 + 2]);
#pragma unroll 1
            for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
                for (int r = 0; r < ROWS_PER_THREAD; ++r) lane_max[r] = fmaxf(lane_max[r], __shfl_xor_sync(0xffffffffu, lane_max[r], lanes));
            if (g == 0) store_row_stats(warp_stats + warp * BLOCK_M, lane_max);
            consumer_barrier();
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r) {
                float top = m[r];
                for (int w = 0; w < 4; ++w) top = fmaxf(top, warp_stats[w * BLOCK_M + row_of(r, q)]);
                const float alpha = m[r] == top ? 1.0f : ex2((m[r] - top) * exponent);  // equal infinities: not NaN
                m[r] = top, l[r] *= alpha, scale_O(r, alpha);
            }
            large = false;
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r) large |= Head::is_large(m[r], exponent);
            large = __any_sync(0xffffffffu, large);
        };

        const auto score_mod_and_mask = [&](int key) {  // raw scores of dot products, -INF where a row does not see
            const int column = opaque(q);            // so that nothing of it is kept over the loop
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const int row = row_of(own_row(k), column);
                const Head head(group_head, work_tile.head(row));
                const ScoreIndex at(work_tile.query(row), key, 0, k / 2 % 2 * 8);
                S[k] = head.visible(at.query_row(), at.key_col()) ? head.raw(S[k], at) : -INF;
            }
        };
        const auto apply_dropout = [&](int k, float x, int key) {  // what dropout leaves of an element of P
            if (!DROPOUT) return x;
            const int row = row_of(own_row(k), opaque(q));
            return Head(group_head, work_tile.head(row)).keep(work_tile.query(row), key + k / 2 % 2 * 8) ? x : 0.0f;
        };

        // Of the i-th tile that goes through the ring: S^T, begun; O^T, begun to grow; and a stage, free again.
        const auto mma_KQ = [&](unsigned i) {
            mbarrier_wait(base + FULL_K + 8 * stage_of(i), parity_of(i));
            const Descriptor K_smem = Keys::k_major(base + K_AT + stage_of(i) * Keys::BYTES), Q_smem = Queries::k_major(base);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < D_PAD / 16; ++step)
                wgmma<Order::K_MAJOR>(S, K_smem + Keys::k_step(step), Q_smem + Queries::k_step(step), step > 0);
            wgmma_commit();
        };
        const auto mma_VP = [&](unsigned i) {
            mbarrier_wait(base + FULL_V + 8 * stage_of(i), parity_of(i));
            const Descriptor P_smem = Pairs::k_major(base + P_AT + i % 2 * Pairs::BYTES);
            wgmma_fence();
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab) {
                const Descriptor V_smem = Values::mn_major(base + V_AT + stage_of(i) * Values::BYTES + slab * Values::SLAB_BYTES);
#pragma unroll
                for (int step = 0; step < BLOCK_N / 16; ++step)
                    wgmma<Order::K_MAJOR, Order::MN_MAJOR>(O_acc[slab], V_smem + Values::mn_step(step), P_smem + Pairs::k_step(step), true);
            }
            wgmma_commit();
        };
        const auto release = [&](unsigned empty, unsigned i) {
            if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(i));
        };
        const auto wait_S = [&] {
            wgmma_wait<0>();
            warpgroup_fence_operand(S);
        };
        const auto wait_O = [&] {
            wgmma_wait<0>();
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab) warpgroup_fence_operand(O_acc[slab]);
        };

        cp_async_wait<0>();
        fence_proxy_async();
        consumer_barrier();  // Q is there; nobody reads the last piece's O any more
        if (OVERLAP_QK && work_tile.tiles > 0) {
            mma_KQ(uniform(next_pipe_index));
            wait_S();
        }
#pragma unroll 1
        for (int j = 0; j < work_tile.tiles; ++j, ++next_pipe_index) {
            const unsigned pipe_index = uniform(next_pipe_index);
            const int n0 = work_tile.first_key(j), key = n0 + static_cast<int>(warp) * 16 + g;
            const auto exponentiate = [&](auto of_differences) {  // to shared memory; whether some P is too large
                float max_P = 0.0f;
#pragma unroll
                for (int k = 0; k < N; ++k) {
                    // Of a row that saw no key yet FAR: then P is 0 where S = -INF, and too much everywhere else.
                    const float top = m[own_row(k)];
                    if constexpr (of_differences.YES) S[k] = ex2((S[k] - (top == -INF ? 0.0f : top)) * exponent);
                    else S[k] = ex2(fmaf(S[k], exponent, fminf(-top * exponent, SCORE_LIMIT)));
                    max_P = fmaxf(max_P, S[k]);
                }
                unsigned pairs[BLOCK_M / 16][4];
#pragma unroll
                for (int k = 0; k < N; k += 2) pairs[k / 8][k / 2 % 4] = pack(apply_dropout(k, S[k], key), apply_dropout(k + 1, S[k + 1], key));
                store_transposed<Pairs>(base + P_AT + pipe_index % 2 * Pairs::BYTES, warp * 2, pairs);
                fence_proxy_async();
                return max_P > P_SUM_LIMIT;
            };
            if (!OVERLAP_QK) {
                mma_KQ(pipe_index);
                wait_S();
            }
            const bool needs_mask = !Head::LINEAR || (Head::FIRST && n0 < fully_visible.begin) || n0 + BLOCK_N > fully_visible.end;
            if (needs_mask) score_mod_and_mask(key);
            const bool needs_rescale = exponentiate(Differences<false>()) || large;
            if (OVERLAP_QK) {
                wait_O();  // of the tile before
                if (j > 0) release(EMPTY_V, pipe_index - 1);
            }
            if (named_barrier_or(CONSUMER_BARRIER, CONSUMERS, needs_rescale)) {
                mma_KQ(pipe_index);
                wait_S();
                if (needs_mask) score_mod_and_mask(key);
                rescale();
                exponentiate(Differences<true>());  // now P is 1 at most
                consumer_barrier();
            }
            release(EMPTY_K, pipe_index);
#pragma unroll
            for (int k = 0; k < N; ++k) l[own_row(k)] += S[k];
            if (OVERLAP_QK && j + 1 < work_tile.tiles) mma_KQ(pipe_index + 1);
            mma_VP(pipe_index);
            if (OVERLAP_QK) {
                wgmma_wait<1>();  // for S alone
                warpgroup_fence_operand(S);
            } else {
                wait_O();
                release(EMPTY_V, pipe_index);
            }
        }
        if (OVERLAP_QK) {
            wait_O();
            if (work_tile.tiles > 0) release(EMPTY_V, next_pipe_index - 1);
        }

        const int number = work_tile.number(row_tiles, Hk) + gridDim.x;
        const bool more = number < work_tiles;
        WorkTileRange next = work_tile;
        if (more) {
            next = WorkTileRange(number, row_tiles, Hk, group, score);
            load_Q(next);  // every warp has read this one's: it said so with the last P
        }
        bool non_finite = false;
#pragma unroll
        for (int slab = 0; slab < Values::SLABS; ++slab) non_finite |= !finite(O_acc[slab]);
#pragma unroll 1
        for (int lanes = 4; lanes < 32; lanes *= 2)
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r) l[r] += __shfl_xor_sync(0xffffffffu, l[r], lanes);
        if (g == 0) store_row_stats(warp_stats + warp * BLOCK_M, l);
        if (warp == 0 && g == 1) store_row_stats(row_maxima, m);  // for LSE
        // The sums are there, and nobody multiplies P any more. A masked key's P is 0, but 0 * NaN brings its value to rows that do not see
        // it. Seldom, and then worth the time.
        if (named_barrier_or(CONSUMER_BARRIER, CONSUMERS, Head::HIDES && non_finite)) {
#pragma unroll 1
            for (int row = warp; work_tile.has(row); row += CONSUMERS / 32)
                attend_non_finite<1, 1>(Q, K, V, O, LSE, group, score, work_tile.b, work_tile.head(row), H, work_tile.query(row), 0);
        } else {
            const auto total = [&](const Head& head, int row, float m) {
                float sum = 0.0f;
                for (int w = 0; w < 4; ++w) sum += warp_stats[w * BLOCK_M + row];
                return head.finalize<!NATURAL, APPROXIMATE>(m, sum);
            };
            const auto head_of = [&](int row) { return Head(group_head, work_tile.has(row) ? work_tile.head(row) : work_tile.h * group); };
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r) scale_O(r, total(SINK ? head_of(row_of(r, q)) : group_head, row_of(r, q), m[r]).inverse);
#pragma unroll
            for (int slab = 0; slab < Values::SLABS; ++slab) {
                unsigned pairs[BLOCK_M / 16][4];
#pragma unroll
                for (int k = 0; k < N; k += 2) pairs[k / 8][k / 2 % 4] = pack(O_acc[slab][k], O_acc[slab][k + 1]);
                store_transposed<Pairs>(base + P_AT + slab * Pairs::BYTES, warp * 2, pairs);
            }
            consumer_barrier();
#pragma unroll
            for (int first = 0; first < BLOCK_M * Values::SLABS * 8; first += CONSUMERS) {
                const int i = first + threadIdx.x, row = i / (Values::SLABS * 8), chunk = i % (Values::SLABS * 8);
                if (!work_tile.has(row) || chunk * 8 >= HEAD_DIM_V) continue;
                const char* const from = smem + P_AT + chunk / 8 * Pairs::BYTES + Pairs::chunk(row, chunk % 8);
                *reinterpret_cast<uint4*>(group_head.query(O, work_tile.head(row), work_tile.query(row)) + 8 * chunk) = *reinterpret_cast<const uint4*>(from);
            }
            if (const int row = threadIdx.x; row < BLOCK_M && work_tile.has(row)) {  // a thread a row
                const Head head = head_of(row);
                LSE[head.lse_offset(H, work_tile.head(row)) + work_tile.query(row)] = total(head, row, row_maxima[row]).lse;
            }
        }
        if (!more) return;
        work_tile = next;
    }
}
