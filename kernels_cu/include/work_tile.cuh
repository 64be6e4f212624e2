// A work tile, the unit of the tile schedulers (tile_scheduler.cuh), and the range of key tiles that its rows see.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

constexpr int WARPGROUP_ROWS = 64;  // query rows of a consumer warpgroup: M of wgmma

// A work tile: query rows (KeyTileOrder: key rows) from row0 on of head h() of batch entry b; invalid if b < 0.
// batch_head: the index of the head in LSE, over all batch entries; in a ragged batch, whose tensors have one batch
// entry, it is the head.
#if RAGGED
struct WorkTile {  // extent: offsets and lengths of its sequence, so that consumers need not load them
    int b, row0, batch_head;
    SequenceExtent extent;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    __device__ __forceinline__ int h() const { return batch_head; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b, extent}; }
};
#else
struct WorkTile {  // batch_head: b * H + head_in_batch
    int b = -1, row0 = 0, batch_head = 0, head_in_batch = 0;
#if KEY_SPLITS
    int split = -1;  // the range of keys (key_splits.cuh); -1: all keys
#endif
    WorkTile() = default;
    __device__ __forceinline__ WorkTile(unsigned row0, unsigned batch_head, unsigned H)
        : b(batch_head / H), row0(row0), batch_head(batch_head), head_in_batch(batch_head % H) {}
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head_in_batch; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b}; }
};
#endif

// The same work tile, uniform over the warp: the compiler may keep it in uniform registers.
__device__ __forceinline__ WorkTile uniform(WorkTile work_tile) {
    unsigned* const words = reinterpret_cast<unsigned*>(&work_tile);
#pragma unroll
    for (unsigned i = 0; i < sizeof(WorkTile) / 4; ++i) words[i] = uniform(words[i]);
    return work_tile;
}

// The range of key tiles (n_blocks) that rows m0 .. m1 - 1 see.
__device__ __forceinline__ Range n_block_range(const Head& head, int m0, int m1) {
    const Range keys = head.keys(m0, m1);
    const int end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    return {Head::HAS_LEFT_BOUND ? min(keys.begin / BLOCK_N, end) : 0, end};
}
