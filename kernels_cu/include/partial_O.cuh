// Partial O in global memory, of a persistent block: O, not divided by l, with m and l. Two uses:
//
//   long sums   float8 wgmma keeps about 14 bits of a sum and rounds towards zero: 32 keys lower O by up to 2^-13 of
//               its value. O therefore accumulates at most MMA_SUM_KEYS keys in the tensor cores (the last time up to
//               one key tile more), and is then added in fp32 to a partial O (CUTLASS: promotion). The worst case,
//               V = 1, has an error of 0.3% with a bfloat16 O (half a unit in the last place), and 0.07% otherwise;
//               without partial O it is 1.2% after 16k keys (experiments/015_fp8).
//   stream-K    blocks that share a work tile exchange their partial O (stream_k.cuh).
#pragma once
#include "softmax_rows.cuh"

#if defined(DTYPE_O_bfloat16)
constexpr int MMA_SUM_KEYS = 4096;
#else
constexpr int MMA_SUM_KEYS = 1024;
#endif

// The part of one thread: N elements of O in rows g and g + 8, in vectors of four, then a vector with m and l. It
// begins at `slot`; its vectors are THREADS vectors apart, so that accesses of the consumer threads are coalesced.
template <int N, int THREADS>
struct PartialO {
    static constexpr int VECTORS = N / 4 + 1, BLOCK_VECTORS = VECTORS * THREADS;
    float4* slot;

    // This thread's part of partial O `number`. In front of all, each block has a vector of counters, which only
    // stream-K uses. The consumer threads follow the 128 threads of the producer.
    __device__ __forceinline__ PartialO(float* partials, unsigned number)
        : slot(reinterpret_cast<float4*>(partials) + gridDim.x + number * BLOCK_VECTORS + threadIdx.x - 128) {}
    __device__ __forceinline__ float4 row_stats() const { return slot[(VECTORS - 1) * THREADS]; }  // m, l

    // Stores O, m and l. For long sums l is 0: the caller keeps it.
    __device__ __forceinline__ void store(const float (&O)[N], const float (&m)[2], float l0 = 0.0f,
                                          float l1 = 0.0f) const {
#pragma unroll
        for (int i = 0; i < N / 4; ++i)
            slot[i * THREADS] = make_float4(O[4 * i], O[4 * i + 1], O[4 * i + 2], O[4 * i + 3]);
        slot[(VECTORS - 1) * THREADS] = make_float4(m[0], m[1], l0, l1);
    }
    // Adds what is stored to O and l. m is at least the stored one.
    __device__ __forceinline__ void add_to(float (&O)[N], const float (&m)[2], float (&l)[2], float scale_log2) const {
        const float4 stored = row_stats();
        const float alpha[2] = {rescale_factor(stored.x, m[0], scale_log2), rescale_factor(stored.y, m[1], scale_log2)};
        l[0] = fmaf(stored.z, alpha[0], l[0]), l[1] = fmaf(stored.w, alpha[1], l[1]);
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            const float4 split = slot[i * THREADS];
            float* const o = O + 4 * i;
            o[0] = fmaf(split.x, alpha[0], o[0]);
            o[1] = fmaf(split.y, alpha[0], o[1]);
            o[2] = fmaf(split.z, alpha[1], o[2]);
            o[3] = fmaf(split.w, alpha[1], o[3]);
        }
    }
};
