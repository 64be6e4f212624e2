// The combine kernel of fwd_latent_wgmma: merges the partial results of entries in several parts.
#pragma once
#include "latent_output.cuh"

// Merges a row: WARPS warps share its splits, and each has QUADS quads of columns per lane. With one warp, a row's
// columns are all in it; with several, block `chunk` along y has 128 columns.
template <int SPLIT_WARPS>
struct CombineBlock {
    static constexpr int QUADS = SPLIT_WARPS > 1 ? 1 : (HEAD_DIM_V + 127) / 128, LOADS_AHEAD = SPLIT_WARPS > 1 ? 8 : 2;
    const View<dtype_o>& O;
    float* LSE;
    const SlotPartials& slots;
    const int H, group, parts;
    const Score& score;

    __device__ __forceinline__ CombineBlock(const View<dtype_o>& O, float* LSE, const SlotPartials& slots, int H,
                                            int group, int parts, const Score& score)
        : O(O), LSE(LSE), slots(slots), H(H), group(group), parts(parts), score(score) {}

    __device__ __forceinline__ void run(int row, int chunk) const {
        const int h = row / score.Sq, i = row % score.Sq, b = blockIdx.z, lane = threadIdx.x % 32;
        const int warp = SPLIT_WARPS > 1 ? threadIdx.x / 32 : 0;
        if (row >= H * score.Sq) return;
        const int row_tile = (i * group + h % group) / BLOCK_M;
        const Segment first =
            KeyScheduler(score, gridDim.z, parts, queries_of_tile(score, row_tile, group)).first_split(score, b);
        griddepcontrol_wait();
        if (first.splits == 1) return;
        const Head head(score, b, h);
        const float exponent = head.unit * Head::LOG2E;

        // m and l of all splits: the lanes' shares, then their maximum and sum
        CombinedRow sum;
        sum.m = -INF;
#pragma unroll 1
        for (int split = lane; split < first.splits; split += 32)
            sum.m = fmaxf(sum.m, slots.sums(row, first.slot + split)->x);
        sum.m = row_max<32>(sum.m);
#pragma unroll 1
        for (int split = lane; split < first.splits; split += 32) {
            const float2 part = *slots.sums(row, first.slot + split);
            sum.l += rescale_factor(part.x, sum.m, exponent) * part.y;
        }
        sum.l = row_sum<32>(sum.l);

        float4 merged[QUADS] = {};
#pragma unroll 1
        for (int split0 = warp; split0 < first.splits; split0 += LOADS_AHEAD * SPLIT_WARPS) {
            float4 parts_of_O[LOADS_AHEAD][QUADS];
            float weights[LOADS_AHEAD];
#pragma unroll
            for (int k = 0; k < LOADS_AHEAD; ++k) {
                const int split = split0 + k * SPLIT_WARPS, slot = first.slot + min(split, first.splits - 1);
                weights[k] = split < first.splits ? rescale_factor(slots.sums(row, slot)->x, sum.m, exponent) : 0.0f;
#pragma unroll
                for (int c = 0; c < QUADS; ++c)
                    parts_of_O[k][c] = reinterpret_cast<const float4*>(slots.O(row, slot))[quad(chunk + c, lane)];
            }
#pragma unroll
            for (int k = 0; k < LOADS_AHEAD; ++k)
                for (int c = 0; c < QUADS; ++c) add(merged[c], weights[k], parts_of_O[k][c]);
        }
        if (SPLIT_WARPS > 1) {
            __shared__ float4 merged_smem[SPLIT_WARPS][32];
            merged_smem[warp][lane] = merged[0];
            __syncthreads();  // the sums of all warps are in shared memory
            if (warp > 0) return;
#pragma unroll
            for (int other = 1; other < SPLIT_WARPS; ++other) add(merged[0], 1.0f, merged_smem[other][lane]);
        }
#pragma unroll
        for (int c = 0; c < QUADS; ++c) {
            if (128 * (chunk + c) + 4 * lane >= HEAD_DIM_V) break;
            sum.O = merged[c];
            store_row(O, LSE, head, h, i, head.lse_offset(H, h) + i, quad(chunk + c, lane), sum);
        }
    }

  private:
    // The last quad of the row instead of those beyond it.
    static __device__ __forceinline__ int quad(int chunk, int lane) {
        return min(32 * chunk + lane, HEAD_DIM_V / 4 - 1);
    }
    static __device__ __forceinline__ void add(float4& sum, float weight, const float4& x) {
        sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
    }
};
