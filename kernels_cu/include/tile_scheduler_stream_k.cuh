// Tile scheduler of fwd_wgmma_stream_k: static, and stream-K (stream_k.cuh) for the work tiles that do not fill a wave.
#pragma once
#include "fwd_tiles.cuh"
#include "stream_k.cuh"

#if STREAM_K
static_assert(!(CAUSAL || RAGGED || PAGE_SIZE || KEY_LENGTHS || WINDOW || Head::HAS_BLOCK_MAP || WALK_BACKWARDS),
              "all rows see all keys, in ascending order");

// Sets the counters to 0; launched before fwd_wgmma_stream_k, which starts meanwhile (programmatic dependent launch).
extern "C" __global__ __launch_bounds__(BLOCKS) void fwd_wgmma_stream_k_clear(float* partials) {
    griddepcontrol_launch_dependents();
    clear_stream_k_counters(partials);
}
#endif

// STREAM_K: publishes the block's work tiles: whole ones in full waves, then its range of the other ones' key tiles.
__device__ __forceinline__ void publish_stream_k(Scheduler::Writer& work_tiles, const Arguments& args) {
#if STREAM_K
    if (!elect()) return;
    const StaticWorkTiles tiles{static_cast<unsigned>(args.H), static_cast<unsigned>(args.group), 1};
    const unsigned m_blocks = tiles.m_blocks(args.score), full = args.full_wave_tiles,
                   count = m_blocks * args.batch_heads - full;
    const auto work_tile = [&](unsigned i) { return tiles.tile(i % m_blocks, i / m_blocks, args.batch_heads); };
    serpentine(blockIdx.x, full, 1, [&](unsigned i) { work_tiles.publish(work_tile(i)); });
    if (count > 0) {
        griddepcontrol_wait();  // fwd_wgmma_stream_k_clear has cleared the counters
        const unsigned block = draw_ticket(args.partials), key_tiles = (args.score.Sk + BLOCK_N - 1) / BLOCK_N;
        for_each_stream_k_range(block, count, key_tiles, [&](unsigned i, Range range, unsigned first_block) {
            WorkTile part = work_tile(full + i);
            part.own_key_tiles = range, part.first_block = first_block, part.block = block;
            work_tiles.publish(part);
        });
    }
    work_tiles.publish(WorkTile());
#endif
}
