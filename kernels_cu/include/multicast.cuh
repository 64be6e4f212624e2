// Tiles that all blocks of a cluster read, loaded once: each block loads every CLUSTER-th slab and multicasts it to all
// blocks, to the same offset in shared memory. With CLUSTER = 1 these functions load, and release, as swizzle.cuh and
// pipeline.cuh do.
//
//   producer of each block    KPipeline::acquire(base, i);                        the stage is empty in all blocks
//                             mbarrier_arrive_expect_tx(full, Tile::BYTES);       the bytes of all slabs
//                             load_part_in_cluster<Tile>(..., full, i);
//   consumer                  KPipeline::wait(base, i); ...; release_in_cluster<KPipeline>(base, i, tiles, lane);
//
// `empty` counts the arrivals of all blocks, since each producer writes to the stages of all blocks. A block's bytes
// may arrive in another block before that one's producer expects them: the phase cannot end before the producer's
// arrival. All blocks must pass through the same number of tiles. A stage that is not loaded again is not released: the
// producers thus wait for every arrival, and none reaches a block that has exited.
#pragma once
#include <cluster.cuh>  // angle brackets: the CPU backend has its own
#include "pipeline.cuh"
#include "swizzle.cuh"

// Loads this block's slabs of a tile that begins at a column (Swizzled::load_part). turn: the same in all blocks; it
// rotates the blocks' slabs, so that tiles of one slab are loaded by each block in turn.
template <class Tile>
__device__ __forceinline__ void load_part_in_cluster(SmemAddr tile, const TensorMap& map, int column, int s, int h,
                                                     int b, SmemAddr full, unsigned turn) {
    if constexpr (CLUSTER == 1) {
        Tile::load_part(tile, map, column, s, h, b, full);
    } else {
        const int first = (turn + cluster_cta_rank()) % CLUSTER;
#pragma unroll
        for (int i = 0; i < Tile::SLABS; i += CLUSTER) {
            const int slab = i + first;
            if (slab < Tile::SLABS)
                tma_load_multicast(tile + slab * Tile::SLAB_BYTES, map, column + slab * 64, s, h, b, full,
                                   (1u << CLUSTER) - 1);
        }
    }
}

// Consumer warp: the stage of tile i, of `tiles`, may be overwritten. Lane `rank` arrives at the barrier of block
// `rank`.
template <class StagePipeline>
__device__ __forceinline__ void release_in_cluster(SmemAddr base, unsigned i, unsigned tiles, int lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) StagePipeline::release(base, i);
    } else if (lane < CLUSTER && i + StagePipeline::STAGE_COUNT < tiles) {
        mbarrier_arrive_at_rank(StagePipeline::empty(base, stage_of<StagePipeline::STAGE_COUNT>(i)), lane);
    }
}
