// Rung 3 for float8: attention forward on tensor cores with 8-bit mma.sync (sm_89 and later).
//
// The structure is that of fwd_mma: a warp owns M_TILES tiles of 16 query rows, and K and V tiles of BLOCK_N keys are
// loaded by cp.async into two stages. Differences:
//
// - The B operand of P V needs four consecutive keys in a register, but ldmatrix.trans gives pairs of columns. Two
//   byte permutations separate the columns; the resulting order of keys is the order of a lane's scores (fp8.cuh). One
//   O accumulator has the even columns of 16, the next one the odd columns, so that a lane stores four adjacent columns
//   of O.
// - Tensor cores accumulate 8-bit products with about 14 bits. The product of SUB_N keys and 16 columns is therefore a
//   separate accumulator T, which is added to O in fp32 by the FFMA that also rescales O. So m is updated in every
//   step, and P is scaled to the largest number of V's type (P_MAX).
// - O is stored from registers: its elements are wider than Q's, so Q's shared memory is too small for it.
#include "fp8.cuh"
#include "mma_smem.cuh"
#include "non_finite.cuh"
#include "softmax_mma.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / (16 * WARPS);
constexpr int D_PAD = (HEAD_DIM + 31) / 32 * 32, DV_PAD = (HEAD_DIM_V + 31) / 32 * 32;  // columns >= HEAD_DIM are zeros
using Tile = SwizzledRows<D_PAD / 2>;                                                   // rows of Q and K, in pairs
using VTile = SwizzledRows<DV_PAD / 2>;                                                 // of V
using QKOffsets = FragmentOffsets<D_PAD / 2>;
constexpr unsigned ROW = Tile::ROW, K_BYTES = BLOCK_N * ROW, STAGE = K_BYTES + BLOCK_N * VTile::ROW;
static_assert(BLOCK_M == 16 * WARPS * M_TILES && BLOCK_N % SUB_N == 0 && SUB_N % 32 == 0,
              "a tile consists of whole MMA steps");
static_assert(SMEM_BYTES == BLOCK_M * ROW + 2 * STAGE, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "rows are copied in 16-byte chunks");

// O and l are scaled by P_MAX.
using Softmax = WarpSoftmax<M_TILES, HEAD_DIM_V>;

struct MmaQK {
    __device__ __forceinline__ void operator()(float (&S)[4], const unsigned (&Q)[4], unsigned k0, unsigned k1) const {
        mma_m16n8k32<dtype>(S, Q, k0, k1);
    }
};

template <bool MASKED>
struct MaskedTile {
    static constexpr bool value = MASKED;
};

// O = alpha O + P V for the keys from row n of the V tile.
template <int STEPS>
__device__ __forceinline__ void add_PV(Softmax& state, const unsigned (&P)[M_TILES][STEPS][4],
                                       const float (&alpha)[M_TILES][2], SmemAddr V_smem, int n) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int dt = 0; dt < HEAD_DIM_V / 16; ++dt) {
        float T[M_TILES][2][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned pair[4];  // of keys 0 .. 7, 8 .. 15, 16 .. 23, 24 .. 31
            ldmatrix_x4_trans(pair, V_smem + VTile::at(n + 32 * step + lane, dt));
            const unsigned even[2] = {even_column(pair[0], pair[1]), even_column(pair[2], pair[3])};
            const unsigned odd[2] = {odd_column(pair[0], pair[1]), odd_column(pair[2], pair[3])};
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                mma_m16n8k32<dtype_v>(T[mt][0], P[mt][step], even[0], even[1]);
                mma_m16n8k32<dtype_v>(T[mt][1], P[mt][step], odd[0], odd[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < M_TILES * 8; ++i) {
            float& o = state.O[i / 8][2 * dt + i / 4 % 2][i % 4];
            o = fmaf(o, alpha[i / 8][i / 2 % 2], T[i / 8][i / 4 % 2][i % 4]);
        }
    }
}

// One K/V tile, KEYS keys at a time. MASKED: the tile may have hidden scores; steps are then of 32 keys (of SUB_N with
// an element mask), and steps outside of the key range of all rows are skipped.
template <bool MASKED>
__device__ __forceinline__ void process_keys(Softmax& state, const Head& head, int warp_row0, int n0, SmemAddr Q_smem,
                                             SmemAddr K_smem, const QKOffsets& q_offsets, const QKOffsets& k_offsets) {
    constexpr int KEYS = MASKED && !Head::ELEMENT_MASK ? 32 : SUB_N;
    const float scale_log2 = head.softmax_scale * Head::LOG2E;
    const SmemAddr V_smem = K_smem + K_BYTES;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll 1
    for (int n = 0; n < BLOCK_N; n += KEYS) {
        const Range keys = head.keys(warp_row0, warp_row0 + 16 * M_TILES);
        if (MASKED && n0 + n >= keys.end) break;  // hidden from all rows of the warp
        if (MASKED && Head::HAS_LEFT_BOUND && n0 + n + KEYS <= keys.begin) continue;
        float S[M_TILES][KEYS / 8][4] = {};
        constexpr int UNROLLED =
            Tile::GROUP / 2;  // steps whose offsets are in registers; the next group's are a constant apart
#pragma unroll(D_PAD > 128 ? 1 : D_PAD / 32)  // D > 128 has no registers for loads in advance
        for (unsigned group_of_steps = 0; group_of_steps < D_PAD / 32 / UNROLLED; ++group_of_steps) {
#pragma unroll
            for (int step = 0; step < UNROLLED; ++step) {
                unsigned Q[M_TILES][4];
#pragma unroll
                for (int mt = 0; mt < M_TILES; ++mt)
                    ldmatrix_x4(Q[mt], Q_smem + group_of_steps * Tile::GROUP * 16 + q_offsets(16 * mt, step));
                mma_ABt_step(S, Q, K_smem + group_of_steps * Tile::GROUP * 16, n, step, k_offsets, MmaQK());
            }
        }

        unsigned P[M_TILES][KEYS / 32][4];
        float alpha[M_TILES][2];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            Head::Kept kept[KEYS / 16];
            head.keep_along_queries(kept, warp_row0 + 16 * mt, n0 + n);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& m = state.m[mt][half];
                const float m_new = row_max<4>(score_mod_and_mask(S[mt], half, head, warp_row0 + g, 16 * mt + 8 * half,
                                                                  n0 + n + 2 * q, MASKED, m));
                alpha[mt][half] = rescale_factor(m, m_new, scale_log2);
                m = m_new;
                float sum = 0.0f, shift = softmax_shift(m, scale_log2, LOG2_P_MAX);
                if (Head::is_large(m, scale_log2)) {  // compute S - m first
                    shift = LOG2_P_MAX;
#pragma unroll
                    for (int i = 0; i < KEYS / 4; ++i) S[mt][i / 2][2 * half + i % 2] -= m;
                }
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& s = S[mt][i / 2][2 * half + i % 2];
                    s = ex2(fmaf(s, scale_log2, shift));
                    sum += s;
                    if (!kept[i / 4].keep(i / 2 % 2 * 2 + half, i % 2)) s = 0.0f;
                }
                state.l[mt][half] = fmaf(state.l[mt][half], alpha[mt][half], sum);
#pragma unroll
                for (int i = 0; i < KEYS / 16; ++i) {  // accumulators 2i and 2i + 1
                    const float (&low)[4] = S[mt][2 * i], (&high)[4] = S[mt][2 * i + 1];
                    P[mt][i / 2][i % 2 * 2 + half] =
                        pack4<dtype_v>(low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]);
                }
            }
        }

        add_PV(state, P, alpha, V_smem, n);
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
    if (LONG_SEQUENCES) griddepcontrol_launch_dependents();  // the short ones run on SMs that this kernel leaves idle
    const int h = blockIdx.y, batch = blockIdx.z;
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int x = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // causal: the longest tiles start first
    const RowTile tile = query_tile<BLOCK_M>(score, x, batch);
    if (RAGGED && tile.invalid()) return;
    const int b = tile.b, m0 = tile.row0;
    const int warp_row0 = m0 + warp * 16 * M_TILES;
    const Head head(score, b, h);
    const auto K_rows = head.rows_of_keys(K, h / group);
    const auto V_rows = head.rows_of_keys(V, h / group);
    const Range keys = head.keys(m0, m0 + BLOCK_M), visible_to_all = head.fully_visible_keys(m0, m0 + BLOCK_M);
    const int fully_visible_begin = (visible_to_all.begin + BLOCK_N - 1) / BLOCK_N;  // key tiles without hidden scores
    const int fully_visible_end = max(visible_to_all.end, 0) / BLOCK_N;
    const int first = keys.begin / BLOCK_N, tiles = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    const SmemAddr stages = smem_address(smem + BLOCK_M * ROW), Q_smem = smem_address(smem + warp * 16 * M_TILES * ROW);
    const auto load_stage = [&](int j) {
        const SmemAddr stage = stages + j % 2 * STAGE;
        cp_async_tile<BLOCK_N, D_PAD / 2, THREADS>(stage, K_rows, j * BLOCK_N, head.Sk);
        cp_async_tile<BLOCK_N, DV_PAD / 2, THREADS, HEAD_DIM_V>(stage + K_BYTES, V_rows, j * BLOCK_N, head.Sk);
        cp_async_commit();
    };
    const auto q_offsets = row_offsets<QKOffsets>(lane), k_offsets = transposed_offsets<QKOffsets>(lane);

    Softmax state;
    state.reset();
    if (tiles > first) {
        cp_async_tile<BLOCK_M, D_PAD / 2, THREADS>(smem_address(smem), head.query(Q, h, 0), Q.stride_s, m0, head.Sq);
        load_stage(first);
    }
    const auto process_tile = [&](auto masked, int j) {
        cp_async_wait<0>();
        __syncthreads();  // all threads' loads of tile j are complete; tile j - 1 is no longer read, and its stage is
                          // loaded next
        if (j + 1 < tiles) load_stage(j + 1);
        process_keys<masked.value>(state, head, warp_row0, j * BLOCK_N, Q_smem, stages + j % 2 * STAGE, q_offsets,
                                   k_offsets);
    };
#pragma unroll 1
    for (int j = first; j < tiles; ++j) {
        if ((!Head::HAS_LEFT_BOUND || fully_visible_begin <= j) && j < fully_visible_end)
            process_tile(MaskedTile<false>(), j);
        else process_tile(MaskedTile<true>(), j);
    }
    // P of a masked key is 0, but 0 * NaN = NaN: the fallback computes non-finite tiles again.
    if (Head::HAS_MASK && __syncthreads_or(!all_finite(state.O)))
        return attend_non_finite<BLOCK_M, WARPS>(Q, K, V, O, LSE, group, score, b, h, gridDim.y, m0, warp);

    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const FinalizedRow final_row = state.finalize(head, mt, half, P_MAX);
            const float O_scale = final_row.O_scale * (1.0f / P_MAX);
            const int query_row = warp_row0 + 16 * mt + 8 * half + g;
            if (query_row >= head.Sq) continue;
            if (q == 0) LSE[head.lse_offset(gridDim.y, h) + query_row] = final_row.lse;
            dtype_o* const to = head.query(O, h, query_row) + 4 * q;
#pragma unroll
            for (int dt = 0; dt < HEAD_DIM_V / 16; ++dt) {
                const float (&even)[4] = state.O[mt][2 * dt], (&odd)[4] = state.O[mt][2 * dt + 1];
                store4(to + 16 * dt, even[2 * half] * O_scale, odd[2 * half] * O_scale, even[2 * half + 1] * O_scale,
                       odd[2 * half + 1] * O_scale);
            }
        }
    }
}
