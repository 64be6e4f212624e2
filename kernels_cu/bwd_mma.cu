// Rung 3: attention backward on tensor cores with mma.sync (sm_80 and later). FlashAttention-2's Algorithm 2
// (arXiv:2307.08691).
//
// A block owns BLOCK_N keys and loops over the query tiles to which they are visible; KEY_WARPS warps own the same
// 32 keys. dK and dV stay in registers. Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, so that the
// accumulators of P^T and dS^T are A operands of dV += P^T dO and dK += dS^T Q without a shuffle, as P in fwd_mma.
//
// clang-format off
//   per query tile, each of the KEY_WARPS warps
//     own QUERIES of the tile    S^T, dP^T -> P^T, dS^T in registers, also stored to shared memory
//     other warps' queries       P^T, dS^T from shared memory
//     for both                   adds to its own COLS columns of dK and dV
//   then all warps of the block  dQ tile = dS K, 32 rows x DQ_COLS columns per warp, added to dQ_accum
//
//   shared memory: K, V [BLOCK_N] | 2 stages: Q, dO, LSE, delta [BLOCK_M] | dS^T, P^T [BLOCK_N][BLOCK_M]
//                  rows of Q and K have D_PAD columns, those of V and dO DV_PAD
// clang-format on
//
// dQ is a sum over blocks: each block adds to dQ_accum in fp32 with atomics, whose order varies, so that the last bits
// of dQ differ from run to run (dK and dV are deterministic). dQ_accum is in the order of the accumulators, not of a
// matrix: an atomic instruction of a warp then covers 512 consecutive bytes (before sm_90: 128). `bwd_mma_postprocess`
// restores the order, scales and converts.
//
// With 32 keys a warp uses each fragment of Q and dO that it loads twice. With 16 keys, shared memory would be the
// bottleneck instead of the tensor cores.
#include "bwd_postprocess.cuh"
#include "mma_smem.cuh"
#include "non_finite.cuh"
#include "score_mod.cuh"
#include "bwd_mma_tiles.cuh"
#include "bwd_mma_fragments.cuh"

// The warp's own queries: computes P^T and dS^T, adds P^T dO and dS^T Q to its columns of dV and dK, and stores P^T and
// dS^T in shared memory for the other warps. masked: the tile may have hidden scores.
__device__ __forceinline__ void compute_own_queries(Accumulators<COLS>& dK, Accumulators<V_COLS>& dV, const Head& head,
                                                    int m0, int n0, bool masked, SmemAddr K_tile, const char* stage,
                                                    char* dS_tile) {
    const SmemAddr Q_tile = smem_address(stage), dO_tile = Q_tile + Q_BYTES;
    const float* LSE_smem = reinterpret_cast<const float*>(stage + Q_BYTES + dO_BYTES);
    const Warp warp(thread_index_x());
    const QKOffsets rows = warp.rows<D_PAD>(), transposed_rows = warp.transposed_rows<D_PAD>(),
                    columns = warp.columns<D_PAD>();
    const VOffsets V_rows = warp.rows<DV_PAD>(), dO_rows = warp.transposed_rows<DV_PAD>(),
                   V_columns = warp.columns<DV_PAD>();
    const int g = warp.lane / 4,
              q = warp.lane % 4;  // of an accumulator fragment: rows g and g + 8, columns 2 * q and 2 * q + 1
    const float scale_log2 = head.softmax_scale * Head::LOG2E;
#pragma unroll 1
    for (int sub = 0; sub < QUERIES; sub += SUB_M) {
        const int first = warp.part * QUERIES + sub;  // first query of this step in the tile
        float S[2][SUB_M / 8][4] = {};
        mma_ABt(S, K_tile + warp.first_key * ROW_BYTES, Q_tile + first * ROW_BYTES, rows, transposed_rows);
        const auto at = [&](int mt, int half, int nt, int odd) {  // element 2 * half + odd of S[mt][nt]
            return ScoreIndex(m0 + first + 2 * q, n0 + warp.first_key + g, 8 * nt + odd, 16 * mt + 8 * half);
        };
        unsigned derivative[Head::HAS_DERIVATIVE ? SUB_M / 16 : 1][2]
                           [4];  // of the score modification; 16-bit pairs, as dS
        score_mod_and_mask(S, derivative, head, masked, at);
        unsigned P[SUB_M / 16][2][4];
        exponentiate(P, S, LSE_smem + first + 2 * q, scale_log2);
        unsigned kept =
            0;  // dropout: one bit per element of P; those of the two elements of a register are 16 bits apart
#pragma unroll
        for (int step = 0; step < SUB_M / 16; ++step) {
            unsigned dropped_P[2][4];
            Head::Kept blocks[2];
            head.keep_along_keys(blocks, Head::dropout_seed(head.score), m0 + first + 16 * step, n0 + warp.first_key);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const unsigned mask = blocks[i / 4].mask(i % 4);
                dropped_P[i / 4][i % 4] = P[step][i / 4][i % 4] & mask;
                kept |= mask & 0x10001u << (8 * step + i);
            }
            mma_AB_step(dV, dropped_P, dO_tile + first * V_ROW_BYTES, 16 * step, V_columns);
        }

        float dP[2][SUB_M / 8][4] = {};
        mma_ABt(dP, K_tile + K_BYTES + warp.first_key * V_ROW_BYTES, dO_tile + first * V_ROW_BYTES, V_rows, dO_rows);
        unsigned dS[SUB_M / 16][2][4];
#pragma unroll
        for (int nt = 0; nt < SUB_M / 8; ++nt) {
            const float2 delta = *reinterpret_cast<const float2*>(LSE_smem + BLOCK_M + first + 8 * nt + 2 * q);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int mt = i / 2, half = i % 2;
                const unsigned packed = P[nt / 2][mt][nt % 2 * 2 + half];
                const float2 p = unpack(packed);
                const unsigned keep_pair = kept >> (nt / 2 * 8 + 4 * mt + nt % 2 * 2 + half) & 0x10001u;
                float ds0 = p.x * (head.apply_dropout(dP[mt][nt][2 * half], keep_pair & 1) - delta.x);
                float ds1 = p.y * (head.apply_dropout(dP[mt][nt][2 * half + 1], keep_pair >> 16) - delta.y);
                if (Head::HAS_DERIVATIVE) {
                    const float2 dx = unpack(derivative[Head::HAS_DERIVATIVE ? nt / 2 : 0][mt][nt % 2 * 2 + half]);
                    ds0 *= dx.x, ds1 *= dx.y;
                }
                const unsigned ds = pack(ds0, ds1);
                dS[nt / 2][mt][nt % 2 * 2 + half] = ds;
                char* out = dS_tile + PTile::at(warp.first_key + 16 * mt + 8 * half + g, first / 8 + nt) + 4 * q;
                *reinterpret_cast<unsigned*>(out) = ds;
                if (KEY_WARPS > 1)
                    *reinterpret_cast<unsigned*>(out + P_BYTES) = DROPOUT ? packed & keep_pair * 0xffffu : packed;
            }
        }
#pragma unroll
        for (int step = 0; step < SUB_M / 16; ++step)
            mma_AB_step(dK, dS[step], Q_tile + first * ROW_BYTES, 16 * step, columns);
    }
}

// The queries of the other warps that own the same keys: adds P^T dO and dS^T Q, with P^T and dS^T from shared memory.
__device__ __forceinline__ void add_other_queries(Accumulators<COLS>& dK, Accumulators<V_COLS>& dV, SmemAddr Q_tile,
                                                  SmemAddr dS_tile) {
    const Warp warp(thread_index_x());
    const QKOffsets columns = warp.columns<D_PAD>();
    const VOffsets V_columns = warp.columns<DV_PAD>();
#pragma unroll 1  // if unrolled, D = 256 spills
    for (int other = 1; other < KEY_WARPS; ++other) {
        const int first = (warp.part + other) % KEY_WARPS * QUERIES;
#pragma unroll
        for (int step = 0; step < QUERIES / 16; ++step) {
            const auto offsets = row_offsets<POffsets>(warp.lane, first / 8);
            const SmemAddr from = dS_tile + warp.first_key * PTile::ROW;
            unsigned A[2][4];
            ldmatrix_x4(A[0], from + P_BYTES + offsets(0, step));
            ldmatrix_x4(A[1], from + P_BYTES + offsets(16, step));
            mma_AB_step(dV, A, Q_tile + Q_BYTES + first * V_ROW_BYTES, 16 * step, V_columns);
            ldmatrix_x4(A[0], from + offsets(0, step));
            ldmatrix_x4(A[1], from + offsets(16, step));
            mma_AB_step(dK, A, Q_tile + first * ROW_BYTES, 16 * step, columns);
        }
    }
}

// Adds 32 rows x DQ_COLS columns of dS K to the warp's part of a tile of dQ_accum.
__device__ __forceinline__ void add_dQ(float* dQ_tile, SmemAddr K_tile, SmemAddr dS_tile) {
    const Warp warp(thread_index_x());
    const auto queries = transposed_offsets<POffsets>(warp.lane, warp.index / DQ_COL_WARPS * 4);
    constexpr int STEP_COLS = DQ_COLS < 32 ? DQ_COLS : 32;  // more columns per step spill
#pragma unroll 1
    for (int col = 0; col < DQ_COLS; col += STEP_COLS) {
        const auto columns = row_offsets<QKOffsets>(warp.lane, (warp.index % DQ_COL_WARPS * DQ_COLS + col) / 8);
        float dQ[2][STEP_COLS / 8][4] = {};
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step) {
            unsigned A[2][4];
            ldmatrix_x4_trans(A[0], dS_tile + queries(16 * step, 0));
            ldmatrix_x4_trans(A[1], dS_tile + queries(16 * step, 1));
            mma_AB_step(dQ, A, K_tile, 16 * step, columns);
        }
        float* out = dQ_tile + warp.index * (32 * DQ_COLS) + col / 8 * 128;
#pragma unroll
        for (int i = 0; i < STEP_COLS / 4; ++i) {
            const int mt = i / (STEP_COLS / 8), nt = i % (STEP_COLS / 8);
            add_fragment(out + (mt * (DQ_COLS / 8) + nt) * 128, dQ[mt][nt]);
        }
    }
}

// MBlockLoader: the query tiles of a block's keys, and their loads.
#include "bwd_mma_load.cuh"

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void bwd_mma(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    float* dQ_accum,                               // (B, H, query tiles, BLOCK_M * D_PAD), zeroed before the launch
    const __grid_constant__ View<dtype> dK,        // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<dtype> dV,        // (B, Hk, Sk, HEAD_DIM_V)
    int group,                                     // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    char* const dS_tile = smem + STAGES_AT + 2 * STAGE_BYTES;
    const RowTile tile_of_block = key_tile<BLOCK_N>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile_of_block.invalid()) return;
    const int kv_head = blockIdx.y, b = tile_of_block.b, H = gridDim.y * group;
    const SeqlenInfo seqlen_info(score, b);
    const SmemAddr K_tile = smem_address(smem);
    const MBlockLoader tiles{Q, dO, LSE, delta, score, seqlen_info, tile_of_block, K_tile, b, kv_head, group, H};

    float dK_rmem[2][COLS / 8][4] = {}, dV_rmem[2][V_COLS / 8][4] = {};
    int h = kv_head * group, m0 = tiles.first_row();  // the current head and query tile
    // Number of tiles that remain, this one included. With a block map: 0 if there is none, 1 if only this one is
    // known, 2 if there is a next one.
    int tiles_left = m0 < tiles.row_end() ? group * ((tiles.row_end() - m0 + BLOCK_M - 1) / BLOCK_M) : 0;
    if (Head::HAS_BLOCK_MAP) tiles_left = tiles.next_tile(h, m0);
    unsigned stage = STAGES_AT;  // offset of the current stage in shared memory
    if (tiles_left > 0) {
        cp_async_tile<BLOCK_N, D_PAD, THREADS>(K_tile, seqlen_info.key(K, kv_head, 0), K.stride_s, tiles.n0(),
                                               seqlen_info.Sk);
        cp_async_tile<BLOCK_N, DV_PAD, THREADS, HEAD_DIM_V>(K_tile + K_BYTES, seqlen_info.key(V, kv_head, 0),
                                                            V.stride_s, tiles.n0(), seqlen_info.Sk);
        tiles.load(stage, h, m0);
    }
#pragma unroll 1
    for (; tiles_left > 0; --tiles_left) {
        TIMELINE(wait_load);
        cp_async_wait<0>();
        if (threadIdx.x < BLOCK_M) {  // the LSE that this thread has copied itself: no barrier needed
            float& lse = reinterpret_cast<float*>(smem + stage + Q_BYTES + dO_BYTES)[threadIdx.x];
            if (Head::is_large(lse)) lse = NOT_A_NUMBER;
        }
        __syncthreads();  // all loads of the stage are complete; the other stage, dS^T and P^T are no longer read
        TIMELINE(load);
        int next_h = h, next_m0 = m0 + BLOCK_M;  // block map: the next visible tile
        if (Head::HAS_BLOCK_MAP) {
            tiles_left = 1 + tiles.next_tile(next_h, next_m0);
            if (tiles_left > 1) tiles.load(other_stage(stage), next_h, next_m0);
        } else if (tiles_left > 1) {
            const bool last = m0 + BLOCK_M >= tiles.row_end();  // tile of this head
            tiles.load(other_stage(stage), last ? h + 1 : h, last ? tiles.first_row() : m0 + BLOCK_M);
        }
        const Head head(tiles.seqlen(), h);
        const bool masked = tiles.masked(head, m0);
        TIMELINE(compute_own_queries);
        compute_own_queries(dK_rmem, dV_rmem, head, m0, tiles.n0(), masked, K_tile, smem + stage, dS_tile);
        TIMELINE(wait_warps);
        __syncthreads();  // dS^T and P^T are complete before other warps read them
        TIMELINE(add_other_queries);
        add_other_queries(dK_rmem, dV_rmem, K_tile + stage, smem_address(dS_tile));  // K_tile is the address of smem
        const long long tile = tiles.seqlen().first_tile<BLOCK_M>(H, h) + m0 / BLOCK_M;
        TIMELINE(dQ);
        add_dQ(dQ_accum + tile * (BLOCK_M * D_PAD), K_tile, smem_address(dS_tile));
        m0 += BLOCK_M, stage = other_stage(stage);
        if (Head::HAS_BLOCK_MAP) h = next_h, m0 = next_m0;
        else if (m0 >= tiles.row_end()) ++h, m0 = tiles.first_row();
    }
    TIMELINE(store);
    // Non-finite fallback (non_finite.cuh): a masked P is 0, but 0 * NaN = NaN; and P is NaN for a row with a large
    // LSE. The barrier also waits for the last reads of K and V, which dK and dV overwrite.
    if (__syncthreads_or(!all_finite(dK_rmem) || !all_finite(dV_rmem)))
        return key_gradients_non_finite<BLOCK_N, WARPS>(Q, K, V, dO, LSE, delta, dK, dV, group, score, b, kv_head, H,
                                                        tiles.n0(), threadIdx.x / 32);

    stage_rows<COLS>(smem, dK_rmem, score.scale);
    stage_rows<V_COLS>(smem + K_BYTES, dV_rmem, Head::dropout_factor(score));
    __syncthreads();  // rows are complete before they are stored in 16-byte chunks
    store_rows<D_PAD, HEAD_DIM>(dK, tiles.seqlen(), kv_head, tiles.n0(), smem);
    store_rows<DV_PAD, HEAD_DIM_V>(dV, tiles.seqlen(), kv_head, tiles.n0(), smem + K_BYTES);
    TIMELINE(done);
}

// Postprocess: dQ = scale * dQ_accum, from the order of accumulators to rows. Each warp converts what the warps with
// the same index have added, in all blocks. LIMIT_BLOCKS: variants that need 512 / THREADS as the minimum number
// of blocks in __launch_bounds__. Without a number (DQ_BLOCKS = 0) ptxas limits their registers, so that more blocks
// fit on an SM, and they spill.
constexpr bool LIMIT_BLOCKS = HEAD_DIM > 128 || HEAD_DIM == 64 || Head::ELEMENT_MASK ||
                              (D_PAD > HEAD_DIM && (Snippet::HAS_SCORE_MOD || DROPOUT));
constexpr int DQ_BLOCKS = LIMIT_BLOCKS ? 512 / THREADS : 0;
extern "C" __global__ __launch_bounds__(THREADS, DQ_BLOCKS) void bwd_mma_postprocess(
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    const float* dQ_accum,                         // as above
    const __grid_constant__ View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    int group,                                     // H / Hk
    const __grid_constant__ Score score) {
    const RowTile tile_of_block = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile_of_block.invalid()) return;
    const int h = blockIdx.y, b = tile_of_block.b, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const SeqlenInfo seqlen_info(score, b);
    const int row0 = tile_of_block.row0 + warp / DQ_COL_WARPS * 32, col0 = warp % DQ_COL_WARPS * DQ_COLS;
    const long long tile = (static_cast<long long>(blockIdx.z) * gridDim.y + h) * gridDim.x + blockIdx.x;
    const float* from = dQ_accum + tile * (BLOCK_M * D_PAD) + warp * (32 * DQ_COLS);
    if (write_dQ_fragments<32, DQ_COLS, 128>(dQ, seqlen_info, h, row0, col0, lane, from, score.scale))
        query_gradients_non_finite<32, DQ_COLS>(Q, K, V, dO, LSE, delta, dQ, group, score, row0, col0);
}
