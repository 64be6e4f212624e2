// Rung 2: attention backward, a two-dimensional thread block per tile.
//
// Both entry points run the same loop with different operands: a block owns rows of a pair of tensors A, B, loads tiles
// of the other pair X, Y, and sums the gradients of its own rows. THREADS_X * THREADS_Y threads share a tile as in
// fwd_block2d; each has a register tile of S, of dP and of the gradients.
//
//                        owned: A, B      loaded: X, Y    S = A X^T   dP = B Y^T
//   bwd_block2d          K, V             Q, dO           dV += P^T dO,  dK += dS^T Q      (its S and P are transposed)
//   bwd_block2d_dq       Q, dO            K, V                           dQ += dS K
//
//   A_smem, B_smem [OWNED][columns, padded, + 4]      loaded once; A and X have HEAD_DIM columns, B and Y HEAD_DIM_V
//   X_smem, Y_smem [OTHER][columns, padded, + 4]      per tile; read by columns (S, dP), then by rows (gradients)
//   P_smem         [OWNED][OTHER + 4]                 P, then dS, exchanged between the threads of a row
//
// All of it is fp32. The threads of a row are lanes of one warp, so that P_smem needs no block barrier.
#include "tensor.cuh"
#include "block2d.cuh"
#include "score_mod.cuh"

constexpr int THREADS = THREADS_X * THREADS_Y;
// Layout of tensors with COLUMNS columns.
template <int COLUMNS>
struct Width {
    static constexpr int THREAD_COLS =
        (COLUMNS + 4 * THREADS_X - 1) / (4 * THREADS_X) * 4;  // of a gradient, per thread
    static constexpr int PADDED = THREAD_COLS * THREADS_X, PITCH = PADDED + 4;
    static constexpr int STEP =
        PADDED % (8 * THREADS_X) == 0 ? 8 * THREADS_X : 4 * THREADS_X;  // columns loaded at a time
};
constexpr int D_COLS = Width<HEAD_DIM>::THREAD_COLS, DV_COLS = Width<HEAD_DIM_V>::THREAD_COLS;
constexpr int PITCH = Width<HEAD_DIM>::PITCH, V_PITCH = Width<HEAD_DIM_V>::PITCH;
__host__ __device__ constexpr int smem_bytes(int owned, int other) {
    return 4 * ((owned + other) * (PITCH + V_PITCH) + owned * (other + 4));
}
// Blocks per SM that the register file allows: S, dP, `gradients` columns, and 80 other registers per thread.
__host__ __device__ constexpr int min_blocks(int owned, int other, int gradients) {
    return 65536 / (THREADS * (owned / THREADS_Y * (gradients + 2 * other / THREADS_X) + 80));
}
static_assert(SMEM_BYTES == smem_bytes(BLOCK_N, BLOCK_M), "spec and kernel disagree on shared memory");
static_assert(SMEM_BYTES_DQ == smem_bytes(BLOCK_M, BLOCK_N), "spec and kernel disagree on shared memory");
static_assert(32 % THREADS_X == 0 && THREADS % 32 == 0, "the threads of a row are lanes of one warp");

template <int COLUMNS, int ROWS>
__device__ __forceinline__ void load_rows(float* tile, View<const dtype> tensor, int b, int h, int row0, int S) {
    using W = Width<COLUMNS>;
#pragma unroll 1
    for (int d0 = 0; d0 < W::PADDED; d0 += W::STEP)
        load_tile4<ROWS, W::STEP, W::PITCH, THREADS_X, THREADS_Y, COLUMNS>(tile + d0, tensor, b, h, row0, S, d0);
}

// Whether the score of an owned row and a row of the other pair is visible. BY_KEY: the owned row is a key.
template <bool BY_KEY>
__device__ __forceinline__ bool visible(const Head& head, int owned, int other) {
    return BY_KEY ? head.visible_in_bounds(other, owned) : head.visible_in_bounds(owned, other);
}

// gradient += P X, with P exchanged through P_smem. FULLY_VISIBLE: no score of the tile is hidden.
template <bool BY_KEY, bool FULLY_VISIBLE, int ROWS, int COLS, int THREAD_COLS>
__device__ __forceinline__ void exchange_and_add(float (&gradient)[ROWS][THREAD_COLS], const float (&P)[ROWS][COLS],
                                                 float* P_row, const float* X_col, const Head& head, int owned0,
                                                 int other0) {
    constexpr int X_PITCH = THREAD_COLS * THREADS_X + 4, P_PITCH = COLS * THREADS_X + 4;
    __syncwarp();  // all lanes of each row have read the previous contents
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLS; ++j) P_row[i * THREADS_Y * P_PITCH + threadIdx.x + j * THREADS_X] = P[i][j];
    __syncwarp();  // each row is complete before any lane reads it
    add_product<FULLY_VISIBLE, COLS * THREADS_X, P_PITCH, X_PITCH>(gradient, P_row, X_col, [&](int i, int j) {
        return visible<BY_KEY>(head, owned0 + i * THREADS_Y, other0 + j);
    });
}

template <int COLUMNS, int ROWS>
__device__ __forceinline__ void store_rows(View<dtype> tensor,
                                           const float (&gradient)[ROWS][Width<COLUMNS>::THREAD_COLS], float factor,
                                           int b, int h, int row0, int S) {
    dtype* out = tensor.row(b, h, row0) + 4 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < ROWS; ++i, out += THREADS_Y * tensor.stride_s) {
        if (row0 + i * THREADS_Y >= S) continue;
#pragma unroll
        for (int c = 0; c < Width<COLUMNS>::THREAD_COLS; ++c) {
            const int d = c / 4 * 4 * THREADS_X + c % 4;  // relative to column 4 * threadIdx.x
            if (COLUMNS % (4 * THREADS_X) == 0 || 4 * threadIdx.x + d < COLUMNS)
                out[d] = dtype(factor * gradient[i][c]);
        }
    }
}

// The gradients of the block's OWNED rows of A, and with BY_KEY of B: sums over all tiles of X and Y, and over the
// query heads of the group.
template <bool BY_KEY, int OWNED, int OTHER>
__device__ __forceinline__ void sum_gradients(View<const dtype> A, View<const dtype> B, View<const dtype> X,
                                              View<const dtype> Y, const float* LSE, const float* delta, View<dtype> dA,
                                              View<dtype> dB, int group, const Score& score) {
    constexpr int ROWS = OWNED / THREADS_Y, COLS = OTHER / THREADS_X;
    const RowTile tile =
        BY_KEY ? key_tile<OWNED>(score, blockIdx.x, blockIdx.z) : query_tile<OWNED>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.invalid()) return;
    extern __shared__ __align__(16) float smem[];
    float *A_smem = smem, *B_smem = A_smem + OWNED * PITCH, *X_smem = B_smem + OWNED * V_PITCH;
    float *Y_smem = X_smem + OTHER * PITCH, *P_smem = Y_smem + OTHER * V_PITCH;
    const int tx = threadIdx.x, ty = threadIdx.y, owned0 = tile.row0, own_head = blockIdx.y, b = tile.b;
    const SeqlenInfo seqlen(score, b);
    if (BY_KEY) seqlen.offset_keys(A, B, dA, dB), seqlen.offset_queries(X, Y);
    else seqlen.offset_queries(A, B, dA, dB), seqlen.offset_keys(X, Y);
    const int owned_end = BY_KEY ? seqlen.key_rows() : seqlen.Sq, heads = BY_KEY ? group : 1;

    load_rows<HEAD_DIM, OWNED>(A_smem, A, b, own_head, owned0, owned_end);
    load_rows<HEAD_DIM_V, OWNED>(B_smem, B, b, own_head, owned0, owned_end);
    float dA_rmem[ROWS][D_COLS] = {}, dB_rmem[ROWS][DV_COLS] = {};

    for (int n = 0; n < heads; ++n) {
        const int query_head = BY_KEY ? own_head * group + n : own_head,
                  other_head = BY_KEY ? query_head : own_head / group;
        const Head head(score, b, query_head);
        const Range range = BY_KEY ? head.queries(owned0, owned0 + OWNED) : head.keys(owned0, owned0 + OWNED);
        const long long row = head.lse_offset(gridDim.y * heads, query_head);  // of LSE and delta
        for (int other0 = range.begin / OTHER * OTHER; other0 < range.end; other0 += OTHER) {
            __syncthreads();  // every row has used the previous tile before it is overwritten
            load_rows<HEAD_DIM, OTHER>(X_smem, X, b, other_head, other0, BY_KEY ? head.Sq : head.Sk);
            load_rows<HEAD_DIM_V, OTHER>(Y_smem, Y, b, other_head, other0, BY_KEY ? head.Sq : head.Sk);
            __syncthreads();  // the tile, and A and B, are complete before any row reads them

            float P[ROWS][COLS] = {}, dS[ROWS][COLS] = {};  // first S and dP
            add_dot_products<PITCH, PITCH>(P, A_smem, X_smem, HEAD_DIM);
            add_dot_products<V_PITCH, V_PITCH>(dS, B_smem, Y_smem, HEAD_DIM_V);
#pragma unroll
            for (int j = 0; j < COLS; ++j)
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int owned = owned0 + ty + i * THREADS_Y, other = other0 + tx + j * THREADS_X;
                    const int query_row = BY_KEY ? other : owned, key_col = BY_KEY ? owned : other;
                    const bool is_visible = head.visible_in_bounds(query_row, key_col);
                    const auto [p, dx] =
                        head.recompute_P(P[i][j], is_visible ? LSE[row + query_row] : 0.0f, query_row, key_col);
                    const bool kept = head.keep(query_row, key_col);
                    P[i][j] = is_visible ? head.apply_dropout(p, kept) : 0.0f;
                    const float dP = head.apply_dropout(dS[i][j], kept);
                    dS[i][j] = is_visible ? p * (dP - delta[row + query_row]) * dx : 0.0f;
                }

            const int m0 = BY_KEY ? other0 : owned0, n0 = BY_KEY ? owned0 : other0;
            float* P_row = P_smem + ty * (OTHER + 4);
            const float *X_col = X_smem + 4 * tx, *Y_col = Y_smem + 4 * tx;
            const Range fully_visible = head.fully_visible_keys(m0, m0 + BLOCK_M);
            if (m0 + BLOCK_M <= head.Sq && fully_visible.begin <= n0 && n0 + BLOCK_N <= fully_visible.end) {
                if (BY_KEY) exchange_and_add<BY_KEY, true>(dB_rmem, P, P_row, Y_col, head, owned0 + ty, other0);
                exchange_and_add<BY_KEY, true>(dA_rmem, dS, P_row, X_col, head, owned0 + ty, other0);
            } else {
                if (BY_KEY) exchange_and_add<BY_KEY, false>(dB_rmem, P, P_row, Y_col, head, owned0 + ty, other0);
                exchange_and_add<BY_KEY, false>(dA_rmem, dS, P_row, X_col, head, owned0 + ty, other0);
            }
        }
    }
    store_rows<HEAD_DIM>(dA, dA_rmem, score.scale, b, own_head, owned0 + ty, owned_end);
    if (BY_KEY) store_rows<HEAD_DIM_V>(dB, dB_rmem, 1.0f, b, own_head, owned0 + ty, owned_end);
}

extern "C" __global__ __launch_bounds__(THREADS, min_blocks(BLOCK_N, BLOCK_M, D_COLS + DV_COLS)) void bwd_block2d(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const float* LSE,      // (B, H, Sq), contiguous
    const float* delta,    // (B, H, Sq), contiguous
    View<dtype> dK,        // (B, Hk, Sk, HEAD_DIM)
    View<dtype> dV,        // (B, Hk, Sk, HEAD_DIM_V)
    int group,             // H / Hk: query heads per key/value head
    Score score) {
    sum_gradients<true, BLOCK_N, BLOCK_M>(K, V, Q, dO, LSE, delta, dK, dV, group, score);
}

extern "C" __global__ __launch_bounds__(THREADS, min_blocks(BLOCK_M, BLOCK_N, D_COLS)) void bwd_block2d_dq(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const float* LSE,      // (B, H, Sq), contiguous
    const float* delta,    // (B, H, Sq), contiguous
    View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    int group,             // H / Hk
    Score score) {
    sum_gradients<false, BLOCK_M, BLOCK_N>(Q, dO, K, V, LSE, delta, dQ, dQ, group, score);
}
