// Split-KV: several blocks (splits) share the keys of a tile of query rows; the combine kernel merges their partial
// results (combine.cuh).
//
//   Scheduler scheduler(score, entries, splits);                                    the splits of a block, one after
//   for (Split split = scheduler.first(z); ...; split = scheduler.next(split, z))   the other
//   scheduler.first_split(b)                                                        combine kernel: the splits of b
//   Scheduler::parts(splits, entries)                                               number of partial results
//
// EqualSplits: each entry has `splits` splits. With key_lengths the host does not know the keys per batch entry;
// SplitScheduler and StreamScheduler then assign blocks on the device in proportion to the keys: each warp reads all
// lengths and computes the assignment itself.
#pragma once
#include "score_mod.cuh"

// Whether each batch entry has its own blocks along z. If sequences may have many queries, the row tiles of all of them
// are along x instead.
constexpr bool BLOCKS_BY_ENTRY = !RAGGED || SHORT_SEQUENCES;
// Whether the number of splits depends on the batch entry's keys. The kernel defines CLUSTER_DIVIDES_KEYS: whether the
// blocks of a cluster share the keys of a split.
constexpr bool DYNAMIC_SPLITS = KEY_LENGTHS && BLOCKS_BY_ENTRY && !CLUSTER_DIVIDES_KEYS;

// Row tile number x of batch entry b, or of all sequences. Ragged queries: invalid if the sequence has fewer rows.
template <int ROWS>
__device__ __forceinline__ RowTile row_tile(const Score& score, unsigned x, int b, int packed = 1) {
    if (RAGGED && BLOCKS_BY_ENTRY) {
        const int row0 = static_cast<int>(x * ROWS);
        return row0 < SeqlenInfo(score, b).Sq * packed ? RowTile{b, row0} : RowTile{-1, 0};
    }
    return query_tile<ROWS>(score, x, b, packed);
}

// The last call of a block that has not waited for the previous entry point. The first block waits here, so that this
// grid does not end before the previous one.
__device__ __forceinline__ void end_after_previous_entry_point() {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) griddepcontrol_wait();
}

// Split `split` of the `splits` of batch entry b; its partial result is number before + split (combine.cuh). tiles:
// those of the entry's key tiles that the split has, with stream-K.
struct Split {
    int b, split, splits, before;
    Range tiles = {0, 0};
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    static __device__ __forceinline__ Split none() { return {-1, 0, 1, 0}; }
};

// The same number of splits for each entry; a block has one.
struct EqualSplits {
    static constexpr bool DYNAMIC = false, STREAM = false;
    const int splits;

    __device__ __forceinline__ EqualSplits(const Score&, int /*entries*/, int splits) : splits(splits) {}
    static __device__ __forceinline__ int parts(int splits, int entries) { return splits * entries; }
    __device__ __forceinline__ Split first(int block) const {
        return {block / splits, block % splits, splits, block / splits * splits};
    }
    __device__ __forceinline__ Split next(const Split&, int) const { return Split::none(); }
    __device__ __forceinline__ Split first_split(int b) const { return {b, 0, splits, b * splits}; }
};

// The key tiles of batch entries.
struct TilesOfEntries {
    static constexpr bool DYNAMIC = true;
    static __device__ __forceinline__ int parts(int splits, int entries) { return splits + entries; }

    const Score& score;
    const int entries, lane;

    __device__ __forceinline__ TilesOfEntries(const Score& score, int entries)
        : score(score), entries(entries), lane(threadIdx.x % 32) {}
    // At least one for an entry with queries.
    __device__ __forceinline__ int tiles(int b) const {
        const Head head0(score, b, 0);  // ranges are the same for all heads
        if (RAGGED && head0.Sq == 0) return 0;
        const Range keys = head0.keys(0, head0.Sq);
        const int begin = keys.begin / BLOCK_N * BLOCK_N, end = max(keys.end, begin);
        return max((end - begin + BLOCK_N - 1) / BLOCK_N, 1);
    }
    // The sum of count_of(b) over entries 0 .. last - 1. A warp collective. With more than 32 entries a lane reads the
    // lengths of four at once: one after the other they take the time of four cache misses.
    template <class Count>
    __device__ __forceinline__ int sum(int last, const Count& count_of) const {
        int found = 0, b = lane;
#pragma unroll 1
        for (; b - lane + 32 < last; b += 4 * 32) {
            int counts[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) counts[i] = count_of(min(b + 32 * i, last - 1));
#pragma unroll
            for (int i = 0; i < 4; ++i) found += b + 32 * i < last ? counts[i] : 0;
        }
        if (b < last) found += count_of(b);
        return __reduce_add_sync(0xffffffffu, found);
    }
    // The first entry up to whose end the sum of count_of(b) is more than `limit`, the sum before it, and its own
    // count; entry -1 if there is none. A warp collective.
    struct Found {
        int b, before, count;
    };
    template <class Count>
    __device__ __forceinline__ Found find(int limit, const Count& count_of) const {
        int before = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < entries; b0 += 32) {
            const int count = b0 + lane < entries ? count_of(b0 + lane) : 0;
            int upto = before + count;  // inclusive prefix sum over the lanes
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto - before, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned lanes = __ballot_sync(0xffffffffu, upto > limit);
            if (lanes) {
                const int lane_of_b = __ffs(lanes) - 1, found = __shfl_sync(0xffffffffu, count, lane_of_b);
                return {b0 + lane_of_b, __shfl_sync(0xffffffffu, upto, lane_of_b) - found, found};
            }
            before = __shfl_sync(0xffffffffu, upto, 31);
        }
        return {-1, 0, 0};
    }
};

// Assigns blocks to batch entries in proportion to their keys: no block has more than max_tiles. At least one block
// per entry with queries, and at most splits + entries in total. A warp collective.
struct SplitScheduler : TilesOfEntries {
    static constexpr bool STREAM = false;
    int max_tiles;

    __device__ __forceinline__ SplitScheduler(const Score& score, int entries, int splits)
        : TilesOfEntries(score, entries) {
        const int all = sum(entries, [&](int b) { return tiles(b); });
        max_tiles = max((all + splits - 1) / splits, 1);
    }
    __device__ __forceinline__ int blocks(int b) const { return (tiles(b) + max_tiles - 1) / max_tiles; }

    // The only split of block `number`; invalid if the grid has more blocks than splits.
    __device__ __forceinline__ Split first(int number) const {
        const Found found = find(number, [&](int b) { return blocks(b); });
        return found.b < 0 ? Split::none() : Split{found.b, number - found.before, found.count, found.before};
    }
    // The first split of batch entry b.
    __device__ __forceinline__ Split first_split(int b) const {
        return {b, 0, blocks(b), sum(b, [&](int other) { return blocks(other); })};
    }
};

// Stream-K (that of fwd_wgmma_fp8 is in stream_k.cuh): the key tiles of all batch entries, one after the other, are
// divided evenly among the blocks, so that a block may have the last tiles of one entry, all tiles of others, and the
// first ones of another. START_TILES before those of an entry count for the start and the end of a split, so that
// blocks with many short entries end when the others do: as long as 2.25 tiles of each warp (measured with 8 rows;
// experiment 028). Each part of an entry is a split; that of block i and entry b is number i + b of all.
struct StreamScheduler : TilesOfEntries {
    static constexpr bool STREAM = true;
    static constexpr int START_TILES = BLOCK_M == 8 ? 9 * WARPS / 4 : 3 * WARPS;
    int per_block;              // tiles, with START_TILES for each entry
    int before = 0, count = 0;  // the same before the tiles of the current entry; and its tiles

    __device__ __forceinline__ StreamScheduler(const Score& score, int entries, int blocks)
        : TilesOfEntries(score, entries), per_block(max((cost_of_first(entries) + blocks - 1) / blocks, 1)) {}
    __device__ __forceinline__ int cost(int b) const {
        const int own = tiles(b);
        return own > 0 ? START_TILES + own : 0;
    }
    // The sum over entries 0 .. last - 1. A warp collective.
    __device__ __forceinline__ int cost_of_first(int last) const {
        return sum(last, [&](int b) { return cost(b); });
    }

    // The part of block `block` of the current entry b; invalid if it has no tiles.
    __device__ __forceinline__ Split part(int b, int block) const {
        const int first = before / per_block, last = (before + count - 1) / per_block,
                  begin = block * per_block - before;
        const Range own = {max(begin, 0), min(begin + per_block, count)};
        return own.begin < own.end ? Split{b, block - first, last - first + 1, first + b, own} : Split::none();
    }
    // The entry in which block `block` begins becomes the current one; returns it, or -1. A warp collective.
    __device__ __forceinline__ int seek(int block) {
        const Found found = find(block * per_block, [&](int b) { return cost(b); });
        before = found.before + START_TILES, count = found.count - START_TILES;
        return found.b;
    }
    // The first split of block `block`, and the one after `split`; invalid if there is none.
    __device__ __forceinline__ Split first(int block) {
        const int b = seek(block);
        return b < 0 ? Split::none() : part(b, block);
    }
    __device__ __forceinline__ Split next(const Split& split, int block) {
        before += count + START_TILES;
        for (int b = split.b + 1; b < entries && before < (block + 1) * per_block; ++b)
            if ((count = tiles(b)) > 0) return part(b, block);
        return Split::none();
    }
    // The first split of the entry that is cut where block `block` begins; invalid if none is, or if an earlier block
    // begins in the same entry, too.
    __device__ __forceinline__ Split first_split_cut_by(int block) {
        const int b = seek(block);
        return b >= 0 && before / per_block == block - 1 ? part(b, block - 1) : Split::none();
    }
    // The first split of batch entry b.
    __device__ __forceinline__ Split first_split(int b) {
        before = cost_of_first(b) + START_TILES, count = tiles(b);
        return part(b, before / per_block);
    }
};

// The scheduler of a kernel: ByKeys, which assigns blocks by the entries' keys, or EqualSplits.
template <class ByKeys, bool DYNAMIC = DYNAMIC_SPLITS>
struct SchedulerOf {
    using Type = ByKeys;
};
template <class ByKeys>
struct SchedulerOf<ByKeys, false> {
    using Type = EqualSplits;
};
