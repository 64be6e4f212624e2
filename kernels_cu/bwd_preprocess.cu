// Backward preprocess: delta = rowsum(dO * O). Two further entry points compute the gradients of the bias and of the
// sinks.
//
// dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = rowsum(P * (dO V^T)) = rowsum(dO * (P V)) = rowsum(dO * O). This
// takes Dv products per row, once, instead of Sk products per row in each kernel that computes dS. FlashAttention-2's
// Algorithm 2, line 4 (arXiv:2307.08691).
//
// If LSE has a gradient dLSE, dS = P * (dP - delta + dLSE): the kernel stores delta - dLSE.
//
// The kernel is memory-bound. LANES adjacent lanes share a row and load 16 bytes each if the tensors are aligned (8%
// faster than 8 bytes at D = 64 and 128). A thread loads all its rows before it stores any result, so that the loads
// overlap. Lanes are summed by shuffles in a fixed order.
#include "tensor.cuh"
#include "score_mod.cuh"

constexpr int ELEMENTS_PER_LOAD = 16 / sizeof(dtype);
constexpr int LANES = HEAD_DIM_V > 16 * ELEMENTS_PER_LOAD  ? 32
                      : HEAD_DIM_V > 8 * ELEMENTS_PER_LOAD ? 16
                                                           : 8;  // per row
constexpr int ROWS = 32 * WARPS / LANES;                         // rows of a block that are loaded at a time
static_assert(SMEM_BYTES == 0 && SMEM_BYTES_SINK == 0, "spec and kernel disagree on shared memory");
static_assert(BLOCK_M % ROWS == 0, "all threads have the same number of rows");

extern "C" __global__ __launch_bounds__(32 * WARPS) void bwd_preprocess(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    View<const dtype> O,   // (B, H, Sq, HEAD_DIM_V)
    const float* dLSE,     // (B, H, Sq), contiguous; null if LSE has no gradient
    float* delta,          // (B, H, Sq), contiguous
    Score score) {
    const RowTile tile = query_tile_by_warp<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.invalid()) return griddepcontrol_wait();
    const int lane = threadIdx.x % LANES, h = blockIdx.y, b = tile.b;
    const int first_row = tile.row0 + threadIdx.x / LANES;  // of this thread; its next rows are ROWS apart
    const SeqlenInfo seqlen(score, b);
    seqlen.offset_queries(dO, O);
    const auto aligned = [&](const View<const dtype>& tensor) {  // every row of the head
        return (reinterpret_cast<unsigned long long>(tensor.row(b, h, 0)) | tensor.stride_s * sizeof(dtype)) % 16 == 0;
    };
    const bool vectorized = HEAD_DIM_V % ELEMENTS_PER_LOAD == 0 && aligned(dO) && aligned(O);
    float sums[BLOCK_M / ROWS] = {};
#pragma unroll
    for (int i = 0; i < BLOCK_M / ROWS; ++i) {
        const int query_row = first_row + i * ROWS, columns = query_row < seqlen.Sq ? HEAD_DIM_V : 0;
        const dtype *dO_row = dO.row(b, h, query_row), *O_row = O.row(b, h, query_row);
        if (vectorized) {
            for (int d = ELEMENTS_PER_LOAD * lane; d < columns; d += ELEMENTS_PER_LOAD * LANES) {
                const uint4 dO_chunk = *reinterpret_cast<const uint4*>(dO_row + d),
                            O_chunk = *reinterpret_cast<const uint4*>(O_row + d);
                const dtype *g = reinterpret_cast<const dtype*>(&dO_chunk),
                            *o = reinterpret_cast<const dtype*>(&O_chunk);
#pragma unroll
                for (int e = 0; e < ELEMENTS_PER_LOAD; ++e) sums[i] = fmaf(to_float(g[e]), to_float(o[e]), sums[i]);
            }
        } else {
            for (int d = lane; d < columns; d += LANES) sums[i] += to_float(dO_row[d]) * to_float(O_row[d]);
        }
    }
    const long long first = seqlen.lse_offset(gridDim.y, h) + first_row;
#pragma unroll
    for (int i = 0; i < BLOCK_M / ROWS; ++i) {
        const float sum = row_sum<LANES>(sums[i]);
        if (lane == 0 && first_row + i * ROWS < seqlen.Sq)
            delta[first + i * ROWS] = dLSE ? sum - dLSE[first + i * ROWS] : sum;
    }
    if (RAGGED || BLOCK_MAP)
        // This launch completes only after the one before it (block map, bwd_wgmma_scheduler): the wait of the next one
        // covers both.
        griddepcontrol_wait();
}

// ---- Gradient of the bias: dbias = sum of P * (dP - delta), times the derivative of score_mod, over
// the broadcast dimensions of the bias.
//
// A block owns a BIAS_M x BIAS_N tile of dbias. It loops over the batch entries and heads that read this tile, over all
// query tiles if the bias is broadcast along Sq, and over all key tiles if it is broadcast along Sk. S and dP are
// recomputed. Each sum belongs to one thread: results are deterministic.
//
// clang-format off
//   16 x 16 threads, each with every 16th row and column of the tile. Q and K, then dO and V, are loaded STEP columns
//   at a time, as fp32:
//   A_smem [BIAS_M][STEP + 1]   rows of Q or dO          X_smem [BIAS_N][STEP + 1]   rows of K or V
// clang-format on

constexpr int SIDE = 16, THREADS = SIDE * SIDE, STEP = 32, PITCH = STEP + 1;  // odd: 16 rows are in different banks
constexpr int ROWS_PER_THREAD = BIAS_M / SIDE, COLS_PER_THREAD = BIAS_N / SIDE;
static_assert(SMEM_BYTES_BIAS == 4 * (BIAS_M + BIAS_N) * PITCH, "spec and kernel disagree on shared memory");
static_assert(BIAS_M % SIDE == 0 && BIAS_N % SIDE == 0, "all threads have the same number of rows and columns");

// Loads columns d0 .. d0 + STEP - 1 of rows row0 .. row0 + COUNT - 1; zeros for rows >= S and columns >= WIDTH.
template <int COUNT, int WIDTH>
__device__ __forceinline__ void load_step(float* tile, const View<const dtype>& tensor, int b, int h, int row0, int S,
                                          int d0) {
    for (int i = threadIdx.x; i < COUNT * STEP; i += THREADS) {
        const int row = row0 + i / STEP, d = d0 + i % STEP;
        tile[i / STEP * PITCH + i % STEP] = row < S && d < WIDTH ? to_float(tensor.row(b, h, row)[d]) : 0.0f;
    }
}

// C += A X^T with WIDTH columns: A from row m0 of head h, X from row n0 of head kv_head.
template <int WIDTH>
__device__ __forceinline__ void add_dot_products(float (&C)[ROWS_PER_THREAD][COLS_PER_THREAD], float* smem,
                                                 const View<const dtype>& A, const View<const dtype>& X, int b, int h,
                                                 int kv_head, int m0, int n0, int Sq, int Sk) {
    float *A_smem = smem, *X_smem = smem + BIAS_M * PITCH;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
#pragma unroll 1
    for (int d0 = 0; d0 < WIDTH; d0 += STEP) {
        __syncthreads();  // all threads have used the previous step before it is overwritten
        load_step<BIAS_M, WIDTH>(A_smem, A, b, h, m0, Sq, d0);
        load_step<BIAS_N, WIDTH>(X_smem, X, b, kv_head, n0, Sk, d0);
        __syncthreads();  // the step is complete before any thread reads it
#pragma unroll 8
        for (int d = 0; d < STEP; ++d)
#pragma unroll
            for (int r = 0; r < ROWS_PER_THREAD; ++r)
#pragma unroll
                for (int c = 0; c < COLS_PER_THREAD; ++c)
                    C[r][c] += A_smem[(ty + r * SIDE) * PITCH + d] * X_smem[(tx + c * SIDE) * PITCH + d];
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 2) void bwd_preprocess_bias(
    const __grid_constant__ View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    const __grid_constant__ View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM_V)
    const float* LSE,                              // (B, H, Sq), contiguous
    const float* delta,                            // (B, H, Sq), contiguous
    bias_t* dbias,                                 // the shape of bias, contiguous
    int bias_b, int bias_h, int bias_i, int bias_j, int H,
    int heads,  // B * H; for a ragged batch H
    int group,  // H / Hk
    const __grid_constant__ Score score) {
#if BIAS
    extern __shared__ __align__(16) float smem[];
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, B = batch_size(score, heads / H);
    const int bias_batch = blockIdx.z, bias_head = blockIdx.y, tiles_j = (bias_j + BIAS_N - 1) / BIAS_N;
    const int bias_m0 = blockIdx.x / tiles_j * BIAS_M, bias_n0 = blockIdx.x % tiles_j * BIAS_N;
    float sums[ROWS_PER_THREAD][COLS_PER_THREAD] = {};

    for (int b = bias_batch; b < B; b += bias_b)
        for (int h = bias_head; h < H; h += bias_h) {
            const Head head(score, b, h);
            View<const dtype> q = Q, k = K, v = V, g = dO;
            head.offset_queries(q, g), head.offset_keys(k, v);
            const long long first = head.lse_offset(H, h);
            const int row_end = bias_i == 1 ? head.Sq : min(bias_m0 + BIAS_M, head.Sq);
            for (int m0 = bias_m0; m0 < row_end; m0 += BIAS_M) {
                const Range keys = head.keys(m0, m0 + BIAS_M);
                const int begin = bias_j == 1 ? keys.begin / BIAS_N * BIAS_N : bias_n0;
                const int end = bias_j == 1 ? keys.end : min(bias_n0 + BIAS_N, keys.end);
                for (int n0 = begin; n0 < end; n0 += BIAS_N) {
                    if (n0 + BIAS_N <= keys.begin) continue;  // uniform across the block
                    float S[ROWS_PER_THREAD][COLS_PER_THREAD] = {}, dP[ROWS_PER_THREAD][COLS_PER_THREAD] = {};
                    add_dot_products<HEAD_DIM>(S, smem, q, k, b, h, h / group, m0, n0, head.Sq, head.Sk);
                    add_dot_products<HEAD_DIM_V>(dP, smem, g, v, b, h, h / group, m0, n0, head.Sq, head.Sk);
#pragma unroll
                    for (int r = 0; r < ROWS_PER_THREAD; ++r)
#pragma unroll
                        for (int c = 0; c < COLS_PER_THREAD; ++c) {
                            const int query_row = m0 + ty + r * SIDE, key_col = n0 + tx + c * SIDE;
                            if (!head.visible_in_bounds(query_row, key_col)) continue;
                            const long long row = first + query_row;
                            const auto [p, dx] = head.recompute_P<true>(S[r][c], LSE[row], query_row, key_col);
                            const float dropped_dP = head.apply_dropout(dP[r][c], head.keep(query_row, key_col));
                            sums[r][c] += p * (dropped_dP - delta[row]) * dx;
                        }
                }
            }
        }

    // Sums the rows and columns of the tile over the broadcast dimensions: through shared memory, in a fixed order.
    float* const tile = smem;  // [BIAS_M][BIAS_N]
    static_assert(SMEM_BYTES_BIAS >= 4 * BIAS_M * BIAS_N, "the tile fits into the memory of the steps");
    __syncthreads();  // all threads have used the last step
#pragma unroll
    for (int r = 0; r < ROWS_PER_THREAD; ++r)
#pragma unroll
        for (int c = 0; c < COLS_PER_THREAD; ++c) tile[(ty + r * SIDE) * BIAS_N + tx + c * SIDE] = sums[r][c];
    __syncthreads();  // the tile is complete
    bias_t* const out = dbias + (static_cast<long long>(bias_batch) * bias_h + bias_head) * bias_i * bias_j;
    const int rows = bias_i == 1 ? 1 : min(BIAS_M, bias_i - bias_m0),
              cols = bias_j == 1 ? 1 : min(BIAS_N, bias_j - bias_n0);
    const int sum_rows = bias_i == 1 ? BIAS_M : 1, sum_cols = bias_j == 1 ? BIAS_N : 1;  // elements per sum
    for (int e = threadIdx.x; e < rows * cols; e += THREADS) {
        const int i = e / cols, j = e % cols;
        float sum = 0.0f;
        for (int r = 0; r < sum_rows; ++r)
            for (int c = 0; c < sum_cols; ++c) sum += tile[(i + r) * BIAS_N + j + c];
        out[static_cast<long long>(bias_m0 + i) * bias_j + bias_n0 + j] = bias_t(sum);
    }
#endif
}

// ---- Gradient of the sinks: dsink[h] = -sum over b and i of exp(sink[h] - LSE) * delta.
//
// A sink is a key with score sink[h] and value 0 that is visible to every row: P = exp(sink - LSE), dP = dO . 0 = 0,
// and dS = P * (dP - delta). One block per head; the order of all sums is fixed.
extern "C" __global__ __launch_bounds__(32 * WARPS) void bwd_preprocess_sink(
    const float* LSE,    // (B, H, Sq), contiguous
    const float* delta,  // (B, H, Sq), contiguous
    float* dsink,        // (H,)
    int H,
    int heads,  // B * H; for a ragged batch H
    Score score) {
    __shared__ float sums[WARPS];
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
#if SINK
    const float sink = score.sink[h * score.sink_stride];
    for (int b = 0; b < batch_size(score, heads / H) && sink != -INF; ++b) {
        const SeqlenInfo seqlen(score, b);
        const long long first = seqlen.lse_offset(H, h);
        for (int i = threadIdx.x; i < seqlen.Sq; i += 32 * WARPS) sum -= expf(sink - LSE[first + i]) * delta[first + i];
    }
#endif
    sum = row_sum<32>(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();  // the sums of all warps are in shared memory
    if (warp > 0) return;
    sum = row_sum<32>(lane < WARPS ? sums[lane] : 0.0f);
    if (lane == 0) dsink[h] = sum;
}
