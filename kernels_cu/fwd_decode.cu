// Rung 3, for decoding: attention of few queries to many keys, where reading K and V once is all there is to do.
//
// The query heads that share a key/value head are rows of one tile ("packed"): row r is query r / group, head r % group of the
// group, so that every key is read once for all of them. The keys of a tile of rows are split over as many blocks as the GPU
// has room for, and a block's over its warps. Each warp walks key tiles of its own, with its own ring of STAGES in shared memory,
// which cp.async fills: no barrier stands between two tiles, and STAGES - 1 tiles a warp are always on their way.
//
// clang-format off
//   split 0                            split 1
//   warp 0  keys   0 .. 15, 64 .. 79,  ...        each warp: S = Q K^T, P, O += P V of all BLOCK_M rows, m and l of its own
//   warp 1  keys  16 .. 31, 80 .. 95,  ...        in the end: the warps of a block through shared memory, then the blocks
//   ...                                           through `partials`, by the second entry, in order: the same bits every time
//
//   shared memory: Q [BLOCK_M][D_PAD] | m, l [WARPS][BLOCK_M][2] | warp 0: stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD],
//   stage 1, ... | warp 1 ...         (a warp's O [BLOCK_M][DV_PAD + 8], fp32, takes the place of its stages)
// clang-format on
//
// A tile of keys lies in one page; where the next one begins is looked up while the one before is on its way. m is followed
// lazily, as in fwd_mma. The matrix units are idle most of the time, so that Q stays in shared memory, and registers are few.
#include "mma_tiles.cuh"
#include "score.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / 16;
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // the columns beyond are zeros
using Tile = Swizzled<D_PAD>;  // rows of Q and K
using VTile = Swizzled<DV_PAD>;
using Place = FragmentPlace<D_PAD>;
using VPlace = FragmentPlace<DV_PAD>;
constexpr unsigned K_BYTES = BLOCK_N * Tile::ROW, STAGE = K_BYTES + BLOCK_N * VTile::ROW;
constexpr unsigned O_PITCH = DV_PAD + 8, O_BYTES = BLOCK_M * O_PITCH * 4;  // 8 more: four rows in different banks
constexpr unsigned RING = STAGES * STAGE > O_BYTES ? STAGES * STAGE : O_BYTES;
constexpr unsigned SUMS_AT = BLOCK_M * Tile::ROW, RINGS_AT = SUMS_AT + WARPS * BLOCK_M * 8;
constexpr float LAZY = 8.0f;
constexpr float FAR = 3e38f;  // below any score: a bias of the lowest number there is must not make NaN
static_assert(BLOCK_M == 16 * M_TILES && BLOCK_N % 16 == 0 && STAGES >= 2, "a tile of whole MMA steps");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a tile of keys lies in one page");
static_assert(SMEM_BYTES == RINGS_AT + WARPS * RING, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "rows are copied in 16-byte chunks");

// What m and l of several parts of a row's keys come to: each part counts e^(its m - m) times.
__device__ __forceinline__ float share(float part, float m, float exponent) {
    return part == m ? 1.0f : ex2((part - m) * exponent);  // equal infinities: not NaN
}

// A row of the packed tile: query i, head h.
struct PackedRow {
    int i, h;
    __device__ __forceinline__ PackedRow(int row, int kv_head, int group) : i(row / group), h(kv_head * group + row % group) {}
};

// Where blocks leave their part of row `row` of all: O, not yet divided by l, and m and l.
struct Partials {
    float* data;
    long long rows;
    int splits;
    __device__ __forceinline__ float* O(long long row, int split) const { return data + (row * splits + split) * HEAD_DIM_V; }
    __device__ __forceinline__ float2* sums(long long row, int split) const {
        return reinterpret_cast<float2*>(data + rows * splits * HEAD_DIM_V) + row * splits + split;
    }
};

struct Rows {  // what a warp keeps of all rows; a lane holds rows g and g + 8 of each 16-row tile
    float O[M_TILES][DV_PAD / 8][4] = {};
    float m[M_TILES][2], l[M_TILES][2] = {};  // m: a raw score; l: this lane's part of the sum
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

// Moves m up to the row maxima `top` and rescales what was accumulated under the old one.
__device__ __forceinline__ void raise_maximum(Rows& rows, float (&top)[M_TILES][2], float exponent) {
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const int mt = i / 2, half = i % 2;
        const float m_new = fmaxf(rows.m[mt][half], row_max<4>(top[mt][half])), alpha = share(rows.m[mt][half], m_new, exponent);
        rows.m[mt][half] = m_new;
        rows.l[mt][half] *= alpha;
#pragma unroll
        for (int nt = 0; nt < DV_PAD / 8; ++nt) {
            rows.O[mt][nt][2 * half] *= alpha;
            rows.O[mt][nt][2 * half + 1] *= alpha;
        }
    }
}

// One tile of keys, from n0 on, that lies in `stage`. `masked`: some row may not see all of it.
__device__ __forceinline__ void attend(Rows& rows, const Sequence& sequence, int row0, int kv_head, int group, int n0, bool masked,
                                       SmemAddress Q_smem, SmemAddress stage, const Place& place, const Place& key_place,
                                       const VPlace& value_place) {
    const float unit = Head::unit_of(sequence.score), exponent = unit * Head::LOG2E, margin = LAZY / exponent;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    float S[M_TILES][BLOCK_N / 8][4] = {};
#pragma unroll
    for (int step = 0; step < D_PAD / 16; ++step) {
        unsigned Q[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) ldmatrix_x4(Q[mt], Q_smem + place(16 * mt, step));
#pragma unroll
        for (int nt = 0; nt < BLOCK_N / 16; ++nt) {
            unsigned K[4];
            ldmatrix_x4(K, stage + key_place(16 * nt, step));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                mma_m16n8k16(S[mt][2 * nt], Q[mt], K[0], K[1]);
                mma_m16n8k16(S[mt][2 * nt + 1], Q[mt], K[2], K[3]);
            }
        }
    }

    float top[M_TILES][2];
    bool exceeds = false;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PackedRow row(row0 + 16 * mt + 8 * half + g, kv_head, group);
            const Head head(sequence, row.h);
            top[mt][half] = -INF;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 4; ++i) {
                float& s = S[mt][i / 2][2 * half + i % 2];
                const At at(row.i, n0 + 2 * q, 0, i / 2 * 8 + i % 2);
                s = head.raw(s, at);
                if (masked && !head.sees(at.query_row(), at.key_col())) s = -INF;
                top[mt][half] = fmaxf(top[mt][half], s);
            }
            exceeds |= top[mt][half] > rows.m[mt][half] + margin;
        }
    }
    if (__any_sync(0xffffffffu, exceeds)) raise_maximum(rows, top, exponent);

    unsigned P[M_TILES][BLOCK_N / 16][4];
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const PackedRow row(row0 + 16 * mt + 8 * half + g, kv_head, group);
            const Head head(sequence, row.h);
            const float m = rows.m[mt][half], negative = Head::LINEAR ? -m * exponent : fminf(-m * exponent, FAR);
            const float shift = m == -INF ? 0.0f : negative;  // no key seen: P = 0, not NaN
#pragma unroll
            for (int nt = 0; nt < BLOCK_N / 8; ++nt) {
                float p[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    p[i] = ex2(fmaf(S[mt][nt][2 * half + i], exponent, shift));
                    rows.l[mt][half] += p[i];
                    if (!head.keeps(row.i, n0 + 8 * nt + 2 * q + i)) p[i] = 0.0f;
                }
                P[mt][nt / 2][nt % 2 * 2 + half] = pack(p[0], p[1]);
            }
        }
    }

#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
#pragma unroll
        for (int dt = 0; dt < DV_PAD / 16; ++dt) {
            unsigned V[4];
            ldmatrix_x4_trans(V, stage + K_BYTES + value_place(16 * step, dt));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                mma_m16n8k16(rows.O[mt][2 * dt], P[mt][step], V[0], V[1]);
                mma_m16n8k16(rows.O[mt][2 * dt + 1], P[mt][step], V[2], V[3]);
            }
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
            for (int nt = 0; nt < DV_PAD / 8; ++nt)
                *reinterpret_cast<float2*>(O_smem + row * O_PITCH + 8 * nt + 2 * q) =
                    make_float2(rows.O[mt][nt][2 * half], rows.O[mt][nt][2 * half + 1]);
        }
    }
}

// The same from the beginning, row by row and out of line, of only those keys that a row sees: a masked key's P is 0, but 0 * NaN brings its
// value to rows that do not see it. Seldom, and then worth the time. Of key tiles `first`, `first` + WARPS, ... before `end`.
__device__ __noinline__ void leave_row_by_row(const View<const dtype>& Q, const View<const dtype>& K, const View<const dtype>& V,
                                              const Score& score, int b, int row0, int kv_head, int group, int first, int end,
                                              float* O_smem, float2* sums) {
    const Sequence sequence(score, b);
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
            if (!head.sees(row.i, j)) continue;
            float dot = 0.0f;
            for (int d = lane; d < HEAD_DIM; d += 32)
                dot += to_float(head.query(Q, row.h, row.i)[d]) * to_float(head.key(K, kv_head, j)[d]);
            const float s = head.raw(row_sum<32>(dot), At(row.i, j)), m_new = fmaxf(m, s);
            const float alpha = share(m, m_new, exponent), p = ex2((s - (m_new == -INF ? 0.0f : m_new)) * exponent);
            const float kept = head.keeps(row.i, j) ? p : 0.0f;
            for (int d = lane; d < HEAD_DIM_V; d += 32) O[d] = alpha * O[d] + kept * to_float(head.key(V, kv_head, j)[d]);
            l = alpha * l + p;
            m = m_new;
        }
        if (lane == 0) sums[r] = make_float2(m, l);
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void fwd_decode(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM), or (pages, Hk, PAGE_SIZE, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // likewise, HEAD_DIM_V wide
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    float* partials,                              // as `Partials` has them; not used where there is one split
    int H,
    int group,                                    // H / Hk
    int splits,                                   // blocks that share the keys of a tile of rows
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const unsigned tiles_of_rows = gridDim.x / splits;
    const int split = blockIdx.x / tiles_of_rows, kv_head = blockIdx.y;
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x % tiles_of_rows, blockIdx.z, group);
    if (RAGGED && tile.surplus()) return;
    const Sequence sequence(score, tile.b);
    const int row0 = tile.row0, rows_end = min(row0 + BLOCK_M, sequence.Sq * group);  // of packed rows
    const int i0 = row0 / group, i1 = (rows_end - 1) / group + 1;                     // their queries

    // Which key tiles: those that some row sees, an equal part of them for each split, in turns of the warps.
    const Head any(sequence, kv_head * group);
    const Range keys = any.keys(i0, i1), seen_by_all = any.keys_seen_by_all(i0, i1);
    const int begin = keys.begin / BLOCK_N, all = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
    const int part = (all + splits - 1) / splits, begin_of_split = min(split * part, all);
    const int end = begin + min(begin_of_split + part, all), first = begin + begin_of_split + warp;

    const SmemAddress Q_smem = smem_address(smem);
    char* const ring = smem + RINGS_AT + warp * RING;
    const auto stage_of = [&](int turn) { return smem_address(ring) + turn % STAGES * STAGE; };
    KeyPlace next = {};  // of the tile that is requested next
    const auto look_up = [&](int j) {
        if (j < end) next = sequence.key_place(j * BLOCK_N);
    };
    const auto request = [&](int j, int turn) {
        if (j < end) {
            const int left = sequence.Sk - j * BLOCK_N;
            request_tile<BLOCK_N, D_PAD, 32>(stage_of(turn), K.row(next.entry, kv_head, next.row), K.stride_s, 0, left, lane);
            request_tile<BLOCK_N, DV_PAD, 32, HEAD_DIM_V>(stage_of(turn) + K_BYTES, V.row(next.entry, kv_head, next.row), V.stride_s,
                                                          0, left, lane);
        }
        cp_async_commit();
        look_up(j + WARPS);
    };

    // Q, by all threads: 16 bytes of a row each.
    for (int i = threadIdx.x; i < BLOCK_M * static_cast<int>(Tile::CHUNKS); i += THREADS) {
        const int r = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
        const bool there = row0 + r < rows_end && chunk * 8 < HEAD_DIM;
        const PackedRow row(there ? row0 + r : row0, kv_head, group);
        cp_async_16(Q_smem + Tile::at(r, chunk), sequence.query(Q, row.h, row.i) + (there ? chunk * 8 : 0), there);
    }
    cp_async_commit();
    look_up(first);
#pragma unroll
    for (int turn = 0; turn < STAGES - 1; ++turn) request(first + turn * WARPS, turn);
    cp_async_wait<STAGES - 1>();
    __syncthreads();  // every thread's part of Q is there

    const Place place(lane % 16, lane / 16), key_place(lane / 16 * 8 + lane % 8, lane / 8 % 2);  // as in fwd_mma
    const VPlace value_place(lane % 16, lane / 16);
    Rows rows;
    int turn = 0;
#pragma unroll 1
    for (int j = first; j < end; j += WARPS, ++turn) {
        request(j + (STAGES - 1) * WARPS, turn + STAGES - 1);
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // tile j is there for every lane
        const bool masked = j * BLOCK_N < seen_by_all.begin || (j + 1) * BLOCK_N > seen_by_all.end;
        attend(rows, sequence, row0, kv_head, group, j * BLOCK_N, masked, Q_smem, stage_of(turn), place, key_place, value_place);
        __syncwarp();  // every lane has read it before its stage is filled again
    }
    cp_async_wait<0>();

    float2* const sums = reinterpret_cast<float2*>(smem + SUMS_AT);
    float* const O_warp = reinterpret_cast<float*>(ring);
    if (Head::HIDES && __any_sync(0xffffffffu, !rows.finite()))
        leave_row_by_row(Q, K, V, score, tile.b, row0, kv_head, group, first, end, O_warp, sums + warp * BLOCK_M);
    else leave(rows, O_warp, sums + warp * BLOCK_M);
    __syncthreads();  // what every warp has summed up is there

    const Partials parts = {partials, static_cast<long long>(gridDim.z) * H * query_rows(score), splits};
    constexpr int CHUNKS = HEAD_DIM_V / 8;
#pragma unroll 1
    for (int i = threadIdx.x; i < (rows_end - row0) * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS, chunk = i % CHUNKS;
        const PackedRow row(row0 + r, kv_head, group);
        const Head head(sequence, row.h);
        const float exponent = head.unit * Head::LOG2E;
        float m = -INF, l = 0.0f, o[8] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) m = fmaxf(m, sums[w * BLOCK_M + r].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 own = sums[w * BLOCK_M + r];
            const float weight = share(own.x, m, exponent);
            const float4* const from = reinterpret_cast<const float4*>(smem + RINGS_AT + w * RING + (r * O_PITCH + 8 * chunk) * 4);
            const float4 left = from[0], right = from[1];
            const float eight[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
            l += weight * own.y;
#pragma unroll
            for (int e = 0; e < 8; ++e) o[e] += weight * eight[e];
        }
        const long long number = head.first_row(H, row.h) + row.i;
        if (splits == 1) {
            const Total total = head.total(m, l);
            uint4 packed;
            packed.x = pack(o[0] * total.inverse, o[1] * total.inverse), packed.y = pack(o[2] * total.inverse, o[3] * total.inverse);
            packed.z = pack(o[4] * total.inverse, o[5] * total.inverse), packed.w = pack(o[6] * total.inverse, o[7] * total.inverse);
            *reinterpret_cast<uint4*>(head.query(O, row.h, row.i) + 8 * chunk) = packed;
            if (chunk == 0) LSE[number] = total.lse;
        } else {
            float4* const to = reinterpret_cast<float4*>(parts.O(number, split)) + 2 * chunk;
            to[0] = make_float4(o[0], o[1], o[2], o[3]), to[1] = make_float4(o[4], o[5], o[6], o[7]);
            if (chunk == 0) *parts.sums(number, split) = make_float2(m, l);
        }
    }
}

// Merges what the splits left, a warp a row: each lane every 32nd pair of columns, split after split.
extern "C" __global__ __launch_bounds__(THREADS) void fwd_decode_merge(
    const __grid_constant__ View<dtype> O,  // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                             // (B, H, Sq), contiguous
    float* partials,                        // as `Partials` has them
    int H,
    int splits,
    const __grid_constant__ Score score) {
    const int h = blockIdx.y * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const RowTile tile = query_tile<1>(score, blockIdx.x, blockIdx.z);
    if (h >= H || (RAGGED && tile.surplus())) return;
    const Head head(score, tile.b, h);
    const long long number = head.first_row(H, h) + tile.row0;
    const Partials parts = {partials, static_cast<long long>(gridDim.z) * H * query_rows(score), splits};
    const float2* const sums = parts.sums(number, 0);
    const float exponent = head.unit * Head::LOG2E;
    float m = -INF, l = 0.0f;
    for (int split = lane; split < splits; split += 32) m = fmaxf(m, sums[split].x);
    m = row_max<32>(m);
    constexpr int PAIRS = HEAD_DIM_V / 2, OWNED = (PAIRS + 31) / 32;
    float2 o[OWNED] = {};
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
        const float2 own = sums[split];
        const float weight = share(own.x, m, exponent);
        const float2* const from = reinterpret_cast<const float2*>(parts.O(number, split));
        l += weight * own.y;
#pragma unroll
        for (int d = 0; d < OWNED; ++d) {
            if (lane + 32 * d >= PAIRS) continue;
            const float2 pair = from[lane + 32 * d];
            o[d].x += weight * pair.x, o[d].y += weight * pair.y;
        }
    }
    const Total total = head.total(m, l);
    unsigned* const to = reinterpret_cast<unsigned*>(head.query(O, h, tile.row0));
#pragma unroll
    for (int d = 0; d < OWNED; ++d)
        if (lane + 32 * d < PAIRS) to[lane + 32 * d] = pack(o[d].x * total.inverse, o[d].y * total.inverse);
    if (lane == 0) LSE[number] = total.lse;
}
