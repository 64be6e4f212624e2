// O, m and l of a row are computed per range of keys and merged.
//
// fwd_wgmma_split: split-KV. Blocks share the key tiles that BLOCK_M rows see, in equal parts, give or take one tile:
// each part is a work tile; best_splits (sandbox/core/key_splits.py) says how many.
// fwd_wgmma_invariant: fixed ranges (KeyRange). With each range O and l start again from 0 and m from -INF, and are
// merged with those of the earlier keys; if the ranges of a row are computed by different blocks and merged afterwards,
// the bits are equal. Merging with empty sums (m = -INF, l = 0) changes no bit except the sign of a zero, which
// `normalized` (epilogue.cuh) removes: a row of one range has the same bits whether it is merged or not.
//
// The macros follow from the problem:
//
//   MERGE_RANGES  a row may have several ranges, which its block computes and merges
//   SPLIT_KEYS    a work tile has one range of keys, and fwd_wgmma_combine merges the ranges of a row
//   neither       no row has more than one range
#pragma once
#if KEY_SPLITS && INVARIANT
#define fwd_wgmma fwd_wgmma_invariant
#define fwd_wgmma_clear fwd_wgmma_invariant_clear
#define fwd_wgmma_combine fwd_wgmma_invariant_combine
#elif KEY_SPLITS
#define fwd_wgmma fwd_wgmma_split
#define fwd_wgmma_combine fwd_wgmma_split_combine
#elif STREAM_K
#define fwd_wgmma fwd_wgmma_stream_k
#endif
#include "epilogue.cuh"
#include "n_block_range.cuh"

// The factors of a sum over earlier keys (x) and of one over later keys (y), whose maxima are m_earlier and m.
// m becomes the larger of the two.
__device__ __forceinline__ float2 merge_factors(float m_earlier, float& m, float scale_log2) {
    const float m_later = m;
    m = fmaxf(m_earlier, m_later);
    return make_float2(rescale_factor(m_earlier, m, scale_log2), rescale_factor(m_later, m, scale_log2));
}
// An explicit fmaf: the rounding must not depend on which product the compiler contracts to an FMA.
__device__ __forceinline__ float merged(float earlier, float later, float2 factors) {
    return fmaf(earlier, factors.x, later * factors.y);
}

// O, m and l of the earlier keys, of one consumer thread. l is the sum of a row, not of a lane. O: vectors of four
// elements, the i-th ones of all THREADS threads adjacent; then a vector for each pair of rows, with their m and l. In
// shared memory if it fits, otherwise in global memory.
template <class State, int THREADS, bool IN_SMEM>
struct EarlierKeys {
    static constexpr int VECTORS = State::O_REGISTERS / 4, BLOCK_VECTORS = VECTORS * THREADS + THREADS / 4;
    // Loads of 16 bytes in flight: LAST_LOADS after the last range, LOADS after an earlier one. More would spill.
    static constexpr int LAST_LOADS = IN_SMEM ? 2 : 4, LOADS = IN_SMEM ? 2 : State::O_REGISTERS > 64 ? 12 : 8;
    float4 *const slot, *const stats;
    // block: the memory of the block. thread: index of the consumer thread.
    __device__ __forceinline__ EarlierKeys(float4* block, unsigned thread)
        : slot(block + thread), stats(block + VECTORS * THREADS + thread / 4) {}

    // m and l of `softmax` become those of all keys. Returns the factors of both sums of O, of the thread's two rows.
    struct Factors {
        float2 of_row[2];
    };
    __device__ __forceinline__ Factors merge_stats(State& softmax, float scale_log2, bool has_earlier) const {
        const float4 earlier = has_earlier ? *stats : make_float4(-INF, -INF, 0.0f, 0.0f);
        const Factors factors = {
            {merge_factors(earlier.x, softmax.m[0], scale_log2), merge_factors(earlier.y, softmax.m[1], scale_log2)}};
        softmax.l[0] = merged(earlier.z, softmax.l[0], factors.of_row[0]);
        softmax.l[1] = merged(earlier.w, softmax.l[1], factors.of_row[1]);
        return factors;
    }
    // O of `softmax` becomes that of all keys.
    __device__ __forceinline__ void add_to(State& softmax, const Factors& factors) const {
        for_each_sum<LAST_LOADS>(softmax, factors, [&](int i, float4 sum) {
            float* const o = softmax.O + 4 * i;
            o[0] = sum.x, o[1] = sum.y, o[2] = sum.z, o[3] = sum.w;
        });
    }
    // Stores O, m and l of `softmax`, merged with those in memory if there are any. m and l of `softmax` also become
    // those of all keys. Its O is unchanged, since a change in a branch would need more registers; the caller's next
    // P V overwrites it.
    __device__ __forceinline__ void add(State& softmax, float scale_log2, bool has_earlier) const {
        if (has_earlier) {
            const Factors factors = merge_stats(softmax, scale_log2, true);
            for_each_sum<LOADS>(softmax, factors, [&](int i, float4 sum) { slot[i * THREADS] = sum; });
        } else {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                const float* const o = softmax.O + 4 * i;
                slot[i * THREADS] = make_float4(o[0], o[1], o[2], o[3]);
            }
        }
        __syncwarp();  // the four lanes of a row have read its m and l
        if (threadIdx.x % 4 == 0) *stats = make_float4(softmax.m[0], softmax.m[1], softmax.l[0], softmax.l[1]);
        __syncwarp();
    }

  private:
    // Calls use(i, sum) for the i-th vector of O of all keys.
    template <int LOADS, class Use>
    __device__ __forceinline__ void for_each_sum(const State& softmax, const Factors& factors, const Use& use) const {
        // No load before the MMAs have ended: until then, P occupies the registers that the loaded values need.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const float4 earlier = slot[i * THREADS];
            const float* const o = softmax.O + 4 * i;
            use(i, make_float4(merged(earlier.x, o[0], factors.of_row[0]), merged(earlier.y, o[1], factors.of_row[0]),
                               merged(earlier.z, o[2], factors.of_row[1]), merged(earlier.w, o[3], factors.of_row[1])));
            if (i % LOADS == LOADS - 1) __syncwarp();
        }
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
    constexpr int LOADS = 16;  // splits in flight
    float m = -INF, l = 0.0f, o[4] = {};
#pragma unroll 1
    for (int first = 0; first < results.splits; first += LOADS) {
        float4 next[LOADS];
        float2 sums[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int split = min(first + i, results.splits - 1);
            next[i] = own ? reinterpret_cast<const float4*>(results.O(number, split))[quad] : float4();
            sums[i] = results.sums(number, split);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (first + i >= results.splits) break;
            const float2 factors = merge_factors(m, sums[i].x, scale_log2);
            l = merged(l, sums[i].y, factors);
            m = sums[i].x;
            o[0] = merged(o[0], next[i].x, factors), o[1] = merged(o[1], next[i].y, factors);
            o[2] = merged(o[2], next[i].z, factors), o[3] = merged(o[3], next[i].w, factors);
        }
    }
    if (Head::HAS_MASK && __syncthreads_or(own && !all_finite(o))) {
        if (threadIdx.x < 32) attend_non_finite<1, 1>(Q, K, V, O, LSE, group, score, b, h, H, row, 0);
        return;
    }
    const FinalizedRow final_row = head.finalize<ScoreUnits::RAW, Precision::APPROXIMATE>(m, l);
    if (own)
        reinterpret_cast<uint2*>(head.query(O, h, row))[quad] =
            make_uint2(pack(normalized(o[0], final_row.O_scale), normalized(o[1], final_row.O_scale)),
                       pack(normalized(o[2], final_row.O_scale), normalized(o[3], final_row.O_scale)));
    if (quad == 0) LSE[number] = final_row.lse;
}

#if KEY_SPLITS
// Merges the splits of a row; one block per row.
extern "C" __global__ __launch_bounds__(64) void fwd_wgmma_combine(
    const __grid_constant__ View<const dtype> Q, const __grid_constant__ View<const dtype> K,
    const __grid_constant__ View<const dtype> V, const __grid_constant__ View<dtype> O, float* LSE, int H,
    int batch_heads, int group, const __grid_constant__ Score score, float* partials, int splits) {
    griddepcontrol_wait();
    merge_splits(Q, K, V, O, LSE, {partials, static_cast<long long>(batch_heads) * score.Sq, splits}, H, group, score);
}
#endif
