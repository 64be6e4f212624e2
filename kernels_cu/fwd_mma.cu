// Rung 3: attention forward on tensor cores with mma.sync (sm_80 and later). FlashAttention-2 (arXiv:2307.08691).
//
// A block has WARPS warps and BLOCK_M query rows. A warp owns M_TILES tiles of 16 rows, so that the softmax needs no communication
// between warps ("split-Q", FlashAttention-2 section 3.3). K and V tiles of BLOCK_N keys are loaded by cp.async into two stages: tile
// j + 1 is loaded while tile j is computed, with one barrier per tile.
//
// clang-format off
//   warp 0  rows   0 ..  31   Q_rmem (A operand)   S = Q K^T, SUB_N keys at a time   O_rmem (accumulators)
//   warp 1  rows  32 ..  63     "                  P = exp2(S - m), packed in place    O += P V
//   ...                                            (an accumulator of S is an A operand of P V)
//
//   shared memory: Q [BLOCK_M][D_PAD] | stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD] | stage 1       (O is staged in Q's memory)
// clang-format on
//
// Tiles are swizzled (include/mma_smem.cuh). Scores are raw (include/score_mod.cuh): the scale is part of the FFMA before exp2.
// Tiles that are fully visible to all rows of the block are computed by a loop without masking.
//
// Deferred rescaling: m is updated, and O and l are rescaled, only if a score exceeds m by more than RESCALE_THRESHOLD in the exponent
// (FlashAttention-4). P stays below 2^RESCALE_THRESHOLD, which fp16 can represent, and results are equal up to rounding. After the
// first tiles a step costs one vote instead of shuffles and HEAD_DIM / 4 multiplications per row.
#define TIMELINE_BRANCH 1  // timeline marks cost 3% instead of 7 … 9% of the time at D = 128 (experiments/018_timeline)
#include "mma_smem.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / (16 * WARPS);
constexpr int D_PAD = (HEAD_DIM + 15) / 16 * 16, DV_PAD = (HEAD_DIM_V + 15) / 16 * 16;  // columns >= HEAD_DIM are zeros
using Tile = Swizzled<D_PAD>;    // rows of Q and K
using VTile = Swizzled<DV_PAD>;  // rows of V and O
// D = 96 and 128: the loads of the next tile are interleaved with the MMAs of Q K^T, and ldmatrix offsets take fewer registers: 6% and
// 3% faster. D = 64 is 2% slower, D = 256 equal.
constexpr bool INTERLEAVE_LOADS = M_TILES == 2 && (D_PAD == 96 || D_PAD == 128) && DV_PAD == D_PAD;
constexpr int QK_STEPS = BLOCK_N / SUB_N * (D_PAD / 16);  // MMA steps of Q K^T per tile
// Large tiles would spill if they were unrolled: their steps of SUB_N keys are a loop. 128 × 64 keys at D = 256 in steps of 16 are
// 4 … 7% faster than 64 × 32 unrolled.
constexpr bool LOOP_STEPS = BLOCK_N * D_PAD > 8192;
// Exception: sm_80 with SUB_N = 48 at D = 128, where NVRTC 13.5 spills 20 bytes with compact offsets.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr bool COMPACT_OFFSETS = INTERLEAVE_LOADS && !(D_PAD == 128 && SUB_N == 48);
#else
constexpr bool COMPACT_OFFSETS = INTERLEAVE_LOADS;
#endif
using QKOffsets = FragmentOffsets<D_PAD, COMPACT_OFFSETS>;
using VOffsets = FragmentOffsets<DV_PAD, COMPACT_OFFSETS>;
constexpr unsigned ROW = Tile::ROW, V_ROW = VTile::ROW, K_BYTES = BLOCK_N * ROW, STAGE = K_BYTES + BLOCK_N * V_ROW;
constexpr unsigned Q_ROW = ROW > V_ROW ? ROW : V_ROW;  // bytes per row of the memory that Q and O share
constexpr float RESCALE_THRESHOLD = 8.0f;
// Q stays in registers if Q, O and S do not spill. The limits were found by trial on each architecture.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int MAX_REGISTERS = 180;
#else
constexpr int MAX_REGISTERS = M_TILES == 1 ? 208 : 180;  // D = 256: 8% faster than from shared memory
#endif
constexpr int OPTION_REGISTERS = Head::READS_TENSORS ? 60 : Head::LINEAR ? 0 : 8;
constexpr bool Q_IN_REGISTERS = M_TILES * (D_PAD / 4 + DV_PAD / 2 + SUB_N / 2) <= MAX_REGISTERS - OPTION_REGISTERS;
static_assert(BLOCK_M == 16 * WARPS * M_TILES && BLOCK_N % SUB_N == 0 && SUB_N % 16 == 0, "a tile consists of whole MMA steps");
static_assert(SMEM_BYTES == BLOCK_M * Q_ROW + 2 * STAGE, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "rows are copied in 16-byte chunks");

struct SoftmaxState {  // the warp's query rows; a lane has rows g and g + 8 of each 16-row tile
    unsigned Q[Q_IN_REGISTERS ? M_TILES : 1][D_PAD / 16][4];
    float O[M_TILES][DV_PAD / 8][4];
    float m[M_TILES][2], l[M_TILES][2];  // m: maximum of raw scores; l: sum over this lane's columns
    bool large;                          // Head::is_large of some m of the warp: then m is updated in every step

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
    __device__ __forceinline__ void load_queries(SmemAddr Q_smem, const QKOffsets& q_offsets) {
#pragma unroll
        for (int i = 0; i < M_TILES * D_PAD / 16; ++i) {
            const int mt = i / (D_PAD / 16), step = i % (D_PAD / 16);
            ldmatrix_x4(Q[Q_IN_REGISTERS ? mt : 0][step], Q_smem + q_offsets(16 * mt, step));
        }
    }
    __device__ __forceinline__ bool finite() const {
        float zero = 0.0f;
#pragma unroll
        for (int i = 0; i < M_TILES * DV_PAD / 2; ++i) zero = fmaf(O[i / (DV_PAD / 2)][i % (DV_PAD / 2) / 4][i % 4], 0.0f, zero);
        return zero == 0.0f;
    }
};

// S = Q K^T for KEYS keys from row n of the K tile. Calls load_part(step) before the MMAs of each step.
template <int KEYS, class Call>
__device__ __forceinline__ void mma_QK(float (&S)[M_TILES][KEYS / 8][4], const SoftmaxState& state, SmemAddr Q_smem,
                                             SmemAddr K_smem, int n, const QKOffsets& q_offsets, const QKOffsets& k_offsets,
                                             const Call& load_part) {
#pragma unroll
    for (int step = 0; step < D_PAD / 16; ++step) {
        load_part(step);
        unsigned Q[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            if (!Q_IN_REGISTERS) ldmatrix_x4(Q[mt], Q_smem + q_offsets(16 * mt, step));
            else for (int i = 0; i < 4; ++i) Q[mt][i] = state.Q[Q_IN_REGISTERS ? mt : 0][step][i];
        }
#pragma unroll
        for (int nt = 0; nt < KEYS / 16; ++nt) {
            unsigned K[4];
            ldmatrix_x4(K, K_smem + k_offsets(n + 16 * nt, step));
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                mma_m16n8k16(S[mt][2 * nt], Q[mt], K[0], K[1]);
                mma_m16n8k16(S[mt][2 * nt + 1], Q[mt], K[2], K[3]);
            }
        }
    }
}

// Updates m with the row maxima tile_max, and rescales O and l. In rows whose m is large, S becomes S - m.
template <int COUNT>
__device__ __forceinline__ void rescale(SoftmaxState& state, float (&S)[M_TILES][COUNT][4], float (&tile_max)[M_TILES][2], float exponent) {
    bool large = false;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& m = state.m[mt][half];
            tile_max[mt][half] = fmaxf(tile_max[mt][half], __shfl_xor_sync(0xffffffffu, tile_max[mt][half], 1));
            const float m_new = fmaxf(m, fmaxf(tile_max[mt][half], __shfl_xor_sync(0xffffffffu, tile_max[mt][half], 2)));
            const float alpha = m == m_new ? 1.0f : ex2((m - m_new) * exponent);  // for equal infinities 1, not NaN
            m = m_new;
            large |= Head::is_large(m, exponent);
            state.l[mt][half] *= alpha;
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                state.O[mt][nt][2 * half] *= alpha;
                state.O[mt][nt][2 * half + 1] *= alpha;
            }
        }
    }
    state.large = __any_sync(0xffffffffu, large);
    if (!state.large) return;
#pragma unroll
    for (int i = 0; i < M_TILES * COUNT * 4; ++i) {
        const int mt = i / (COUNT * 4), half = i / 2 % 2;
        if (Head::is_large(state.m[mt][half], exponent)) S[mt][i / 4 % COUNT][i % 4] -= state.m[mt][half];
    }
}

template <bool MASKED>
struct MaskedTile {
    static constexpr bool value = MASKED;
};

// One K/V tile, KEYS keys at a time. MASKED: the tile may have hidden scores; steps are then small, and steps outside of the key
// range of all rows are skipped. Otherwise calls load_part(step) for each of the tile's QK_STEPS.
template <bool MASKED, class Call>
__device__ __forceinline__ void process_keys(SoftmaxState& state, const Head& head, int warp_row0, int n0, SmemAddr Q_smem,
                                       const char* stage, const QKOffsets& q_offsets, const QKOffsets& k_offsets, const VOffsets& v_offsets,
                                       const Call& load_part) {
    constexpr int KEYS = MASKED && !Head::ELEMENT_MASK ? 16 : SUB_N;
    const float exponent = head.unit * Head::LOG2E, margin = RESCALE_THRESHOLD / exponent;
    const char* V_tile = stage + K_BYTES;
    const SmemAddr K_smem = smem_address(stage), V_smem = smem_address(V_tile);
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll (MASKED || LOOP_STEPS ? 1 : BLOCK_N / KEYS)
    for (int n = 0; n < BLOCK_N; n += KEYS) {
        const Range keys = head.keys(warp_row0, warp_row0 + 16 * M_TILES);
        if (MASKED && n0 + n >= keys.end) break;  // hidden from all rows of the warp
        if (MASKED && Head::FIRST && n0 + n + KEYS <= keys.begin) continue;
        float S[M_TILES][KEYS / 8][4] = {};
        TIMELINE(QK);
        mma_QK<KEYS>(S, state, Q_smem, K_smem, n, q_offsets, k_offsets, [&](int step) {
            if (!MASKED) load_part(n / KEYS * (D_PAD / 16) + step);
        });

        TIMELINE(softmax);
        float tile_max[M_TILES][2];
        bool exceeds = state.large;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                tile_max[mt][half] = -INF;
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& s = S[mt][i / 2][2 * half + i % 2];
                    const ScoreIndex at(warp_row0 + g, n0 + n + 2 * q, 16 * mt + 8 * half, i / 2 * 8 + i % 2);
                    s = head.raw(s, at);
                    if (MASKED && !head.visible(at.query_row(), at.key_col())) s = -INF;
                    tile_max[mt][half] = fmaxf(tile_max[mt][half], s);
                }
                exceeds |= tile_max[mt][half] > state.m[mt][half] + margin;
            }
        }
        if (__any_sync(0xffffffffu, exceeds)) rescale(state, S, tile_max, exponent);

        unsigned P[M_TILES][KEYS / 16][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float scaled_m = -state.m[mt][half] * exponent;
                const float shift = fabsf(scaled_m) > Head::LARGE ? 0.0f : scaled_m;  // no visible key: P = 0; large: S is S - m
#pragma unroll
                for (int nt = 0; nt < KEYS / 8; ++nt) {
                    const float p0 = ex2(fmaf(S[mt][nt][2 * half], exponent, shift));
                    const float p1 = ex2(fmaf(S[mt][nt][2 * half + 1], exponent, shift));
                    state.l[mt][half] += p0 + p1;
                    P[mt][nt / 2][nt % 2 * 2 + half] = pack(p0, p1);
                }
            }
            Head::Kept kept[KEYS / 16];
            head.keep_along_queries(kept, warp_row0 + 16 * mt, n0 + n);
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) P[mt][i / 4][i % 4] = kept[i / 4].apply(i % 4, P[mt][i / 4][i % 4]);
        }

        TIMELINE(PV);
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
#pragma unroll
            for (int dt = 0; dt < DV_PAD / 16; ++dt) {
                unsigned V[4];
                ldmatrix_x4_trans(V, V_smem + v_offsets(n + 16 * step, dt));
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt) {
                    mma_m16n8k16(state.O[mt][2 * dt], P[mt][step], V[0], V[1]);
                    mma_m16n8k16(state.O[mt][2 * dt + 1], P[mt][step], V[2], V[3]);
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
    const int b = tile.b, m0 = tile.row0;  // causal: the longest tiles start first
    const int warp_row0 = m0 + warp * 16 * M_TILES;
    const Head head(score, b, h);
    const dtype* const K_head = head.key(K, h / group, 0);
    const dtype* const V_head = head.key(V, h / group, 0);
    const Range keys = head.keys(m0, m0 + BLOCK_M), visible_to_all = head.fully_visible_keys<Head::MAPPED>(m0, m0 + BLOCK_M);
    const int fully_visible_begin = (visible_to_all.begin + BLOCK_N - 1) / BLOCK_N;  // key tiles without hidden scores
    const int fully_visible_end = max(visible_to_all.end, 0) / BLOCK_N;

    const int begin = keys.begin / BLOCK_N, tiles = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    const auto next_tile = [&](int j) { return head.next_key_tile<BLOCK_N>(m0, m0 + BLOCK_M, j, tiles); };  // tile j or the next visible one
    const int first = next_tile(begin);
    int stage_count = 0;  // tiles so far: selects the stage if a block map makes j skip tiles
    const auto stage_of = [&](int j, int ahead = 0) { return stages + (Head::MAPPED ? stage_count + ahead : j) % 2 * STAGE; };
    const auto load_stage = [&](int j, int ahead = 0) {
        const SmemAddr stage = smem_address(stage_of(j, ahead));
        cp_async_tile<BLOCK_N, D_PAD, THREADS>(stage, K_head, K.stride_s, j * BLOCK_N, head.Sk);
        cp_async_tile<BLOCK_N, DV_PAD, THREADS, HEAD_DIM_V>(stage + K_BYTES, V_head, V.stride_s, j * BLOCK_N, head.Sk);
        cp_async_commit();
    };
    char* const Q_warp = smem + warp * 16 * M_TILES * ROW;
    const SmemAddr Q_smem = smem_address(Q_warp);
    // ldmatrix addresses of 16 x 16 blocks. K's differ from Q's and V's, so that the two registers of a B operand are adjacent (12%
    // faster at D = 128).
    const QKOffsets q_offsets(lane % 16, lane / 16), k_offsets(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const VOffsets v_offsets(lane % 16, lane / 16);

    SoftmaxState state;
    if (tiles > first) cp_async_tile<BLOCK_M, D_PAD, THREADS>(smem_address(smem), head.query(Q, h, 0), Q.stride_s, m0, head.Sq);
    state.reset();
    if (tiles > first) load_stage(first);
    const auto load_next = [&](int j) {
        const int next = next_tile(j + 1);
        if (next < tiles) load_stage(next, 1);
    };
    TileCopies<BLOCK_N, D_PAD, THREADS> K_copies;
    TileCopies<BLOCK_N, DV_PAD, THREADS, HEAD_DIM_V> V_copies;
    int next = 0;
    // Loads an equal part of the next tile at each step but the first. After the last tile it writes zeros, to avoid a branch.
    const auto load_next_part = [&](int j, int step) {
        constexpr int K_COUNT = decltype(K_copies)::COUNT, COUNT = K_COUNT + decltype(V_copies)::COUNT;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (step != 1 + i * (QK_STEPS - 1) / COUNT) continue;
            if (i == 0) next = next_tile(j + 1);
            const SmemAddr stage = smem_address(stage_of(next, 1));
            if (i == 0) K_copies.begin(stage, K_head, K.stride_s, next * BLOCK_N, next < tiles ? head.Sk : 0);
            if (i == K_COUNT) V_copies.begin(stage + K_BYTES, V_head, V.stride_s, next * BLOCK_N, next < tiles ? head.Sk : 0);
            if (i < K_COUNT) K_copies.load(i, K.stride_s);
            else V_copies.load(i - K_COUNT, V.stride_s);
            if (i == COUNT - 1) cp_async_commit();
        }
    };
    const auto process_tile = [&](auto masked, int j) {
        constexpr bool interleave_loads = INTERLEAVE_LOADS && !masked.value;
        TIMELINE(wait_load);
        cp_async_wait<0>();
        __syncthreads();  // all threads' loads of tile j are complete; tile j - 1 is no longer read, and its stage is loaded next
        if (!interleave_loads) {
            TIMELINE(load);
            load_next(j);
        }
        if (Q_IN_REGISTERS && j == first) state.load_queries(Q_smem, q_offsets);
        process_keys<masked.value>(state, head, warp_row0, j * BLOCK_N, Q_smem, stage_of(j), q_offsets, k_offsets, v_offsets, [&](int step) {
            if (interleave_loads) load_next_part(j, step);
        });
        ++stage_count;
    };
    int j = first;
#pragma unroll 1
    for (; (Head::FIRST || Head::MAPPED) && j < tiles; j = next_tile(j + 1)) {
        const bool fully_visible = head.map_covers<Head::FULLY_VISIBLE, BLOCK_N>(m0, m0 + BLOCK_M, j * BLOCK_N);
        if (fully_visible_begin <= j && j < fully_visible_end && fully_visible) process_tile(MaskedTile<false>(), j);
        else process_tile(MaskedTile<true>(), j);
    }
#pragma unroll 1
    for (; j < fully_visible_end; ++j) process_tile(MaskedTile<false>(), j);
#pragma unroll 1
    for (; j < tiles; ++j) process_tile(MaskedTile<true>(), j);
    if (INTERLEAVE_LOADS) cp_async_wait<0>();  // the zeros after the last tile
    // P of a masked key is 0, but 0 * NaN = NaN: the fallback computes non-finite tiles again.
    if (Head::HIDES && __syncthreads_or(!state.finite()))
        return attend_non_finite<BLOCK_M, WARPS>(Q, K, V, O, LSE, group, score, b, h, gridDim.y, m0, warp);

    TIMELINE(store);
    if (V_ROW > ROW) __syncthreads();  // every warp has read Q before rows of O, which are wider, overwrite it
    __syncwarp();  // every lane has read the warp's own rows of Q before O overwrites them
    char* const O_warp = V_ROW == ROW ? Q_warp : smem + warp * 16 * M_TILES * V_ROW;
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float l = state.l[mt][half];
            l += __shfl_xor_sync(0xffffffffu, l, 1);
            l += __shfl_xor_sync(0xffffffffu, l, 2);
            const FinalizedRow final_row = head.finalize(state.m[mt][half], l);
            const int row = 16 * mt + 8 * half + g;
#pragma unroll
            for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                const unsigned pair =
                    pack(state.O[mt][nt][2 * half] * final_row.inverse, state.O[mt][nt][2 * half + 1] * final_row.inverse);
                *reinterpret_cast<unsigned*>(O_warp + VTile::at(row, nt) + 4 * q) = pair;
            }
            if (q == 0 && warp_row0 + row < head.Sq)
                LSE[head.lse_offset(gridDim.y, h) + warp_row0 + row] = final_row.lse;
        }
    }
    __syncwarp();  // the warp's rows of O are complete before its lanes copy them in 16-byte chunks
#pragma unroll 4
    for (int i = lane; i < 16 * M_TILES * VTile::CHUNKS; i += 32) {
        const int row = i / VTile::CHUNKS, chunk = i % VTile::CHUNKS;
        if (warp_row0 + row < head.Sq && chunk * 8 < HEAD_DIM_V)
            *reinterpret_cast<uint4*>(head.query(O, h, warp_row0 + row) + chunk * 8) =
                *reinterpret_cast<const uint4*>(O_warp + VTile::at(row, chunk));
    }
    TIMELINE(done);
}
