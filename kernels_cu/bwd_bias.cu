// The gradient of the bias: dbias = sum of dx = P * (dP - delta) over all that the bias was broadcast to.
//
// A block owns a tile of dbias, BLOCK_M x BLOCK_N, and walks what shares it: the batch entries and heads that read the same
// bias, and all query tiles, or key tiles, of a bias that is the same for all of them. S and dP are recomputed there, as the
// other backward kernels do; nothing larger than dbias is written, a sum has one owner, and results are the same in every run.
//
//   16 x 16 threads, each with every 16th row and column of the tile; Q, K (then dO, V) STEP columns at a time, fp32:
//   A_smem [BLOCK_M][STEP + 1]   rows of Q or dO          X_smem [BLOCK_N][STEP + 1]   rows of K or V
#include "common.cuh"
#include "score.cuh"

constexpr int SIDE = 16, THREADS = SIDE * SIDE, STEP = 32, PITCH = STEP + 1;  // odd: 16 rows fall into different banks
constexpr int ROWS = BLOCK_M / SIDE, COLS = BLOCK_N / SIDE;
static_assert(SMEM_BYTES == 4 * (BLOCK_M + BLOCK_N) * PITCH, "spec and kernel disagree on shared memory");
static_assert(BLOCK_M % SIDE == 0 && BLOCK_N % SIDE == 0, "each thread owns as many rows and columns");

// Columns d0 .. d0 + STEP of rows row0 .. row0 + COUNT; zeros beyond row S or column WIDTH.
template <int COUNT, int WIDTH>
__device__ __forceinline__ void load_step(float* tile, const View<const dtype>& tensor, int b, int h, int row0, int S, int d0) {
    for (int i = threadIdx.x; i < COUNT * STEP; i += THREADS) {
        const int row = row0 + i / STEP, d = d0 + i % STEP;
        tile[i / STEP * PITCH + i % STEP] = row < S && d < WIDTH ? to_float(tensor.row(b, h, row)[d]) : 0.0f;
    }
}

// C += A X^T over WIDTH columns: rows m0 .. of head h of A, rows n0 .. of head kv_head of X.
template <int WIDTH>
__device__ __forceinline__ void add_dot_products(float (&C)[ROWS][COLS], float* smem, const View<const dtype>& A,
                                                 const View<const dtype>& X, int b, int h, int kv_head, int m0, int n0, int Sq,
                                                 int Sk) {
    float *A_smem = smem, *X_smem = smem + BLOCK_M * PITCH;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
#pragma unroll 1
    for (int d0 = 0; d0 < WIDTH; d0 += STEP) {
        __syncthreads();  // everybody has used the previous step before it is overwritten
        load_step<BLOCK_M, WIDTH>(A_smem, A, b, h, m0, Sq, d0);
        load_step<BLOCK_N, WIDTH>(X_smem, X, b, kv_head, n0, Sk, d0);
        __syncthreads();  // the step is whole before anybody reads it
#pragma unroll 8
        for (int d = 0; d < STEP; ++d)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < COLS; ++c)
                    C[r][c] += A_smem[(ty + r * SIDE) * PITCH + d] * X_smem[(tx + c * SIDE) * PITCH + d];
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void bwd_bias(
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    bias_t* dbias,                                 // of the bias's shape, contiguous
    int bias_b, int bias_h, int bias_i, int bias_j,
    int H,
    int heads,  // B * H
    int group,  // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(16) float smem[];
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, B = heads / H;
    const int own_b = blockIdx.z, own_h = blockIdx.y, tiles_j = (bias_j + BLOCK_N - 1) / BLOCK_N;
    const int own_m0 = blockIdx.x / tiles_j * BLOCK_M, own_n0 = blockIdx.x % tiles_j * BLOCK_N;
    float sums[ROWS][COLS] = {};

    for (int b = own_b; b < B; b += bias_b)
        for (int h = own_h; h < H; h += bias_h) {
            const Head head(score, b, h);
            const long long first = (static_cast<long long>(b) * H + h) * score.Sq;
            const int row_end = bias_i == 1 ? score.Sq : min(own_m0 + BLOCK_M, score.Sq);
            for (int m0 = own_m0; m0 < row_end; m0 += BLOCK_M) {
                const Range keys = head.keys(m0, m0 + BLOCK_M);
                const int begin = bias_j == 1 ? keys.begin / BLOCK_N * BLOCK_N : own_n0;
                const int end = bias_j == 1 ? keys.end : min(own_n0 + BLOCK_N, keys.end);
                for (int n0 = begin; n0 < end; n0 += BLOCK_N) {
                    if (n0 + BLOCK_N <= keys.begin) continue;  // alike in all threads
                    float S[ROWS][COLS] = {}, dP[ROWS][COLS] = {};
                    add_dot_products<HEAD_DIM>(S, smem, Q, K, b, h, h / group, m0, n0, score.Sq, head.Sk);
                    add_dot_products<HEAD_DIM_V>(dP, smem, dO, V, b, h, h / group, m0, n0, score.Sq, head.Sk);
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int c = 0; c < COLS; ++c) {
                            const int query_row = m0 + ty + r * SIDE, key_col = n0 + tx + c * SIDE;
                            if (!head.counts(query_row, key_col)) continue;
                            const long long row = first + query_row;
                            const Dual P = head.P<true>(S[r][c], LSE[row], query_row, key_col);
                            sums[r][c] += P.value * (dP[r][c] - delta[row]) * P.derivative;
                        }
                }
            }
        }

    // One number for all rows, or all columns: by way of shared memory, always in the same order.
    float* const tile = smem;  // [BLOCK_M][BLOCK_N]
    static_assert(SMEM_BYTES >= 4 * BLOCK_M * BLOCK_N, "the tile's sums fit where its steps were");
    __syncthreads();  // everybody has used the last step
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < COLS; ++c) tile[(ty + r * SIDE) * BLOCK_N + tx + c * SIDE] = sums[r][c];
    __syncthreads();  // the tile is whole
    bias_t* const to = dbias + (static_cast<long long>(own_b) * bias_h + own_h) * bias_i * bias_j;
    const int rows = bias_i == 1 ? 1 : min(BLOCK_M, bias_i - own_m0), cols = bias_j == 1 ? 1 : min(BLOCK_N, bias_j - own_n0);
    const int deep = bias_i == 1 ? BLOCK_M : 1, wide = bias_j == 1 ? BLOCK_N : 1;  // summed up
    for (int e = threadIdx.x; e < rows * cols; e += THREADS) {
        const int i = e / cols, j = e % cols;
        float sum = 0.0f;
        for (int r = 0; r < deep; ++r)
            for (int c = 0; c < wide; ++c) sum += tile[(i + r) * BLOCK_N + j + c];
        to[static_cast<long long>(own_m0 + i) * bias_j + own_n0 + j] = bias_t(sum);
    }
}
