// The steps of the backward mainloop on wgmma (`bwd_step` in bwd_consumer*.cuh): S^T and dP^T, P and dS, dV, dK and dQ.
// STEPS: steps of 16 query rows of a fragment of P^T or dS^T, 4 registers each, two packed elements per register.
// SmemLayoutK and SmemLayoutQ also stand for V and dO: steps and strides depend only on the rows of a layout.
#pragma once
#include "bwd_fragment.cuh"
#include "bwd_tiles.cuh"

// S^T = K Q^T or dP^T = V dO^T of 64 keys and 2 * R queries (R accumulators per lane); both operands are K-major.
// COLUMNS: columns of both operands that contain data.
template <int COLUMNS, int R>
__device__ __forceinline__ void mma_SdP(float (&C)[R], Descriptor A, Descriptor B) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < (COLUMNS + 15) / 16; ++step)
        wgmma<Order::K_MAJOR>(C, A + SmemLayoutK::k_step(step), B + SmemLayoutQ::k_step(step), step > 0);
    wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q: 64 keys, all queries of the tile. A, P^T or dS^T, is in registers.
template <int R>
__device__ __forceinline__ void mma_dKV(float (&C)[R], const unsigned (&A)[BLOCK_M / 16][4], SmemAddr queries,
                                        bool accumulate = true) {
    const Descriptor B = SmemLayoutQ::mn_major(queries);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_M / 16; ++step)
        wgmma<Order::MN_MAJOR>(C, A[step], B + SmemLayoutQ::mn_step(step), accumulate || step > 0);
    wgmma_commit();
}

// 64 rows of dQ = dS K, 2 * R columns. A: dS, K-major; B: K, MN-major.
template <int R>
__device__ __forceinline__ void mma_dQ(float (&dQ)[R], Descriptor A, Descriptor B) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step)
        wgmma<Order::MN_MAJOR>(dQ, A + SmemLayoutPdS::k_step(step), B + SmemLayoutK::mn_step(step), step > 0);
    wgmma_commit();
}

// P = exp2(S * scale_log2 - LSE * log2(e)). stats: -LSE * log2(e), with dropout plus log2 of its factor
// (load_LSE_or_delta in bwd_load.cuh), from the lane's first query on.
template <int STEPS>
__device__ __forceinline__ void compute_P(unsigned (&P)[STEPS][4], const float (&S)[8 * STEPS], float scale_log2,
                                          const float* stats) {
#pragma unroll
    for (int k = 0; k < 8 * STEPS; k += 2) {
        const float2 shift = *reinterpret_cast<const float2*>(stats + k / 4 * 8);
        P[k / 8][k / 2 % 4] = pack(ex2(fmaf(S[k], scale_log2, shift.x)), ex2(fmaf(S[k + 1], scale_log2, shift.y)));
    }
}

// dS = P (dP - delta). delta: from the lane's first query on.
template <int STEPS>
__device__ __forceinline__ void compute_dS(unsigned (&dS)[STEPS][4], const unsigned (&P)[STEPS][4],
                                           const float (&dP)[8 * STEPS], const float* delta) {
#pragma unroll
    for (int k = 0; k < 8 * STEPS; k += 2) {
        const float2 delta_pair = *reinterpret_cast<const float2*>(delta + k / 4 * 8);
        const float2 p = unpack(P[k / 8][k / 2 % 4]);
        dS[k / 8][k / 2 % 4] = pack(p.x * (dP[k] - delta_pair.x), p.y * (dP[k + 1] - delta_pair.y));
    }
}

// dS = P (dP - delta) * derivative, with dropout of dP; P becomes P after dropout. derivative: see apply_score_mod
// (bwd_fragment.cuh). Dropout: P and delta contain a factor (load_LSE_or_delta in bwd_load.cuh).
template <int STEPS>
__device__ __forceinline__ void compute_dS(unsigned (&dS)[STEPS][4], unsigned (&P)[STEPS][4],
                                           const float (&dP)[8 * STEPS], const float* delta,
                                           const KeepBits<16 * STEPS>& keep, const unsigned (&derivative)[STEPS][4]) {
#pragma unroll
    for (int k = 0; k < 8 * STEPS; k += 2) {
        const float2 delta_pair = *reinterpret_cast<const float2*>(delta + k / 4 * 8);
        unsigned& packed = P[k / 8][k / 2 % 4];
        const float2 p = unpack(packed);
        float dS0, dS1;
        if (DROPOUT) {
            packed &= keep.mask(k / 8, k / 2 % 4);
            const float2 kept = unpack(packed);
            dS0 = fmaf(kept.x, dP[k], -p.x * delta_pair.x), dS1 = fmaf(kept.y, dP[k + 1], -p.y * delta_pair.y);
        } else {
            dS0 = p.x * (dP[k] - delta_pair.x), dS1 = p.y * (dP[k + 1] - delta_pair.y);
        }
        if (Head::HAS_DERIVATIVE) {
            const float2 dx = unpack(derivative[k / 8][k / 2 % 4]);
            dS0 *= dx.x, dS1 *= dx.y;
        }
        dS[k / 8][k / 2 % 4] = pack(dS0, dS1);
    }
}

// Writes a consumer's accumulators of dQ to `part`, its part of the dQ tile in shared memory, in the layout of
// dQ_accum.
template <int R>
__device__ __forceinline__ void stage_dQ(SmemAddr part, const float (&dQ)[R]) {
    const SmemAddr to = part + thread_index_x() % 128 * 16;
#pragma unroll
    for (int k = 0; k < R; k += 4)
        store_floats(to + k / 4 * (4 * DQ_CHUNK_FLOATS), dQ[k], dQ[k + 1], dQ[k + 2], dQ[k + 3]);
}

// One lane (`arrives`) arrives for its warp: the stage of tile i may be overwritten. All lanes' reads precede the
// producer's next write: __syncwarp orders them before the arrival (a release), which the producer's wait acquires, and
// PTX's causality order is transitive. racecheck (CUDA 13.0) considers only the arriving thread and reports false
// hazards; the race detector of the CPU backend models __syncwarp (tests/verify/test_sanitize.py).
template <class StagePipeline>
__device__ __forceinline__ void release_stage(SmemAddr base, unsigned i, bool arrives) {
    __syncwarp();  // all lanes have read the stage (of Q: with LSE, delta and the bias)
    if (arrives) StagePipeline::release(base, i);
}
