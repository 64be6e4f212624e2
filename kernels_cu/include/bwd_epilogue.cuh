// The epilogue of the wgmma backward kernels: a consumer writes its dK or dV to shared memory, from where TMA stores
// it.
#pragma once
#include "bwd_combine_group.cuh"
#include "bwd_tiles.cuh"
#include "non_finite.cuh"
#include "wgmma_fragment.cuh"

// Writes 64 rows of dK or dV (accumulators of a warpgroup), times `factor`, to `tile`.
template <class SmemLayout, int R>
__device__ __forceinline__ void stage_dKV(SmemAddr tile, const float (&accum)[R], float factor, unsigned warp,
                                          unsigned lane) {
#pragma unroll
    for (int k = 0; k < R; k += 8) {
        unsigned pair[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) pair[e] = pack(accum[k + 2 * e] * factor, accum[k + 2 * e + 1] * factor);
        stmatrix_x4(tile + SmemLayout::chunk(warp % 4 * 16 + lane % 16, k / 4 + lane / 16), pair[0], pair[1], pair[2],
                    pair[3]);
    }
}

template <int R>
__device__ __forceinline__ void zero(float (&accum)[R]) {
#pragma unroll
    for (int k = 0; k < R; ++k) accum[k] = 0.0f;
}

// Stores a consumer's dK or dV: 64 keys from key key_offset of the n_block on, columns from 64 * first_slab on (slabs:
// swizzle.cuh). `tile`: shared memory for staging, which nothing else uses. Returns whether a value is not finite.
// Block: see BwdBlock (bwd_wgmma_tiles.cuh).
template <class SmemLayout, Gradient GRADIENT, class Block, int R>
__device__ __forceinline__ bool store_dKV(const Block& block, unsigned consumer, SmemAddr tile, const float (&accum)[R],
                                          float factor, int key_offset, int first_slab) {
    const TensorMap& map = GRADIENT == Gradient::dV ? block.params.dV_map : block.params.dK_map;
    const bool non_finite = !all_finite(accum);
    stage_dKV<SmemLayout>(tile, accum, factor, block.warp, block.lane);
    fence_proxy_async();
    named_barrier_sync(consumer_barrier(consumer),
                       CONSUMER_THREADS);  // all four warps have written the tile before the TMA store
    const auto work_tile = block.reload_work_tile();
    if (threadIdx.x % CONSUMER_THREADS == 0) {
#pragma unroll
        for (int slab = 0; slab < (2 * R + 63) / 64; ++slab)
            if (SPLIT_GROUP || block.slot() >= 0)
                bulk_store(block.partial(work_tile, GRADIENT, key_offset, slab + first_slab),
                           tile + slab * SmemLayout::SLAB_BYTES, PARTIAL_SLAB_BYTES);
            else
                tma_store(map, (slab + first_slab) * 64, block.head0.tma_dKV_row(block.m_blocks.n0() + key_offset),
                          work_tile.work_head, block.head0.tma_dKV_batch(work_tile.b),
                          tile + slab * SmemLayout::SLAB_BYTES);
        tma_store_commit();
    }
    return non_finite;
}
