// Rung 2: attention forward, a two-dimensional thread block per tile.
//
// In rung 1 a thread owns a query row and loads one word of shared memory per multiply-add. Here X * Y threads
// (THREADS_X, THREADS_Y) share BLOCK_M rows: threads along y divide the rows, threads along x the columns of a row.
// Each thread has a small rectangle of S and of O in registers, so that a loaded word is used by several multiply-adds.
//
// clang-format off
//                  S = Q K^T                           O += P V
//            ┌───────────────────┐         ┌─────────────────────────────┐
//   row ty   │ a b … h a b … h … │ ty = 0  │ aaaabbbb…hhhhaaaabbbb…hhhh… │    a: tx = 0, b: tx = 1, … h: tx = 7
//   ty + Y   │ a b … h a b … h … │ ty = 1  │ aaaabbbb…hhhhaaaabbbb…hhhh… │    a warp: 8 along x, 4 along y
//    …       │ keys              │         │ columns of V                │
// clang-format on
//
// The threads of a row are lanes of one warp: m and l are reduced by shuffles (l once, at the end), and P is exchanged
// through P_smem. A lane owns every X-th key, and rows of K are padded to a multiple of 32 words plus 4: eight lanes
// that read four words each of eight keys access 32 different banks.
//
//   Q_smem  [BLOCK_M][HEAD_DIM, padded, + 4]   loaded once
//   KV_smem [BLOCK_N][BLOCK_D + 4]             K, BLOCK_D columns at a time; then V, V_ROWS rows at a time
//   P_smem  [BLOCK_M][BLOCK_N + 4]             all in fp32: a value is used, and would be converted, many times
//
// Inner loops on sm_90a for D = 64 / 128 / 256: Q K^T has 128 FFMA per 12 LDS.128, P V 128 / 256 / 512
// per 12 / 20 / 36.
#include "tensor.cuh"
#include "block2d.cuh"
#include "score_mod.cuh"

constexpr int THREADS = THREADS_X * THREADS_Y;
constexpr int ROWS = BLOCK_M / THREADS_Y, COLS = BLOCK_N / THREADS_X;           // of S per thread
constexpr int O_COLS = (HEAD_DIM_V + 4 * THREADS_X - 1) / (4 * THREADS_X) * 4;  // of O per thread
constexpr int Q_PITCH = (HEAD_DIM + BLOCK_D - 1) / BLOCK_D * BLOCK_D + 4, K_PITCH = BLOCK_D + 4, P_PITCH = BLOCK_N + 4;
constexpr int V_PITCH = O_COLS * THREADS_X;
__device__ constexpr int v_rows(int rows) { return rows * V_PITCH <= BLOCK_N * K_PITCH ? rows : v_rows(rows / 2); }
constexpr int V_ROWS = v_rows(BLOCK_N);  // BLOCK_N, halved until they fit in the memory of K
// Four blocks per SM would spill for D <= 64.
constexpr bool FEWER_BLOCKS = CAUSAL && (__CUDA_ARCH__ < 900 ? SOFTCAP : RAGGED);
// In addition to S and O.
constexpr int OTHER_REGISTERS = Head::READS_TENSORS ? 124 : PAGE_SIZE ? 92 : FEWER_BLOCKS ? 72 : 64;
constexpr int MIN_BLOCKS = 65536 / (THREADS * (ROWS * (COLS + O_COLS) + OTHER_REGISTERS));
constexpr float LOG2E = 1.44269504f;
static_assert(SMEM_BYTES == 4 * (BLOCK_M * Q_PITCH + BLOCK_N * K_PITCH + BLOCK_M * P_PITCH),
              "spec and kernel disagree on shared memory");
static_assert(COLS <= 32, "one bit per key of a thread");
static_assert(32 % THREADS_X == 0 && THREADS % 32 == 0, "the threads of a row are lanes of one warp");
static_assert(BLOCK_N % V_ROWS == 0 && V_ROWS % THREADS_Y == 0 && V_ROWS % 4 == 0, "V is loaded in equal steps");

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void fwd_block2d(
    View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    View<const dtype_k> K,  // (B, Hk, Sk, HEAD_DIM)
    View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,             // (B, H, Sq), contiguous
    int group,              // H / Hk: query heads per key/value head
    Score score) {
    extern __shared__ __align__(16) float smem[];
    float* Q_smem = smem;
    float* KV_smem = Q_smem + BLOCK_M * Q_PITCH;
    float* P_smem = KV_smem + BLOCK_N * K_PITCH;
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.invalid()) return;
    const int tx = threadIdx.x, ty = threadIdx.y, m0 = tile.row0;
    const int h = blockIdx.y, b = tile.b, kv_head = h / group;
    const Head head(score, b, h);
    head.offset_queries(Q, O), head.offset_keys(K, V);
    const int query_row = m0 + ty;  // this thread's first row; the others are THREADS_Y apart

    for (int d0 = 0; d0 < HEAD_DIM; d0 += BLOCK_D)
        load_tile4<BLOCK_M, BLOCK_D, Q_PITCH, THREADS_X, THREADS_Y>(Q_smem + d0, Q, b, h, m0, head.Sq, d0);
    float m[ROWS], l[ROWS] = {}, O_rmem[ROWS][O_COLS] = {};  // l: sum over this thread's columns
#pragma unroll
    for (int i = 0; i < ROWS; ++i) m[i] = -INF;

    const Range keys = head.keys(m0, m0 + BLOCK_M);
    for (int n0 = keys.begin / BLOCK_N * BLOCK_N; n0 < keys.end; n0 += BLOCK_N) {
        float S_rmem[ROWS][COLS] = {};
#pragma unroll 1
        for (int d0 = 0; d0 < HEAD_DIM; d0 += BLOCK_D) {
            __syncthreads();  // every row has used the previous V, or step of K, before it is overwritten
            load_tile4<BLOCK_N, BLOCK_D, K_PITCH, THREADS_X, THREADS_Y>(KV_smem, head.key_view(K), b, kv_head, n0,
                                                                        head.Sk, d0);
            __syncthreads();  // the step of K, and Q, are complete before any row reads them
            add_dot_products<Q_PITCH, K_PITCH>(S_rmem, Q_smem + d0, KV_smem, min(BLOCK_D, HEAD_DIM - d0));
        }

        const auto keep = [&](int i, int j) { return head.keep(query_row + i * THREADS_Y, n0 + tx + j * THREADS_X); };
        // Dropout: one bit per key; a loop, because computing all keep bits at once spills.
        unsigned keep_bits[ROWS] = {};
#pragma unroll 1
        for (int j = 0; DROPOUT && j < COLS; ++j)
#pragma unroll
            for (int i = 0; i < ROWS; ++i) keep_bits[i] |= static_cast<unsigned>(keep(i, j)) << j;

        bool fully_visible = true;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float m_new = m[i];
#pragma unroll
            for (int j = 0; j < COLS; ++j) {
                const int row = query_row + i * THREADS_Y, col = n0 + tx + j * THREADS_X;
                fully_visible &= head.visible(row, col);
                S_rmem[i][j] = head.masked_score(S_rmem[i][j], row, col);
                m_new = fmaxf(m_new, S_rmem[i][j]);
            }
            m_new = row_max<THREADS_X>(m_new);
            const float shift = m_new == -INF ? 0.0f : m_new;  // no visible key yet: exp(-INF - 0) is 0, not NaN
            const float alpha = exp2f(LOG2E * (m[i] - shift));
            m[i] = m_new;
            l[i] *= alpha;
#pragma unroll
            for (int j = 0; j < COLS; ++j) {
                const float p = exp2f(LOG2E * (S_rmem[i][j] - shift));
                l[i] += p;
                const bool kept = DROPOUT ? keep_bits[i] >> j & 1 : keep(i, j);
                P_smem[(ty + i * THREADS_Y) * P_PITCH + tx + j * THREADS_X] = kept ? p : 0.0f;
            }
#pragma unroll
            for (int c = 0; c < O_COLS; ++c) O_rmem[i][c] *= alpha;
        }
        fully_visible = __all_sync(0xffffffffu, fully_visible);
#pragma unroll 1
        for (int j0 = 0; j0 < BLOCK_N && n0 + j0 < keys.end; j0 += V_ROWS) {
            __syncthreads();  // every row has used K, or the previous step of V, before it is overwritten
            load_tile4<V_ROWS, V_PITCH, V_PITCH, THREADS_X, THREADS_Y, HEAD_DIM_V>(KV_smem, head.key_view(V), b,
                                                                                   kv_head, n0 + j0, head.Sk, 0);
            __syncthreads();  // the step of V, and P, are complete before any row reads them
            const float *P_row = P_smem + ty * P_PITCH + j0, *V_col = KV_smem + 4 * tx;
            const auto visible = [&](int i, int j) { return head.visible(query_row + i * THREADS_Y, n0 + j0 + j); };
            if (fully_visible) add_product<true, V_ROWS, P_PITCH, V_PITCH>(O_rmem, P_row, V_col, visible);
            else add_product<false, V_ROWS, P_PITCH, V_PITCH>(O_rmem, P_row, V_col, visible);
        }
    }

    dtype_o* O_row = O.row(b, h, query_row) + 4 * tx;
    float* lse = LSE + head.lse_offset(gridDim.y, h) + query_row;
#pragma unroll
    for (int i = 0; i < ROWS; ++i, O_row += THREADS_Y * O.stride_s) {
        const FinalizedRow final_row = head.finalize<ScoreUnits::SCALED>(m[i], row_sum<THREADS_X>(l[i]));
        if (query_row + i * THREADS_Y >= head.Sq) continue;
#pragma unroll
        for (int c = 0; c < O_COLS; ++c) {
            const int d = c / 4 * 4 * THREADS_X + c % 4;  // relative to column 4 * tx
            if (HEAD_DIM_V % (4 * THREADS_X) == 0 || 4 * tx + d < HEAD_DIM_V)
                O_row[d] = dtype_o(O_rmem[i][c] * final_row.O_scale);
        }
        if (tx == 0) lse[i * THREADS_Y] = final_row.lse;
    }
}
