// Rung 1: attention backward, one thread per row, two entry points: dK and dV by key tile, then dQ by query tile.
//
//   P = exp(S - LSE)          dV_j = sum over i of P_ij dO_i            dP_ij = dO_i . V_j
//   dS = P * (dP - delta)     dK_j = scale * sum over i of dS_ij Q_i    dQ_i = scale * sum over j of dS_ij K_j
//
// S is the score x of include/score_mod.cuh, and dS has the factor dx / d(scale * (Q_i . K_j)) where that is not 1.
//
// FlashAttention-2's Algorithm 2 (arXiv:2307.08691) computes all three sums in one loop over key tiles, and each key
// tile adds to dQ of all query rows with atomics. Here each sum belongs to one thread: P is computed twice, and results
// are deterministic. The reference with the same loops is sandbox/reference/flash_backward.py.
//
// As in fwd_minimal, a thread's own rows are columns of transposed shared-memory tiles [columns][rows], and all threads
// read the other tile by broadcast. dK and dV of a key/value head are sums over the query heads of its group.
#include "tensor.cuh"
#include "score_mod.cuh"

static_assert(SMEM_BYTES == 4 * (HEAD_DIM + HEAD_DIM_V) * (2 * BLOCK_N + BLOCK_M),
              "spec and kernel disagree on shared memory");
static_assert(SMEM_BYTES_DQ == 4 * (HEAD_DIM * (2 * BLOCK_M + BLOCK_N) + HEAD_DIM_V * (BLOCK_M + BLOCK_N)),
              "spec and kernel disagree on shared memory");

// Loads this thread's row of a tensor into its column of a tile [WIDTH][ROWS] in shared memory, which begins at
// `column`; zeros for row >= S.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_column(float* column, View<const dtype> tensor, int b, int h, int row, int S) {
#pragma unroll 8  // more loads in flight spill
    for (int d = 0; d < WIDTH; ++d) column[d * ROWS] = row < S ? to_float(tensor.row(b, h, row)[d]) : 0.0f;
}

// At least 1 block per SM: without this number ptxas limits the registers for several blocks, although shared memory
// has room for one; variants with windows then spill.
extern "C" __global__ __launch_bounds__(BLOCK_N, 1) void bwd_minimal(
    View<const dtype> dO, View<const dtype> Q,  // (B, H, Sq, HEAD_DIM_V), (B, H, Sq, HEAD_DIM)
    View<const dtype> K, View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM), (B, Hk, Sk, HEAD_DIM_V)
    const float* LSE, const float* delta,       // (B, H, Sq), contiguous
    View<dtype> dK, View<dtype> dV,             // as K and V
    int group,                                  // H / Hk: query heads per key/value head
    Score score) {
    extern __shared__ __align__(16) float smem[];
    const RowTile tile = key_tile<BLOCK_N>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.invalid()) return;
    const int t = threadIdx.x, kv_head = blockIdx.y, b = tile.b, n0 = tile.row0, key_col = n0 + t;
    const SeqlenInfo seqlen(score, b);
    seqlen.offset_queries(dO, Q), seqlen.offset_keys(K, V, dK, dV);
    float *K_column = smem + t, *V_column = K_column + HEAD_DIM * BLOCK_N, *dK_column = V_column + HEAD_DIM_V * BLOCK_N;
    float *dV_column = dK_column + HEAD_DIM * BLOCK_N, *Q_smem = smem + 2 * (HEAD_DIM + HEAD_DIM_V) * BLOCK_N;
    float* dO_smem = Q_smem + BLOCK_M * HEAD_DIM;

    load_column<BLOCK_N, HEAD_DIM>(K_column, K, b, kv_head, key_col, seqlen.key_rows());
    load_column<BLOCK_N, HEAD_DIM_V>(V_column, V, b, kv_head, key_col, seqlen.key_rows());
    for (int d = 0; d < HEAD_DIM; ++d) dK_column[d * BLOCK_N] = 0.0f;
    for (int d = 0; d < HEAD_DIM_V; ++d) dV_column[d * BLOCK_N] = 0.0f;
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const Head head(score, b, h);
        const long long first = head.lse_offset(gridDim.y * group, h);  // offset in LSE and delta
        const Range queries = head.queries(n0, n0 + BLOCK_N);
        for (int m0 = queries.begin / BLOCK_M * BLOCK_M; m0 < queries.end; m0 += BLOCK_M) {
            __syncthreads();  // every row has used the previous Q/dO tile before it is overwritten
            load_tile<BLOCK_M, BLOCK_N>(Q_smem, Q, b, h, m0, head.Sq, t);
            load_tile<BLOCK_M, BLOCK_N, HEAD_DIM_V>(dO_smem, dO, b, h, m0, head.Sq, t);
            __syncthreads();  // the tile is complete before any row reads it

            float P_rmem[BLOCK_M] = {}, dS_rmem[BLOCK_M] = {};
#pragma unroll 1  // the loops over i are unrolled; unrolling these as well spills
            for (int d = 0; d < HEAD_DIM; ++d) {
                const float k = K_column[d * BLOCK_N];
                for (int i = 0; i < BLOCK_M; ++i) P_rmem[i] += Q_smem[i * HEAD_DIM + d] * k;  // S
            }
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM_V; ++d) {
                const float v = V_column[d * BLOCK_N];
                for (int i = 0; i < BLOCK_M; ++i) dS_rmem[i] += dO_smem[i * HEAD_DIM_V + d] * v;  // dP
            }
            const auto visible = head.visible_query_rows<BLOCK_M>(m0, key_col);
            for (int i = 0; i < BLOCK_M; ++i) {
                const bool is_visible = visible(i);
                const auto [p, dx] =
                    head.recompute_P(P_rmem[i], is_visible ? LSE[first + m0 + i] : 0.0f, m0 + i, key_col);
                const bool kept = head.keep(m0 + i, key_col);
                P_rmem[i] = is_visible ? head.apply_dropout(p, kept) : 0.0f;
                const float dP = head.apply_dropout(dS_rmem[i], kept);
                dS_rmem[i] = is_visible ? p * (dP - delta[first + m0 + i]) * dx : 0.0f;
            }
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM_V; ++d) {
                float dv = dV_column[d * BLOCK_N];
                for (int i = 0; i < BLOCK_M; ++i)  // skips masked rows: their P is 0, but 0 * NaN is NaN
                    if (visible(i)) dv += P_rmem[i] * dO_smem[i * HEAD_DIM_V + d];
                dV_column[d * BLOCK_N] = dv;
            }
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) {
                float dk = dK_column[d * BLOCK_N];
                for (int i = 0; i < BLOCK_M; ++i)
                    if (visible(i)) dk += dS_rmem[i] * Q_smem[i * HEAD_DIM + d];
                dK_column[d * BLOCK_N] = dk;
            }
        }
    }
    if (key_col >= seqlen.key_rows()) return;  // no barrier below
#pragma unroll 8                               // a full unroll spills 8 bytes on sm_80
    for (int d = 0; d < HEAD_DIM; ++d) dK.row(b, kv_head, key_col)[d] = dtype(score.scale * dK_column[d * BLOCK_N]);
#pragma unroll 8
    for (int d = 0; d < HEAD_DIM_V; ++d) dV.row(b, kv_head, key_col)[d] = dtype(dV_column[d * BLOCK_N]);
}

constexpr int DQ_MIN_BLOCKS = Head::READS_TENSORS ? 1 : 0;  // 1: as above; 0: not specified
extern "C" __global__ __launch_bounds__(BLOCK_M, DQ_MIN_BLOCKS) void bwd_minimal_dq(
    View<const dtype> dO, View<const dtype> Q,  // (B, H, Sq, HEAD_DIM_V), (B, H, Sq, HEAD_DIM)
    View<const dtype> K, View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM), (B, Hk, Sk, HEAD_DIM_V)
    const float* LSE, const float* delta,       // (B, H, Sq), contiguous
    View<dtype> dQ,                             // (B, H, Sq, HEAD_DIM)
    int group,                                  // H / Hk
    Score score) {
    extern __shared__ __align__(16) float smem[];
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.invalid()) return;
    const int t = threadIdx.x, h = blockIdx.y, b = tile.b, m0 = tile.row0, query_row = m0 + t;
    float *Q_column = smem + t, *dQ_column = Q_column + HEAD_DIM * BLOCK_M, *dO_column = dQ_column + HEAD_DIM * BLOCK_M;
    float *K_smem = smem + (2 * HEAD_DIM + HEAD_DIM_V) * BLOCK_M, *V_smem = K_smem + BLOCK_N * HEAD_DIM;
    const Head head(score, b, h);
    head.offset_queries(dO, Q, dQ), head.offset_keys(K, V);
    const long long row = head.lse_offset(gridDim.y, h) + query_row;
    const float lse = query_row < head.Sq ? LSE[row] : 0.0f, row_delta = query_row < head.Sq ? delta[row] : 0.0f;

    load_column<BLOCK_M, HEAD_DIM>(Q_column, Q, b, h, query_row, head.Sq);
    load_column<BLOCK_M, HEAD_DIM_V>(dO_column, dO, b, h, query_row, head.Sq);
    for (int d = 0; d < HEAD_DIM; ++d) dQ_column[d * BLOCK_M] = 0.0f;
    const Range keys = head.keys(m0, m0 + BLOCK_M);
    for (int n0 = keys.begin / BLOCK_N * BLOCK_N; n0 < keys.end; n0 += BLOCK_N) {
        __syncthreads();  // every row has used the previous K/V tile before it is overwritten
        load_tile<BLOCK_N, BLOCK_M>(K_smem, K, b, h / group, n0, head.Sk, t);
        load_tile<BLOCK_N, BLOCK_M, HEAD_DIM_V>(V_smem, V, b, h / group, n0, head.Sk, t);
        __syncthreads();  // the tile is complete before any row reads it

        float S_rmem[BLOCK_N] = {}, dS_rmem[BLOCK_N] = {};
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) {
            const float q = Q_column[d * BLOCK_M];
            for (int j = 0; j < BLOCK_N; ++j) S_rmem[j] += q * K_smem[j * HEAD_DIM + d];
        }
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM_V; ++d) {
            const float g = dO_column[d * BLOCK_M];
            for (int j = 0; j < BLOCK_N; ++j) dS_rmem[j] += g * V_smem[j * HEAD_DIM_V + d];  // dP
        }
        const auto visible = head.visible_keys<BLOCK_N>(query_row, n0);
        for (int j = 0; j < BLOCK_N; ++j) {
            const auto [p, dx] = head.recompute_P(S_rmem[j], lse, query_row, n0 + j);
            const float dP = head.apply_dropout(dS_rmem[j], head.keep(query_row, n0 + j));
            dS_rmem[j] = p * (dP - row_delta) * dx;
        }
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) {
            float dq = dQ_column[d * BLOCK_M];
            for (int j = 0; j < BLOCK_N; ++j)
                if (!Head::HAS_MASK || visible(j)) dq += dS_rmem[j] * K_smem[j * HEAD_DIM + d];
            dQ_column[d * BLOCK_M] = dq;
        }
    }
    for (int d = 0; d < HEAD_DIM && query_row < head.Sq; ++d)
        dQ.row(b, h, query_row)[d] = dtype(score.scale * dQ_column[d * BLOCK_M]);
}
