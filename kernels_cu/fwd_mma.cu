// Rung 3: attention forward on tensor cores, warp by warp (mma.sync, sm_80 and later).
//
// A block has WARPS warps and takes BLOCK_M query rows; a warp owns M_TILES tiles of 16 whole rows, so that softmax
// needs no other warp ("split-Q", FlashAttention-2 section 3.3). K and V tiles of BLOCK_N keys arrive by cp.async, two
// stages deep: tile j + 1 is on its way while tile j is computed, with one barrier a tile.
//
// clang-format off
//   warp 0  rows   0 ..  31   Q_rmem (A operand)   S = Q K^T, SUB_N keys at a time   O_rmem (accumulators)
//   warp 1  rows  32 ..  63     "                  P = exp2(S - m), packed in place    O += P V
//   ...                                            (an accumulator of S is an A operand of P V)
//
//   shared memory: Q [BLOCK_M][D_PAD] | stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD] | stage 1       (O leaves through Q's)
// clang-format on
//
// Tiles are swizzled (include/mma_smem.cuh). Scores stay raw (include/score_mod.cuh), of a plain problem dot products: their unit,
// the scale, is folded with log2(e) into the one FFMA before exp2. Tiles that every row of the block sees whole have a loop of
// their own, without masks.
//
// The row maximum is followed lazily: m moves, and O and l are rescaled, only when some score exceeds m by more than
// LAZY in the exponent. P stays below 2^LAZY, which fp16 holds; the result is the same to rounding, and after the first
// tiles a step costs one vote instead of shuffles and HEAD_DIM / 4 multiplications a row (FlashAttention-4's idea).
//
// Two warps share a scheduler, and neither is ever short of instructions that wait for the tensor cores; what counts is how
// well ptxas mixes one step's exponentials with the next step's products. What helped and what did not, with numbers:
// experiments/003_forward_paper.
#define TIMELINE_BRANCH 1  // marks cost 3% of time for 7 … 9% at D = 128: experiments/018_timeline
#include "mma_smem.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / (16 * WARPS);
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // the columns beyond are zeros
using Tile = Swizzled<D_PAD>;    // rows of Q and K
using VTile = Swizzled<DV_PAD>;  // rows of V and O
// D of 96 and 128: the next tile's copies are spread over the steps of Q K^T instead of requested at once, and places take fewer
// registers: 6 and 3% faster. D = 64 loses 2%, D = 256 gains nothing.
constexpr bool SPREAD = M_TILES == 2 && (D_PAD == 96 || D_PAD == 128) && DV_PAD == D_PAD;
constexpr int STEPS = BLOCK_N / SUB_N * (D_PAD / 16);  // of Q K^T in a tile
// A tile too large to be unrolled without spills: its steps are a loop. 128 × 64 keys at D = 256 in steps of 16: 4 … 7% faster
// than 64 × 32 unrolled, half as many barriers, a tenth less from shared memory and half from L2; 128 × 64 unrolled gains nothing.
constexpr bool ROLLED = BLOCK_N * D_PAD > 8192;
// Not so on 8.0 with 48 keys a step at D = 128: there the additional instructions make NVRTC 13.5 spill 20 bytes of 255
// registers without a mask; it needs 254 with places that are computed once.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr bool ONE_REGISTER = SPREAD && !(D_PAD == 128 && SUB_N == 48);
#else
constexpr bool ONE_REGISTER = SPREAD;
#endif
using Place = FragmentOffsets<D_PAD, ONE_REGISTER>;
using VPlace = FragmentOffsets<DV_PAD, ONE_REGISTER>;
constexpr unsigned ROW = Tile::ROW, V_ROW = VTile::ROW, K_BYTES = BLOCK_N * ROW, STAGE = K_BYTES + BLOCK_N * V_ROW;
constexpr unsigned Q_ROW = ROW > V_ROW ? ROW : V_ROW;  // of the place that O takes over
constexpr float RESCALE_THRESHOLD = 8.0f;
// Q stays in registers where ptxas finds room for it beside O and S without spilling, by trial on each architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int ROOM = 180;
#else
constexpr int ROOM = M_TILES == 1 ? 208 : 180;  // D = 256: 8% faster than from shared memory
#endif
constexpr int RESERVE = Head::READS_TENSORS ? 60 : Head::LINEAR ? 0 : 8;
constexpr bool Q_IN_REGISTERS = M_TILES * (D_PAD / 4 + DV_PAD / 2 + SUB_N / 2) <= ROOM - RESERVE;
static_assert(BLOCK_M == 16 * WARPS * M_TILES && BLOCK_N % SUB_N == 0 && SUB_N % 16 == 0, "a tile of whole MMA steps");
static_assert(SMEM_BYTES == BLOCK_M * Q_ROW + 2 * STAGE, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "rows are copied in 16-byte chunks");

struct Rows {  // what a warp keeps of its query rows; a lane holds rows g and g + 8 of each 16-row tile
    unsigned Q[Q_IN_REGISTERS ? M_TILES : 1][D_PAD / 16][4];
    float O[M_TILES][DV_PAD / 8][4];
    float m[M_TILES][2], l[M_TILES][2];  // m: a raw score; l: this lane's part of the sum
    bool large;                          // whether some m of the warp is large: then m is raised at every step

    __device__ __forceinline__ void reset() {
        large = false;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            m[mt][0] = m[mt][1] = -INF;
            l[mt][0] = l[mt][1] = 0.0f;
#pragma unroll
            for (int i = 0; i < DV_PAD / 2; ++i) O[mt][i / 4][i % 4] = 0.0f;
        }
    }
    __device__ __forceinline__ void load_queries(SmemAddr Q_smem, const Place& place) {
#pragma unroll
        for (int i = 0; i < M_TILES * D_PAD / 16; ++i) {
            const int mt = i / (D_PAD / 16), step = i % (D_PAD / 16);
            ldmatrix_x4(Q[Q_IN_REGISTERS ? mt : 0][step], Q_smem + place(16 * mt, step));
        }
    }
    __device__ __forceinline__ bool finite() const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < M_TILES * DV_PAD / 2; ++i) zero = fmaf(O[i / (DV_PAD / 2)][i % (DV_PAD / 2) / 4][i % 4], 0.0f, zero);
        return zero == 0.0f;
    }
};

// S = Q K^T for KEYS keys from key row `n` of the tile on. `beside(step)` is called before each step's products.
template <int KEYS, class Call>
__device__ __forceinline__ void dot_products(float (&S)[M_TILES][KEYS / 8][4], const Rows& rows, SmemAddr Q_smem,
                                             SmemAddr K_smem, int n, const Place& place, const Place& key_address,
                                             const Call& beside) {
#pragma unroll
    for (int step = 0; step < D_PAD / 16; ++step) {
        beside(step);
        unsigned Q[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            if (!Q_IN_REGISTERS) ldmatrix_x4(Q[mt], Q_smem + place(16 * mt, step));
            else for (int i = 0; i < 4; ++i) Q[mt][i] = rows.Q[Q_IN_REGISTERS ? mt : 0][step][i];
        }
#pragma unroll
        for (int nt = 0; nt < KEYS / 16; ++nt) {
            unsigned K[4];
            ldmatrix_x4(K, K_smem + key_address(n + 16 * nt, step));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                mma_m16n8k16(S[mt][2 * nt], Q[mt], K[0], K[1]);
                mma_m16n8k16(S[mt][2 * nt + 1], Q[mt], K[2], K[3]);
            }
        }
    }
}

// Moves m up to the row maxima `top` and rescales what was accumulated under the old one. Where m is large, S becomes S - m.
template <int COUNT>
__device__ __forceinline__ void rescale(Rows& rows, float (&S)[M_TILES][COUNT][4], float (&top)[M_TILES][2], float exponent) {
    bool large = false;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& m = rows.m[mt][half];
            top[mt][half] = fmaxf(top[mt][half], __shfl_xor_sync(0xffffffffu, top[mt][half], 1));
            const float m_new = fmaxf(m, fmaxf(top[mt][half], __shfl_xor_sync(0xffffffffu, top[mt][half], 2)));
            const float alpha = m == m_new ? 1.0f : ex2((m - m_new) * exponent);  // equal infinities: not NaN
            m = m_new;
            large |= Head::is_large(m, exponent);
            rows.l[mt][half] *= alpha;
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                rows.O[mt][nt][2 * half] *= alpha;
                rows.O[mt][nt][2 * half + 1] *= alpha;
            }
        }
    }
    rows.large = __any_sync(0xffffffffu, large);
    if (!rows.large) return;
#pragma unroll
    for (int i = 0; i < M_TILES * COUNT * 4; ++i) {
        const int mt = i / (COUNT * 4), half = i / 2 % 2;
        if (Head::is_large(rows.m[mt][half], exponent)) S[mt][i / 4 % COUNT][i % 4] -= rows.m[mt][half];
    }
}

template <bool MASKED>
struct Masked {
    static constexpr bool YES = MASKED;
};

// One K/V tile, KEYS keys at a time. MASKED: some row of the warp does not see all of it; then in small steps, as soon as
// no row sees more it ends. Otherwise `beside` is called with each of the tile's STEPS of Q K^T.
template <bool MASKED, class Call>
__device__ __forceinline__ void attend(Rows& rows, const Head& head, int first_row, int n0, SmemAddr Q_smem,
                                       const char* stage, const Place& place, const Place& key_address, const VPlace& value_place,
                                       const Call& beside) {
    constexpr int KEYS = MASKED && !Head::ELEMENT_MASK ? 16 : SUB_N;
    const float exponent = head.unit * Head::LOG2E, margin = RESCALE_THRESHOLD / exponent;
    const char* V_tile = stage + K_BYTES;
    const SmemAddr K_smem = smem_address(stage), V_smem = smem_address(V_tile);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll (MASKED || ROLLED ? 1 : BLOCK_N / KEYS)
    for (int n = 0; n < BLOCK_N; n += KEYS) {
        const Range keys = head.keys(first_row, first_row + 16 * M_TILES);
        if (MASKED && n0 + n >= keys.end) break;  // no row of the warp sees the rest
        if (MASKED && Head::FIRST && n0 + n + KEYS <= keys.begin) continue;
        float S[M_TILES][KEYS / 8][4] = {};
        TIMELINE(QK);
        dot_products<KEYS>(S, rows, Q_smem, K_smem, n, place, key_address, [&](int step) {
            if (!MASKED) beside(n / KEYS * (D_PAD / 16) + step);
        });

        TIMELINE(softmax);
        float top[M_TILES][2];
        bool exceeds = rows.large;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                top[mt][half] = -INF;
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& s = S[mt][i / 2][2 * half + i % 2];
                    const ScoreIndex at(first_row + g, n0 + n + 2 * q, 16 * mt + 8 * half, i / 2 * 8 + i % 2);
                    s = head.raw(s, at);
                    if (MASKED && !head.visible(at.query_row(), at.key_col())) s = -INF;
                    top[mt][half] = fmaxf(top[mt][half], s);
                }
                exceeds |= top[mt][half] > rows.m[mt][half] + margin;
            }
        }
        if (__any_sync(0xffffffffu, exceeds)) rescale(rows, S, top, exponent);

        unsigned P[M_TILES][KEYS / 16][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float negative = -rows.m[mt][half] * exponent;
                const float shift = fabsf(negative) > Head::LARGE ? 0.0f : negative;  // no key seen: P = 0; large: S is S - m
#pragma unroll
                for (int nt = 0; nt < KEYS / 8; ++nt) {
                    const float p0 = ex2(fmaf(S[mt][nt][2 * half], exponent, shift));
                    const float p1 = ex2(fmaf(S[mt][nt][2 * half + 1], exponent, shift));
                    rows.l[mt][half] += p0 + p1;
                    P[mt][nt / 2][nt % 2 * 2 + half] = pack(p0, p1);
                }
            }
            Head::Kept kept[KEYS / 16];
            head.keep_along_queries(kept, first_row + 16 * mt, n0 + n);
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) P[mt][i / 4][i % 4] = kept[i / 4].apply(i % 4, P[mt][i / 4][i % 4]);
        }

        TIMELINE(PV);
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
#pragma unroll
            for (int dt = 0; dt < DV_PAD / 16; ++dt) {
                unsigned V[4];
                ldmatrix_x4_trans(V, V_smem + value_place(n + 16 * step, dt));
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt) {
                    mma_m16n8k16(rows.O[mt][2 * dt], P[mt][step], V[0], V[1]);
                    mma_m16n8k16(rows.O[mt][2 * dt + 1], P[mt][step], V[2], V[3]);
                }
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void fwd_mma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    int group,                                    // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    char* const stages = smem + BLOCK_M * Q_ROW;
    const int h = blockIdx.y, batch = blockIdx.z;
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const RowTile tile = query_tile<BLOCK_M>(score, CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x, batch);
    if (RAGGED && tile.invalid()) return;
    const int b = tile.b, m0 = tile.row0;  // causal: long rows first
    const int first_row = m0 + warp * 16 * M_TILES;
    const Head head(score, b, h);
    const dtype* const K_head = head.key(K, h / group, 0);
    const dtype* const V_head = head.key(V, h / group, 0);
    const Range keys = head.keys(m0, m0 + BLOCK_M), visible_to_all = head.fully_visible_keys<Head::MAPPED>(m0, m0 + BLOCK_M);
    const int whole = max(visible_to_all.end, 0) / BLOCK_N;  // tiles before that: every row of the block sees them whole,
    const int first_whole = (visible_to_all.begin + BLOCK_N - 1) / BLOCK_N;  // from here on

    const int begin = keys.begin / BLOCK_N, tiles = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    const auto next_from = [&](int j) { return head.next_key_tile<BLOCK_N>(m0, m0 + BLOCK_M, j, tiles); };  // to be walked
    const int first = next_from(begin);
    int turn = 0;  // in a walk by the block map, which of the two stages
    const auto stage_of = [&](int j, int ahead = 0) { return stages + (Head::MAPPED ? turn + ahead : j) % 2 * STAGE; };
    const auto request_stage = [&](int j, int ahead = 0) {
        const SmemAddr stage = smem_address(stage_of(j, ahead));
        cp_async_tile<BLOCK_N, D_PAD, THREADS>(stage, K_head, K.stride_s, j * BLOCK_N, head.Sk);
        cp_async_tile<BLOCK_N, DV_PAD, THREADS, HEAD_DIM_V>(stage + K_BYTES, V_head, V.stride_s, j * BLOCK_N, head.Sk);
        cp_async_commit();
    };
    char* const Q_warp = smem + warp * 16 * M_TILES * ROW;
    const SmemAddr Q_smem = smem_address(Q_warp);
    // Matrices in the order of the fragments' registers: of a block of Q or V (transposed) by rows, of one of K by columns,
    // so that the two registers of a B operand are neighbours (moving them into place cost 12% of the speed at D = 128).
    const Place place(lane % 16, lane / 16), key_address(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const VPlace value_place(lane % 16, lane / 16);

    Rows rows;
    if (tiles > first) cp_async_tile<BLOCK_M, D_PAD, THREADS>(smem_address(smem), head.query(Q, h, 0), Q.stride_s, m0, head.Sq);
    rows.reset();
    if (tiles > first) request_stage(first);
    const auto request_after = [&](int j) {
        const int next = next_from(j + 1);
        if (next < tiles) request_stage(next, 1);
    };
    TileCopies<BLOCK_N, D_PAD, THREADS> K_copies;
    TileCopies<BLOCK_N, DV_PAD, THREADS, HEAD_DIM_V> V_copies;
    int next = 0;
    // An even share of the tile after j at each step but the first. Where there is none its rows become zeros: no branch.
    const auto request_share_after = [&](int j, int step) {
        constexpr int K_COUNT = decltype(K_copies)::COUNT, COUNT = K_COUNT + decltype(V_copies)::COUNT;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (step != 1 + i * (STEPS - 1) / COUNT) continue;
            if (i == 0) next = next_from(j + 1);
            const SmemAddr stage = smem_address(stage_of(next, 1));
            if (i == 0) K_copies.begin(stage, K_head, K.stride_s, next * BLOCK_N, next < tiles ? head.Sk : 0);
            if (i == K_COUNT) V_copies.begin(stage + K_BYTES, V_head, V.stride_s, next * BLOCK_N, next < tiles ? head.Sk : 0);
            if (i < K_COUNT) K_copies.request(i, K.stride_s);
            else V_copies.request(i - K_COUNT, V.stride_s);
            if (i == COUNT - 1) cp_async_commit();
        }
    };
    const auto attend_tile = [&](auto masked, int j) {
        constexpr bool spread = SPREAD && !masked.YES;
        TIMELINE(wait_load);
        cp_async_wait<0>();
        __syncthreads();  // tile j is there for everybody, and everybody has used tile j - 1, whose stage is filled next
        if (!spread) {
            TIMELINE(load);
            request_after(j);
        }
        if (Q_IN_REGISTERS && j == first) rows.load_queries(Q_smem, place);
        attend<masked.YES>(rows, head, first_row, j * BLOCK_N, Q_smem, stage_of(j), place, key_address, value_place, [&](int step) {
            if (spread) request_share_after(j, step);
        });
        ++turn;
    };
    int j = first;
#pragma unroll 1
    for (; (Head::FIRST || Head::MAPPED) && j < tiles; j = next_from(j + 1)) {
        const bool all = head.map_covers<Head::FULLY_VISIBLE, BLOCK_N>(m0, m0 + BLOCK_M, j * BLOCK_N);
        if (first_whole <= j && j < whole && all) attend_tile(Masked<false>(), j);
        else attend_tile(Masked<true>(), j);
    }
#pragma unroll 1
    for (; j < whole; ++j) attend_tile(Masked<false>(), j);
#pragma unroll 1
    for (; j < tiles; ++j) attend_tile(Masked<true>(), j);
    if (SPREAD) cp_async_wait<0>();  // for the zeros of a tile that does not come
    // A masked key's P is 0, but 0 * NaN brings its value to rows that do not see it. Seldom, and then worth the time:
    if (Head::HIDES && __syncthreads_or(!rows.finite()))
        return attend_non_finite<BLOCK_M, WARPS>(Q, K, V, O, LSE, group, score, b, h, gridDim.y, m0, warp);

    TIMELINE(store);
    if (V_ROW > ROW) __syncthreads();  // every warp has read Q before rows of O, wider than its own, take its place
    __syncwarp();  // every lane has read the warp's own rows of Q before O takes their place
    char* const O_warp = V_ROW == ROW ? Q_warp : smem + warp * 16 * M_TILES * V_ROW;
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float l = rows.l[mt][half];
            l += __shfl_xor_sync(0xffffffffu, l, 1);
            l += __shfl_xor_sync(0xffffffffu, l, 2);
            const FinalizedRow final_row = head.finalize(rows.m[mt][half], l);
            const int row = 16 * mt + 8 * half + g;
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                const unsigned pair =
                    pack(rows.O[mt][nt][2 * half] * final_row.inverse, rows.O[mt][nt][2 * half + 1] * final_row.inverse);
                *reinterpret_cast<unsigned*>(O_warp + VTile::at(row, nt) + 4 * q) = pair;
            }
            if (q == 0 && first_row + row < head.Sq)
                LSE[head.lse_offset(gridDim.y, h) + first_row + row] = final_row.lse;
        }
    }
    __syncwarp();  // the warp's rows of O are whole before its lanes copy them, 16 bytes each, neighbours side by side
#pragma unroll 4
    for (int i = lane; i < 16 * M_TILES * VTile::CHUNKS; i += 32) {
        const int row = i / VTile::CHUNKS, chunk = i % VTile::CHUNKS;
        if (first_row + row < head.Sq && chunk * 8 < HEAD_DIM_V)
            *reinterpret_cast<uint4*>(head.query(O, h, first_row + row) + chunk * 8) =
                *reinterpret_cast<const uint4*>(O_warp + VTile::at(row, chunk));
    }
    TIMELINE(done);
}
