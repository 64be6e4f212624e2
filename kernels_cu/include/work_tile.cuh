// A work tile, the unit of the tile schedulers (tile_scheduler.cuh), and the range of key tiles that its rows see.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

constexpr int WARPGROUP_ROWS = 64;     // query rows of a consumer warpgroup: M of wgmma
constexpr int WARP_ROWS = 16;          // of these, a warp has 16
constexpr int UNBOUNDED = 0x7fffffff;  // more key tiles than any work tile has

// A work tile: query rows of head h() of batch entry b, the first of which is row0; invalid if b < 0. With KeyTileOrder
// (longest_first.cuh), in the backward, they are key rows. batch_head: the index of the head in LSE, over all batch
// entries. The tensors of a ragged batch have one batch entry: there batch_head is the index of the head, h(), or with
// KeyTileOrder that of the work head (BwdWorkTile::work_head).
//
// SPLIT_KEYS: only the keys of range `split` of `splits` (key_splits.cuh).
// STREAM_K: of the key tiles that the rows see, those in own_key_tiles, computed by block number `block` in the order
// of the tickets; first_block has the first ones (stream_k.cuh).
//
// PACK_GQA (packed GQA): rows of several query heads of a group, which share their keys. The rows of each head fill
// slots of 16, one for each warp of the consumers; row0 counts the rows of all slots before the work tile, and h() is
// the group's first head. With few queries a group then has fewer work tiles.
#if RAGGED
struct WorkTile {  // extent: offsets and lengths of its sequence, so that consumers need not load them
    int b, row0, batch_head;
    SequenceExtent extent;
    static constexpr int split = 0, splits = 1, group = 1;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    __device__ __forceinline__ int h() const { return batch_head; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b, extent}; }
};
#else
struct WorkTile {  // batch_head: b * H + head_in_batch
    int b = -1, row0 = 0, batch_head = 0, head_in_batch = 0;
#if KEY_SPLITS && INVARIANT
    int split = 0, group = 1;
    static constexpr int splits = 1;  // not used: ranges are fixed (KeyRange), whatever their number
#elif KEY_SPLITS
    int split = 0, splits = 1, group = 1;
#else
    static constexpr int split = 0, splits = 1, group = 1;
#if STREAM_K
    Range own_key_tiles = {0, UNBOUNDED};
    int first_block = 0, block = 0;
#endif
#endif
    WorkTile() = default;
    __device__ __forceinline__ WorkTile(unsigned row0, unsigned batch_head, unsigned H)
        : b(batch_head / H), row0(row0), batch_head(batch_head), head_in_batch(batch_head % H) {}
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head_in_batch; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b}; }
};
#endif

__device__ __forceinline__ unsigned slots_of_head(unsigned Sq) { return (Sq + WARP_ROWS - 1) / WARP_ROWS; }

#if PACK_GQA
// The rows of one warp of the consumers: a WorkTile with its head and, as row0, its first row. If it has no rows,
// row0 >= Sq.
__device__ __forceinline__ WorkTile rows_of_warp(WorkTile work_tile, unsigned warp, const Score& score) {
    const int slots = slots_of_head(score.Sq), slot = work_tile.row0 / WARP_ROWS + warp, in_group = slot / slots;
    work_tile.row0 = in_group < work_tile.group ? (slot - in_group * slots) * WARP_ROWS : slots * WARP_ROWS;
    if (in_group < work_tile.group) work_tile.batch_head += in_group, work_tile.head_in_batch += in_group;
    return work_tile;
}
#else
__device__ __forceinline__ WorkTile rows_of_warp(WorkTile work_tile, unsigned warp, const Score&) {
    work_tile.row0 += WARP_ROWS * warp;
    return work_tile;
}
#endif

// The same work tile, uniform over the warp: the compiler may keep it in uniform registers.
__device__ __forceinline__ WorkTile uniform(WorkTile work_tile) {
    unsigned* const words = reinterpret_cast<unsigned*>(&work_tile);
#pragma unroll
    for (unsigned i = 0; i < sizeof(WorkTile) / 4; ++i) words[i] = uniform(words[i]);
    return work_tile;
}

__device__ __forceinline__ Range intersection(Range a, Range b) {
    const int begin = max(a.begin, b.begin);
    return {begin, max(begin, min(a.end, b.end))};
}

// The range of key tiles (n_blocks) that rows m0 .. m1 - 1 see.
__device__ __forceinline__ Range n_block_range(const Head& head, int m0, int m1) {
    const Range keys = head.keys(m0, m1);
    const int end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    return {Head::HAS_LEFT_BOUND ? min(keys.begin / BLOCK_N, end) : 0, end};
}
