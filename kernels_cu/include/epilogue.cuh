// The epilogue of a wgmma forward kernel: LSE, and O / l from the accumulators to shared memory and from there, by TMA,
// to global memory. Each warp stores its 16 rows by itself.
#pragma once
#include "score_mod.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

// 227 KiB is the maximum shared memory of a block of sm_90; the last 1024 bytes are for barriers and tile lists.
constexpr unsigned MAX_SMEM = 232448, BARRIER_BYTES = 1024;
constexpr bool fits_in_smem(unsigned tile_bytes) { return tile_bytes + BARRIER_BYTES <= MAX_SMEM; }

// An element of O divided by l. INVARIANT: -0 becomes 0, since merging ranges of keys (key_splits.cuh) may change the
// sign of a zero.
__device__ __forceinline__ float normalized(float o, float O_scale) {
    return INVARIANT ? fmaf(o, O_scale, 0.0f) : o * O_scale;
}

// O's buffer for CONSUMERS warpgroups. A slab is 64 columns of a tile (swizzle.cuh). If all or half of O's slabs fit at
// byte AT, after all other tiles, O has a buffer of its own, so that the next Q can load during the store. Otherwise O
// reuses Q's buffer, at byte 0.
template <class Outputs, class Queries, int CONSUMERS, unsigned AT>
struct OutputBuffer {
    static constexpr int HALF_SLABS = (Outputs::SLABS + 1) / 2;
    static constexpr bool SEPARATE = fits_in_smem(AT + CONSUMERS * HALF_SLABS * Outputs::SLAB_BYTES);
    static constexpr int SLABS =
        !SEPARATE || fits_in_smem(AT + CONSUMERS * Outputs::BYTES) ? Outputs::SLABS : HALF_SLABS;
    static constexpr unsigned BYTES = SLABS * Outputs::SLAB_BYTES;  // per consumer
    static constexpr unsigned END = AT + (SEPARATE ? CONSUMERS * BYTES : 0);
    static_assert(SEPARATE || BYTES <= Queries::BYTES, "O must fit in Q's buffer");

    // Address of one warp's rows in the first slab: 16 rows of 128 bytes in each slab.
    static __device__ __forceinline__ SmemAddr warp_rows(SmemAddr base, unsigned consumer, unsigned warp) {
        return base + (SEPARATE ? AT + consumer * BYTES : consumer * Queries::BYTES) + warp % 4 * 16 * 128;
    }

    // Stores O * O_scale of the warp's 16 rows from first_row on. `store_lane`: the lane that issues the TMA stores.
    static __device__ __forceinline__ void store(const SoftmaxState& softmax, const float (&O_scale)[2],
                                                 SmemAddr O_smem, const TensorMap& O_warp_map, const Head& head, int h,
                                                 int b, int first_row, unsigned lane, bool store_lane) {
        // A buffer for all slabs: one store. A buffer for half of them: one store per slab, and the slabs are reused.
        constexpr int SLABS_PER_STORE = SLABS == Outputs::SLABS ? SLABS : 1;
#pragma unroll
        for (int slab = 0; slab < Outputs::SLABS; slab += SLABS_PER_STORE) {
            if (slab >= SLABS) {
                if (store_lane) tma_store_wait_read<SLABS - 1>();  // the slab that is overwritten has been read
                __syncwarp();
            }
            const SmemAddr slab_smem = O_smem + slab % SLABS * Outputs::SLAB_BYTES;
#pragma unroll
            for (int step = 4 * slab; step < min(4 * (slab + SLABS_PER_STORE), SoftmaxState::O_REGISTERS / 8); ++step) {
                unsigned packed[4];  // 16 x 16 elements: a slab is four steps, of eight registers each
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const int i = 8 * step + 2 * k;
                    packed[k] =
                        pack(normalized(softmax.O[i], O_scale[k % 2]), normalized(softmax.O[i + 1], O_scale[k % 2]));
                }
                const unsigned offset = Outputs::chunk(lane % 16, 2 * (step - 4 * slab) + lane / 16);
                stmatrix_x4(slab_smem + offset, packed[0], packed[1], packed[2], packed[3]);
            }
            fence_proxy_async();
            __syncwarp();  // the slabs' 16 rows are complete before one lane stores them
            if (store_lane)
                Outputs::store(O_warp_map, head.tma_query_row(first_row), h, head.tma_query_batch(b), slab_smem, slab,
                               SLABS_PER_STORE);
        }
    }
};

// Stores LSE of the thread's two rows, `row` and row + 8, and returns in O_scale the factors of O (FinalizedRow).
// batch_head: the index of the head in LSE. q: the lane's position in the four lanes of a row.
__device__ __forceinline__ void finalize_rows(const SoftmaxState& softmax, const Head& head, float* LSE, int batch_head,
                                              int row, int q, float (&O_scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float l = row_sum<4>(softmax.l[half]);
        const FinalizedRow final_row = head.finalize<ScoreUnits::RAW, Precision::APPROXIMATE>(softmax.m[half], l);
        O_scale[half] = final_row.O_scale;
        const int query_row = row + 8 * half;
        if (q == 0 && query_row < head.Sq) LSE[head.lse_offset(batch_head) + query_row] = final_row.lse;
    }
}
