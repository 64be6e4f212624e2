// The n_blocks (key tiles) of a forward work tile: which ones, in which order, and which of them a consumer warpgroup
// processes. A work tile is BLOCK_M query rows; each of its CONSUMERS warpgroups has 64 of them.
//
//   const WorkTileRange work_tile(scheduler.tile, score);      the key tiles that some row of the work tile sees
//   for (int j = 0; j < work_tile.tiles; ++j) ... work_tile.n0(j) ...
//
// With a block map (block_sparse.cuh) the key tiles are those of a list, in ascending order.
#pragma once
#include "tile_scheduler.cuh"
#include "block_sparse.cuh"

constexpr int CONSUMERS = BLOCK_M / WARPGROUP_ROWS;  // consumer warpgroups

// With ALiBi, visit the key tiles in descending order: under a causal mask the last keys of a row have the largest
// biases, so rescaling (softmax.cuh) becomes rare. Without a causal mask, the largest bias is on the diagonal, and the
// order is descending as well. With a block map the list is in ascending order.
#ifndef WALK_BACKWARDS
#define WALK_BACKWARDS (ALIBI && !BLOCK_MAP)
#endif

// STAGGERED: with a left window bound, the first key tiles of two consumers are up to WINDOW_SKEW tiles apart. Each
// consumer starts with the first tile that it sees: it drains the tiles before it without ping-pong. Of the tiles
// after its last one, it drains up to STAGES in the next work tile (postponed_tiles), so that it stores O without
// waiting for them. The consumers then begin a work tile at about the same time, each with its own first key tile, if
// there are enough pipeline stages (window of 1024: 553 instead of 537 TFLOP/s).
constexpr unsigned WINDOW_SKEW = (BLOCK_M - WARPGROUP_ROWS + BLOCK_N - 1) / BLOCK_N;
constexpr bool STAGGERED =
    Head::HAS_LEFT_BOUND && !Head::HAS_BLOCK_MAP && !WALK_BACKWARDS && CONSUMERS > 1 && STAGES >= 2 + WINDOW_SKEW;

// SCHEDULE_LATE: in ragged batches, each thread that loads K or V releases the scheduler's stage at the second to last
// key tile (after the load of its K), not when the work tile starts, so that the block draws its next work tile late. A
// work tile that is drawn early waits for this block, although another block may be idle (20 sequences of 21 ... 6192
// rows: +9%, 8 of 2048 rows at D = 256: +6%; a release at the last key tile: -1%). The thread gets there only when all
// consumers have released earlier tiles. A consumer therefore drains its remaining key tiles before it waits for the
// next work tile: otherwise both could wait for each other.
constexpr bool SCHEDULE_LATE = RAGGED && !STAGGERED;

// The fixed ranges of keys of fwd_wgmma_invariant (key_splits.cuh), in key tiles; sandbox/core/key_splits.py has the
// same numbers. The first SHORT_RANGES of a row are short, so that several blocks share its keys even if it sees few.
struct KeyRange {
    static constexpr int KEYS = 1024, SHORT_RANGES = 8;
    static constexpr int SHORT = (KEYS + BLOCK_N / 2) / BLOCK_N, LONG = 2 * SHORT;
    static constexpr int FIRST_LONG = SHORT_RANGES * SHORT;  // the first key tile of a long range
    static_assert(FIRST_LONG % LONG == 0, "long ranges begin at multiples of their length");
    // The first key tile of a range.
    static __device__ __forceinline__ int begin(int range) {
        return SHORT * min(range, SHORT_RANGES) + LONG * max(range - SHORT_RANGES, 0);
    }
    // Whether a range begins with n_block j.
    static __device__ __forceinline__ bool begins(int j) {
        return j % SHORT == 0 && (j < FIRST_LONG || j / SHORT % 2 == 0);
    }
    // Key tiles of the range that begins with n_block j.
    static __device__ __forceinline__ int tiles(int j) { return j < FIRST_LONG ? SHORT : LONG; }
};
static_assert(!(MERGE_RANGES || SPLIT_KEYS) || !(Head::HAS_LEFT_BOUND || WALK_BACKWARDS || Head::HAS_BLOCK_MAP),
              "KeyRange counts key tiles from key 0: with MERGE_RANGES, key tile j of a work tile must be n_block j");

// mask_allows_all: the mask tensor and mask_mod hide no key of the tile from the consumer's rows. Lengths, causality
// and windows are tested separately (ConsumerTiles::fully_visible_keys).
struct KeyTile {
    int n0;  // first key
    bool mask_allows_all;
};

struct WorkTileRange : WorkTile {  // its query rows (row0 .. row0 + BLOCK_M - 1, without PACK_GQA), and their key tiles
    Range n_blocks;
    int tiles;  // how many; with a block map, at most
    __device__ __forceinline__ WorkTileRange(const WorkTile& tile, const Score& score) : WorkTile(tile) {
        const Head head(sequence(score), h());
        n_blocks = PACK_GQA ? n_block_range(head, 0, head.Sq) : n_block_range(head, row0, row0 + BLOCK_M);
        if (SPLIT_KEYS || STREAM_K) n_blocks = of_split(n_blocks);
        tiles = n_blocks.end - n_blocks.begin;
    }
    // SPLIT_KEYS, STREAM_K: of all key tiles that the rows see, those of the work tile. INVARIANT: of a fixed range.
    __device__ __forceinline__ Range of_split(Range all) const {
#if STREAM_K
        return intersection(own_key_tiles, all);
#else
        if (!SPLIT_KEYS) return all;
        if (INVARIANT) return intersection({KeyRange::begin(split), KeyRange::begin(split + 1)}, all);
        // The first `more` splits have count + 1 key tiles, the others `count`.
        const int count = (all.end - all.begin) / splits, more = (all.end - all.begin) % splits;
        const int begin = all.begin + split * count + min(split, more);
        return {begin, begin + count + (split < more)};
#endif
    }
    // The key tiles of the work tile that rows row .. row + 63 see; PACK_GQA: that any row of the head sees.
    __device__ __forceinline__ Range of_warpgroup(const Head& head, int row) const {
        if (PACK_GQA) return n_blocks;
        const Range own = n_block_range(head, row, row + WARPGROUP_ROWS);
        return SPLIT_KEYS && !INVARIANT ? intersection(own, n_blocks) : of_split(own);
    }
    // First key of the j-th key tile in the order of the mainloop.
    __device__ __forceinline__ int n0(int j) const {
        return (WALK_BACKWARDS                                   ? n_blocks.end - 1 - j
                : Head::HAS_LEFT_BOUND || SPLIT_KEYS || STREAM_K ? n_blocks.begin + j
                                                                 : j) *
               BLOCK_N;
    }
    // Index j of the first key tile that one consumer sees; only other consumers see the earlier ones. own_n_blocks:
    // the range of its `count` key tiles.
    __device__ __forceinline__ int first_own_tile(Range own_n_blocks, int count) const {
        if (count <= 0 || Head::HAS_BLOCK_MAP) return 0;
        if (WALK_BACKWARDS) return n_blocks.end - own_n_blocks.end;
        return Head::HAS_LEFT_BOUND ? own_n_blocks.begin - n_blocks.begin : 0;
    }

    // Producer: calls loader.load_K(j, n0, list entry) and loader.load_V(j, n0) for all key tiles in the order in which
    // the consumers use them, K of tile j before V of tile j - 1. If SCHEDULE_LATE, calls schedule_late() after K of
    // the second to last tile. Returns the number of key tiles.
    template <class Loader, class ScheduleLate>
    __device__ __forceinline__ int load_key_tiles(TileLists& lists, const Loader& loader,
                                                  const ScheduleLate& schedule_late) const {
        if constexpr (Head::HAS_BLOCK_MAP) {
            if (tiles <= 0) return 0;
            int j = 0;
#pragma unroll 1
            for (int previous_n0 = 0, n0 = 0, entry = 0;; ++j, previous_n0 = n0) {
                const bool has_next = !list_entry::is_last(entry);
                if (has_next) {
                    entry = lists.next();
                    n0 = list_entry::n_block(entry) * BLOCK_N;
                    loader.load_K(j, n0, entry);
                }
                if (j > 0) loader.load_V(j - 1, previous_n0);
                if (!has_next) break;
            }
            return j;
        } else {
#pragma unroll 1
            for (int j = 0; j <= tiles; ++j) {
                if (j < tiles) loader.load_K(j, n0(j), 0);
                if (SCHEDULE_LATE && j == max(tiles - 2, 0)) schedule_late();
                if (j > 0) loader.load_V(j - 1, n0(j - 1));
            }
            return tiles;
        }
    }
};

// The 64 query rows of one consumer warpgroup in a work tile, and the key tiles that they see.
struct ConsumerTiles : WorkTileRange {
    const unsigned warp, consumer;
    const int warpgroup_row, warp_row;  // first row of the warpgroup, and of the warp's 16
    const Head head;
    const Range own_n_blocks;
    const int own_tiles;             // key tiles that the rows see; with a block map an upper bound
    const int first_own;             // index of the first own tile; only other consumers see the tiles before it
    int last;                        // index of the last own tile; with a block map unknown until it arrives
    const Range fully_visible_keys;  // keys that all rows of the warp see

    __device__ __forceinline__ ConsumerTiles(const WorkTile& tile, unsigned warp, const Score& score)
        : WorkTileRange(PACK_GQA ? rows_of_warp(tile, warp - 4, score) : tile, score), warp(warp),
          consumer(warp / 4 - 1), warpgroup_row(rows_of_warp(tile, 4 * consumer, score).row0),
          warp_row(PACK_GQA ? row0 : warpgroup_row + warp % 4 * WARP_ROWS), head(sequence(score), h()),
          own_n_blocks(of_warpgroup(head, warpgroup_row)),
          own_tiles(Head::HAS_BLOCK_MAP       ? tiles
                    : warpgroup_row < head.Sq ? own_n_blocks.end - own_n_blocks.begin
                                              : 0),
          first_own(first_own_tile(own_n_blocks, own_tiles)),
          last(Head::HAS_BLOCK_MAP && own_tiles > 0 ? UNBOUNDED : first_own + own_tiles - 1),
          fully_visible_keys(head.fully_visible_keys<Head::HAS_BLOCK_MAP>(warp_row, warp_row + 16)) {}

    // Key tile j. With a block map it is given by its list entry, which also tells `last`.
    __device__ __forceinline__ KeyTile key_tile(int j, unsigned entry) {
        if (!Head::HAS_BLOCK_MAP) return {n0(j), !Head::ELEMENT_MASK};
        if (list_entry::is_last(entry)) last = j;
        return {list_entry::n_block(entry) * BLOCK_N, list_entry::all_allowed(entry, consumer)};
    }
    // Number of key tiles of the work tile that pass through the pipeline. A consumer uses some of them, and drains the
    // others.
    __device__ __forceinline__ int pipeline_tiles() const { return Head::HAS_BLOCK_MAP ? last + 1 : tiles; }
    // STAGGERED: number of key tiles after the last own one that this consumer drains in the next work tile. At most
    // STAGES: after the block's last work tile nothing drains them, and with more the producer would wait for ever.
    __device__ __forceinline__ int postponed_tiles() const {
        return STAGGERED ? min(pipeline_tiles() - last - 1, static_cast<int>(STAGES)) : 0;
    }
};
