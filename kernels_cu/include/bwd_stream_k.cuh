// STREAM_K (bwd_wgmma_stream_k): without a mask all work tiles take equally long, and those that do not fill a wave are
// split by queries. They are divided evenly into shares, one per SM: with a work tile of `shares` units, share x has
// units x * tiles .. (x + 1) * tiles - 1 of `tiles` work tiles. The end of a work tile cuts a share in two. What lies
// between two such cuts is a part, and each part has a block:
//
//   tiles = 2, shares = 3      work tile 0       work tile 1
//   units                      0   1   2         3   4   5
//   shares                     0   0   1         1   2   2
//   parts, and their slots     0   0   1         2   3   3
//
// Blocks start in the order of blockIdx: whole work tiles, then uncut shares, then parts of cut shares, longest first,
// so that the SM that gets the shorter part of a cut share had a longer one before. Each part stores its own dK and dV
// in 16 bits; bwd_wgmma_combine adds them (bwd_combine_group.cuh).
#pragma once
#include "bwd_tiles.cuh"

// A work tile or a part of it, in shared memory: the block's keys, and its rows of each query head. The loop over
// m_blocks starts at row `first`, continues at row 0 after the last row, and ends at row `stop`.
struct WorkTilePart {
    int n_block, kv_head, b;
    int first, stop;  // stop < 0: no m_blocks
    int slot;         // of its partial dK and dV in dKV_partials; < 0: it has all rows, and stores dK and dV
};

// How the work tiles from full_wave_tiles on are split: the same pattern repeats in periods of `tiles` work tiles.
struct StreamKParts {
    int full_wave_tiles, tiles, shares;  // tiles < shares, without a common divisor
    int inverse;                         // of shares, modulo tiles

    __device__ __forceinline__ int slots() const { return tiles + shares - 1; }  // of a period
    // The slots of the parts of a work tile.
    __device__ __forceinline__ Range slots_of(int tile) const {
        const int first = tile / tiles * slots() + tile % tiles, begin = tile % tiles * shares;
        return {first + begin / tiles, first + (begin + shares - 1) / tiles + 1};
    }
    // Calls f(work tile, first unit, end of units, slot) for the part of block `index` of `periods` periods. In the
    // order of lengths a period has its uncut shares, `tiles` units each, of which k * (shares - tiles) / tiles,
    // rounded up, are before work tile k; then two parts of tiles - 1 units, the end of a work tile and the begin of
    // another one, two of tiles - 2, ... Work tile k cuts a share k * shares % tiles units after its begin.
    template <class F>
    __device__ __forceinline__ void find_part(int index, int periods, F f) const {
        const int period = index % periods, rank = index / periods, uncut = shares - tiles + 1;
        int tile = min(rank * tiles / (shares - tiles), tiles - 1), share = rank + tile, begin = share * tiles,
            units = tiles;
        if (rank >= uncut) {
            units = tiles - 1 - (rank - uncut) / 2;
            const bool ends = (rank - uncut) % 2 == 0;  // the end of a work tile
            const int next = (ends ? units : tiles - units) * inverse % tiles, cut = next * shares;
            tile = ends ? next - 1 : next, share = cut / tiles, begin = ends ? cut - units : cut;
        }
        begin -= tile * shares;
        f(period * tiles + tile, begin, begin + units, period * slots() + share + tile);
    }
};

// Writes the work tile or the part of the block to `part`. By one thread.
__device__ __forceinline__ void write_work_tile_part(volatile WorkTilePart& part, const StreamKParts& parts, int Hk,
                                                     int B, const Score& score) {
    const int key_tiles = (score.Sk + BLOCK_N - 1) / BLOCK_N, m_blocks = (score.Sq + BLOCK_M - 1) / BLOCK_M;
    const int index = static_cast<int>(blockIdx.x) - parts.full_wave_tiles;
    int tile = blockIdx.x, begin = 0, end = 0, slot = -1;
    if (index >= 0) {
        const int periods = (key_tiles * Hk * B - parts.full_wave_tiles) / parts.tiles;
        const auto row = [&](int unit) { return unit * m_blocks / parts.shares * BLOCK_M; };
        parts.find_part(index, periods, [&](int split_tile, int first_unit, int end_unit, int part_slot) {
            tile = parts.full_wave_tiles + split_tile, slot = part_slot;
            begin = row(first_unit), end = row(end_unit);
        });
    }
    const int head = tile / key_tiles, n_block = tile - head * key_tiles, n0 = n_block * BLOCK_N, b = head / Hk;
    if (slot < 0) begin = end = n0 < score.Sq ? n0 / BLOCK_M * BLOCK_M : 0;  // all m_blocks
    if (score.Sq == 0 || (slot >= 0 && begin == end)) end = -1;
    part.n_block = n_block, part.kv_head = head - b * Hk, part.b = b, part.slot = slot;
    part.first = begin, part.stop = end < score.Sq ? end : 0;
}

// The m_blocks of a WorkTilePart; as MBlockRange (m_block_range.cuh), without mask.
struct PartOfMBlocks {
    const volatile WorkTilePart& part;
    const int Sq, heads, first, stop, n0_register;

    __device__ __forceinline__ PartOfMBlocks(const volatile WorkTilePart& part, int heads, int Sq)
        : part(part), Sq(Sq), heads(heads), first(uniform(part.first)), stop(uniform(part.stop)),
          n0_register(uniform(part.n_block) * BLOCK_N) {}
    // BLOCK_M = 128: read on each use, which saves a register.
    __device__ __forceinline__ int n0() const { return BLOCK_M == 128 ? part.n_block * BLOCK_N : n0_register; }
    __device__ __forceinline__ bool fully_visible(int, int) const { return true; }
    // The first m_block; head = heads if there is none.
    __device__ __forceinline__ void start(int& head, int& m0) const { m0 = first, head = stop < 0 ? heads : 0; }
    __device__ __forceinline__ int next(int m0) const { return m0 + BLOCK_M; }
    __device__ __forceinline__ void seek(int& head, int& m0) const {
        if (m0 >= Sq) m0 = 0;
        if (m0 == stop) ++head, m0 = first;
    }
    __device__ __forceinline__ void advance(int& head, int& m0) const {
        m0 = next(m0);
        seek(head, m0);
    }
    // Calls f(i, head of the work tile, m0) for the i-th m_block.
    template <class F>
    __device__ __forceinline__ void for_each(F f) const {
        int head, m0;
        start(head, m0);
#pragma unroll 1
        for (unsigned i = 0; head < heads; advance(head, m0)) f(i++, head, m0);
    }
};
