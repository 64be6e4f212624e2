// Rung 3, for decoding: attention of few queries to many keys, where reading K and V once is all there is to do.
//
// The query heads that share a key/value head are rows of one tile ("packed"): row r is query r / group, head r % group of the
// group, so that every key is read once for all of them. The keys of a tile of rows are split over as many blocks as keep the GPU's
// memory busy, and a block's over its warps. Each warp walks key tiles of its own, with its own ring of STAGES in shared memory,
// which cp.async fills: no barrier stands between two tiles, and STAGES - 1 tiles a warp are always on their way.
//
// clang-format off
//   split 0                            split 1
//   warp 0  keys   0 .. 15, 64 .. 79,  ...        each warp: S = Q K^T, P, O += P V of all BLOCK_M rows, m and l of its own
//   warp 1  keys  16 .. 31, 80 .. 95,  ...        in the end: the warps of a block through shared memory, then the blocks
//   ...                                           through `partials`, by the second entry, in order: the same bits every time
//
//   a team: two blocks of a split, or four, each of which finishes some of the columns: in the end the others send it their part of these
//
//   shared memory: Q [BLOCK_M][D_PAD] | m, l [WARPS][BLOCK_M][2] | warp 0: stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD],
//   stage 1, ... | warp 1 ...         (a warp's O [BLOCK_M][DV_PAD + 8], fp32, takes the place of its stages) | a team's inbox
// clang-format on
//
// A tile of keys lies in one page; where the next one begins is looked up while the one before is on its way. m is followed
// lazily, as in fwd_mma. The matrix units are idle most of the time, so that Q stays in shared memory, and registers are few.
//
// Of float8 a tile of as many bytes has twice the keys. S is a product of 8 bits; V becomes halves as it comes out of shared memory, so that
// P is rounded to a half and no more: tensor cores wait for memory in any case.
//
// A user alone waits for latencies, not for memory: B1 H32/8 Sk2048 is 8 MiB, 11 … 12 us, reading alone 8 (H200). What made it of 17: the
// second entry has all parts of a row on their way at once (4.5 us) and begins early (0.9), and 8 splits (0.5). What did not: a merge by the
// last block to arrive (0.5 us more), or by a team of eight (0.5), eight warps a block or four stages (1).
// Many users: a merge costs 2 ... 4 us; a team of two spares them, and its members' sending what they have merged, instead of reading all
// of each other's warps, another 0.9; a team of four, where keys are of different numbers, 0.3 ... 1, and costs 11 ... 39 where all is one
// wave. What did not help: one line of all keys cut into equal stretches (0 ... 5% more), copies with L2's evict_first (4 ... 5%) or by TMA
// (5 ... 7% where maps promote 256 bytes in L2, as ours did; else nothing), keys requested before it is known how many there are (1 us), the
// next block's keys fetched into L2 while one merges (1 ... 5%), blocks that stay (1% less at B64 Sq4 Sk8192, 2% more at B32 Sk4096).
#include "mma_smem.cuh"
#include "split_kv.cuh"
#include "cluster.cuh"
#if FLOAT8
#include "fp8.cuh"
#endif

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / 16;
constexpr int ITEM = sizeof(dtype), CHUNK = 16 / ITEM;  // bytes of an element of Q, K and V; elements of a chunk
constexpr int STEP_D = 2 * CHUNK;                      // columns of an MMA step of S, and of a fragment of V
constexpr int D_PAD = (HEAD_DIM + STEP_D - 1) / STEP_D * STEP_D, DV_PAD = (HEAD_DIM_V + STEP_D - 1) / STEP_D * STEP_D;  // beyond: zeros
using Tile = Swizzled<D_PAD * ITEM / 2>;  // rows of Q and K; of float8, in pairs
using VTile = Swizzled<DV_PAD * ITEM / 2>;
using Place = FragmentOffsets<D_PAD * ITEM / 2>;
using VPlace = FragmentOffsets<DV_PAD * ITEM / 2>;
constexpr unsigned K_BYTES = BLOCK_N * Tile::ROW, STAGE = K_BYTES + BLOCK_N * VTile::ROW;
constexpr unsigned O_PITCH = DV_PAD + 8, O_BYTES = BLOCK_M * O_PITCH * 4;  // 8 more: four rows in different banks
constexpr unsigned RING = STAGES * STAGE > O_BYTES ? STAGES * STAGE : O_BYTES;
constexpr unsigned SUMS_AT = BLOCK_M * Tile::ROW, RINGS_AT = SUMS_AT + WARPS * BLOCK_M * 8, DSMEM_AT = RINGS_AT + WARPS * RING;
constexpr int OWN_QUADS = (HEAD_DIM_V / 4 + CLUSTER - 1) / CLUSTER;  // four columns each, of O, that a member of a team finishes
constexpr unsigned DSMEM_BYTES = CLUSTER == 1 ? 0 : CLUSTER * BLOCK_M * (16 * OWN_QUADS + 8);
constexpr float RESCALE_THRESHOLD = 8.0f;
static_assert(BLOCK_M == 16 * M_TILES && BLOCK_N % 16 == 0 && STAGES >= 2, "a tile of whole MMA steps");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a tile of keys lies in one page");
static_assert(SMEM_BYTES == DSMEM_AT + DSMEM_BYTES, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % CHUNK == 0 && HEAD_DIM_V % CHUNK == 0, "rows are copied in 16-byte chunks");

// A row of the packed tile: query i, head h.
struct PackedRow {
    int i, h;
    __device__ __forceinline__ PackedRow(int row, int kv_head, int group) : i(row / group), h(kv_head * group + row % group) {}
};

struct Rows {  // what a warp keeps of all rows; a lane holds rows g and g + 8 of each 16-row tile
    float O[M_TILES][DV_PAD / 8][4] = {};
    float m[M_TILES][2], l[M_TILES][2] = {};  // m: a raw score; l: this lane's part of the sum
    bool large = false;                       // whether some m of the warp is large: then m is raised at every step
    __device__ __forceinline__ Rows() {
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

// An MMA step of S; P as it is multiplied by V; and what a fragment of V, of 16 keys and STEP_D columns, adds to O. Of float8 V becomes
// halves, exactly, as it comes out of shared memory, and P halves: an accumulator of O has the even columns of 16, the next the odd ones.
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

// Moves m up to the row maxima `top` and rescales what was accumulated under the old one. Where m is large, S becomes S - m.
__device__ __forceinline__ void rescale(Rows& rows, float (&S)[M_TILES][BLOCK_N / 8][4], float (&top)[M_TILES][2],
                                              const float (&exponents)[M_TILES][2]) {
    bool large = false;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const int mt = i / 2, half = i % 2;
        const float m_new = fmaxf(rows.m[mt][half], row_max<4>(top[mt][half]));
        const float alpha = share(rows.m[mt][half], m_new, exponents[mt][half]);
        rows.m[mt][half] = m_new;
        large |= Head::is_large(m_new, exponents[mt][half]);
        rows.l[mt][half] *= alpha;
#pragma unroll
        for (int nt = 0; nt < DV_PAD / 8; ++nt) {
            rows.O[mt][nt][2 * half] *= alpha;
            rows.O[mt][nt][2 * half + 1] *= alpha;
        }
    }
    rows.large = __any_sync(0xffffffffu, large);
    if (!rows.large) return;
#pragma unroll
    for (int i = 0; i < M_TILES * BLOCK_N / 2; ++i) {
        const int mt = i / (BLOCK_N / 2), half = i / 2 % 2;
        const float m = rows.m[mt][half];
        if (Head::is_large(m, exponents[mt][half])) S[mt][i / 4 % (BLOCK_N / 8)][i % 4] -= m;
    }
}

// Requests the BLOCK_N rows of a tile of keys, or values, from `from` on, by the lanes of a warp; rows from `left` on become zeros. Shorter than
// `cp_async_tile`, which asks twice: before a block's first keys arrive its instructions have to.
template <class Rows, int WIDTH, class T>
__device__ __forceinline__ void request_rows(SmemAddr tile, const T* from, long long stride, int left, unsigned lane) {
    constexpr unsigned STEP = 32 / Rows::CHUNKS, COPIERS = STEP * Rows::CHUNKS;
    const unsigned row0 = lane / Rows::CHUNKS, chunk = lane % Rows::CHUNKS;
    if (COPIERS < 32 && lane >= COPIERS) return;
    const int rows = chunk * CHUNK < WIDTH ? left - static_cast<int>(row0) : 0;
    from += row0 * stride + chunk * CHUNK;
#pragma unroll
    for (unsigned i = 0; i < (BLOCK_N + STEP - 1) / STEP; ++i, from += STEP * stride)
        if (BLOCK_N % STEP == 0 || row0 + i * STEP < BLOCK_N)
            cp_async_16(tile + Rows::at(row0 + i * STEP, chunk), from, static_cast<int>(i * STEP) < rows);
}

// One tile of keys, from n0 on, that lies in `stage`. `masked`: some row may not see all of it.
__device__ __forceinline__ void attend(Rows& rows, const SeqlenInfo& sequence, int row0, int kv_head, int group, int n0, bool masked,
                                       SmemAddr Q_smem, SmemAddr stage, const Place& place, const Place& key_address,
                                       const VPlace& value_place) {
    const float unit = Head::unit_of(sequence.score), exponent = unit * Head::LOG2E, margin = RESCALE_THRESHOLD / exponent;
    float exponents[M_TILES][2];  // of scores; the same for all rows, unless each head of float8 has numbers of its own
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float S[M_TILES][BLOCK_N / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D_PAD / STEP_D; ++step) {
        unsigned Q[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) ldmatrix_x4(Q[mt], Q_smem + place(16 * mt, step));
#pragma unroll
        for (int nt = 0; nt < BLOCK_N / 16; ++nt) {
            unsigned K[4];
            ldmatrix_x4(K, stage + key_address(16 * nt, step));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                add_scores(S[mt][2 * nt], Q[mt], K[0], K[1]);
                add_scores(S[mt][2 * nt + 1], Q[mt], K[2], K[3]);
            }
        }
    }

    float top[M_TILES][2];
    bool exceeds = rows.large;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PackedRow row(row0 + 16 * mt + 8 * half + g, kv_head, group);
            const Head head(sequence, row.h);
            exponents[mt][half] = DESCALE % 4 ? head.unit * Head::LOG2E : exponent;
            top[mt][half] = -INF;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 4; ++i) {
                float& s = S[mt][i / 2][2 * half + i % 2];
                const ScoreIndex at(row.i, n0 + 2 * q, 0, i / 2 * 8 + i % 2);
                s = head.raw(s, at);
                if (masked && !head.visible(at.query_row(), at.key_col())) s = -INF;
                top[mt][half] = fmaxf(top[mt][half], s);
            }
            exceeds |= top[mt][half] > rows.m[mt][half] + (DESCALE % 4 ? RESCALE_THRESHOLD / exponents[mt][half] : margin);
        }
    }
    if (__any_sync(0xffffffffu, exceeds)) rescale(rows, S, top, exponents);

    unsigned P[M_TILES][BLOCK_N / 16][4];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PackedRow row(row0 + 16 * mt + 8 * half + g, kv_head, group);
            const Head head(sequence, row.h);
            const float exponent = exponents[mt][half], negative = -rows.m[mt][half] * exponent;
            const float shift = fabsf(negative) > Head::LARGE ? 0.0f : negative;  // no key seen: P = 0; large: S is S - m
#pragma unroll
            for (int nt = 0; nt < BLOCK_N / 8; ++nt) {
                float p[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    p[i] = ex2(fmaf(S[mt][nt][2 * half + i], exponent, shift));
                    rows.l[mt][half] += p[i];
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
            ldmatrix_x4_trans(V, stage + K_BYTES + value_place(16 * step, dt));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) add_values(&rows.O[mt][STEP_D / 8 * dt], P[mt][step], V);
        }
    }
}

// What the warp has summed up, into shared memory: O [BLOCK_M][O_PITCH], and m and l.
__device__ __forceinline__ void leave(const Rows& rows, float* O_smem, float2* sums) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * mt + 8 * half + g;
            const float l = row_sum<4>(rows.l[mt][half]);
            if (q == 0) sums[row] = make_float2(rows.m[mt][half], l);
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                const float left = rows.O[mt][nt][2 * half], right = rows.O[mt][nt][2 * half + 1];
                float* const to = O_smem + row * O_PITCH;
                if (FLOAT8) to[nt / 2 * 16 + 4 * q + nt % 2] = left, to[nt / 2 * 16 + 4 * q + nt % 2 + 2] = right;
                else *reinterpret_cast<float2*>(to + 8 * nt + 2 * q) = make_float2(left, right);
            }
        }
    }
}

// The same from the beginning, row by row and out of line, of only those keys that a row sees: a masked key's P is 0, but 0 * NaN brings its
// value to rows that do not see it. Seldom, and then worth the time. Of key tiles `first`, `first` + WARPS, ... before `end`.
__device__ __noinline__ void store_partial_non_finite(const View<const dtype>& Q, const View<const dtype>& K, const View<const dtype_v>& V,
                                              const Score& score, int b, int row0, int kv_head, int group, int first, int end,
                                              float* O_smem, float2* sums) {
    const SeqlenInfo sequence(score, b);
    const int lane = threadIdx.x % 32;
    for (int r = 0; r < BLOCK_M; ++r) {
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(sequence, row.h);
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
            const float alpha = share(m, m_new, exponent), p = ex2((s - (m_new == -INF ? 0.0f : m_new)) * exponent);
            const float kept = head.keep(row.i, j) ? p : 0.0f;
            for (int d = lane; d < HEAD_DIM_V; d += 32) O[d] = alpha * O[d] + kept * to_float(head.key(V, kv_head, j)[d]);
            l = alpha * l + p;
            m = m_new;
        }
        if (lane == 0) sums[r] = make_float2(m, l);
    }
}

// Writes columns 4 quad .. of O's row, and, with the first of them, its LSE. `number`: of the row, of all of LSE's.
__device__ __forceinline__ void put(const View<dtype_o>& O, float* LSE, const Head& head, int h, int i, long long number, int quad,
                                    const CombinedRow& sum) {
    constexpr bool WIDE = sizeof(dtype_o) == 4;  // of float8 O may be fp32
    const FinalizedRow final_row = head.finalize(sum.m, sum.l);
    const float4 o = make_float4(sum.O.x * final_row.inverse, sum.O.y * final_row.inverse, sum.O.z * final_row.inverse, sum.O.w * final_row.inverse);
    dtype_o* const to = head.query(O, h, i) + 4 * quad;
    if (WIDE) *reinterpret_cast<float4*>(to) = o;
    else *reinterpret_cast<uint2*>(to) = make_uint2(pack(o.x, o.y), pack(o.z, o.w));
    if (quad == 0) LSE[number] = final_row.lse;
}

// A window with a left bound and float8 may have more registers than those at which ptxas stops by itself: 4 bytes spilled.
extern "C" __global__ __launch_bounds__(THREADS, Head::FIRST || FLOAT8 ? 1 : 0) void fwd_decode(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,    // (B, Hk, Sk, HEAD_DIM), or (pages, Hk, PAGE_SIZE, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // likewise, HEAD_DIM_V wide
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    float* partials,                                // as `Partials` has them; not used where there is one split
    int H,
    int group,                                      // H / Hk
    int splits,                                     // blocks that share the keys of a tile of rows; if dealt, of all batch entries
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    griddepcontrol_launch_dependents();
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int kv_head = blockIdx.y, z = blockIdx.z;
    const Split own = DYNAMIC_SPLITS ? SplitScheduler(score, gridDim.z - splits, splits).block(z) : Split{z / splits, z % splits, splits, z / splits * splits};
    if (DYNAMIC_SPLITS && own.invalid()) return;
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x / CLUSTER, own.b, group);
    if (RAGGED && tile.invalid()) return;
    cluster_arrive();
    const SeqlenInfo sequence(score, tile.b);
    const int row0 = tile.row0, rows_end = min(row0 + BLOCK_M, sequence.Sq * group);  // of packed rows
    const int i0 = row0 / group, i1 = (rows_end - 1) / group + 1;                     // their queries

    // Which key tiles: those that some row sees, an equal part of them for each block of each split, in turns of its warps.
    const Head any(sequence, kv_head * group);
    const Range keys = any.keys(i0, i1), visible_to_all = any.fully_visible_keys(i0, i1);
    const int begin = keys.begin / BLOCK_N, all = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
    const int blocks = own.splits * CLUSTER, part = (all + blocks - 1) / blocks;
    const int begin_of_block = min((own.split * CLUSTER + static_cast<int>(cluster_cta_rank())) * part, all);
    const int end = begin + min(begin_of_block + part, all), first = begin + begin_of_block + warp;

    const SmemAddr Q_smem = smem_address(smem);
    char* const ring = smem + RINGS_AT + warp * RING;
    const SmemAddr stages = smem_address(ring), stages_end = stages + STAGES * STAGE;
    const auto after = [&](SmemAddr stage) { return stage + STAGE == stages_end ? stages : stage + STAGE; };
    KeyAddress next = {};  // of the tile that is requested next
    const auto look_up = [&](int j) {
        if (j < end) next = sequence.key_address(j * BLOCK_N);
    };
    SmemAddr filled = stages, read = stages;  // the stages that are requested, and read, next
    const auto request = [&](int j) {
        if (j < end) {
            const int left = sequence.Sk - j * BLOCK_N;
            request_rows<Tile, HEAD_DIM>(filled, K.row(next.entry, kv_head, next.row), K.stride_s, left, lane);
            request_rows<VTile, HEAD_DIM_V>(filled + K_BYTES, V.row(next.entry, kv_head, next.row), V.stride_s, left, lane);
        }
        cp_async_commit();
        filled = after(filled);
        look_up(j + WARPS);
    };

    // Q, by all threads: 16 bytes of a row each.
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_M * static_cast<int>(Tile::CHUNKS); i += THREADS) {
        const int r = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
        const bool there = row0 + r < rows_end && chunk * CHUNK < HEAD_DIM;
        const PackedRow row(there ? row0 + r : row0, kv_head, group);
        cp_async_16(Q_smem + Tile::at(r, chunk), sequence.query(Q, row.h, row.i) + (there ? chunk * CHUNK : 0), there);
    }
    cp_async_commit();
    look_up(first);
#pragma unroll 1
    for (int turn = 0; turn < STAGES - 1; ++turn) request(first + turn * WARPS);
    cp_async_wait<STAGES - 1>();
    __syncthreads();  // every thread's part of Q is there

    const Place place(lane % 16, lane / 16), key_address(lane / 16 * 8 + lane % 8, lane / 8 % 2);  // as in fwd_mma
    const VPlace value_place(lane % 16, lane / 16);
    Rows rows;
#pragma unroll 1
    for (int j = first; j < end; j += WARPS, read = after(read)) {
        request(j + (STAGES - 1) * WARPS);
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // tile j is there for every lane
        const bool masked = j * BLOCK_N < visible_to_all.begin || (j + 1) * BLOCK_N > visible_to_all.end;
        attend(rows, sequence, row0, kv_head, group, j * BLOCK_N, masked, Q_smem, read, place, key_address, value_place);
        __syncwarp();  // every lane has read it before its stage is filled again
    }
    cp_async_wait<0>();

    float2* const sums = reinterpret_cast<float2*>(smem + SUMS_AT);
    float* const O_warp = reinterpret_cast<float*>(ring);
    if (Head::HIDES && __any_sync(0xffffffffu, !rows.finite()))
        store_partial_non_finite(Q, K, V, score, tile.b, row0, kv_head, group, first, end, O_warp, sums + warp * BLOCK_M);
    else leave(rows, O_warp, sums + warp * BLOCK_M);
    __syncthreads();  // what every warp has summed up is there

    // Merged, four columns of a row a thread, or eight of 32 rows: what the warps left; then, by the member of the team whose columns these
    // are, what the members have sent.
    constexpr int QUADS = HEAD_DIM_V / 4, AT_ONCE = M_TILES > 1 ? 2 : 1;
    float4* const O_dsmem = reinterpret_cast<float4*>(smem + DSMEM_AT);                          // [CLUSTER][BLOCK_M][OWN_QUADS]
    float2* const sums_dsmem = reinterpret_cast<float2*>(O_dsmem + CLUSTER * BLOCK_M * OWN_QUADS);  // [CLUSTER][BLOCK_M]
    const int rows_there = rows_end - row0, member = cluster_cta_rank();
    const Partials parts(partials, gridDim.z, static_cast<long long>(H) * query_rows(score), own);
    const auto finish = [&](const PackedRow& row, const Head& head, int quad, const CombinedRow& sum) {
        const long long number = head.lse_offset(H, row.h) + row.i;
        if (own.splits == 1) put(O, LSE, head, row.h, row.i, number, quad, sum);
        else parts.put(number, own.split, quad, sum);
    };
    cluster_wait();
#pragma unroll 1
    for (int i = threadIdx.x * AT_ONCE; i < rows_there * QUADS; i += AT_ONCE * THREADS) {
        const int r = i / QUADS;
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(sequence, row.h);
        float2 of_warps[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) of_warps[w] = sums[w * BLOCK_M + r];
#pragma unroll
        for (int quad = i % QUADS; quad < i % QUADS + AT_ONCE; ++quad) {
            float4 O_of_warps[WARPS];
#pragma unroll
            for (int w = 0; w < WARPS; ++w)
                O_of_warps[w] = *reinterpret_cast<const float4*>(smem + RINGS_AT + w * RING + (r * O_PITCH + 4 * quad) * 4);
            CombinedRow sum;
            sum.add(of_warps, O_of_warps, head.unit * Head::LOG2E);
            if (CLUSTER == 1) finish(row, head, quad, sum);
            else {
                const int owner = quad / OWN_QUADS, its_quad = quad - owner * OWN_QUADS, to = member * BLOCK_M + r;
                map_shared_rank(O_dsmem, owner)[to * OWN_QUADS + its_quad] = sum.O;
                if (its_quad == 0) map_shared_rank(sums_dsmem, owner)[to] = make_float2(sum.m, sum.l);
            }
        }
    }
    if (CLUSTER == 1) return;
    cluster_sync();  // what every member has sent is there
    const int first_quad = member * OWN_QUADS, own_quads = min(QUADS - first_quad, OWN_QUADS);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows_there * own_quads; i += THREADS) {
        const int r = i / own_quads, its_quad = i % own_quads;
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(sequence, row.h);
        float2 of_members[CLUSTER];
        float4 O_of_ranks[CLUSTER];
#pragma unroll
        for (int m = 0; m < CLUSTER; ++m) {
            of_members[m] = sums_dsmem[m * BLOCK_M + r];
            O_of_ranks[m] = O_dsmem[(m * BLOCK_M + r) * OWN_QUADS + its_quad];
        }
        CombinedRow sum;
        sum.add(of_members, O_of_ranks, head.unit * Head::LOG2E);
        finish(row, head, first_quad + its_quad, sum);
    }
}

// Merges what the splits left, a block a row: PARTS parties of COLUMNS / 4 threads take every PARTS-th split each, many on their way
// at once, since all of it is a matter of latencies. The order of sums is fixed.
extern "C" __global__ __launch_bounds__(THREADS) void fwd_decode_combine(
    const __grid_constant__ View<dtype_o> O,  // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                               // (B, H, Sq), contiguous
    float* partials,                          // as `Partials` has them
    int H,
    int splits,
    const __grid_constant__ Score score) {
    constexpr int QUADS = HEAD_DIM_V / 4, PARTS = THREADS / QUADS, AHEAD = 8;
    static_assert(PARTS >= 1, "a thread for every four columns");
    __shared__ float4 O_smem[AHEAD][THREADS];  // a thread's own, until all have merged theirs
    __shared__ float2 sums_smem[PARTS];
    const int h = blockIdx.y, entry = blockIdx.z, entries = gridDim.z, part = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
    const Split of = DYNAMIC_SPLITS ? SplitScheduler(score, entries, splits).first_of(entry) : Split{entry, 0, splits, entry * splits};
    const RowTile tile = query_tile<1>(score, blockIdx.x, entry);
    griddepcontrol_wait();
    if ((RAGGED && tile.invalid()) || (DYNAMIC_SPLITS && of.splits == 1)) return;
    const Head head(score, tile.b, h);
    const long long number = head.lse_offset(H, h) + tile.row0;
    const Partials parts(partials, DYNAMIC_SPLITS ? splits + entries : entries * splits, static_cast<long long>(H) * query_rows(score), of);
    const float exponent = head.unit * Head::LOG2E;

    CombinedRow own;
    const int splits_end = part < PARTS ? of.splits : 0;
#pragma unroll 1
    for (int first = part; first < splits_end; first += AHEAD * PARTS) {
        float2 sums[AHEAD];
        float4 O_part[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int split = min(first + i * PARTS, of.splits - 1);
            cp_async_16(smem_address(&O_smem[i][threadIdx.x]), parts.O(number, split) + 4 * quad, first + i * PARTS < of.splits);
            sums[i] = *parts.sums(number, split);
            if (first + i * PARTS >= of.splits) sums[i] = make_float2(-INF, 0.0f);
        }
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) O_part[i] = O_smem[i][threadIdx.x];
        own.add(sums, O_part, exponent);
    }
    O_smem[0][threadIdx.x] = own.O;
    if (part < PARTS && quad == 0) sums_smem[part] = make_float2(own.m, own.l);
    __syncthreads();
    if (part > 0) return;
    CombinedRow whole;
    float2 sums[PARTS];
    float4 O_part[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) sums[i] = sums_smem[i], O_part[i] = O_smem[0][i * QUADS + quad];
    whole.add(sums, O_part, exponent);
    put(O, LSE, head, h, tile.row0, number, quad, whole);
}
