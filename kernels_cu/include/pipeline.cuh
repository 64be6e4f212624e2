// A pipeline of tiles in shared memory. Each stage has two mbarriers: full (TMA has written the stage) and empty (all
// consumers have read the stage). The producer acquires an empty stage and loads a tile. A consumer waits until the
// stage is full, reads the tile, and then releases the stage.
//
//   using KPipeline = TilePipeline<Keys, K_AT, BARRIERS_AT>;      STAGES tiles at K_AT; barriers at BARRIERS_AT
//   KPipeline::acquire(base, i), KPipeline::load(base, i, ...)    producer (fwd_wgmma: KeyTileLoader instead of load)
//   KPipeline::wait(base, i), ..., KPipeline::release(base, i)    consumer
//
// i counts the tiles that have passed through the pipeline, and is the only state: stage and phase are computed from i.
// There is no function to commit: TMA completes the phase of the full barrier. A warp that also writes to a stage (LSE
// and delta, bwd_load.cuh) arrives on the full barrier.
#pragma once
#include <hopper.cuh>

// COUNT mbarriers of 8 bytes each, at byte AT of shared memory.
template <unsigned AT, unsigned COUNT>
struct BarrierArray {
    static constexpr unsigned END = AT + 8 * COUNT;
    static __device__ __forceinline__ SmemAddr at(SmemAddr base, unsigned i) { return base + AT + 8 * i; }
};

// Stage of the i-th tile of a pipeline, and parity of that stage's phase i / DEPTH. The producer waits with parity ^ 1,
// the parity of the preceding phase. The phase that precedes phase 0 counts as completed, so the first DEPTH acquires
// return at once.
template <unsigned DEPTH = STAGES>
__device__ __forceinline__ unsigned stage_of(unsigned i) {
    return i % DEPTH;
}
template <unsigned DEPTH = STAGES>
__device__ __forceinline__ unsigned parity_of(unsigned i) {
    return i / DEPTH % 2;
}

// The barriers of a pipeline of DEPTH stages, at byte AT of shared memory.
template <unsigned AT, unsigned DEPTH = STAGES>
struct Pipeline {
    using Full = BarrierArray<AT, DEPTH>;
    using Empty = BarrierArray<Full::END, DEPTH>;
    static constexpr unsigned END = Empty::END;
    static __device__ __forceinline__ SmemAddr full(SmemAddr base, unsigned stage) { return Full::at(base, stage); }
    static __device__ __forceinline__ SmemAddr empty(SmemAddr base, unsigned stage) { return Empty::at(base, stage); }
    // Producer: waits until tile i's stage is empty.
    static __device__ __forceinline__ void acquire(SmemAddr base, unsigned i) {
        mbarrier_wait(empty(base, stage_of<DEPTH>(i)), parity_of<DEPTH>(i) ^ 1);
    }
    // Consumer: waits until tile i has been loaded.
    static __device__ __forceinline__ void wait(SmemAddr base, unsigned i) {
        mbarrier_wait(full(base, stage_of<DEPTH>(i)), parity_of<DEPTH>(i));
    }
    // Consumer: tile i's stage may be overwritten. Called as often per tile as `empty` counts arrivals (init_barriers
    // of the kernel): by one lane of each consumer warp; in SchedulerPipeline (tile_scheduler.cuh), which
    // passes work tiles to the other warps, by every thread that reads the work tile.
    static __device__ __forceinline__ void release(SmemAddr base, unsigned i) {
        mbarrier_arrive(empty(base, stage_of<DEPTH>(i)));
    }
};

// A pipeline of STAGES tiles (Swizzled), which are at byte TILES_AT of shared memory.
template <class Tile_, unsigned TILES_AT, unsigned BARRIERS_AT>
struct TilePipeline : Pipeline<BARRIERS_AT> {
    using Tile = Tile_;
    // Offset of tile i in shared memory.
    static __device__ __forceinline__ unsigned tile_at(unsigned i) { return TILES_AT + stage_of(i) * Tile::BYTES; }
    // Producer: loads tile i, from row s of head (b, h), into the acquired stage. extra_tx_bytes: bytes of other loads
    // on the same barrier.
    static __device__ __forceinline__ void load(SmemAddr base, unsigned i, const TensorMap& map, int s, int h, int b,
                                                unsigned extra_tx_bytes = 0) {
        Tile::load(base + tile_at(i), map, s, h, b, TilePipeline::full(base, stage_of(i)), extra_tx_bytes);
    }
};

// Initialises the barriers of K, V and Q for `consumers` warpgroups, of which each has a tile of Q. A full barrier
// counts one arrival (of the thread that starts the TMA load, with its bytes), an empty barrier counts one arrival per
// warp that reads the tile.
template <class KPipeline, class VPipeline, class FullQ, class EmptyQ>
__device__ __forceinline__ void init_QKV_barriers(SmemAddr base, unsigned consumers) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(KPipeline::full(base, stage), 1);
        mbarrier_init(VPipeline::full(base, stage), 1);
        mbarrier_init(KPipeline::empty(base, stage), 4 * consumers);
        mbarrier_init(VPipeline::empty(base, stage), 4 * consumers);
    }
    for (unsigned consumer = 0; consumer < consumers; ++consumer) {
        mbarrier_init(FullQ::at(base, consumer), 1);
        mbarrier_init(EmptyQ::at(base, consumer), 4);
    }
}
