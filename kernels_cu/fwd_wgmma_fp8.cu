// Rung 4 for float8: attention forward on Hopper's warpgroup MMA of 8 bits (wgmma, k = 32), fed by tensor-map copies (TMA).
//
// As fwd_wgmma: a block stays on its SM and takes one piece of work after the other, one warpgroup produces, the others
// consume, 64 query rows each. What 8 bits change:
//
// clang-format off
//   producer, warp 0       K0 V0 Q  K1 V1  K2 V2 ...       one thread finds pieces, tells them, and requests tiles
//             warps 1, 2, 3         V0' ->     V1' -> ...  transpose V: TMA's tile -> another, keys along rows
//   consumer 0             O += P0 V0', S1 = Q K1^T | maxima, exponentials, P1               | O += P1 V1', S2 = Q K2^T | ...
//   consumer 1                                      | O += P0 V0', S1 = Q K1^T | ...            time ->
//
//   shared memory: Q [BLOCK_M / 64] | K [STAGES] | V [STAGES] | V' [STAGES] | mbarriers
// clang-format on
//
// wgmma of 8 bits reads both operands with the index that it sums over contiguous. Three warps of the producer, which had nothing
// to do, turn V round between TMA's arrival and the consumers' wait: ldmatrix.trans, two byte permutations, stmatrix, without a
// bank conflict. The keys come out in the order in which a lane holds its scores (fp8.cuh), and even columns apart from odd
// ones, which makes of a lane's columns of O runs of four. After FlashAttention-3, section 3.3 (Shah et al. 2024).
//
// The tensor cores keep some 14 bits of a sum of 8-bit products, and round towards zero: what 32 keys add to O pulls it down by up
// to 2^-13. So O is summed up there for SPLIT_KEYS keys at most, then put away in fp32, in `partials`, and begun anew. Of V = 1,
// the worst there is, that is 0.3% for a bfloat16 O, below half of its last place, and 0.07% for any other; a sum over 16k keys
// would be pulled down by 1.2%. (A sum T of each tile's own, taken on in fp32, was 10 ... 15% slower: experiments/015_fp8.)
//
// What a row's scores are exponentiated against, m, is SLACK bits above the score that moved it there. A higher one moves it only
// where its P would be more than SHARE of the row's sum, or more than the largest number that V's type has: P of a key that
// outweighs the others has to be exact, as that of plain attention's largest score is, and of all others is rounded as any. A
// lane takes four times its own part of the sum for the row's, which needs no shuffle. So a tile asks each lane once whether a score
// is too high (BY_SUMS: whether a sum of exponentials is), and is done with it: no alpha, O stays with the tensor cores. A row moves
// for its own scores' sake alone, whatever its warp's others do.
#define FALLBACK_INLINE __forceinline__
#define TIMELINE_BRANCH 1  // registers are few
#include "fp8_hopper.cuh"
#include "tile_scheduler.cuh"
#include "pipeline.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "swizzle.cuh"
#include "timeline.cuh"

constexpr int CONSUMERS = BLOCK_M / 64;
constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
constexpr int D_PAD = (HEAD_DIM + 31) / 32 * 32;  // the columns beyond are zeros
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40, CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
constexpr unsigned TRANSPOSE_WARPS = 3;  // warps that turn V round
constexpr bool PING_PONG = CONSUMERS > 1;  // consumers, on the tensor cores
// Pieces are alike, and those that no round is left for are parted by their keys. Options that take registers would spill.
constexpr bool STREAM_K = !Head::HIDES && !RAGGED && Head::LINEAR && !DROPOUT && !(DESCALE & 7);
constexpr float SCORE_LIMIT = 3e38f;
static_assert(BLOCK_M % 64 == 0 && CONSUMERS <= 3, "64 rows for each consumer warpgroup");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N <= 256, "a tile of whole wgmma steps");
static_assert((STAGES & STAGES - 1) == 0, "the highest bit of a number of tiles says something else");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "a tensor map's rows are multiples of 16 bytes");

// That a row's m has to move is noticed after the exponentials, by their sums, which none of them exceeds: where rows begin with the tile
// that their walk begins with, so that no exponential is of what has no m yet, and scores are dot products, which seldom rise by 120 bits.
// Elsewhere it is noticed before, by the scores' maximum.
constexpr bool CHECK_SUMS = Head::LINEAR && !Head::FIRST && !Head::ELEMENT_MASK;
// Whole bits, for P at what moved m to be exact; so many that a sum of BLOCK_N / 8 keys all alike is not too much.
constexpr int HEADROOM = CHECK_SUMS && BLOCK_N > 128 ? 5 : 4;
constexpr float RESCALE_SHARE = 1.0f / 4, P_AFTER_RESCALE = P_MAX / (1 << HEADROOM), P_OVERFLOW = 1.03f * P_MAX;  // P at what moved m; what is rounded to P_MAX
#if defined(DTYPE_O_bfloat16)
constexpr int SPLIT_KEYS = 4096;
#else
constexpr int SPLIT_KEYS = 1024;
#endif
constexpr int SPLIT_TILES = SPLIT_KEYS / BLOCK_N;

using Queries = Swizzled<64, D_PAD, 1>;
using Keys = Swizzled<BLOCK_N, D_PAD, 1>;
using Values = Swizzled<BLOCK_N, HEAD_DIM_V, 1>;
using Transposed = Swizzled<HEAD_DIM_V, BLOCK_N, 1>;

// Shared memory, in bytes from its beginning.
constexpr unsigned K_AT = CONSUMERS * Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES, VT_AT = V_AT + STAGES * Values::BYTES;
constexpr unsigned VT_BYTES = (Transposed::BYTES + 1023) / 1024 * 1024, BARRIERS_AT = VT_AT + STAGES * VT_BYTES;
static_assert(Transposed::SLAB_BYTES % 1024 == 0, "a swizzled slab begins at a multiple of 1024 bytes");
static_assert(SMEM_BYTES == BARRIERS_AT + 1024, "spec and kernel disagree on shared memory");

// The mbarriers, 8 bytes each: of each stage of K, V and V', and of each consumer's Q.
constexpr unsigned FULL_K = BARRIERS_AT, EMPTY_K = FULL_K + 8 * STAGES, FULL_V = EMPTY_K + 8 * STAGES,
                   EMPTY_V = FULL_V + 8 * STAGES, FULL_VT = EMPTY_V + 8 * STAGES, EMPTY_VT = FULL_VT + 8 * STAGES,
                   FULL_Q = EMPTY_VT + 8 * STAGES, EMPTY_Q = FULL_Q + 8 * CONSUMERS;
constexpr unsigned HAS_TILE_AT = EMPTY_Q + 8 * CONSUMERS;  // of each stage of V: whether there is a tile, or the walk has ended
constexpr unsigned TILE_INFO_AT = (HAS_TILE_AT + 4 * STAGES + 15) / 16 * 16;  // of each consumer: its piece, and the one before or after
static_assert(TILE_INFO_AT + 64 * CONSUMERS <= SMEM_BYTES, "the mbarriers have 1024 bytes");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(base + FULL_K + 8 * stage, 1);
        mbarrier_init(base + FULL_V + 8 * stage, 1);
        mbarrier_init(base + FULL_VT + 8 * stage, TRANSPOSE_WARPS);
        mbarrier_init(base + EMPTY_K + 8 * stage, 4 * CONSUMERS);  // a lane of each warp that reads it
        mbarrier_init(base + EMPTY_V + 8 * stage, TRANSPOSE_WARPS);
        mbarrier_init(base + EMPTY_VT + 8 * stage, 4 * CONSUMERS);
    }
    for (unsigned consumer = 0; consumer < CONSUMERS; ++consumer) {
        mbarrier_init(base + FULL_Q + 8 * consumer, 1);
        mbarrier_init(base + EMPTY_Q + 8 * consumer, 4);
    }
    fence_proxy_async();
}

struct alignas(16) TileInfo {  // of a piece: query rows m0 .. end of head h of batch entry b. None: b < 0
    int b, h, m0, end;
    Range split;   // of the key tiles, where pieces are parted
    int first;    // where it does not begin with the first: the block that does, from which on to this one all have some
    int continued;  // whether there are some behind, the next block's
};
__device__ __forceinline__ TileInfo& tile_info(char* smem, unsigned consumer, unsigned parity) {
    return reinterpret_cast<TileInfo*>(smem + TILE_INFO_AT)[2 * consumer + parity];
}
__device__ __forceinline__ TileInfo uniform(const TileInfo& info) {  // as told to all lanes of a warp
    const auto same = [](int x) { return static_cast<int>(uniform(static_cast<unsigned>(x))); };
    return {same(info.b), same(info.h), same(info.m0), same(info.end), {same(info.split.begin), same(info.split.end)}};
}

struct WorkTileRange : TileInfo {  // of work, and the key tiles it sees
    Range range;
    int tiles;
    __device__ __forceinline__ WorkTileRange(const TileInfo& info, const Score& score)
        : TileInfo(info), range(STREAM_K ? split : n_block_range(Head(score, b, h), m0, end)), tiles(range.end - range.begin) {}
    // The first key of the j-th tile to be walked.
    __device__ __forceinline__ int keys_at(int j) const { return (STREAM_K || Head::FIRST ? range.begin + j : j) * BLOCK_N; }
};

// How many of a piece's tiles are walked before the first of a warpgroup's own.
__device__ __forceinline__ int first_own_tile(const WorkTileRange& work_tile, Range own, int tiles) {
    return tiles > 0 && Head::FIRST ? own.begin - work_tile.range.begin : 0;
}

// Calls f with each of the block's pieces.
//
// A piece of fewer rows than BLOCK_M costs more than its share: of 64 rows 0.6 of one of 192. Causal: it is a head's first one, which
// sees the fewest keys. Otherwise its last one, and in each round every block is one further on, so that all have as many of them.
//
// Where pieces are alike, only the first `full_wave_tiles` are dealt out so. The others, too few for a round of all blocks, are parted by
// their key tiles: each block has as many, of one piece or of two, the later one first. So who finishes a piece, the last of its
// blocks, does not wait for long for what those before have summed up.
template <class F>
__device__ __forceinline__ void for_each_fp8_work_tile(unsigned heads, int H, unsigned full_wave_tiles, const Score& score, F f) {
    const unsigned tiles = query_tiles<BLOCK_M>(score);
#if RAGGED
    for_each_work_tile(tiles, heads, [&](unsigned tile, int head) {
        const RowTile tile_rows = query_tile<BLOCK_M>(score, tile, 0);
        if (!tile_rows.invalid()) f(WorkTileRange({tile_rows.b, head, tile_rows.row0, tile_rows.row0 + BLOCK_M}, score));
    });
#else
    const auto work_tile = [&](int head, int row, Range split = {}, unsigned first = 0, bool continued = false) {
        return WorkTileRange({head / H, head % H, max(row, 0), row + BLOCK_M, split, static_cast<int>(first), continued}, score);
    };
    if constexpr (CAUSAL) {
        const int beyond = tiles * BLOCK_M - (score.Sq + 63) / 64 * 64;
        for_each_work_tile(tiles, heads, [&](unsigned tile, int head) {
            f(work_tile(head, static_cast<int>(tile * BLOCK_M) - beyond));
        });
    } else {
        const int keys = (score.Sk + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
        for (unsigned round = 0, own = blockIdx.x; round < full_wave_tiles; round += gridDim.x, own = own + 1 < gridDim.x ? own + 1 : 0)
            if (const unsigned i = round + own; i < full_wave_tiles) f(work_tile(i / tiles, i % tiles * BLOCK_M, {0, keys}));
        const unsigned split_tiles = (heads * tiles - full_wave_tiles) * keys, begin = blockIdx.x * split_tiles / gridDim.x;
#pragma unroll 1
        for (unsigned end = STREAM_K ? (blockIdx.x + 1) * split_tiles / gridDim.x : 0; end > begin;) {
            const unsigned i = full_wave_tiles + (end - 1) / keys, tile_begin = (end - 1) / keys * keys, from = max(begin, tile_begin);
            f(work_tile(i / tiles, i % tiles * BLOCK_M, {static_cast<int>(from - tile_begin), static_cast<int>(end - tile_begin)},
                    ((tile_begin + 1) * gridDim.x - 1) / split_tiles, end - tile_begin < keys));
            end = from;
        }
    }
#endif
}

// V' of V, a tile each, by the warps that turn it round, of which this is number `transpose_warp`: 16 columns at a time. In V' a row is
// a column of V, of each 16 first the even ones, and keys are in the order SLOTS. LOADS times 32 keys are loaded before the
// first of them are stored: fewer waits for shared memory.
__device__ __forceinline__ void transpose_V(SmemAddr V_smem, SmemAddr Vt_smem, unsigned transpose_warp) {
    const unsigned lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll 1
    for (unsigned columns = transpose_warp; columns < HEAD_DIM_V / 16; columns += TRANSPOSE_WARPS) {
        const SmemAddr from = V_smem + Values::chunk(lane, columns);
        const unsigned slot = Transposed::chunk(matrix % 2 * 8 + row, matrix / 2);
        const SmemAddr dst = Vt_smem + 16 * 128 * columns;
#pragma unroll
        for (unsigned keys = 0; keys < BLOCK_N / 32; keys += LOADS) {
            unsigned pairs[LOADS][4];  // of keys 0, 8, 16 and 24 on
#pragma unroll
            for (unsigned i = 0; i < LOADS && keys + i < BLOCK_N / 32; ++i) ldmatrix_x4_trans(pairs[i], from + 32 * 128 * (keys + i));
#pragma unroll
            for (unsigned i = 0; i < LOADS && keys + i < BLOCK_N / 32; ++i) {
                const unsigned(&pair)[4] = pairs[i];
                const unsigned slab = (keys + i) / 4 * Transposed::SLAB_BYTES, chunk = (keys + i) % 4 * 2;
                stmatrix_x4(dst + (slot ^ chunk * 16) + slab, even_column(pair[0], pair[1]), odd_column(pair[0], pair[1]),
                            even_column(pair[2], pair[3]), odd_column(pair[2], pair[3]));
            }
        }
    }
}

// What a consumer's thread keeps of its two query rows, g and g + 8 of its warp's 16.
struct SoftmaxState {
    float O[HEAD_DIM_V / 2] = {};
    float m[2] = {-INF, -INF}, l[2] = {};  // m: a raw score; l: this lane's part of the sum, times P_MAX

    // The largest of a lane's scores in row g or g + 8, as integers: three at a time, four chains.
    static __device__ __forceinline__ int largest(const float (&S)[BLOCK_N / 2], int half) {
        const auto score = [&](int k) { return static_cast<int>(__float_as_uint(S[k / 2 * 4 + half * 2 + k % 2])); };
        int lane_max[4] = {score(0), score(1), score(2), score(3)};
#pragma unroll
        for (int k = 4; k < BLOCK_N / 4; k += 2) lane_max[k / 2 % 4] = max3(lane_max[k / 2 % 4], score(k), score(k + 1));
        return max(max3(lane_max[0], lane_max[1], lane_max[2]), lane_max[3]);
    }
    // What a score, times the exponent's unit, must not exceed if m is to stay, by what this lane has summed up: a quarter of the
    // row's, as far as it knows.
    __device__ __forceinline__ float score_limit(int half, float exponent) const {
        const float room = LOG2_P_MAX - lg2(l[half] * (4 * RESCALE_SHARE));
        return fmaf(m[half], exponent, -fminf(fmaxf(room, 0.0f), HEADROOM));
    }
    // Whether some lane's score may ask for another m. As integers positive numbers are in order, and above all negative ones: only
    // where the limit is negative the largest integer does not tell.
    __device__ __forceinline__ bool scores_too_large(const float (&S)[BLOCK_N / 2], float exponent) const {
        bool any = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int lane_max = largest(S, half);
            const float limit = score_limit(half, exponent);
            any |= __int_as_float(lane_max) * exponent > limit || (lane_max < 0 && limit < 0.0f);
        }
        return __any_sync(0xffffffffu, any);
    }
    // Moves m of rows of which a lane asks for it, and of no other: alpha is what such a row's sums shrink by. Whether any row's moved.
    __device__ __forceinline__ bool rescale(const float (&S)[BLOCK_N / 2], float exponent, float (&alpha)[2]) {
        float lane_max[2][2] = {{-INF, -INF}, {-INF, -INF}};  // two of each row: shorter chains
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) lane_max[i / 2 % 2][i % 2] = fmaxf(lane_max[i / 2 % 2][i % 2], S[i]);
        bool rescaled = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own = fmaxf(lane_max[half][0], lane_max[half][1]), highest = row_max<4>(own);
            const bool requested = row_max<4>(own * exponent > score_limit(half, exponent) ? 1.0f : 0.0f) > 0.0f;
            alpha[half] = 1.0f;
            if (requested) {
                const float m_new = highest + HEADROOM / exponent;
                alpha[half] = m[half] == m_new ? 1.0f : ex2((m[half] - m_new) * exponent);  // equal infinities: not NaN
                m[half] = m_new;
                rescaled = true;
            }
        }
        return __any_sync(0xffffffffu, rescaled);
    }
    __device__ __forceinline__ void scale_sums(const float (&alpha)[2]) {  // what has been summed up
        l[0] *= alpha[0], l[1] *= alpha[1];
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 2; ++i) O[i] *= alpha[i / 2 % 2];
    }
    // Likewise, and shrinks what has been summed up.
    __device__ __forceinline__ void rescale(const float (&S)[BLOCK_N / 2], float exponent) {
        float alpha[2];
        if (rescale(S, exponent, alpha)) scale_sums(alpha);
    }
    // S becomes P = P_MAX exp2 of what it exceeds m by; two sums of each row's.
    __device__ __forceinline__ void exponentiate(float (&S)[BLOCK_N / 2], float exponent, float (&sums)[2][2]) {
        float shift[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            shift[half] = fminf(fmaf(-m[half], exponent, LOG2_P_MAX), SCORE_LIMIT);  // of a row that saw no key yet P is 0
            sums[half][0] = sums[half][1] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            S[i] = ex2(fmaf(S[i], exponent, shift[i / 2 % 2]));
            sums[i / 2 % 2][i % 2] += S[i];
        }
    }
    __device__ __forceinline__ void add(const float (&sums)[2][2]) {
        l[0] += sums[0][0] + sums[0][1], l[1] += sums[1][0] + sums[1][1];
    }
    // What a P must not exceed if m is to stay; whether a lane's may: none is more than its sum.
    __device__ __forceinline__ float max_P(int half) const { return fminf(fmaxf(l[half] * (4 * RESCALE_SHARE), P_AFTER_RESCALE), P_OVERFLOW); }
    __device__ __forceinline__ bool sums_too_large(const float (&sums)[2][2]) const {
        bool any = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) any |= fmaxf(sums[half][0], sums[half][1]) > max_P(half);
        return __any_sync(0xffffffffu, any);
    }
    // Moves m of rows of which a lane asks for it, and of no other, after the exponentials: the largest P becomes LOW. Where it is
    // infinite m becomes infinite, hence `large`, and the rows are computed one by one.
    __device__ __forceinline__ void rescale_after_exp(float (&P)[BLOCK_N / 2], float (&sums)[2][2], float exponent) {
        float lane_max[2][2] = {};
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) lane_max[i / 2 % 2][i % 2] = fmaxf(lane_max[i / 2 % 2][i % 2], P[i]);
        float alpha[2] = {1.0f, 1.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float own = fmaxf(lane_max[half][0], lane_max[half][1]), highest = row_max<4>(own);
            const bool requested = own > max_P(half) || fmaxf(sums[half][0], sums[half][1]) > P_OVERFLOW;
            if (row_max<4>(requested ? 1.0f : 0.0f) == 0.0f) continue;
            alpha[half] = P_AFTER_RESCALE / highest;
            m[half] -= lg2(alpha[half]) / exponent;
            sums[half][0] *= alpha[half], sums[half][1] *= alpha[half];
        }
        if (!__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) P[i] *= alpha[i / 2 % 2];
        scale_sums(alpha);
    }
    // O goes to `place`, with m and, of a part, l; and comes back on top of what has been summed up since, or of other keys. A float4
    // each, the block's threads abreast.
    static constexpr int STRIDE = THREADS - 128, VECTORS = HEAD_DIM_V / 8 + 1;
    __device__ __forceinline__ void store_partial_O(float4* slot, float l0 = 0.0f, float l1 = 0.0f) const {
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 8; ++i)
            slot[i * STRIDE] = make_float4(O[4 * i], O[4 * i + 1], O[4 * i + 2], O[4 * i + 3]);
        slot[(VECTORS - 1) * STRIDE] = make_float4(m[0], m[1], l0, l1);
    }
    __device__ __forceinline__ void load_partial_O(const float4* slot, float exponent) {
        const float4 stored = slot[(VECTORS - 1) * STRIDE];
        const float alpha[2] = {stored.x == m[0] ? 1.0f : ex2((stored.x - m[0]) * exponent),
                                stored.y == m[1] ? 1.0f : ex2((stored.y - m[1]) * exponent)};
        l[0] = fmaf(stored.z, alpha[0], l[0]), l[1] = fmaf(stored.w, alpha[1], l[1]);
#pragma unroll
        for (int i = 0; i < HEAD_DIM_V / 8; ++i) {
            const float4 split = slot[i * STRIDE];
            float* const o = O + 4 * i;
            o[0] = fmaf(split.x, alpha[0], o[0]);
            o[1] = fmaf(split.y, alpha[0], o[1]);
            o[2] = fmaf(split.z, alpha[1], o[2]);
            o[3] = fmaf(split.w, alpha[1], o[3]);
        }
    }
    // m becomes `top`, which is no less: of equal infinities alpha is 1.
    __device__ __forceinline__ void rescale_to(const float (&lane_max)[2], float exponent) {
        float alpha[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            alpha[half] = m[half] == lane_max[half] ? 1.0f : ex2((m[half] - lane_max[half]) * exponent);
            m[half] = lane_max[half];
        }
        scale_sums(alpha);
    }
    // Whether a row's scores are too large for one FFMA: by 2^-5 P may be off at the limit, half of what it is rounded by.
    __device__ __forceinline__ bool large(float exponent) const {
        constexpr float P_SUM_LIMIT = 128.0f;  // times LARGE: 2^20
        return Head::is_large(m[0], exponent / P_SUM_LIMIT) || Head::is_large(m[1], exponent / P_SUM_LIMIT);
    }
    __device__ __forceinline__ bool finite() const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < (Head::HIDES ? HEAD_DIM_V / 2 : 0); ++i) zero = fmaf(O[i], 0.0f, zero);
        return zero == 0.0f;
    }
};

extern "C" __global__ __launch_bounds__(THREADS, 1) void fwd_wgmma_fp8(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,    // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,        // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,        // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    int H,
    int heads,                                      // B * H
    int group,                                      // H / Hk
    const __grid_constant__ Score score,
    int full_wave_tiles,                                  // pieces that are not parted
    float* partials) {                              // of each block: four counters; O put away; O of a part
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are there before anybody uses them
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;

    if (warp < 4) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        unsigned pipe_index = 0, work_tiles = 0;  // tiles of earlier pieces, and these
        unsigned* const has_tile = reinterpret_cast<unsigned*>(smem + HAS_TILE_AT);
        if (warp == 0 && elect()) {
            for_each_fp8_work_tile(heads, H, full_wave_tiles, score, [&](const WorkTileRange& work_tile) {
                const int h = work_tile.h / group, b = work_tile.b;
                const SeqlenInfo sequence(score, b);
                // A stride of 0 is a dimension of size 1 to a tensor map.
                const auto load = [&](auto tiles, const TensorMap& map, const auto& tensor, unsigned tile, unsigned empty,
                                         unsigned full, int j) {
                    const unsigned i = pipe_index + j, stage = stage_of(i);
                    TIMELINE(wait_empty);
                    mbarrier_wait(base + empty + 8 * stage, parity_of(i) ^ 1);
                    TIMELINE(load);
                    if (full == FULL_V) has_tile[stage] = true;
                    tiles.load(base + tile + stage * tiles.BYTES, map, sequence.key_box(work_tile.keys_at(j)), tensor.stride_h ? h : 0,
                                  sequence.key_batch(tensor.stride_b ? b : 0), base + full + 8 * stage);
                };
                const auto load_KV = [&](int begin, int end) {
#pragma unroll 1
                    for (int j = begin; j < end; ++j) {
                        load(Keys(), K_map, K, K_AT, EMPTY_K, FULL_K, j);
                        load(Values(), V_map, V, V_AT, EMPTY_V, FULL_V, j);
                    }
                };
                load_KV(0, min(work_tile.tiles, 1));  // for which there is room before all consumers have done with the Q before
#pragma unroll 1
                for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                    mbarrier_wait(base + EMPTY_Q + 8 * consumer, work_tiles % 2 ^ 1);
                    tile_info(smem, consumer, work_tiles % 2) = work_tile;
                    Queries::load(base + consumer * Queries::BYTES, Q_map, sequence.query_box(work_tile.m0 + 64 * consumer),
                                     Q.stride_h ? work_tile.h : 0, sequence.query_batch(Q.stride_b ? b : 0), base + FULL_Q + 8 * consumer);
                }
                ++work_tiles;
                load_KV(1, work_tile.tiles);
                pipe_index += work_tile.tiles;
            });
            mbarrier_wait(base + EMPTY_V + 8 * stage_of(pipe_index), parity_of(pipe_index) ^ 1);
            has_tile[stage_of(pipe_index)] = false;
            mbarrier_arrive(base + FULL_V + 8 * stage_of(pipe_index));
#pragma unroll 1
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                mbarrier_wait(base + EMPTY_Q + 8 * consumer, work_tiles % 2 ^ 1);
                tile_info(smem, consumer, work_tiles % 2).b = -1;
                mbarrier_arrive(base + FULL_Q + 8 * consumer);
            }
        } else if (warp >= 4 - TRANSPOSE_WARPS) {
#pragma unroll 1
            for (unsigned i = 0;; ++i) {  // the tiles of all pieces
                const unsigned stage = stage_of(i);
                TIMELINE(wait_V);
                mbarrier_wait(base + FULL_V + 8 * stage, parity_of(i));
                if (!has_tile[stage]) break;
                TIMELINE(wait_empty);
                mbarrier_wait(base + EMPTY_VT + 8 * stage, parity_of(i) ^ 1);
                TIMELINE(scheduler_barrier);
                transpose_V(base + V_AT + stage * Values::BYTES, base + VT_AT + stage * VT_BYTES, warp + TRANSPOSE_WARPS - 4);
                fence_proxy_async();
                __syncwarp();  // every lane has read its part of V, and its part of V' is there, before one says so
                if (lane == 0) {
                    mbarrier_arrive(base + EMPTY_V + 8 * stage);
                    mbarrier_arrive(base + FULL_VT + 8 * stage);
                }
            }
        }
        TIMELINE(done);
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const unsigned consumer = warp / 4 - 1, consumer_barrier = 1 + consumer;  // of the consumer's own 128 threads
    const unsigned scheduler_barrier = 4 + consumer, next_scheduler_barrier = 4 + (consumer + 1) % CONSUMERS;
    const int g = lane / 4, q = lane % 4;
    unsigned pipe_index = 0;  // tiles of earlier pieces; the highest bit: whether these were odd in number
    if (PING_PONG && consumer == CONSUMERS - 1) named_barrier_arrive(next_scheduler_barrier, 256);  // consumer 0 begins

#pragma unroll 1
    for (;;) {
        mbarrier_wait(base + FULL_Q + 8 * consumer, pipe_index >> 31);
        const TileInfo& info = tile_info(smem, consumer, pipe_index >> 31);
        if (info.b < 0) break;
        const WorkTileRange work_tile(uniform(info), score);
        const int m0 = work_tile.m0 + 64 * consumer, first_row = m0 + warp % 4 * 16;  // of the warpgroup, of the warp
        const Head head(score, work_tile.b, work_tile.h);
        const float exponent = head.unit * Head::LOG2E;
        const Range own = STREAM_K ? work_tile.range : n_block_range(head, m0, m0 + 64);  // of which the warpgroup sees anything:
        const int tiles = own.end - own.begin, first_own = first_own_tile(work_tile, own, tiles);
        const Range fully_visible = head.fully_visible_keys(first_row, first_row + 16);  // of the keys, by the warp's rows
        SoftmaxState softmax;
        // Of a wide head every step's descriptor would be kept in a register, more than there are.
        const auto address = [](SmemAddr tile) { return D_PAD > 128 || HEAD_DIM_V > 128 ? uniform(tile) : tile; };
        const auto is_full = [&](unsigned full, int j) { return mbarrier_test_wait(base + full + 8 * stage_of(pipe_index + j), parity_of(pipe_index + j)); };
        const auto wait = [&](unsigned full, int j, unsigned is_full = 0) {
            mbarrier_wait_unless(is_full, base + full + 8 * stage_of(pipe_index + j), parity_of(pipe_index + j));
        };
        const auto release = [&](unsigned empty, int j) { if (lane == 0) mbarrier_arrive(base + empty + 8 * stage_of(pipe_index + j)); };
        const auto mma_QK = [&](float (&S)[BLOCK_N / 2], int j) {
            const Descriptor Q_smem = Queries::k_major(address(base + consumer * Queries::BYTES));
            const Descriptor K_smem = Keys::k_major(address(base + K_AT + stage_of(pipe_index + j) * Keys::BYTES));
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < D_PAD / 32; ++step)
                wgmma8<dtype>(S, Q_smem + Queries::k_step(step), K_smem + Keys::k_step(step), step > 0);
            wgmma_commit();
        };
        const auto mask = [&](float (&S)[BLOCK_N / 2], int j) {  // raw scores of tile j, -INF where a row does not see
            const int n0 = work_tile.keys_at(j), column = n0 + 2 * q, row = first_row + g;
            const auto at = [&](int i) { return ScoreIndex(row, column, i / 2 % 2 * 8, i / 4 * 8 + i % 2); };
#pragma unroll
            for (int i = 0; i < (Head::LINEAR ? 0 : BLOCK_N / 2); ++i) S[i] = head.raw(S[i], at(i));
            if ((!Head::FIRST || fully_visible.begin <= n0) && n0 + BLOCK_N <= fully_visible.end) return;
            if (Head::ELEMENT_MASK) {
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i)
                    if (!head.visible(at(i).query_row(), at(i).key_col())) S[i] = -INF;
                return;
            }
            const Range seen[2] = {head.keys(row, row + 1), head.keys(row + 8, row + 9)};
            const int end[2] = {seen[0].end - column, seen[1].end - column};
            const int begin[2] = {seen[0].begin - column, seen[1].begin - column};
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {
                if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) S[i] = -INF;
                if (Head::FIRST && i / 4 * 8 + i % 2 < begin[i / 2 % 2]) S[i] = -INF;
            }
        };
        const auto apply_dropout = [&](float (&S)[BLOCK_N / 2], int j) {  // what dropout drops of tile j's P
            Head::Kept kept[BLOCK_N / 16];
            head.keep_along_queries(kept, first_row, work_tile.keys_at(j));
#pragma unroll
            for (int i = 0; i < (DROPOUT ? BLOCK_N / 2 : 0); ++i)
                if (!kept[i / 8].keep(i / 4 % 2 * 2 + i / 2 % 2, i % 2)) S[i] = 0.0f;
        };
        const auto pack_P = [&](unsigned (&P)[BLOCK_N / 32][4], const float (&S)[BLOCK_N / 2]) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) {
                const float* s = S + i / 2 * 8 + i % 2 * 2;  // of blocks 2 k and 2 k + 1, of row g or g + 8
                P[i / 4][i % 4] = pack4<dtype_v>(s[0], s[1], s[4], s[5]);
            }
        };
        const auto mma_PV = [&](const unsigned (&P)[BLOCK_N / 32][4], int j, bool accumulate) {
            const Descriptor Vt_smem = Transposed::k_major(address(base + VT_AT + stage_of(pipe_index + j) * VT_BYTES));
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < BLOCK_N / 32; ++step)
                wgmma8<dtype_v>(softmax.O, P[step], Vt_smem + Transposed::k_step(step), step > 0 || accumulate);
            wgmma_commit();
        };
        const auto wait_PV = [&] {
            TIMELINE(wait_PV);
            wgmma_wait<0>();
            TIMELINE(multiply);
            warpgroup_fence_operand(softmax.O);
        };
        // Of a block, O put away; and from gridDim.x on, its part of a piece.
        const auto slot_of = [&](unsigned block) {
            return reinterpret_cast<float4*>(partials) + gridDim.x + block * (SoftmaxState::VECTORS * SoftmaxState::STRIDE) + threadIdx.x - 128;
        };
        float4* const slot = slot_of(blockIdx.x);
        const auto warp_scheduler_barrier_sync = [&] { if (PING_PONG) named_barrier_sync(scheduler_barrier, 256); };
        const auto warp_scheduler_barrier_arrive = [&] { if (PING_PONG) named_barrier_arrive(next_scheduler_barrier, 256); };
        const auto skip_tile = [&](int j) {  // a tile that only the other consumers see
            warp_scheduler_barrier_sync();
            warp_scheduler_barrier_arrive();
            wait(FULL_K, j);
            release(EMPTY_K, j);
            wait(FULL_VT, j);
            release(EMPTY_VT, j);
        };

        if (m0 >= min(head.Sq, work_tile.end)) {  // none of the piece's rows are the warpgroup's
            if (lane == 0) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
#pragma unroll 1
            for (int j = 0; j < work_tile.tiles; ++j) skip_tile(j);
            pipe_index = pipe_index + work_tile.tiles ^ 1u << 31;
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < first_own; ++j) skip_tile(j);
        if (tiles > 0) {
            const int last = first_own + tiles - 1;
            float S[BLOCK_N / 2];
            unsigned P[BLOCK_N / 32][4];
            const auto finish_S = [&](int j) {  // S, which is under way, is there
                TIMELINE(wait_S);
                wgmma_wait<0>();
                TIMELINE(softmax);
                warpgroup_fence_operand(S);
                release(EMPTY_K, j);
                if (j == last && lane == 0) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);  // all of the piece's Q K^T
                mask(S, j);
            };
            const auto convert_P = [&](int j) {  // S does
                apply_dropout(S, j);
                pack_P(P, S);
            };
            wait(FULL_K, first_own);
            mma_QK(S, first_own);
            finish_S(first_own);
            float unused_alpha[2];  // is summed up yet
            softmax.rescale(S, exponent, unused_alpha);
            float sums[2][2];
            softmax.exponentiate(S, exponent, sums);
            softmax.add(sums);
            convert_P(first_own);
            unsigned V_full = 0, K_full = 0;  // what is asked ahead, beside exponentials
#pragma unroll 1
            for (int j = first_own; j < last; ++j) {
                const int tiles_in_O = (j - first_own) % SPLIT_TILES;  // tiles, in O
                if (tiles_in_O == 0 && j > first_own) {
                    if (j - first_own > SPLIT_TILES) softmax.load_partial_O(slot, exponent);
                    softmax.store_partial_O(slot);
                }
                TIMELINE(wait_V);
                wait(FULL_VT, j, V_full);
                TIMELINE(wait_barrier);
                warp_scheduler_barrier_sync();
                TIMELINE(multiply);
                mma_PV(P, j, tiles_in_O > 0);
                TIMELINE(wait_K);
                wait(FULL_K, j + 1, K_full);
                wait_PV();
                wgmma_discard(S);
                mma_QK(S, j + 1);
                warp_scheduler_barrier_arrive();
                release(EMPTY_VT, j);
                finish_S(j + 1);
                if (!CHECK_SUMS && softmax.scores_too_large(S, exponent)) softmax.rescale(S, exponent);
                V_full = is_full(FULL_VT, j + 1), K_full = is_full(FULL_K, j + 2);
                softmax.exponentiate(S, exponent, sums);
                if (CHECK_SUMS && softmax.sums_too_large(sums)) softmax.rescale_after_exp(S, sums, exponent);
                softmax.add(sums);
                convert_P(j + 1);
            }
            wait(FULL_VT, last);
            warp_scheduler_barrier_sync();
            mma_PV(P, last, last > first_own);
            wait_PV();
            warp_scheduler_barrier_arrive();
            release(EMPTY_VT, last);
            if (last - first_own > SPLIT_TILES) softmax.load_partial_O(slot, exponent);
        }
        if (tiles <= 0 && lane == 0) mbarrier_arrive(base + EMPTY_Q + 8 * consumer);
#pragma unroll 1
        for (int j = first_own + max(tiles, 0); j < work_tile.tiles; ++j) skip_tile(j);
        const TileInfo epilogue_info = tile_info(smem, consumer, pipe_index >> 31);  // not kept in registers since the beginning
        pipe_index = pipe_index + work_tile.tiles ^ 1u << 31;
        unsigned* const counters = reinterpret_cast<unsigned*>(partials);
        if (STREAM_K && epilogue_info.continued) {
            softmax.store_partial_O(slot_of(gridDim.x + blockIdx.x), softmax.l[0], softmax.l[1]);
            named_barrier_sync(consumer_barrier, 128);
            if (warp % 4 == 0 && lane == 0) counter_arrive(counters + 4 * blockIdx.x + consumer);
            continue;
        }
        if (STREAM_K && epilogue_info.split.begin > 0) {
            float lane_max[2] = {softmax.m[0], softmax.m[1]};
#pragma unroll 1
            for (unsigned block = epilogue_info.first; block < blockIdx.x; ++block) {
                counter_wait(counters + 4 * block + consumer, 1);
                const float4 stored = slot_of(gridDim.x + block)[(SoftmaxState::VECTORS - 1) * SoftmaxState::STRIDE];
                lane_max[0] = fmaxf(lane_max[0], stored.x), lane_max[1] = fmaxf(lane_max[1], stored.y);
            }
            softmax.rescale_to(lane_max, exponent);
#pragma unroll 1
            for (unsigned block = epilogue_info.first; block < blockIdx.x; ++block) softmax.load_partial_O(slot_of(gridDim.x + block), exponent);
        }

        const Head scaled(score, epilogue_info.b, epilogue_info.h);
        // A masked key's P is 0, but 0 * NaN brings its value to rows that do not see it. Seldom, and then worth the time. So are large scores.
        if (named_barrier_or(consumer_barrier, 128, !softmax.finite() || softmax.large(scaled.unit * Head::LOG2E))) {
            attend_non_finite<64, 4>(Q, K, V, O, LSE, group, score, epilogue_info.b, epilogue_info.h, H, m0, warp % 4);
            continue;
        }
        const int thread = thread_index_x() - 128, row = epilogue_info.m0 + thread / 32 * 16 + thread % 32 / 4;  // likewise
        const float sum[2] = {row_sum<4>(softmax.l[0]), row_sum<4>(softmax.l[1])};
        float* const lse = LSE + scaled.lse_offset(H, epilogue_info.h) + row;
        dtype_o* const dst = scaled.query(O, epilogue_info.h, row) + 4 * q;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const FinalizedRow final_row = scaled.finalize<!NATURAL, APPROXIMATE>(softmax.m[half], sum[half] * (1.0f / P_MAX));
            const float inverse = final_row.inverse * (1.0f / P_MAX);
            if (row + 8 * half >= scaled.Sq) continue;
            if (q == 0) lse[8 * half] = final_row.lse;
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 16; ++i) {  // even columns of each 16 in one block of 8, odd ones in the next
                const float* o = softmax.O + 8 * i + 2 * half;
                store4(dst + 8 * half * O.stride_s + 16 * i, o[0] * inverse, o[4] * inverse, o[1] * inverse, o[5] * inverse);
            }
        }
    }
    TIMELINE(done);
}
