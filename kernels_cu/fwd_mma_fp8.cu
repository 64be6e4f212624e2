// Rung 3 for float8: attention forward on tensor cores, warp by warp (mma.sync of 8 bits, sm_89 and later).
//
// As fwd_mma: a warp owns M_TILES tiles of 16 whole query rows, K and V tiles of BLOCK_N keys arrive by cp.async two stages deep.
// What 8 bits change:
//
// - A step of mma is 32 deep, and V's keys have to be neighbours in a register. ldmatrix.trans keeps pairs of columns together;
//   two byte permutations part them, and leave the keys in the order in which a lane holds its scores (fp8.cuh). An O
//   accumulator has the even columns of 16, its neighbour the odd ones: four columns of O side by side in a lane.
// - What the tensor cores add up has some 14 bits. SUB_N keys' worth of 16 columns is a sum T of its own, which O takes on in
//   fp32 with the FFMA that rescales it; so the maximum is followed at each step, and P's largest is the largest number of V's
//   type.
// - O leaves from registers: its elements are wider than Q's.
#include "fp8.cuh"
#include "mma_smem.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / (16 * WARPS);
constexpr int D_PAD = (HEAD_DIM + 31) / 32 * 32, DV_PAD = (HEAD_DIM_V + 31) / 32 * 32;  // the columns beyond are zeros
using Tile = Swizzled<D_PAD / 2>;    // rows of Q and K, in pairs
using VTile = Swizzled<DV_PAD / 2>;  // of V
using Place = FragmentOffsets<D_PAD / 2>;
constexpr unsigned ROW = Tile::ROW, K_BYTES = BLOCK_N * ROW, STAGE = K_BYTES + BLOCK_N * VTile::ROW;
constexpr float SCORE_LIMIT = 3e38f;
static_assert(BLOCK_M == 16 * WARPS * M_TILES && BLOCK_N % SUB_N == 0 && SUB_N % 32 == 0, "a tile of whole MMA steps");
static_assert(SMEM_BYTES == BLOCK_M * ROW + 2 * STAGE, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "rows are copied in 16-byte chunks");

struct Rows {  // what a warp keeps of its query rows; a lane holds rows g and g + 8 of each 16-row tile
    float O[M_TILES][HEAD_DIM_V / 8][4] = {};
    float m[M_TILES][2], l[M_TILES][2] = {};  // m: a raw score; l: this lane's part of the sum; O and l: times P_MAX

    __device__ __forceinline__ Rows() {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) m[mt][0] = m[mt][1] = -INF;
    }
    __device__ __forceinline__ bool finite() const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < M_TILES * HEAD_DIM_V / 2; ++i) zero = fmaf(O[i / (HEAD_DIM_V / 2)][i % (HEAD_DIM_V / 2) / 4][i % 4], 0.0f, zero);
        return zero == 0.0f;
    }
};

template <bool MASKED>
struct Masked {
    static constexpr bool YES = MASKED;
};

// One K/V tile, KEYS keys at a time. MASKED: some row of the warp does not see all of it; then in small steps, as soon as no
// row sees more it ends.
template <bool MASKED>
__device__ __forceinline__ void attend(Rows& rows, const Head& head, int first_row, int n0, SmemAddr Q_smem, SmemAddr K_smem,
                                       const Place& place, const Place& key_address) {
    constexpr int KEYS = MASKED && !Head::ELEMENT_MASK ? 32 : SUB_N;
    const float exponent = head.unit * Head::LOG2E;
    const SmemAddr V_smem = K_smem + K_BYTES;
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll 1
    for (int n = 0; n < BLOCK_N; n += KEYS) {
        const Range keys = head.keys(first_row, first_row + 16 * M_TILES);
        if (MASKED && n0 + n >= keys.end) break;  // no row of the warp sees the rest
        if (MASKED && Head::FIRST && n0 + n + KEYS <= keys.begin) continue;
        float S[M_TILES][KEYS / 8][4] = {};
        constexpr int TOGETHER = Tile::GROUP / 2;  // steps whose places are computed once
#pragma unroll (D_PAD > 128 ? 1 : D_PAD / 32)  // of wide heads there are no registers to load ahead into
        for (unsigned far = 0; far < D_PAD / 32 / TOGETHER; ++far) {
#pragma unroll
            for (int step = 0; step < TOGETHER; ++step) {
                unsigned Q[M_TILES][4];
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt) ldmatrix_x4(Q[mt], Q_smem + far * Tile::GROUP * 16 + place(16 * mt, step));
#pragma unroll
                for (int nt = 0; nt < KEYS / 16; ++nt) {
                    unsigned K[4];
                    ldmatrix_x4(K, K_smem + far * Tile::GROUP * 16 + key_address(n + 16 * nt, step));
#pragma unroll
                    for (int mt = 0; mt < M_TILES; ++mt) {
                        mma_m16n8k32<dtype>(S[mt][2 * nt], Q[mt], K[0], K[1]);
                        mma_m16n8k32<dtype>(S[mt][2 * nt + 1], Q[mt], K[2], K[3]);
                    }
                }
            }
        }

        unsigned P[M_TILES][KEYS / 32][4];
        float alpha[M_TILES][2];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            Head::Kept kept[KEYS / 16];
            head.keep_along_queries(kept, first_row + 16 * mt, n0 + n);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = rows.m[mt][half], sum = 0.0f;
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& s = S[mt][i / 2][2 * half + i % 2];
                    const ScoreIndex at(first_row + g, n0 + n + 2 * q, 16 * mt + 8 * half, i / 2 * 8 + i % 2);
                    s = head.raw(s, at);
                    if (MASKED && !head.visible(at.query_row(), at.key_col())) s = -INF;
                    top = fmaxf(top, s);
                }
                top = row_max<4>(top);
                float& m = rows.m[mt][half];
                alpha[mt][half] = m == top ? 1.0f : ex2((m - top) * exponent);  // equal infinities: not NaN
                m = top;
                float shift = fminf(fmaf(-m, exponent, LOG2_P_MAX), SCORE_LIMIT);  // no key seen: P = 0, not NaN
                if (Head::is_large(m, exponent)) {  // of S - m
                    shift = LOG2_P_MAX;
#pragma unroll
                    for (int i = 0; i < KEYS / 4; ++i) S[mt][i / 2][2 * half + i % 2] -= m;
                }
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& s = S[mt][i / 2][2 * half + i % 2];
                    s = ex2(fmaf(s, exponent, shift));
                    sum += s;
                    if (!kept[i / 4].keep(i / 2 % 2 * 2 + half, i % 2)) s = 0.0f;
                }
                rows.l[mt][half] = fmaf(rows.l[mt][half], alpha[mt][half], sum);
#pragma unroll
                for (int i = 0; i < KEYS / 16; ++i) {  // of blocks 2 i and 2 i + 1
                    const float(&low)[4] = S[mt][2 * i], (&high)[4] = S[mt][2 * i + 1];
                    P[mt][i / 2][i % 2 * 2 + half] = pack4<dtype_v>(low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]);
                }
            }
        }

#pragma unroll
        for (int dt = 0; dt < HEAD_DIM_V / 16; ++dt) {
            float T[M_TILES][2][4] = {};
#pragma unroll
            for (int step = 0; step < KEYS / 32; ++step) {
                unsigned pair[4];  // of keys 0, 8, 16 and 24 on
                ldmatrix_x4_trans(pair, V_smem + VTile::at(n + 32 * step + lane, dt));
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt) {
                    mma_m16n8k32<dtype_v>(T[mt][0], P[mt][step], even_column(pair[0], pair[1]), even_column(pair[2], pair[3]));
                    mma_m16n8k32<dtype_v>(T[mt][1], P[mt][step], odd_column(pair[0], pair[1]), odd_column(pair[2], pair[3]));
                }
            }
#pragma unroll
            for (int i = 0; i < M_TILES * 8; ++i) {
                float& o = rows.O[i / 8][2 * dt + i / 4 % 2][i % 4];
                o = fmaf(o, alpha[i / 8][i / 2 % 2], T[i / 8][i / 4 % 2][i % 4]);
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void fwd_mma_fp8(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,    // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    int group,                                      // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const int h = blockIdx.y, batch = blockIdx.z;
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const RowTile tile = query_tile<BLOCK_M>(score, CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, batch);
    if (RAGGED && tile.invalid()) return;
    const int b = tile.b, m0 = tile.row0;  // causal: long rows first
    const int first_row = m0 + warp * 16 * M_TILES;
    const Head head(score, b, h);
    const dtype* const K_head = head.key(K, h / group, 0);
    const dtype_v* const V_head = head.key(V, h / group, 0);
    const Range keys = head.keys(m0, m0 + BLOCK_M), visible_to_all = head.fully_visible_keys(m0, m0 + BLOCK_M);
    const int whole = max(visible_to_all.end, 0) / BLOCK_N;  // tiles before that: every row of the block sees them whole,
    const int first_whole = (visible_to_all.begin + BLOCK_N - 1) / BLOCK_N;  // from here on
    const int first = keys.begin / BLOCK_N, tiles = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    const SmemAddr stages = smem_address(smem + BLOCK_M * ROW), Q_smem = smem_address(smem + warp * 16 * M_TILES * ROW);
    const auto request_stage = [&](int j) {
        const SmemAddr stage = stages + j % 2 * STAGE;
        cp_async_tile<BLOCK_N, D_PAD / 2, THREADS>(stage, K_head, K.stride_s, j * BLOCK_N, head.Sk);
        cp_async_tile<BLOCK_N, DV_PAD / 2, THREADS, HEAD_DIM_V>(stage + K_BYTES, V_head, V.stride_s, j * BLOCK_N, head.Sk);
        cp_async_commit();
    };
    // Matrices in the order of the fragments' registers: of a block of Q by rows, of one of K by columns.
    const Place place(lane % 16, lane / 16), key_address(lane / 16 * 8 + lane % 8, lane / 8 % 2);

    Rows rows;
    if (tiles > first) {
        cp_async_tile<BLOCK_M, D_PAD / 2, THREADS>(smem_address(smem), head.query(Q, h, 0), Q.stride_s, m0, head.Sq);
        request_stage(first);
    }
    const auto attend_tile = [&](auto masked, int j) {
        cp_async_wait<0>();
        __syncthreads();  // tile j is there for everybody, and everybody has used tile j - 1, whose stage is filled next
        if (j + 1 < tiles) request_stage(j + 1);
        attend<masked.YES>(rows, head, first_row, j * BLOCK_N, Q_smem, stages + j % 2 * STAGE, place, key_address);
    };
#pragma unroll 1
    for (int j = first; j < tiles; ++j) {
        if ((!Head::FIRST || first_whole <= j) && j < whole) attend_tile(Masked<false>(), j);
        else attend_tile(Masked<true>(), j);
    }
    // A masked key's P is 0, but 0 * NaN brings its value to rows that do not see it. Seldom, and then worth the time:
    if (Head::HIDES && __syncthreads_or(!rows.finite()))
        return attend_non_finite<BLOCK_M, WARPS>(Q, K, V, O, LSE, group, score, b, h, gridDim.y, m0, warp);

    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const FinalizedRow final_row = head.finalize(rows.m[mt][half], row_sum<4>(rows.l[mt][half]) * (1.0f / P_MAX));
            const float inverse = final_row.inverse * (1.0f / P_MAX);
            const int query_row = first_row + 16 * mt + 8 * half + g;
            if (query_row >= head.Sq) continue;
            if (q == 0) LSE[head.lse_offset(gridDim.y, h) + query_row] = final_row.lse;
            dtype_o* const to = head.query(O, h, query_row) + 4 * q;
#pragma unroll
            for (int dt = 0; dt < HEAD_DIM_V / 16; ++dt) {
                const float(&even)[4] = rows.O[mt][2 * dt], (&odd)[4] = rows.O[mt][2 * dt + 1];
                store4(to + 16 * dt, even[2 * half] * inverse, odd[2 * half] * inverse, even[2 * half + 1] * inverse,
                       odd[2 * half + 1] * inverse);
            }
        }
    }
}
