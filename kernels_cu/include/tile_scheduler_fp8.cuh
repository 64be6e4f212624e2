// Tile scheduler of fwd_wgmma_fp8: static persistent, and stream-K for the last wave.
#pragma once
#include "stream_k.cuh"
#include "tile_scheduler.cuh"

// Stream-K: work tiles that do not fill a wave are split by key tiles. Not with options that need registers (spills),
// nor if the work tiles differ in length.
constexpr bool SPLITS_LAST_WAVE =
    !Head::HAS_MASK && !RAGGED && !Head::HAS_SCORE_MOD && !DROPOUT && !(DESCALE_Q || DESCALE_K || DESCALE_V);

struct alignas(16) TileInfo {  // a work tile: query rows m0 .. end - 1 of head h of batch entry b; invalid if b < 0
    int b, h, m0, end;
    Range split;  // stream-K: this block's range of key tiles
    int first;    // stream-K, if split.begin > 0: the first block that has key tiles of this work tile
    int block;    // stream-K: this block's index in the order of the tickets
};
__device__ __forceinline__ TileInfo uniform(const TileInfo& info) {  // uniform over the warp
    const auto same = [](int x) { return static_cast<int>(uniform(static_cast<unsigned>(x))); };
    return {same(info.b), same(info.h), same(info.m0), same(info.end), {same(info.split.begin), same(info.split.end)}};
}

struct Fp8WorkTileRange : TileInfo {  // and the key tiles that it sees
    Range n_blocks;
    int tiles;
    __device__ __forceinline__ Fp8WorkTileRange(const TileInfo& info, const Score& score)
        : TileInfo(info), n_blocks(SPLITS_LAST_WAVE ? split : n_block_range(Head(score, b, h), m0, end)),
          tiles(n_blocks.end - n_blocks.begin) {}
    // First key of the j-th key tile in the order of the mainloop.
    __device__ __forceinline__ int n0(int j) const {
        return (SPLITS_LAST_WAVE || Head::HAS_LEFT_BOUND ? n_blocks.begin + j : j) * BLOCK_N;
    }
};

// Index j of the first key tile that this consumer's rows see; earlier ones belong to other consumers.
__device__ __forceinline__ int first_own_tile(const Fp8WorkTileRange& work_tile, Range own_n_blocks, int tiles) {
    return tiles > 0 && Head::HAS_LEFT_BOUND ? own_n_blocks.begin - work_tile.n_blocks.begin : 0;
}

// Calls f(work_tile) with each work tile of the block (static persistent scheduler).
//
// The query tile with fewer than BLOCK_M rows is inefficient: 64 rows take 0.6 of the time of 192. Causal: it is the
// head's first tile, which sees the fewest keys. Otherwise it is the last one, and each wave shifts the blocks by one,
// so that all blocks have the same number of them. The first full_wave_tiles work tiles are processed whole, the others
// by stream-K (stream_k.cuh).
template <class F>
__device__ __forceinline__ void for_each_fp8_work_tile(unsigned batch_heads, int H, unsigned full_wave_tiles,
                                                       float* partials, const Score& score, F f) {
    const unsigned tiles = query_tiles<BLOCK_M>(score);
#if RAGGED
    for_each_work_tile(tiles, batch_heads, [&](unsigned tile, int batch_head) {
        const RowTile tile_rows = query_tile<BLOCK_M>(score, tile, 0);
        if (!tile_rows.invalid())
            f(Fp8WorkTileRange({tile_rows.b, batch_head, tile_rows.row0, tile_rows.row0 + BLOCK_M}, score));
    });
#else
    const auto work_tile = [&](int batch_head, int row, Range split = {}, int first = 0, int block = 0) {
        return Fp8WorkTileRange({batch_head / H, batch_head % H, max(row, 0), row + BLOCK_M, split, first, block},
                                score);
    };
    if constexpr (CAUSAL) {
        const int beyond = tiles * BLOCK_M - (score.Sq + 63) / 64 * 64;
        for_each_work_tile(tiles, batch_heads, [&](unsigned tile, int batch_head) {
            f(work_tile(batch_head, static_cast<int>(tile * BLOCK_M) - beyond));
        });
    } else {
        const int key_tiles = (score.Sk + BLOCK_N - 1) / BLOCK_N;
#pragma unroll 1
        for (unsigned wave = 0, in_wave = blockIdx.x; wave < full_wave_tiles;
             wave += gridDim.x, in_wave = in_wave + 1 < gridDim.x ? in_wave + 1 : 0)
            if (const unsigned i = wave + in_wave; i < full_wave_tiles)
                f(work_tile(i / tiles, i % tiles * BLOCK_M, {0, key_tiles}));
        if (const unsigned count = batch_heads * tiles - full_wave_tiles; SPLITS_LAST_WAVE && count > 0) {
            const unsigned block = draw_ticket(partials);
            for_each_stream_k_range(block, count, key_tiles, [&](unsigned index, Range split, unsigned first) {
                const unsigned i = full_wave_tiles + index;
                f(work_tile(i / tiles, i % tiles * BLOCK_M, split, static_cast<int>(first), static_cast<int>(block)));
            });
        }
    }
#endif
}
