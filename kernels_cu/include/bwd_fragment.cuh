// A consumer's fragment of S^T = K Q^T: the wgmma accumulators of 64 keys and M queries, M / 2 per lane. P^T and dS^T
// have the same layout, packed: M / 16 steps of 4 registers. Here: its coordinates, dropout, mask, bias and score
// modification.
#pragma once
#include "bwd_tiles.cuh"
#include "wgmma_fragment.cuh"

// Query and key of each element of the lane's fragment of S^T.
struct FragmentCoords {
    int row, key;  // query and key of element 0
    __device__ __forceinline__ FragmentCoords(int first_query, int first_key) {
        const unsigned thread = thread_index_x() % 128;
        row = first_query + thread % 4 * 2, key = first_key + thread / 32 * 16 + thread / 4 % 8;
    }
    __device__ __forceinline__ ScoreIndex at(int k) const { return {row, key, k / 4 * 8 + k % 2, k / 2 % 2 * 8}; }
};

// Dropout's keep mask of a fragment: one bit per element of P. The bits of the two elements of a register are 16 bits
// apart.
template <int M>
struct KeepBits {
    unsigned bits[(M + 63) / 64] = {};

    // warp_key: first key of the warp's 16.
    __device__ __forceinline__ void compute(const Head& head, unsigned long long seed, int first_query, int warp_key) {
#pragma unroll
        for (int begin = 0; begin < (DROPOUT ? M : 0); begin += 64) {
#pragma unroll
            for (int step = 0; step < (M < 64 ? M : 64) / 16; ++step) {
                Head::Kept block[1];
                head.keep_along_keys(block, seed, first_query + begin + 16 * step, warp_key);
                unsigned step_bits = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) step_bits |= block[0].mask(k) & 0x10001u << k;
                bits[begin / 64] |= step_bits << 4 * step;
            }
        }
    }
    // All ones in the halves of register k of step `step` whose elements are kept.
    __device__ __forceinline__ unsigned mask(int step, int k) const {
        return DROPOUT ? signs_of_halves(bits[step / 4] << (15 - (step % 4 * 4 + k))) : ~0u;
    }
};

// P after dropout.
template <int STEPS>
__device__ __forceinline__ void drop_P(unsigned (&P_dropped)[STEPS][4], const unsigned (&P)[STEPS][4],
                                       const KeepBits<16 * STEPS>& keep) {
#pragma unroll
    for (int k = 0; k < 4 * STEPS; ++k) P_dropped[k / 4][k % 4] = P[k / 4][k % 4] & keep.mask(k / 4, k % 4);
}

constexpr int MASK_UNROLL = DROPOUT ? 4 : 16;  // elements whose mask is loaded at the same time: more would spill

// Calls mask_element(k) for those of the lane's N elements of S^T that a causal mask, a window or the sequence lengths
// hide.
template <int N, class MaskElement>
__device__ __forceinline__ void mask_fragment(const Head& head, const FragmentCoords& coords,
                                              const MaskElement& mask_element) {
    // Visible queries of each of the lane's two keys, relative to its first query. A right bound of the keys of a query
    // is a lower bound of the queries of a key.
    int begin[2], end[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Range rows = head.visible_queries(coords.key + 8 * half);
        begin[half] = rows.begin - coords.row, end[half] = rows.end - coords.row;
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int row = k / 4 * 8 + k % 2, half = k / 2 % 2;
        if ((Head::HAS_RIGHT_BOUND && row < begin[half]) || row >= end[half]) mask_element(k);
    }
}

// Sets element k of P to 0.
template <int STEPS>
__device__ __forceinline__ void hide(unsigned (&P)[STEPS][4], int k) {
    P[k / 8][k / 2 % 4] &= k % 2 ? 0xffffu : 0xffff0000u;
}

// The mask of a fragment: the mask's ranges, and one bit per element for the element mask (Head::ELEMENT_MASK).
template <int M>
struct FragmentMask {
    static_assert(M <= 64 || !Head::ELEMENT_MASK, "the mask has 32 bits per lane, one per element");
    const Head &head, &head0;  // of this query head; of the work tile's first one, whose lengths are in registers
    const int first_query, first_key, warp_key;  // warp_key: first key of the warp's 16
    const bool elementwise;                      // whether the element mask may hide an element
    unsigned visible_bits = 0;

    __device__ __forceinline__ void load() {
        if (!elementwise) return;
        if constexpr (Head::HAS_ELEMENT_BITS) {
            load_element_bits();
        } else {
            const FragmentCoords coords(first_query, first_key);
#pragma unroll MASK_UNROLL
            for (int k = 0; k < M / 2; ++k) {  // clamped indices instead of a branch, so that the loads overlap
                const int i = min(coords.at(k).query_row(), head0.Sq - 1),
                          j = min(coords.at(k).key_col(), head0.Sk - 1);
                visible_bits |= static_cast<unsigned>(head.mask_allows(i, j)) << k;
            }
        }
    }
    // Each lane loads the bits of the warp's 16 keys for one query row, or two if M = 64, and shuffles distribute them.
    __device__ __forceinline__ void load_element_bits() {
        const unsigned lane = thread_index_x() % 32;
        unsigned rows[2][1] = {};
#pragma unroll
        for (int i = 0; i < M / 32; ++i) head.element_bits<16>(rows[i], first_query + 32 * i + lane, warp_key);
        // k = 0, 1, 4, 5, 8 ...: row k / 4 * 8 + k % 2, and the row that is 32 rows below.
#pragma unroll
        for (int k = 0; k < 16; k += k % 4 ? 3 : 1) {
            const unsigned from = k / 4 * 8 + k % 2 + lane % 4 * 2;
            const unsigned bits = __shfl_sync(0xffffffffu, rows[0][0] | rows[1][0] << 16, from) >> lane / 4;
            visible_bits |= (bits & 1) << k | (bits >> 8 & 1) << (k + 2) | (bits >> 16 & 1) << (k + 16) |
                            (bits >> 24 & 1) << (k + 18);
        }
    }
    // Calls mask_element(k) for all hidden elements. The consumer's first key is m_blocks.n0() + key_offset: calling
    // n0() again saves a register.
    template <class MBlocks, class MaskElement>
    __device__ __forceinline__ void apply(const MBlocks& m_blocks, int key_offset, const FragmentCoords& coords,
                                          const MaskElement& mask_element) const {
        if (elementwise) {
#pragma unroll
            for (int k = 0; k < M / 2; ++k)
                if (!(visible_bits >> k & 1)) mask_element(k);
        }
        const Range fully_visible =  // <true>: by ranges only, without the element mask
            head0.template fully_visible_queries<true>(m_blocks.n0() + key_offset, m_blocks.n0() + key_offset + 64);
        // Query rows from Sq on are masked, too: their q is 0, and 0 * inf is NaN.
        if ((first_query < fully_visible.begin) | (first_query + M > fully_visible.end))
            mask_fragment<M / 2>(head0, coords, mask_element);
    }
};

// Loads the bias of a warp's 16 keys from shared memory, where it has one row per query, to the layout of P^T: the
// inverse of store_transposed.
template <int STEPS>
__device__ __forceinline__ void load_bias_fragment(unsigned (&bias)[STEPS][4], SmemAddr rows, unsigned chunk) {
    const unsigned lane = thread_index_x() % 32;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        ldmatrix_x4_trans(bias[step],
                          rows + SmemLayoutPdS::chunk(16 * step + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
}

// Softcap, ALiBi, bias and score_mod. S: q . k, becomes the raw score. derivative: dx / d(scale * (q . k)), packed; it
// is that of x, not that of the raw score (RecomputedP::dx). packed_bias: read only if BIAS.
template <int STEPS>
__device__ __forceinline__ void apply_score_mod(float (&S)[8 * STEPS], unsigned (&derivative)[STEPS][4],
                                                const Head& head, const FragmentCoords& coords,
                                                const unsigned (&packed_bias)[STEPS][4]) {
#pragma unroll
    for (int k = 0; k < (Head::HAS_SCORE_MOD ? 8 * STEPS : 0); k += 2) {
        const ScoreIndex at0 = coords.at(k), at1 = coords.at(k + 1);
        const float2 bias = BIAS ? unpack(packed_bias[k / 8][k / 2 % 4]) : float2{};
        if (Head::HAS_DERIVATIVE) {
            const Dual x0 = head.raw_dual(S[k], at0, bias.x), x1 = head.raw_dual(S[k + 1], at1, bias.y);
            S[k] = x0.value, S[k + 1] = x1.value;
            derivative[k / 8][k / 2 % 4] = pack(x0.derivative, x1.derivative);
        } else {
            S[k] = head.raw(S[k], at0, bias.x), S[k + 1] = head.raw(S[k + 1], at1, bias.y);
        }
    }
}
