// Fragments of bwd_mma: a warp's indices and offsets, P^T from S^T, and the store of dK and dV.
#pragma once
#include "bwd_mma_tiles.cuh"

template <int COLUMNS>
using Accumulators = float[2][COLUMNS / 8][4];  // 32 keys x COLUMNS columns of dK or dV

// C = A B^T with COLUMNS columns: 32 rows of one tile, 8 * N_TILES rows of another.
template <int COLUMNS, int N_TILES>
__device__ __forceinline__ void mma_ABt(float (&C)[2][N_TILES][4], SmemAddr A_tile, SmemAddr B_tile,
                                        const FragmentOffsets<COLUMNS>& A_offsets,
                                        const FragmentOffsets<COLUMNS>& B_offsets) {
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; ++step) {
        unsigned A[2][4];
        ldmatrix_x4(A[0], A_tile + A_offsets(0, step));
        ldmatrix_x4(A[1], A_tile + A_offsets(16, step));
        mma_ABt_step(C, A, B_tile, 0, step, B_offsets);
    }
}

// Indices of a thread's warp. Each function computes them, and its addresses, again from thread_index_x(), because the
// accumulators leave no registers for them.
struct Warp {
    // first_key: in the tile; part: its index among the KEY_WARPS warps that own these keys, which selects its
    // queries and columns.
    unsigned index, lane, first_key, part;
    __device__ __forceinline__ explicit Warp(unsigned thread)
        : index(thread / 32), lane(thread % 32), first_key(index / KEY_WARPS * 32), part(index % KEY_WARPS) {}

    // ldmatrix offsets of 16 x 16 blocks: rows of an A operand, rows of a B operand (transposed), the warp's columns of
    // dK or dV.
    template <int COLUMNS>
    __device__ __forceinline__ FragmentOffsets<COLUMNS> rows() const {
        return row_offsets<FragmentOffsets<COLUMNS>>(lane);
    }
    template <int COLUMNS>
    __device__ __forceinline__ FragmentOffsets<COLUMNS> transposed_rows() const {
        return transposed_offsets<FragmentOffsets<COLUMNS>>(lane);
    }
    template <int COLUMNS>
    __device__ __forceinline__ FragmentOffsets<COLUMNS> columns() const {
        return row_offsets<FragmentOffsets<COLUMNS>>(lane, part * (COLUMNS / KEY_WARPS / 8));
    }
};

// Score modification and mask of 32 keys x SUB_M queries of S^T. at(mt, half, nt, odd): index of element 2 * half + odd
// of S[mt][nt]. derivative: dx / d(scale * (q . k)), packed. masked: some scores may be hidden.
template <class At, int STEPS>
__device__ __forceinline__ void score_mod_and_mask(float (&S)[2][SUB_M / 8][4], unsigned (&derivative)[STEPS][2][4],
                                                   const Head& head, bool masked, const At& at) {
#pragma unroll
    for (int i = 0; i < (Head::HAS_SCORE_MOD ? SUB_M / 2 : 0); ++i) {
        const int mt = i % 2, half = i / 2 % 2, nt = i / 4;
        float* const s = &S[mt][nt][2 * half];
        if (Head::HAS_DERIVATIVE) {
            const Dual x0 = head.raw_dual(s[0], at(mt, half, nt, 0)), x1 = head.raw_dual(s[1], at(mt, half, nt, 1));
            s[0] = x0.value, s[1] = x1.value;
            derivative[Head::HAS_DERIVATIVE ? nt / 2 : 0][mt][nt % 2 * 2 + half] = pack(x0.derivative, x1.derivative);
        } else {
            s[0] = head.raw(s[0], at(mt, half, nt, 0)), s[1] = head.raw(s[1], at(mt, half, nt, 1));
        }
    }
    if (masked) {
#pragma unroll
        for (int i = 0; i < SUB_M; ++i) {
            const int mt = i % 2, half = i / 2 % 2, nt = i / 4 % (SUB_M / 8), odd = i / 4 / (SUB_M / 8);
            const ScoreIndex index = at(mt, half, nt, odd);
            if (!head.visible_in_bounds(index.query_row(), index.key_col())) S[mt][nt][2 * half + odd] = -INF;
        }
    }
}

// P^T = exp2(S^T * scale_log2 - LSE * log2(e)), packed. LSE: of the lane's first query.
__device__ __forceinline__ void exponentiate(unsigned (&P)[SUB_M / 16][2][4], const float (&S)[2][SUB_M / 8][4],
                                             const float* LSE, float scale_log2) {
#pragma unroll
    for (int nt = 0; nt < SUB_M / 8; ++nt) {
        const float2 lse = *reinterpret_cast<const float2*>(LSE + 8 * nt);
        const float shift0 = lse.x == -INF ? -INF : -lse.x * Head::LOG2E;
        const float shift1 = lse.y == -INF ? -INF : -lse.y * Head::LOG2E;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float s0 = S[i / 2][nt][i % 2 * 2], s1 = S[i / 2][nt][i % 2 * 2 + 1];
            P[nt / 2][i / 2][nt % 2 * 2 + i % 2] =
                pack(ex2(fmaf(s0, scale_log2, shift0)), ex2(fmaf(s1, scale_log2, shift1)));
        }
    }
}

// Stores accumulators, multiplied by `factor`, as 16-bit rows of a tile with the layout of K or V in shared memory.
template <int COLUMNS>
__device__ __forceinline__ void stage_rows(char* tile, const Accumulators<COLUMNS>& sums, float factor) {
    const Warp warp(thread_index_x());
#pragma unroll
    for (int i = 0; i < 4 * (COLUMNS / 8); ++i) {
        const int half = i % 2, mt = i / 2 % 2, nt = i / 4, row = warp.first_key + 16 * mt + 8 * half + warp.lane / 4;
        const unsigned offset = SwizzledRows<COLUMNS * KEY_WARPS>::at(row, warp.part * (COLUMNS / 8) + nt);
        *reinterpret_cast<unsigned*>(tile + offset + warp.lane % 4 * 4) =
            pack(sums[mt][nt][2 * half] * factor, sums[mt][nt][2 * half + 1] * factor);
    }
}

// Copies a staged tile to rows n0 .. n0 + BLOCK_N - 1 of dK or dV, which has WIDTH columns.
template <int COLUMNS, int WIDTH>
__device__ __forceinline__ void store_rows(const View<dtype>& out, const SeqlenInfo& seqlen_info, int h, int n0,
                                           const char* tile) {
    using Tile = SwizzledRows<COLUMNS>;
    for (int i = threadIdx.x; i < BLOCK_N * Tile::CHUNKS; i += THREADS) {
        const int row = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
        if (n0 + row < seqlen_info.key_rows() && chunk * 8 < WIDTH)
            *reinterpret_cast<uint4*>(seqlen_info.key(out, h, n0 + row) + chunk * 8) =
                *reinterpret_cast<const uint4*>(tile + Tile::at(row, chunk));
    }
}
