// Rung 1: attention forward, one thread per query row. FlashAttention-2's Algorithm 1 (arXiv:2307.08691).
// sandbox/reference/flash.py (flash2) has the same loops in NumPy.
//
// Thread t of a block computes query row m0 + t. All threads read the same keys and values, so the block loads each K/V
// tile into shared memory once. Q and O of a row are too large for registers at 256 columns: they are in shared memory,
// transposed, so that the 32 rows of a warp are in 32 different banks. One block per SM may use all registers.
//
//   Q_smem, O_smem [columns][BLOCK_M]    only thread t uses column t: no barrier
//   K_smem, V_smem [BLOCK_N][columns]    all threads read the same word: a broadcast
#include "tensor.cuh"
#include "score_mod.cuh"

static_assert(SMEM_BYTES == 4 * (HEAD_DIM + HEAD_DIM_V) * (BLOCK_M + BLOCK_N),
              "spec and kernel disagree on shared memory");

extern "C" __global__ __launch_bounds__(BLOCK_M, 1) void fwd_minimal(
    View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    View<const dtype_k> K,  // (B, Hk, Sk, HEAD_DIM)
    View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    View<dtype_o> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,             // (B, H, Sq), contiguous
    int group,              // H / Hk: query heads per key/value head
    Score score) {
    extern __shared__ __align__(16) float smem[];
    float *Q_smem = smem, *O_smem = Q_smem + HEAD_DIM * BLOCK_M;
    float *K_smem = O_smem + HEAD_DIM_V * BLOCK_M, *V_smem = K_smem + BLOCK_N * HEAD_DIM;
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.invalid()) return;
    const int t = threadIdx.x, h = blockIdx.y, b = tile.b, m0 = tile.row0, query_row = m0 + t;
    const Head head(score, b, h);
    head.offset_queries(Q, O), head.offset_keys(K, V);

    for (int d = 0; d < HEAD_DIM; ++d)
        Q_smem[d * BLOCK_M + t] = query_row < head.Sq ? to_float(Q.row(b, h, query_row)[d]) : 0.0f;
    for (int d = 0; d < HEAD_DIM_V; ++d) O_smem[d * BLOCK_M + t] = 0.0f;
    float m = -INF, l = 0.0f;

    const Range keys = head.keys(m0, m0 + BLOCK_M);
    for (int n0 = keys.begin / BLOCK_N * BLOCK_N; n0 < keys.end; n0 += BLOCK_N) {
        __syncthreads();  // every row has used the previous K/V tile before it is overwritten
        load_tile<BLOCK_N, BLOCK_M>(K_smem, head.key_view(K), b, h / group, n0, head.Sk, t);
        load_tile<BLOCK_N, BLOCK_M, HEAD_DIM_V>(V_smem, head.key_view(V), b, h / group, n0, head.Sk, t);
        __syncthreads();  // the tile is complete before any row reads it

        float S_rmem[BLOCK_N] = {};
#pragma unroll 1  // the loops over j are unrolled; unrolling this one as well spills
        for (int d = 0; d < HEAD_DIM; ++d) {
            const float q = Q_smem[d * BLOCK_M + t];
            for (int j = 0; j < BLOCK_N; ++j) S_rmem[j] += q * K_smem[j * HEAD_DIM + d];
        }
        float m_new = m, row_sum = 0.0f;
        for (int j = 0; j < BLOCK_N; ++j) {
            S_rmem[j] = head.masked_score(S_rmem[j], query_row, n0 + j);
            m_new = fmaxf(m_new, S_rmem[j]);
        }
        const float shift = m_new == -INF ? 0.0f : m_new;  // no visible key yet: exp(-INF - 0) is 0, not NaN
        const float alpha = expf(m - shift);
        for (int j = 0; j < BLOCK_N; ++j) {
            S_rmem[j] = expf(S_rmem[j] - shift);  // P
            row_sum += S_rmem[j];
            if (!head.keep(query_row, n0 + j)) S_rmem[j] = 0.0f;  // dropout
        }
        l = alpha * l + row_sum;
        m = m_new;
        const auto visible = head.visible_keys<BLOCK_N>(query_row, n0);
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM_V; ++d) {
            float o = alpha * O_smem[d * BLOCK_M + t];
            for (int j = 0; j < BLOCK_N; ++j)  // skips masked keys: their P is 0, but 0 * NaN is NaN
                if (!Head::HAS_MASK || visible(j)) o += S_rmem[j] * V_smem[j * HEAD_DIM_V + d];
            O_smem[d * BLOCK_M + t] = o;
        }
    }

    if (query_row >= head.Sq) return;  // no barrier below
    const FinalizedRow final_row = head.finalize<ScoreUnits::SCALED>(m, l);
    for (int d = 0; d < HEAD_DIM_V; ++d)
        O.row(b, h, query_row)[d] = dtype_o(O_smem[d * BLOCK_M + t] * final_row.O_scale);
    LSE[head.lse_offset(gridDim.y, h) + query_row] = final_row.lse;
}
