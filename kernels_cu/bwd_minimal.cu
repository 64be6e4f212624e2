// Rung 1: attention backward, one thread per row, twice: dK and dV by key tile, then dQ by query tile.
//
// FlashAttention-2's Algorithm 2 (arXiv:2307.08691) sums all three in one pass over the key tiles, where dQ needs
// atomics, for each key tile adds to every query row. Here each sum has one owner and the loops are walked twice: P is
// computed twice, and results are the same in every run. Read it beside sandbox/reference/flash_backward.py.
//
//   P = exp(S - LSE)    dV_j = sum over i of P_ij dO_i          dP_ij = dO_i . V_j
//                       dK_j = scale * sum over i of dS_ij Q_i   dS = P * (dP - delta)
//                       dQ_i = scale * sum over j of dS_ij K_j
//
// As in fwd_minimal, a thread's own rows live in shared memory, transposed, and the tile that all of them walk is read
// by broadcast. A key/value head's gradients sum over the query heads that share it: the block loops over them.
//
//   bwd_minimal     K, V, dK, dV _smem [HEAD_DIM][BLOCK_N] own rows    Q, dO _smem [BLOCK_M][HEAD_DIM] walked
//   bwd_minimal_dq  Q, dO, dQ    _smem [HEAD_DIM][BLOCK_M] own rows    K, V  _smem [BLOCK_N][HEAD_DIM] walked
#include "common.cuh"
#include "score.cuh"

static_assert(SMEM_BYTES == 4 * HEAD_DIM * (4 * BLOCK_N + 2 * BLOCK_M), "spec and kernel disagree on shared memory");
static_assert(SMEM_BYTES_DQ == 4 * HEAD_DIM * (3 * BLOCK_M + 2 * BLOCK_N), "spec and kernel disagree on shared memory");

extern "C" __global__ __launch_bounds__(BLOCK_N) void bwd_minimal(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM)
    View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM)
    const float* LSE,      // (B, H, Sq), contiguous
    const float* delta,    // (B, H, Sq), contiguous
    View<dtype> dK,        // (B, Hk, Sk, HEAD_DIM)
    View<dtype> dV,        // (B, Hk, Sk, HEAD_DIM)
    int group,             // H / Hk: so many query heads share a key/value head
    Score score) {
    extern __shared__ __align__(16) float smem[];
    float *K_smem = smem, *V_smem = K_smem + HEAD_DIM * BLOCK_N, *dK_smem = V_smem + HEAD_DIM * BLOCK_N;
    float *dV_smem = dK_smem + HEAD_DIM * BLOCK_N, *Q_smem = dV_smem + HEAD_DIM * BLOCK_N;
    float* dO_smem = Q_smem + BLOCK_M * HEAD_DIM;
    const int t = threadIdx.x, kv_head = blockIdx.y, b = blockIdx.z, n0 = blockIdx.x * BLOCK_N, key_col = n0 + t;

    for (int d = 0; d < HEAD_DIM; ++d) {
        K_smem[d * BLOCK_N + t] = key_col < score.Sk ? to_float(K.row(b, kv_head, key_col)[d]) : 0.0f;
        V_smem[d * BLOCK_N + t] = key_col < score.Sk ? to_float(V.row(b, kv_head, key_col)[d]) : 0.0f;
        dK_smem[d * BLOCK_N + t] = dV_smem[d * BLOCK_N + t] = 0.0f;
    }
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const long long head = (static_cast<long long>(b) * gridDim.y * group + h) * score.Sq;  // where LSE has it
        for (int m0 = score.query_start(n0) / BLOCK_M * BLOCK_M; m0 < score.Sq; m0 += BLOCK_M) {
            __syncthreads();  // every row has used the previous Q/dO tile before it is overwritten
            load_tile<BLOCK_M, BLOCK_N>(Q_smem, Q, b, h, m0, score.Sq, t);
            load_tile<BLOCK_M, BLOCK_N>(dO_smem, dO, b, h, m0, score.Sq, t);
            __syncthreads();  // the tile is whole before any row reads it

            float P_rmem[BLOCK_M] = {}, dS_rmem[BLOCK_M] = {};
#pragma unroll 1  // the loops over i are unrolled; unrolling this one too spills
            for (int d = 0; d < HEAD_DIM; ++d) {
                const float k = K_smem[d * BLOCK_N + t], v = V_smem[d * BLOCK_N + t];
                for (int i = 0; i < BLOCK_M; ++i) P_rmem[i] += Q_smem[i * HEAD_DIM + d] * k;    // S
                for (int i = 0; i < BLOCK_M; ++i) dS_rmem[i] += dO_smem[i * HEAD_DIM + d] * v;  // dP as yet
            }
            for (int i = 0; i < BLOCK_M; ++i) {
                const bool counts = score.counts(m0 + i, key_col);
                P_rmem[i] = counts ? score.P(P_rmem[i], LSE[head + m0 + i], m0 + i, key_col) : 0.0f;
                dS_rmem[i] = counts ? P_rmem[i] * (dS_rmem[i] - delta[head + m0 + i]) : 0.0f;
            }
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) {
                float dk = dK_smem[d * BLOCK_N + t], dv = dV_smem[d * BLOCK_N + t];
                for (int i = 0; i < BLOCK_M; ++i)  // 0 is no mask: 0 * NaN would let a row's numbers through
                    if (score.counts(m0 + i, key_col)) dv += P_rmem[i] * dO_smem[i * HEAD_DIM + d];
                for (int i = 0; i < BLOCK_M; ++i)
                    if (score.counts(m0 + i, key_col)) dk += dS_rmem[i] * Q_smem[i * HEAD_DIM + d];
                dV_smem[d * BLOCK_N + t] = dv;
                dK_smem[d * BLOCK_N + t] = dk;
            }
        }
    }

    if (key_col >= score.Sk) return;  // no barrier below
    for (int d = 0; d < HEAD_DIM; ++d) {
        dK.row(b, kv_head, key_col)[d] = dtype(score.scale * dK_smem[d * BLOCK_N + t]);
        dV.row(b, kv_head, key_col)[d] = dtype(dV_smem[d * BLOCK_N + t]);
    }
}

extern "C" __global__ __launch_bounds__(BLOCK_M) void bwd_minimal_dq(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM)
    View<const dtype> Q,   // (B, H, Sq, HEAD_DIM)
    View<const dtype> K,   // (B, Hk, Sk, HEAD_DIM)
    View<const dtype> V,   // (B, Hk, Sk, HEAD_DIM)
    const float* LSE,      // (B, H, Sq), contiguous
    const float* delta,    // (B, H, Sq), contiguous
    View<dtype> dQ,        // (B, H, Sq, HEAD_DIM)
    int group,             // H / Hk
    Score score) {
    extern __shared__ __align__(16) float smem[];
    float *Q_smem = smem, *dO_smem = Q_smem + HEAD_DIM * BLOCK_M, *dQ_smem = dO_smem + HEAD_DIM * BLOCK_M;
    float *K_smem = dQ_smem + HEAD_DIM * BLOCK_M, *V_smem = K_smem + BLOCK_N * HEAD_DIM;
    const int t = threadIdx.x, h = blockIdx.y, b = blockIdx.z, m0 = blockIdx.x * BLOCK_M, query_row = m0 + t;
    const long long row = (static_cast<long long>(b) * gridDim.y + h) * score.Sq + query_row;
    const float lse = query_row < score.Sq ? LSE[row] : 0.0f, my_delta = query_row < score.Sq ? delta[row] : 0.0f;

    for (int d = 0; d < HEAD_DIM; ++d) {
        Q_smem[d * BLOCK_M + t] = query_row < score.Sq ? to_float(Q.row(b, h, query_row)[d]) : 0.0f;
        dO_smem[d * BLOCK_M + t] = query_row < score.Sq ? to_float(dO.row(b, h, query_row)[d]) : 0.0f;
        dQ_smem[d * BLOCK_M + t] = 0.0f;
    }
    const int key_end = score.key_end(m0 + BLOCK_M);
    for (int n0 = 0; n0 < key_end; n0 += BLOCK_N) {
        __syncthreads();  // every row has used the previous K/V tile before it is overwritten
        load_tile<BLOCK_N, BLOCK_M>(K_smem, K, b, h / group, n0, score.Sk, t);
        load_tile<BLOCK_N, BLOCK_M>(V_smem, V, b, h / group, n0, score.Sk, t);
        __syncthreads();  // the tile is whole before any row reads it

        float S_rmem[BLOCK_N] = {}, dS_rmem[BLOCK_N] = {};
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) {
            const float q = Q_smem[d * BLOCK_M + t], g = dO_smem[d * BLOCK_M + t];
            for (int j = 0; j < BLOCK_N; ++j) S_rmem[j] += q * K_smem[j * HEAD_DIM + d];
            for (int j = 0; j < BLOCK_N; ++j) dS_rmem[j] += g * V_smem[j * HEAD_DIM + d];  // dP as yet
        }
        for (int j = 0; j < BLOCK_N; ++j)
            dS_rmem[j] = score.P(S_rmem[j], lse, query_row, n0 + j) * (dS_rmem[j] - my_delta);
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) {
            float dq = dQ_smem[d * BLOCK_M + t];
            for (int j = 0; j < BLOCK_N; ++j)
                if (score.sees(query_row, n0 + j)) dq += dS_rmem[j] * K_smem[j * HEAD_DIM + d];
            dQ_smem[d * BLOCK_M + t] = dq;
        }
    }

    if (query_row >= score.Sq) return;  // no barrier below
    for (int d = 0; d < HEAD_DIM; ++d) dQ.row(b, h, query_row)[d] = dtype(score.scale * dQ_smem[d * BLOCK_M + t]);
}
