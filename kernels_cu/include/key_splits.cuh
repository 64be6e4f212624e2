// Sums of a row over fixed ranges of keys (fwd_wgmma_invariant): every RANGE_TILES key tiles O, m and l begin anew, and
// are merged with those of the earlier keys. The ranges of a row may therefore also be computed by different blocks
// (split-KV), and be merged afterwards, with equal bits.
#pragma once
#include "n_block_range.cuh"
#include "partial_O.cuh"

// Whether a long row has several ranges. A range begins where j % RANGE_TILES == 0, so key tile j must begin at key
// j * BLOCK_N. It does not with a left window bound, a block map, or tiles in descending order (ALiBi).
constexpr bool KEY_RANGES = KEY_SPLITS && !Head::HAS_LEFT_BOUND && !WALK_BACKWARDS && !Head::HAS_BLOCK_MAP;

// The factors of a sum over earlier keys (x) and of one over later keys (y), whose maxima are m_earlier and m.
// m becomes the larger of the two.
__device__ __forceinline__ float2 merge_factors(float m_earlier, float& m, float scale_log2) {
    const float m_later = m;
    m = fmaxf(m_earlier, m_later);
    return make_float2(rescale_factor(m_earlier, m, scale_log2), rescale_factor(m_later, m, scale_log2));
}
// One rounding order, wherever it is compiled.
__device__ __forceinline__ float merged(float earlier, float later, float2 factors) {
    return fmaf(earlier, factors.x, later * factors.y);
}

// O, m and l of the earlier keys, of one consumer thread of a persistent block, in global memory. l is the sum of a
// row, not of a lane.
template <class State, int THREADS>
struct EarlierKeys : PartialO<State::O_REGISTERS, THREADS> {
    using Memory = PartialO<State::O_REGISTERS, THREADS>;
    using Memory::Memory, Memory::slot, Memory::row_stats;
    static constexpr int LOADS = State::O_REGISTERS > 64 ? 4 : 8;  // in flight, of 16 bytes

    // Adds O of the earlier keys, if there are any, to that of `softmax`, and calls use(i, sum) for the i-th vector of
    // four elements. m and l of `softmax` become those of all keys. Without earlier keys the sums are merged with
    // zeros: a branch around the loop would need more registers.
    template <class Use>
    __device__ __forceinline__ void merge(State& softmax, float scale_log2, bool has_earlier, const Use& use) const {
        __syncwarp();  // no load before the MMAs have ended: their results need the registers
        const float4 stats = has_earlier ? row_stats() : make_float4(-INF, -INF, 0.0f, 0.0f);
        const float2 factors[2] = {merge_factors(stats.x, softmax.m[0], scale_log2),
                                   merge_factors(stats.y, softmax.m[1], scale_log2)};
        softmax.l[0] = merged(stats.z, softmax.l[0], factors[0]);
        softmax.l[1] = merged(stats.w, softmax.l[1], factors[1]);
#pragma unroll
        for (int i = 0; i < State::O_REGISTERS / 4; ++i) {
            const float4 earlier = has_earlier ? slot[i * THREADS] : float4();
            const float* const o = softmax.O + 4 * i;
            use(i, make_float4(merged(earlier.x, o[0], factors[0]), merged(earlier.y, o[1], factors[0]),
                               merged(earlier.z, o[2], factors[1]), merged(earlier.w, o[3], factors[1])));
            if (i % LOADS == LOADS - 1) __syncwarp();  // more loads in flight would spill
        }
    }
    // O, m and l of `softmax` become those of all keys.
    __device__ __forceinline__ void merge_into(State& softmax, float scale_log2, bool has_earlier) const {
        merge(softmax, scale_log2, has_earlier, [&](int i, float4 sum) {
            float* const o = softmax.O + 4 * i;
            o[0] = sum.x, o[1] = sum.y, o[2] = sum.z, o[3] = sum.w;
        });
    }
    // Adds O, m and l of `softmax` to those in memory. m and l of `softmax` also become those of all keys. Its O is
    // unchanged, since a change in a branch would need more registers; the caller's next P V overwrites it.
    __device__ __forceinline__ void add(State& softmax, float scale_log2, bool has_earlier) const {
        merge(softmax, scale_log2, has_earlier, [&](int i, float4 sum) { slot[i * THREADS] = sum; });
        slot[(Memory::VECTORS - 1) * THREADS] = make_float4(softmax.m[0], softmax.m[1], softmax.l[0], softmax.l[1]);
    }
};

// Partial results of split-KV in global memory: O, not divided by l, of all rows, the splits of a row adjacent; then m
// and l. row: its index in LSE.
struct SplitResults {
    float* const data;
    const long long rows;
    const int splits;
    __device__ __forceinline__ float* O(long long row, int split) const {
        return data + (row * splits + split) * HEAD_DIM_V;
    }
    __device__ __forceinline__ float2& sums(long long row, int split) const {
        return reinterpret_cast<float2*>(data + rows * splits * HEAD_DIM_V)[row * splits + split];
    }
};

// O and LSE of a row from its splits, by a block of at least HEAD_DIM_V / 4 threads.
__device__ __forceinline__ void merge_splits(const View<const dtype>& Q, const View<const dtype>& K,
                                             const View<const dtype>& V, const View<dtype>& O, float* LSE,
                                             const SplitResults& results, int H, int group, const Score& score) {
    const int row = blockIdx.x, h = blockIdx.y, b = blockIdx.z, quad = threadIdx.x;
    const Head head(score, b, h);
    const long long number = head.lse_offset(H, h) + row;
    const bool own = quad < HEAD_DIM_V / 4;
    const float scale_log2 = head.softmax_scale * Head::LOG2E;
    float m = -INF, l = 0.0f, o[4] = {};
#pragma unroll 4
    for (int split = 0; split < results.splits; ++split) {
        const float4 next = own ? reinterpret_cast<const float4*>(results.O(number, split))[quad] : float4();
        const float2 sums = results.sums(number, split);
        const float earlier[4] = {o[0], o[1], o[2], o[3]}, later[4] = {next.x, next.y, next.z, next.w};
        float m_new = sums.x;
        const float2 factors = merge_factors(m, m_new, scale_log2);
        l = merged(l, sums.y, factors);
        m = m_new;
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] = merged(earlier[i], later[i], factors);
    }
    if (Head::HAS_MASK && __syncthreads_or(own && !all_finite(o))) {
        if (threadIdx.x < 32) attend_non_finite<1, 1>(Q, K, V, O, LSE, group, score, b, h, H, row, 0);
        return;
    }
    const FinalizedRow final_row = head.finalize<ScoreUnits::RAW, Precision::APPROXIMATE>(m, l);
    if (own)
        reinterpret_cast<uint2*>(head.query(O, h, row))[quad] =
            make_uint2(pack(o[0] * final_row.O_scale, o[1] * final_row.O_scale),
                       pack(o[2] * final_row.O_scale, o[3] * final_row.O_scale));
    if (quad == 0) LSE[number] = final_row.lse;
}

#if KEY_SPLITS
// Merges the splits of a row; one block per row.
extern "C" __global__ __launch_bounds__(64) void fwd_wgmma_combine(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<dtype> O, float* LSE, int H,
    int batch_heads, int group, const __grid_constant__ Score score, float* partials, int splits) {
    merge_splits(Q, K, V, O, LSE, {partials, static_cast<long long>(batch_heads) * score.Sq, splits}, H, group, score);
}
#endif
