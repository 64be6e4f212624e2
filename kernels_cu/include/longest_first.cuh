// Dynamic orders of work tiles: longest first (LPT) for ragged batches, and the order of a causal mask with a block
// map. Persistent blocks draw tile indices from a counter in global memory (FlashAttention-3: tile_count_semaphore):
// sequence lengths, and the number of visible key tiles, are not known when the kernel is launched. In a ragged
// batch bwd_wgmma has no counter: bwd_wgmma_scheduler writes all work tiles to a list in this order, and each block
// reads one entry.
//
// Heads are grouped so that the keys and values that are read at the same time stay in L2 (L2 head groups). In a ragged
// batch the last group has up to twice as many heads: its short tiles fill the tail of the grid. Tiles are sorted by
// length bucket (two key tiles, or four query tiles, wide), so that the tiles of one sequence stay together; each is
// followed by the same tile of the other heads of the group. In measurements, 16 x 512 is 16 sequences of 512 rows, and
// +1% is 1% faster.
#pragma once
#include <hopper.cuh>
#include "work_tile.cuh"

#if RAGGED
// Rows of K and V, or of Q and dO, that fill a third of L2.
constexpr unsigned HEAD_GROUP_ROWS = (16 << 20) / ((HEAD_DIM + HEAD_DIM_V) * sizeof(dtype));

// The length of a query tile is the number of keys it sees, that of a key tile the number of queries that see it. Tiles
// of a bucket are longer than bucket_begin(bucket), by at most Tiles::BUCKET. FIRST_BUCKET_HALVED: the first one is
// split into halves, buckets 0 and 1, so that tiles shorter than BUCKET / 2 run last and balance the blocks (16 x 512:
// +3%, KeyTileOrder +0.5%). LongestFirst treats the halves as one if no sequence is longer than BUCKET (32 x 256: -4%
// otherwise).
template <class Tiles>
__device__ __forceinline__ int bucket_begin(int bucket) {
    if (!Tiles::FIRST_BUCKET_HALVED) return bucket * Tiles::BUCKET;
    return bucket > 1 ? (bucket - 1) * Tiles::BUCKET : bucket * Tiles::BUCKET / 2;
}

struct QueryTileOrder {  // the query tiles of one sequence and head, sorted by the number of keys they see
    static constexpr int ROWS = BLOCK_M, BUCKET = 2 * BLOCK_N;  // keys
    int tiles, Sk, diagonal;
    __device__ __forceinline__ QueryTileOrder(const Score& score, const SequenceExtent& extent)
        : tiles((extent.Sq + BLOCK_M - 1) / BLOCK_M), Sk(extent.Sk),
          diagonal(score.bottom_right ? extent.Sk - extent.Sq : 0) {}
    static constexpr bool FIRST_BUCKET_HALVED = BUCKET >= 2 * ROWS;
    // Number of tiles in buckets >= `bucket` (the longer tiles), which are the last tiles of the sequence. Bucket -1:
    // all tiles.
    __device__ __forceinline__ int tiles_from(int bucket) const {
        const int keys = bucket_begin<QueryTileOrder>(bucket);
        const int shorter_tiles = CAUSAL ? max(keys - diagonal, 0) / BLOCK_M : 0;  // which see at most `keys` keys
        return bucket < 0 ? tiles : Sk <= keys ? 0 : max(tiles - shorter_tiles, 0);
    }
    // First tile of a bucket, given tiles_from(bucket + 1) and tiles_from(bucket).
    __device__ __forceinline__ int first_of_bucket(int /*from_next*/, int from_this) const { return tiles - from_this; }
    // Whether a tile is so short that the next one is drawn at once, without waiting until the block's other warps have
    // released this one (16 x 512: +1%).
    static __device__ __forceinline__ bool is_short(const Score& score, const WorkTile& work_tile) {
        const SequenceExtent& extent = work_tile.extent;
        const int diagonal = score.bottom_right ? extent.Sk - extent.Sq : 0;
        return CAUSAL && extent.Sk > BUCKET && work_tile.row0 + ROWS + diagonal <= BUCKET;
    }
    // Length of the longest tile, given the sequence lengths.
    static __device__ __forceinline__ int longest(int, int Sk) { return Sk; }
    // Heads per L2 head group.
    static __device__ __forceinline__ unsigned head_group(const Score& score, unsigned group, unsigned keys) {
        return HEAD_GROUP_ROWS * group / (keys + 1) + 1;
    }
};

struct KeyTileOrder {  // the key tiles of one sequence and head, sorted by the number of queries that see them
    static constexpr int ROWS = BLOCK_N, BUCKET = 4 * BLOCK_M;  // queries
    static constexpr bool FIRST_BUCKET_HALVED = BUCKET >= 2 * ROWS;
    int tiles, Sq, Sk, diagonal;
    __device__ __forceinline__ KeyTileOrder(const Score& score, const SequenceExtent& extent)
        : tiles((extent.all_keys + BLOCK_N - 1) / BLOCK_N), Sq(extent.Sq), Sk(extent.Sk),
          diagonal(score.bottom_right ? extent.Sk - extent.Sq : 0) {}
    // Number of tiles in buckets >= `bucket` (the longer tiles), which are the first tiles of the sequence. Bucket -1:
    // all tiles.
    __device__ __forceinline__ int tiles_from(int bucket) const {
        const int rows = bucket_begin<KeyTileOrder>(bucket), keys = CAUSAL ? min(Sk, max(Sq - rows + diagonal, 0)) : Sk;
        return bucket < 0 ? tiles : Sq <= rows ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int first_of_bucket(int from_next, int /*from_this*/) const { return from_next; }
    static __device__ __forceinline__ int longest(int Sq, int) { return Sq; }
    static __device__ __forceinline__ unsigned head_group(const Score& score, unsigned group, unsigned) {
        // heads: the number of heads whose Q and dO together fit in a third of L2. dQ_accum is in L2, too, so if
        // HEAD_DIM > 64 and heads < 7, the L2 head group has max(heads / 4, 1) = 1 head (16 x 512: +1.9%, random
        // lengths up to 883: +2.7%; at D = 64: -0.7%). Otherwise it has max(heads, 1); measured with heads >= 7, 4 x
        // 512: +4.3% compared to heads / 2. `group`: query heads per work tile.
        const unsigned heads = HEAD_GROUP_ROWS / group / (score.rows_q + 1);
        return max(HEAD_DIM > 64 && heads < 7 ? heads / 4 : heads, 1u);
    }
};

// The order of a ragged batch: longest tiles first, in L2 head groups. Holds few values between tiles: with three
// consumer warpgroups the scheduler warp has 32 registers per thread.
template <class Tiles>
struct LongestFirst {
    const Score& score;
    const SequenceExtent lane_extent;  // of sequence threadIdx.x % 32: the first 32 sequences, kept in registers

    __device__ __forceinline__ explicit LongestFirst(const Score& score)
        : score(score), lane_extent(extent(threadIdx.x % 32)) {}

    // Of sequence b; empty if b is out of range.
    __device__ __forceinline__ SequenceExtent extent(int b) const {
        return b < score.sequences ? SeqlenInfo(score, b).extent() : SequenceExtent{};
    }
    // Of sequence b0 + lane. thread_index_x() is re-read, so that no address is kept in a register.
    __device__ __forceinline__ SequenceExtent extent_of(int b0) const {
        return b0 == 0 ? lane_extent : extent(b0 + thread_index_x() % 32);
    }

    // Number of tiles of all sequences in buckets >= `bucket`.
    __device__ __forceinline__ int count(int bucket) const {
        int tiles = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < score.sequences; b0 += 32) tiles += Tiles(score, extent_of(b0)).tiles_from(bucket);
        return __reduce_add_sync(0xffffffffu, tiles);
    }

    // Keys of all sequences. With pages they are estimated from the first 32 sequences.
    __device__ __forceinline__ unsigned keys() const {
#if RAGGED_KEYS
        return score.rows_k;
#else
        return __reduce_add_sync(0xffffffffu, lane_extent.Sk) * ((score.sequences + 31) / 32);
#endif
    }

    struct Located {
        RowTile rows;
        SequenceExtent extent;
    };
    // Tile `index` of a head in this order, over all sequences. All lanes of the warp call it.
    __device__ __forceinline__ Located tile(int index) const {
        int longest = __reduce_max_sync(0xffffffffu, Tiles::longest(lane_extent.Sq, lane_extent.Sk));
        if (score.sequences > 32) longest = Tiles::longest(score.Sq, score.Sk);
        // Binary search: count(bucket) > index, count(end) <= index.
        int bucket = -1, end = (longest + Tiles::BUCKET - 1) / Tiles::BUCKET + Tiles::FIRST_BUCKET_HALVED;
        int from_end = 0;  // count(end)
        // If one_bucket, the search ends with bucket = 0, end = 2: the two halves are one bucket. (For a tile of
        // length 0 it ends with -1 and 0.)
        const bool one_bucket = Tiles::FIRST_BUCKET_HALVED && longest <= Tiles::BUCKET;
#pragma unroll 1
        while (end - bucket > (one_bucket && bucket == 0 ? 2 : 1)) {
            const int mid = (bucket + end) / 2, from_mid = count(mid);
            if (from_mid > index) bucket = mid;
            else end = mid, from_end = from_mid;
        }
        index -= from_end;  // now the index in the bucket
#pragma unroll 1
        for (int b0 = 0;; b0 += 32) {  // the tiles of the bucket, by sequence
            const SequenceExtent sequence = extent_of(b0);
            const Tiles tiles(score, sequence);
            const int from_this = tiles.tiles_from(bucket);
            const int from_next = tiles.tiles_from(Tiles::FIRST_BUCKET_HALVED ? end : bucket + 1);
            const int in_bucket = from_this - from_next, lane = threadIdx.x % 32;
            int prefix = in_bucket;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int below = __shfl_up_sync(0xffffffffu, prefix, step);
                prefix += lane >= step ? below : 0;
            }
            const unsigned ballot = __ballot_sync(0xffffffffu, prefix > index);
            if (ballot) {
                const int source = __ffs(ballot) - 1;
                const int first = tiles.first_of_bucket(from_next, from_this);
                const int row0 = (first + index - (prefix - in_bucket)) * Tiles::ROWS;
                const auto from_source = [&](int x) { return __shfl_sync(0xffffffffu, x, source); };
                return {{b0 + source, from_source(row0)},
                        {from_source(sequence.first_query), from_source(sequence.Sq), from_source(sequence.first_key),
                         from_source(sequence.all_keys), from_source(sequence.Sk)}};
            }
            index -= __shfl_sync(0xffffffffu, prefix, 31);
        }
    }

    __device__ __forceinline__ bool is_short(const WorkTile& work_tile) const {
        return Tiles::is_short(score, work_tile);
    }

    // Work tile `index` of all heads in this order, invalid if there are fewer. QueryTileOrder: `heads` are query
    // heads, `group` is H / Hk. KeyTileOrder: work_tile_heads and query_heads_per_work_tile (bwd_combine_group.cuh).
    // All lanes of the warp call it.
    __device__ __forceinline__ WorkTile work_tile(unsigned index, unsigned heads, unsigned group) const {
        const unsigned all = count(-1);
        if (index >= all * heads) return {-1};
        const unsigned head_group = min(Tiles::head_group(score, group, keys()), heads);
        unsigned first = 0;
#pragma unroll 1
        while (heads - first > 2 * head_group && index >= head_group * all)
            first += head_group, index -= head_group * all;
        const unsigned width = heads - first > 2 * head_group ? head_group : heads - first;
        const Located located = tile(index / width);
        return {located.rows.b, located.rows.row0, static_cast<int>(first + index % width), located.extent};
    }
};
#elif BLOCK_MAP
// The forward's order with a block map: by the causal mask alone, in L2 head groups, as in the static order
// (for_each_work_tile in tile_scheduler.cuh). How many key tiles the map leaves is not known when the order is chosen.
struct CausalOrder {
    const unsigned m_blocks, H;
    __device__ __forceinline__ CausalOrder(const Score& score, unsigned H)
        : m_blocks(query_tiles<BLOCK_M>(score)), H(H) {}
    // Whether the next work tile is drawn at once.
    __device__ __forceinline__ bool is_short(const WorkTile&) const { return false; }  // not known without the map
    // The work tile with index tile_index of the order, invalid if there are fewer.
    __device__ __forceinline__ WorkTile work_tile(unsigned tile_index, unsigned batch_heads, unsigned) const {
        if (tile_index >= m_blocks * batch_heads) return {};
        const unsigned head_group = CAUSAL ? max(2 * gridDim.x / m_blocks, 1) : 1;
        const unsigned first = tile_index / (head_group * m_blocks) * head_group;
        const unsigned width = min(head_group, batch_heads - first), i = tile_index - first * m_blocks;
        return {(m_blocks - 1 - i / width) * BLOCK_M, first + i % width, H};
    }
};
#endif
