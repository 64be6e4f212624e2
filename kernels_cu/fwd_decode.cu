// Rung 3 for decoding: few queries and many keys (split-KV, as FlashDecoding; sm_80 and later). The time is the time to read K and V.
//
// The query heads of a group are rows of one tile (packed GQA): row r is query r / group, head r % group, so that each key is read once
// for the whole group. The keys of a row tile are split among blocks, and a block's keys among its warps. Each warp has its own
// pipeline of STAGES stages, filled by cp.async: no block barrier between tiles, and STAGES - 1 tiles per warp are always being loaded.
//
// clang-format off
//   split 0                            split 1
//   warp 0  keys   0 .. 15, 64 .. 79,  ...        each warp: S = Q K^T, P, O += P V of all BLOCK_M rows, with its own m and l
//   warp 1  keys  16 .. 31, 80 .. 95,  ...        combined in a fixed order: the warps of a block through shared memory, then the
//   ...                                           splits through `partials` by fwd_decode_combine
//
//   cluster: 2 or 4 blocks of a split; each combines a part of the columns, which the other blocks write to its shared memory (DSMEM)
//
//   shared memory: Q [BLOCK_M][D_PAD] | m, l [WARPS][BLOCK_M][2] | warp 0: stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD],
//   stage 1, ... | warp 1 ...         (at the end O [BLOCK_M][DV_PAD + 8] in fp32 in a warp's stages) | DSMEM: O, m, l of each rank
// clang-format on
//
// A key tile is in one page; the address of the next tile is read while the current one is loaded. Rescaling is deferred as in fwd_mma.
// The tensor cores are mostly idle: Q stays in shared memory to save registers.
//
// float8: a tile of the same size in bytes has twice as many keys. S is an 8-bit MMA. V is converted to fp16 after the load from shared
// memory, so that P needs to be rounded to fp16 only.
//
// Measured (H200): B1 H32/8 Sk2048 takes 11 … 12 us, of which reading 8 MiB takes 8. The combine kernel loads all partial results of a
// row at once (4.5 us less) and starts early (0.9 us less). A cluster of two saves the combine kernel, 2 … 4 us, if it makes one wave.
#include "mma_smem.cuh"
#include "split_kv.cuh"
#include "cluster.cuh"
#if FLOAT8
#include "fp8.cuh"
#endif

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / 16;
constexpr int ELEMENT_BYTES = sizeof(dtype), CHUNK = 16 / ELEMENT_BYTES;  // bytes per element of Q, K and V; elements per 16 bytes
constexpr int STEP_D = 2 * CHUNK;                     // columns per MMA step of S, and per fragment of V
constexpr int D_PAD = (HEAD_DIM + STEP_D - 1) / STEP_D * STEP_D, DV_PAD = (HEAD_DIM_V + STEP_D - 1) / STEP_D * STEP_D;  // padding: zeros
using Tile = Swizzled<D_PAD * ELEMENT_BYTES / 2>;  // rows of Q and K; float8: of pairs
using VTile = Swizzled<DV_PAD * ELEMENT_BYTES / 2>;
using QKOffsets = FragmentOffsets<D_PAD * ELEMENT_BYTES / 2>;
using VOffsets = FragmentOffsets<DV_PAD * ELEMENT_BYTES / 2>;
constexpr unsigned K_BYTES = BLOCK_N * Tile::ROW, STAGE = K_BYTES + BLOCK_N * VTile::ROW;
constexpr unsigned O_PITCH = DV_PAD + 8, O_BYTES = BLOCK_M * O_PITCH * 4;  // padded: four rows are in different banks
constexpr unsigned RING = STAGES * STAGE > O_BYTES ? STAGES * STAGE : O_BYTES;
constexpr unsigned SUMS_AT = BLOCK_M * Tile::ROW, RINGS_AT = SUMS_AT + WARPS * BLOCK_M * 8, DSMEM_AT = RINGS_AT + WARPS * RING;
constexpr int RANK_QUADS = (HEAD_DIM_V / 4 + CLUSTER - 1) / CLUSTER;  // groups of four columns of O that a block of a cluster combines
constexpr unsigned DSMEM_BYTES = CLUSTER == 1 ? 0 : CLUSTER * BLOCK_M * (16 * RANK_QUADS + 8);
constexpr float RESCALE_THRESHOLD = 8.0f;
static_assert(BLOCK_M == 16 * M_TILES && BLOCK_N % 16 == 0 && STAGES >= 2, "a tile consists of whole MMA steps");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a key tile is in one page");
static_assert(SMEM_BYTES == DSMEM_AT + DSMEM_BYTES, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % CHUNK == 0 && HEAD_DIM_V % CHUNK == 0, "rows are copied in 16-byte chunks");

// Query i and head h of a row of the packed tile.
struct PackedRow {
    int i, h;
    __device__ __forceinline__ PackedRow(int row, int kv_head, int group) : i(row / group), h(kv_head * group + row % group) {}
};

struct SoftmaxState {  // of one warp, all rows; a lane has rows g and g + 8 of each 16-row tile
    float O[M_TILES][DV_PAD / 8][4] = {};
    float m[M_TILES][2], l[M_TILES][2] = {};  // m: maximum of raw scores; l: sum over this lane's columns
    bool large = false;                       // Head::is_large of some m of the warp: then m is updated in every step
    __device__ __forceinline__ SoftmaxState() {
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; ++i) m[i / 2][i % 2] = -INF;
    }
    __device__ __forceinline__ bool finite() const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < M_TILES * DV_PAD / 2; ++i) zero = fmaf(O[i / (DV_PAD / 2)][i % (DV_PAD / 2) / 4][i % 4], 0.0f, zero);
        return zero == 0.0f;
    }
};

// An MMA step of S; conversion of P to an operand; O += P V for a fragment of V, 16 keys and STEP_D columns. float8: V is converted
// to fp16, which is exact, and P is rounded to fp16; an accumulator of O has the even columns of 16, the next one the odd columns.
#if FLOAT8
__device__ __forceinline__ void add_scores(float (&S)[4], const unsigned (&Q)[4], unsigned k0, unsigned k1) {
    mma_m16n8k32<dtype>(S, Q, k0, k1);
}
__device__ __forceinline__ unsigned pack_P(float low, float high) { return pack_halves(low, high); }
__device__ __forceinline__ void add_values(float (*O)[4], const unsigned (&P)[4], const unsigned (&V)[4]) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        unsigned even[2], odd[2];
        columns_as_halves<dtype_v>(V[2 * block], even[0], odd[0]);
        columns_as_halves<dtype_v>(V[2 * block + 1], even[1], odd[1]);
        mma_m16n8k16(O[2 * block], P, even[0], even[1]);
        mma_m16n8k16(O[2 * block + 1], P, odd[0], odd[1]);
    }
}
#else
__device__ __forceinline__ void add_scores(float (&S)[4], const unsigned (&Q)[4], unsigned k0, unsigned k1) { mma_m16n8k16(S, Q, k0, k1); }
__device__ __forceinline__ unsigned pack_P(float low, float high) { return pack(low, high); }
__device__ __forceinline__ void add_values(float (*O)[4], const unsigned (&P)[4], const unsigned (&V)[4]) {
    mma_m16n8k16(O[0], P, V[0], V[1]);
    mma_m16n8k16(O[1], P, V[2], V[3]);
}
#endif

// Updates m with the row maxima tile_max, and rescales O and l. In rows whose m is large, S becomes S - m.
__device__ __forceinline__ void rescale(SoftmaxState& state, float (&S)[M_TILES][BLOCK_N / 8][4], float (&tile_max)[M_TILES][2],
                                              const float (&exponents)[M_TILES][2]) {
    bool large = false;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const int mt = i / 2, half = i % 2;
        const float m_new = fmaxf(state.m[mt][half], row_max<4>(tile_max[mt][half]));
        const float alpha = rescale_factor(state.m[mt][half], m_new, exponents[mt][half]);
        state.m[mt][half] = m_new;
        large |= Head::is_large(m_new, exponents[mt][half]);
        state.l[mt][half] *= alpha;
#pragma unroll
        for (int nt = 0; nt < DV_PAD / 8; ++nt) {
            state.O[mt][nt][2 * half] *= alpha;
            state.O[mt][nt][2 * half + 1] *= alpha;
        }
    }
    state.large = __any_sync(0xffffffffu, large);
    if (!state.large) return;
#pragma unroll
    for (int i = 0; i < M_TILES * BLOCK_N / 2; ++i) {
        const int mt = i / (BLOCK_N / 2), half = i / 2 % 2;
        const float m = state.m[mt][half];
        if (Head::is_large(m, exponents[mt][half])) S[mt][i / 4 % (BLOCK_N / 8)][i % 4] -= m;
    }
}

// Issues cp.async for a tile of BLOCK_N rows of K or V with the lanes of a warp; rows >= `left` are filled with zeros. Fewer
// instructions than cp_async_tile: the instruction cache misses of a new block delay its first loads.
template <class TileRows, int WIDTH, class T>
__device__ __forceinline__ void load_rows(SmemAddr tile, const T* from, long long stride, int valid_rows, unsigned lane) {
    constexpr unsigned STEP = 32 / TileRows::CHUNKS, ACTIVE = STEP * TileRows::CHUNKS;
    const unsigned row0 = lane / TileRows::CHUNKS, chunk = lane % TileRows::CHUNKS;
    if (ACTIVE < 32 && lane >= ACTIVE) return;
    const int rows = chunk * CHUNK < WIDTH ? valid_rows - static_cast<int>(row0) : 0;
    from += row0 * stride + chunk * CHUNK;
#pragma unroll
    for (unsigned i = 0; i < (BLOCK_N + STEP - 1) / STEP; ++i, from += STEP * stride)
        if (BLOCK_N % STEP == 0 || row0 + i * STEP < BLOCK_N)
            cp_async_16(tile + TileRows::at(row0 + i * STEP, chunk), from, static_cast<int>(i * STEP) < rows);
}

// The key tile from n0, in `stage`. masked: it may have hidden scores.
__device__ __forceinline__ void process_tile(SoftmaxState& state, const SeqlenInfo& seqlen, int row0, int kv_head, int group, int n0, bool masked,
                                       SmemAddr Q_smem, SmemAddr stage, const QKOffsets& q_offsets, const QKOffsets& k_offsets,
                                       const VOffsets& v_offsets) {
    const float unit = Head::unit_of(seqlen.score), exponent = unit * Head::LOG2E, margin = RESCALE_THRESHOLD / exponent;
    float exponents[M_TILES][2];  // unit * log2(e) of each row; differs only with per-head descale
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float S[M_TILES][BLOCK_N / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D_PAD / STEP_D; ++step) {
        unsigned Q[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) ldmatrix_x4(Q[mt], Q_smem + q_offsets(16 * mt, step));
#pragma unroll
        for (int nt = 0; nt < BLOCK_N / 16; ++nt) {
            unsigned K[4];
            ldmatrix_x4(K, stage + k_offsets(16 * nt, step));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                add_scores(S[mt][2 * nt], Q[mt], K[0], K[1]);
                add_scores(S[mt][2 * nt + 1], Q[mt], K[2], K[3]);
            }
        }
    }

    float tile_max[M_TILES][2];
    bool exceeds = state.large;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PackedRow row(row0 + 16 * mt + 8 * half + g, kv_head, group);
            const Head head(seqlen, row.h);
            exponents[mt][half] = DESCALE % 4 ? head.unit * Head::LOG2E : exponent;
            tile_max[mt][half] = -INF;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 4; ++i) {
                float& s = S[mt][i / 2][2 * half + i % 2];
                const ScoreIndex at(row.i, n0 + 2 * q, 0, i / 2 * 8 + i % 2);
                s = head.raw(s, at);
                if (masked && !head.visible(at.query_row(), at.key_col())) s = -INF;
                tile_max[mt][half] = fmaxf(tile_max[mt][half], s);
            }
            exceeds |= tile_max[mt][half] > state.m[mt][half] + (DESCALE % 4 ? RESCALE_THRESHOLD / exponents[mt][half] : margin);
        }
    }
    if (__any_sync(0xffffffffu, exceeds)) rescale(state, S, tile_max, exponents);

    unsigned P[M_TILES][BLOCK_N / 16][4];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PackedRow row(row0 + 16 * mt + 8 * half + g, kv_head, group);
            const Head head(seqlen, row.h);
            const float exponent = exponents[mt][half], scaled_m = -state.m[mt][half] * exponent;
            const float shift = fabsf(scaled_m) > Head::LARGE ? 0.0f : scaled_m;  // no visible key: P = 0; large: S is S - m
#pragma unroll
            for (int nt = 0; nt < BLOCK_N / 8; ++nt) {
                float p[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    p[i] = ex2(fmaf(S[mt][nt][2 * half + i], exponent, shift));
                    state.l[mt][half] += p[i];
                    if (!head.keep(row.i, n0 + 8 * nt + 2 * q + i)) p[i] = 0.0f;
                }
                P[mt][nt / 2][nt % 2 * 2 + half] = pack_P(p[0], p[1]);
            }
        }
    }

#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
        for (int dt = 0; dt < DV_PAD / STEP_D; ++dt) {
            unsigned V[4];
            ldmatrix_x4_trans(V, stage + K_BYTES + v_offsets(16 * step, dt));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) add_values(&state.O[mt][STEP_D / 8 * dt], P[mt][step], V);
        }
    }
}

// Stores the warp's results in shared memory: O [BLOCK_M][O_PITCH], m and l.
__device__ __forceinline__ void store_warp_result(const SoftmaxState& state, float* O_smem, float2* sums) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * mt + 8 * half + g;
            const float l = row_sum<4>(state.l[mt][half]);
            if (q == 0) sums[row] = make_float2(state.m[mt][half], l);
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                const float low = state.O[mt][nt][2 * half], high = state.O[mt][nt][2 * half + 1];
                float* const to = O_smem + row * O_PITCH;
                if (FLOAT8) to[nt / 2 * 16 + 4 * q + nt % 2] = low, to[nt / 2 * 16 + 4 * q + nt % 2 + 2] = high;
                else *reinterpret_cast<float2*>(to + 8 * nt + 2 * q) = make_float2(low, high);
            }
        }
    }
}

// The non-finite fallback (non_finite.cuh): computes the warp's results again from visible keys only, row by row. Key tiles `first`,
// `first` + WARPS, ... before `end`.
__device__ __noinline__ void store_partial_non_finite(const View<const dtype>& Q, const View<const dtype>& K, const View<const dtype_v>& V,
                                              const Score& score, int b, int row0, int kv_head, int group, int first, int end,
                                              float* O_smem, float2* sums) {
    const SeqlenInfo seqlen(score, b);
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < BLOCK_M; ++r) {
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(seqlen, row.h);
        const float exponent = head.unit * Head::LOG2E;
        float* const O = O_smem + r * O_PITCH;
        float m = -INF, l = 0.0f;
        for (int d = lane; d < HEAD_DIM_V; d += 32) O[d] = 0.0f;
        for (int n = 0; row.i < head.Sq && first + n / BLOCK_N * WARPS < end; ++n) {
            const int j = (first + n / BLOCK_N * WARPS) * BLOCK_N + n % BLOCK_N;
            if (!head.visible(row.i, j)) continue;
            float dot = 0.0f;
            for (int d = lane; d < HEAD_DIM; d += 32)
                dot += to_float(head.query(Q, row.h, row.i)[d]) * to_float(head.key(K, kv_head, j)[d]);
            const float s = head.raw(row_sum<32>(dot), ScoreIndex(row.i, j)), m_new = fmaxf(m, s);
            const float alpha = rescale_factor(m, m_new, exponent), p = ex2((s - (m_new == -INF ? 0.0f : m_new)) * exponent);
            const float kept = head.keep(row.i, j) ? p : 0.0f;
            for (int d = lane; d < HEAD_DIM_V; d += 32) O[d] = alpha * O[d] + kept * to_float(head.key(V, kv_head, j)[d]);
            l = alpha * l + p;
            m = m_new;
        }
        if (lane == 0) sums[r] = make_float2(m, l);
    }
}

// Stores columns 4 quad .. 4 quad + 3 of a row of O, and for quad 0 its LSE. number: the row's index in LSE.
__device__ __forceinline__ void store_row(const View<dtype_o>& O, float* LSE, const Head& head, int h, int i, long long number, int quad,
                                    const CombinedRow& sum) {
    constexpr bool WIDE = sizeof(dtype_o) == 4;  // fp32 output of float8 inputs
    const FinalizedRow final_row = head.finalize(sum.m, sum.l);
    const float4 o = make_float4(sum.O.x * final_row.inverse, sum.O.y * final_row.inverse, sum.O.z * final_row.inverse, sum.O.w * final_row.inverse);
    dtype_o* const to = head.query(O, h, i) + 4 * quad;
    if (WIDE) *reinterpret_cast<float4*>(to) = o;
    else *reinterpret_cast<uint2*>(to) = make_uint2(pack(o.x, o.y), pack(o.z, o.w));
    if (quad == 0) LSE[number] = final_row.lse;
}

// Windows with a left bound and float8 spill 4 bytes with ptxas's own register limit: one block per SM raises it.
extern "C" __global__ __launch_bounds__(THREADS, Head::FIRST || FLOAT8 ? 1 : 0) void fwd_decode(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,    // (B, Hk, Sk, HEAD_DIM), or (pages, Hk, PAGE_SIZE, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // the same with HEAD_DIM_V columns
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    float* partials,                                // Partials of split_kv.cuh; not used with one split
    int H,
    int group,                                      // H / Hk
    int splits,                                     // per row tile and batch entry; with DYNAMIC_SPLITS a target for the sum over entries
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    griddepcontrol_launch_dependents();
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y, z = blockIdx.z;
    const Split split = DYNAMIC_SPLITS ? SplitScheduler(score, gridDim.z - splits, splits).block(z) : Split{z / splits, z % splits, splits, z / splits * splits};
    if (DYNAMIC_SPLITS && split.invalid()) return;
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x / CLUSTER, split.b, group);
    if (RAGGED && tile.invalid()) return;
    cluster_arrive();
    const SeqlenInfo seqlen(score, tile.b);
    const int row0 = tile.row0, rows_end = min(row0 + BLOCK_M, seqlen.Sq * group);  // of packed rows
    const int i0 = row0 / group, i1 = (rows_end - 1) / group + 1;                     // their queries

    // The visible key tiles are divided evenly among the blocks of all splits; the warps of a block take turns.
    const Head head0(seqlen, kv_head * group);
    const Range keys = head0.keys(i0, i1), visible_to_all = head0.fully_visible_keys(i0, i1);
    const int begin = keys.begin / BLOCK_N, key_tiles = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
    const int blocks = split.splits * CLUSTER, tiles_per_block = (key_tiles + blocks - 1) / blocks;
    const int begin_of_block = min((split.split * CLUSTER + static_cast<int>(cluster_cta_rank())) * tiles_per_block, key_tiles);
    const int end = begin + min(begin_of_block + tiles_per_block, key_tiles), first = begin + begin_of_block + warp;

    const SmemAddr Q_smem = smem_address(smem);
    char* const ring = smem + RINGS_AT + warp * RING;
    const SmemAddr stages = smem_address(ring), stages_end = stages + STAGES * STAGE;
    const auto next_stage = [&](SmemAddr stage) { return stage + STAGE == stages_end ? stages : stage + STAGE; };
    KeyAddress next = {};  // of the next tile to load
    const auto update_address = [&](int j) {
        if (j < end) next = seqlen.key_address(j * BLOCK_N);
    };
    SmemAddr write_stage = stages, read_stage = stages;  // the next stages to load and to read
    const auto load_tile = [&](int j) {
        if (j < end) {
            const int valid_rows = seqlen.Sk - j * BLOCK_N;
            load_rows<Tile, HEAD_DIM>(write_stage, K.row(next.entry, kv_head, next.row), K.stride_s, valid_rows, lane);
            load_rows<VTile, HEAD_DIM_V>(write_stage + K_BYTES, V.row(next.entry, kv_head, next.row), V.stride_s, valid_rows, lane);
        }
        cp_async_commit();
        write_stage = next_stage(write_stage);
        update_address(j + WARPS);
    };

    // Load Q with all threads, 16 bytes each.
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_M * static_cast<int>(Tile::CHUNKS); i += THREADS) {
        const int r = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
        const bool there = row0 + r < rows_end && chunk * CHUNK < HEAD_DIM;
        const PackedRow row(there ? row0 + r : row0, kv_head, group);
        cp_async_16(Q_smem + Tile::at(r, chunk), seqlen.query(Q, row.h, row.i) + (there ? chunk * CHUNK : 0), there);
    }
    cp_async_commit();
    update_address(first);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) load_tile(first + stage * WARPS);
    cp_async_wait<STAGES - 1>();
    __syncthreads();  // Q is complete

    const QKOffsets q_offsets(lane % 16, lane / 16), k_offsets(lane / 16 * 8 + lane % 8, lane / 8 % 2);  // as in fwd_mma
    const VOffsets v_offsets(lane % 16, lane / 16);
    SoftmaxState state;
#pragma unroll 1
    for (int j = first; j < end; j += WARPS, read_stage = next_stage(read_stage)) {
        load_tile(j + (STAGES - 1) * WARPS);
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // all lanes' loads of tile j are complete
        const bool masked = j * BLOCK_N < visible_to_all.begin || (j + 1) * BLOCK_N > visible_to_all.end;
        process_tile(state, seqlen, row0, kv_head, group, j * BLOCK_N, masked, Q_smem, read_stage, q_offsets, k_offsets, v_offsets);
        __syncwarp();  // all lanes have read the stage before it is loaded again
    }
    cp_async_wait<0>();

    float2* const sums = reinterpret_cast<float2*>(smem + SUMS_AT);
    float* const O_warp = reinterpret_cast<float*>(ring);
    if (Head::HIDES && __any_sync(0xffffffffu, !state.finite()))
        store_partial_non_finite(Q, K, V, score, tile.b, row0, kv_head, group, first, end, O_warp, sums + warp * BLOCK_M);
    else store_warp_result(state, O_warp, sums + warp * BLOCK_M);
    __syncthreads();  // the results of all warps are in shared memory

    // Combine the warps: a thread combines four columns of a row, or eight if BLOCK_M = 32. In a cluster the result goes to the block
    // that combines these columns.
    constexpr int QUADS = HEAD_DIM_V / 4, QUADS_PER_THREAD = M_TILES > 1 ? 2 : 1;
    float4* const O_dsmem = reinterpret_cast<float4*>(smem + DSMEM_AT);                          // [CLUSTER][BLOCK_M][RANK_QUADS]
    float2* const sums_dsmem = reinterpret_cast<float2*>(O_dsmem + CLUSTER * BLOCK_M * RANK_QUADS);  // [CLUSTER][BLOCK_M]
    const int valid_rows = rows_end - row0, rank = cluster_cta_rank();
    const Partials parts(partials, gridDim.z, static_cast<long long>(H) * query_rows(score), split);
    const auto store_combined = [&](const PackedRow& row, const Head& head, int quad, const CombinedRow& sum) {
        const long long number = head.lse_offset(H, row.h) + row.i;
        if (split.splits == 1) store_row(O, LSE, head, row.h, row.i, number, quad, sum);
        else parts.store(number, split.split, quad, sum);
    };
    cluster_wait();
#pragma unroll 1
    for (int i = threadIdx.x * QUADS_PER_THREAD; i < valid_rows * QUADS; i += QUADS_PER_THREAD * THREADS) {
        const int r = i / QUADS;
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(seqlen, row.h);
        float2 sums_of_warps[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sums_of_warps[w] = sums[w * BLOCK_M + r];
#pragma unroll
        for (int quad = i % QUADS; quad < i % QUADS + QUADS_PER_THREAD; ++quad) {
            float4 O_of_warps[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                O_of_warps[w] = *reinterpret_cast<const float4*>(smem + RINGS_AT + w * RING + (r * O_PITCH + 4 * quad) * 4);
            CombinedRow sum;
            sum.add(sums_of_warps, O_of_warps, head.unit * Head::LOG2E);
            if (CLUSTER == 1) store_combined(row, head, quad, sum);
            else {
                const int owner = quad / RANK_QUADS, rank_quad = quad - owner * RANK_QUADS, to = rank * BLOCK_M + r;
                map_shared_rank(O_dsmem, owner)[to * RANK_QUADS + rank_quad] = sum.O;
                if (rank_quad == 0) map_shared_rank(sums_dsmem, owner)[to] = make_float2(sum.m, sum.l);
            }
        }
    }
    if (CLUSTER == 1) return;
    cluster_sync();  // the stores of all blocks of the cluster are visible
    const int first_quad = rank * RANK_QUADS, rank_quads = min(QUADS - first_quad, RANK_QUADS);
#pragma unroll 1
    for (int i = threadIdx.x; i < valid_rows * rank_quads; i += THREADS) {
        const int r = i / rank_quads, rank_quad = i % rank_quads;
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(seqlen, row.h);
        float2 sums_of_ranks[CLUSTER];
        float4 O_of_ranks[CLUSTER];
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            sums_of_ranks[m] = sums_dsmem[m * BLOCK_M + r];
            O_of_ranks[m] = O_dsmem[(m * BLOCK_M + r) * RANK_QUADS + rank_quad];
        }
        CombinedRow sum;
        sum.add(sums_of_ranks, O_of_ranks, head.unit * Head::LOG2E);
        store_combined(row, head, first_quad + rank_quad, sum);
    }
}

// Combines the partial results of all splits, one block per row. GROUPS groups of HEAD_DIM_V / 4 threads each merge every
// GROUPS-th split, with LOADS_AHEAD loads in flight; then the first group merges the groups' sums. The order of sums is fixed.
extern "C" __global__ __launch_bounds__(THREADS) void fwd_decode_combine(
    const __grid_constant__ View<dtype_o> O,  // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                               // (B, H, Sq), contiguous
    float* partials,                          // Partials of split_kv.cuh
    int H,
    int splits,
    const __grid_constant__ Score score) {
    constexpr int QUADS = HEAD_DIM_V / 4, GROUPS = THREADS / QUADS, LOADS_AHEAD = 8;
    static_assert(GROUPS >= 1, "one thread per four columns");
    __shared__ float4 O_smem[LOADS_AHEAD][THREADS];  // private to each thread until the groups' sums are merged
    __shared__ float2 sums_smem[GROUPS];
    const int h = blockIdx.y, entry = blockIdx.z, entries = gridDim.z, group = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
    const Split first_split = DYNAMIC_SPLITS ? SplitScheduler(score, entries, splits).first_split(entry) : Split{entry, 0, splits, entry * splits};
    const RowTile tile = query_tile<1>(score, blockIdx.x, entry);
    griddepcontrol_wait();
    if ((RAGGED && tile.invalid()) || (DYNAMIC_SPLITS && first_split.splits == 1)) return;
    const Head head(score, tile.b, h);
    const long long number = head.lse_offset(H, h) + tile.row0;
    const Partials parts(partials, DYNAMIC_SPLITS ? splits + entries : entries * splits, static_cast<long long>(H) * query_rows(score), first_split);
    const float exponent = head.unit * Head::LOG2E;

    CombinedRow group_sum;
    const int splits_end = group < GROUPS ? first_split.splits : 0;
#pragma unroll 1
    for (int first = group; first < splits_end; first += LOADS_AHEAD * GROUPS) {
        float2 sums[LOADS_AHEAD];
        float4 O_part[LOADS_AHEAD];
#pragma unroll
        for (int i = 0; i < LOADS_AHEAD; ++i) {
            const int split = min(first + i * GROUPS, first_split.splits - 1);
            cp_async_16(smem_address(&O_smem[i][threadIdx.x]), parts.O(number, split) + 4 * quad, first + i * GROUPS < first_split.splits);
            sums[i] = *parts.sums(number, split);
            if (first + i * GROUPS >= first_split.splits) sums[i] = make_float2(-INF, 0.0f);
        }
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll
        for (int i = 0; i < LOADS_AHEAD; ++i) O_part[i] = O_smem[i][threadIdx.x];
        group_sum.add(sums, O_part, exponent);
    }
    O_smem[0][threadIdx.x] = group_sum.O;
    if (group < GROUPS && quad == 0) sums_smem[group] = make_float2(group_sum.m, group_sum.l);
    __syncthreads();  // the sums of all groups are in shared memory
    if (group > 0) return;
    CombinedRow sum;
    float2 sums[GROUPS];
    float4 O_part[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) sums[i] = sums_smem[i], O_part[i] = O_smem[0][i * QUADS + quad];
    sum.add(sums, O_part, exponent);
    store_row(O, LSE, head, h, tile.row0, number, quad, sum);
}
