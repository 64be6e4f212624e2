// Tile schedulers: which work tiles a block processes, and in which order. A work tile is BLOCK_M query rows of one
// head (forward), or BLOCK_N key rows of one head (backward).
//
//   for_each_work_tile, for_each_window_work_tile   static persistent scheduler of dense batches
//   LongestFirst<QueryTiles or KeyTiles>            longest-first order for ragged batches and for block maps
//   SchedulerPipeline<AT>                           broadcasts the work tile inside a block; its publish_all chooses
//                                                   one of these orders (forward)
//
// With LongestFirst, persistent blocks draw tile numbers from a counter in global memory (dynamic scheduler): sequence
// lengths, and the number of visible key tiles, are not known when the kernel is launched.
// Heads are grouped so that the keys and values that are read at the same time stay in L2 (L2 head groups). In a ragged
// batch the last group has up to twice as many heads: its short tiles fill the tail of the grid. Tiles are sorted by
// length bucket (two key tiles, or four query tiles, wide), so that tiles of one sequence and head stay together. In
// measurements, 16 x 512 is 16 sequences of 512 rows.
#pragma once
#include <hopper.cuh>
#include "pipeline.cuh"
#include "score_mod.cuh"

#if RAGGED
struct WorkTile {  // extent: offsets and lengths of its sequence, so that consumers need not load them
    int b, row0, head;
    SeqlenOffsets extent;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b, extent}; }
};

// Rows of K and V, or of Q and dO, that fill a third of L2.
constexpr unsigned HEAD_GROUP_ROWS = (16 << 20) / ((HEAD_DIM + HEAD_DIM_V) * sizeof(dtype));

// First key (or query) of a length bucket. FIRST_BUCKET_HALVED: the first Tiles::BUCKET keys are two buckets, 0 and 1,
// because they would contain several tiles of a sequence. The shortest tiles then run last and balance the blocks (16 x
// 512: +3%, KeyTiles +0.5%). LongestFirst treats the two as one if no sequence is longer (32 x 256: -4% otherwise).
template <class Tiles>
__device__ __forceinline__ int bucket_begin(int bucket) {
    if (!Tiles::FIRST_BUCKET_HALVED) return bucket * Tiles::BUCKET;
    return bucket > 1 ? (bucket - 1) * Tiles::BUCKET : bucket * Tiles::BUCKET / 2;
}

struct QueryTiles {  // the query tiles of one sequence and head, sorted by the number of keys they see
    static constexpr int ROWS = BLOCK_M, BUCKET = 2 * BLOCK_N;  // keys
    int tiles, Sk, diagonal;
    __device__ __forceinline__ QueryTiles(const Score& score, const SeqlenOffsets& own)
        : tiles((own.Sq + BLOCK_M - 1) / BLOCK_M), Sk(own.Sk), diagonal(score.bottom_right ? own.Sk - own.Sq : 0) {}
    static constexpr bool FIRST_BUCKET_HALVED = BUCKET >= 2 * ROWS;
    // Number of tiles that see a key in bucket `bucket` or later; these are the last ones. Bucket -1: all tiles.
    __device__ __forceinline__ int tiles_reaching(int bucket) const {
        const int key = bucket_begin<QueryTiles>(bucket);
        const int masked_tiles = CAUSAL ? max(key - diagonal, 0) / BLOCK_M : 0;
        return bucket < 0 ? tiles : Sk <= key ? 0 : max(tiles - masked_tiles, 0);
    }
    // First tile of a bucket, given tiles_reaching of the next bucket and of this one.
    __device__ __forceinline__ int first(int, int reaching) const { return tiles - reaching; }
    // Whether a tile is so short that the next tile must be drawn before the consumers have acquired this one
    // (16 x 512: +1%).
    static __device__ __forceinline__ bool is_short(const Score& score, const WorkTile& work_tile) {
        const SeqlenOffsets& own = work_tile.extent;
        const int diagonal = score.bottom_right ? own.Sk - own.Sq : 0;
        return CAUSAL && own.Sk > BUCKET && work_tile.row0 + ROWS + diagonal <= BUCKET;
    }
    // Length of the longest tile, given the sequence lengths.
    static __device__ __forceinline__ int longest(int, int Sk) { return Sk; }
    // Heads per L2 head group.
    static __device__ __forceinline__ unsigned head_group(const Score& score, unsigned group) {
        return HEAD_GROUP_ROWS * group / (score.rows_k + 1) + 1;
    }
};

struct KeyTiles {  // the key tiles of one sequence and head, sorted by the number of queries that see them
    static constexpr int ROWS = BLOCK_N, BUCKET = 4 * BLOCK_M;  // queries
    static constexpr bool FIRST_BUCKET_HALVED = BUCKET >= 2 * ROWS;
    int tiles, Sq, Sk, diagonal;
    __device__ __forceinline__ KeyTiles(const Score& score, const SeqlenOffsets& own)
        : tiles((own.all_keys + BLOCK_N - 1) / BLOCK_N), Sq(own.Sq), Sk(own.Sk),
          diagonal(score.bottom_right ? own.Sk - own.Sq : 0) {}
    // Number of tiles that a query in bucket `bucket` or later sees; these are the first ones. Bucket -1: all tiles.
    __device__ __forceinline__ int tiles_reaching(int bucket) const {
        const int rows = bucket_begin<KeyTiles>(bucket), keys = CAUSAL ? min(Sk, max(Sq - rows + diagonal, 0)) : Sk;
        return bucket < 0 ? tiles : Sq <= rows ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int first(int reaching_next, int) const { return reaching_next; }
    static __device__ __forceinline__ int longest(int Sq, int) { return Sq; }
    static __device__ __forceinline__ unsigned head_group(const Score& score, unsigned group) {
        // dQ_accum is in L2, too, so the group has a quarter of the heads (16 x 512: +1.9%, random lengths up to 883:
        // +2.7%, D = 64: -0.7%). Not if L2 holds 7 heads or more (4 x 512: +4.3%).
        const unsigned heads = HEAD_GROUP_ROWS / group / (score.rows_q + 1);
        return max(HEAD_DIM > 64 && heads < 7 ? heads / 4 : heads, 1u);
    }
};

// The order of a ragged batch: longest tiles first, in L2 head groups. Holds few values between tiles: with three
// consumer warpgroups the scheduler warp has 32 registers per thread.
template <class Tiles>
struct LongestFirst {
    const Score& score;
    const SeqlenOffsets own;  // extent of sequence threadIdx.x % 32: a cache of the first 32 sequences

    __device__ __forceinline__ explicit LongestFirst(const Score& score)
        : score(score), own(extent(threadIdx.x % 32)) {}

    // SeqlenOffsets of sequence b; empty if b is out of range.
    __device__ __forceinline__ SeqlenOffsets extent(int b) const {
        return b < score.sequences ? SeqlenInfo(score, b).extent() : SeqlenOffsets{};
    }
    // SeqlenOffsets of this lane's sequence, b0 + lane. thread_index_x() is re-read, so that no address is kept in a
    // register.
    __device__ __forceinline__ SeqlenOffsets extent_of(int b0) const {
        return b0 == 0 ? own : extent(b0 + thread_index_x() % 32);
    }

    // Number of tiles of all sequences in bucket `bucket` or later.
    __device__ __forceinline__ int count(int bucket) const {
        int tiles = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < score.sequences; b0 += 32) tiles += Tiles(score, extent_of(b0)).tiles_reaching(bucket);
        return __reduce_add_sync(0xffffffffu, tiles);
    }

    struct Located {
        RowTile rows;
        SeqlenOffsets extent;
    };
    // The number-th tile of a head, over all sequences. All lanes of the warp call it.
    __device__ __forceinline__ Located tile(int number) const {
        int longest = __reduce_max_sync(0xffffffffu, Tiles::longest(own.Sq, own.Sk));
        if (score.sequences > 32) longest = Tiles::longest(score.Sq, score.Sk);
        // Binary search: more than `number` tiles reach `bucket`, at most `number` reach `end`.
        int bucket = -1, end = (longest + Tiles::BUCKET - 1) / Tiles::BUCKET + Tiles::FIRST_BUCKET_HALVED, at_end = 0;
        const bool one_bucket = Tiles::FIRST_BUCKET_HALVED && longest <= Tiles::BUCKET;
#pragma unroll 1
        while (end - bucket > (one_bucket && bucket == 0 ? 2 : 1)) {
            const int mid = (bucket + end) / 2, reaching = count(mid);
            if (reaching > number) bucket = mid;
            else end = mid, at_end = reaching;
        }
        number -= at_end;
#pragma unroll 1
        for (int b0 = 0;; b0 += 32) {  // the tiles of the bucket, by sequence
            const SeqlenOffsets sequence = extent_of(b0);
            const Tiles tiles(score, sequence);
            const int reaching = tiles.tiles_reaching(bucket);
            const int reaching_next = tiles.tiles_reaching(Tiles::FIRST_BUCKET_HALVED ? end : bucket + 1);
            const int in_bucket = reaching - reaching_next, lane = threadIdx.x % 32;
            int prefix = in_bucket;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int below = __shfl_up_sync(0xffffffffu, prefix, step);
                prefix += lane >= step ? below : 0;
            }
            const unsigned ballot = __ballot_sync(0xffffffffu, prefix > number);
            if (ballot) {
                const int source = __ffs(ballot) - 1;
                const int row0 = (tiles.first(reaching_next, reaching) + number - (prefix - in_bucket)) * Tiles::ROWS;
                const auto from_source = [&](int x) { return __shfl_sync(0xffffffffu, x, source); };
                return {{b0 + source, from_source(row0)},
                        {from_source(sequence.first_query), from_source(sequence.Sq), from_source(sequence.first_key),
                         from_source(sequence.all_keys), from_source(sequence.Sk)}};
            }
            number -= __shfl_sync(0xffffffffu, prefix, 31);
        }
    }

    __device__ __forceinline__ bool is_short(const WorkTile& work_tile) const {
        return Tiles::is_short(score, work_tile);
    }

    // The number-th work tile of all heads, invalid if there are fewer. `heads` are query heads (QueryTiles) or
    // key/value heads (KeyTiles); `group` is H / Hk. All lanes of the warp call it.
    __device__ __forceinline__ WorkTile work_tile(unsigned number, unsigned heads, unsigned group) const {
        const unsigned all = count(-1);
        if (number >= all * heads) return {-1};
        const unsigned head_group = min(Tiles::head_group(score, group), heads);
        unsigned first = 0;
#pragma unroll 1
        while (heads - first > 2 * head_group && number >= head_group * all)
            first += head_group, number -= head_group * all;
        const unsigned width = heads - first > 2 * head_group ? head_group : heads - first;
        const Located located = tile(number / width);
        return {located.rows.b, located.rows.row0, static_cast<int>(first + number % width), located.extent};
    }
};
#else
struct WorkTile {  // of a dense batch: `head` counts over the batch, head_of_b within batch entry b
    int b = -1, row0 = 0, head = 0, head_of_b = 0;
    WorkTile() = default;
    __device__ __forceinline__ WorkTile(unsigned row0, unsigned head, unsigned H)
        : b(head / H), row0(row0), head(head), head_of_b(head % H) {}
    __device__ __forceinline__ bool invalid() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head_of_b; }
    __device__ __forceinline__ SeqlenInfo sequence(const Score& score) const { return {score, b}; }
};
#endif

#if BLOCK_MAP && !RAGGED
struct QueryTiles;
template <class Tiles>
struct LongestFirst {  // block map: ordered by the causal mask alone; in L2 head groups, as for_each_work_tile
    const unsigned tiles, H;
    __device__ __forceinline__ LongestFirst(const Score& score, unsigned H)
        : tiles(query_tiles<BLOCK_M>(score)), H(H) {}
    __device__ __forceinline__ bool is_short(const WorkTile&) const { return false; }  // not known without the map
    __device__ __forceinline__ WorkTile work_tile(unsigned number, unsigned heads, unsigned) const {
        if (number >= tiles * heads) return {};
        const unsigned head_group = CAUSAL ? max(2 * gridDim.x / tiles, 1) : 1;
        const unsigned first = number / (head_group * tiles) * head_group;
        const unsigned width = min(head_group, heads - first), i = number - first * tiles;
        return {(tiles - 1 - i / width) * BLOCK_M, first + i % width, H};
    }
};
#endif

// The range of key tiles (n_blocks) that rows m0 .. m1 - 1 see.
__device__ __forceinline__ Range n_block_range(const Head& head, int m0, int m1) {
    const Range keys = head.keys(m0, m1);
    const int end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    return {Head::FIRST ? min(keys.begin / BLOCK_N, end) : 0, end};
}

// Calls f(i) for each i < count that this block processes, in waves of gridDim.x, alternating in direction (serpentine
// order). With several `heads` (index i belongs to head i % heads), a block processes its two indices of a pair of
// waves in the order of their heads.
template <class F>
__device__ __forceinline__ void serpentine(unsigned begin, unsigned count, unsigned heads, F f) {
#pragma unroll 1
    for (unsigned first = 0, i = begin; first < count; first += gridDim.x, i = 2 * first - 1 - i) {
        unsigned own = i;
        if (heads > 1) {
            const bool reversed = first / gridDim.x % 2;
            const unsigned paired = 2 * (reversed ? first : first + gridDim.x) - 1 - i;
            const unsigned first_index = reversed ? paired : i, second_index = reversed ? i : paired;
            if (second_index < count && second_index % heads < first_index % heads) own = paired;
        }
        if (own >= count) continue;
        f(own);
    }
}

// Calls f(query tile, head) for each work tile of the block, given the number of query tiles per head.
//
// Causal: L2 head groups of two waves each, longest tiles first. In serpentine order, the two tiles of a block have
// together the same length in every block. Each group starts at another block, and a remainder of heads joins the last
// group, as far as L2 permits (mean fraction of time in which a block is busy: 0.79 -> 0.95 at B8 H12 S1024 D64). If
// one head has four waves of tiles or more, no remainder joins: one head balances the blocks, and more cost L2 hits (B1
// H16 D128, S = 128k: 4%, 512k: 10%). Windows: one group, since most tiles have the same length.
//
// PAIR_BY_HEAD: a block processes its two tiles of two waves in the order of their heads, so that half of the heads are
// active at a time. At D = 256, two waves exceed L2: +9% at S = 512, +3% at 1k, +1% at 2k. D = 64, 128: -0.3 ... +0.9%;
// float8: up to -3%.
template <bool PAIR_BY_HEAD = false, class F>
__device__ __forceinline__ void for_each_work_tile(unsigned tiles, unsigned heads, F f) {
    constexpr bool HEAD_GROUPS = CAUSAL && !Head::FIRST;
    const unsigned head_group = HEAD_GROUPS ? max(2 * gridDim.x / tiles, 1) : heads;
    constexpr unsigned L2_HEADS = (HEAD_DIM <= 128 ? 28 : 8) / sizeof(dtype);  // maximum remainder, in heads
    const unsigned merged_heads = HEAD_GROUPS && tiles >= 4 * gridDim.x ? 0 : max(head_group / 2, L2_HEADS);
    const unsigned last = head_group + merged_heads;  // the last group has fewer heads than this
#pragma unroll 1
    for (unsigned head = 0, size; head < heads; head += size) {
        size = heads - head < last ? heads - head : head_group;
        const unsigned begin = (blockIdx.x + 17 * (head % gridDim.x)) % gridDim.x;
        serpentine(begin, size * tiles, HEAD_GROUPS && PAIR_BY_HEAD ? size : 1,
                   [&](unsigned i) { CAUSAL ? f(tiles - 1 - i / size, head + i % size) : f(i % tiles, i / tiles); });
    }
}

// The same for a causal window. First the tiles of full length, head by head, so that neighbouring blocks share keys;
// then, longest first, the tiles of all heads whose window begins before key 0 (+5% at a window of 1024).
template <class F>
__device__ __forceinline__ void for_each_window_work_tile(const Score& score, unsigned tiles, unsigned heads, F f) {
    const unsigned shortened_rows = max(-Head(score, 0, 0).first_key(0), 0);  // per head
    const unsigned short_tiles = min((shortened_rows + BLOCK_M - 1) / BLOCK_M, tiles), full_tiles = tiles - short_tiles;
    serpentine(blockIdx.x, heads * tiles, 1, [&](unsigned i) {
        const bool is_short = i >= heads * full_tiles;
        const unsigned j = is_short ? i - heads * full_tiles : i, stride = is_short ? heads : full_tiles;
        f(is_short ? short_tiles - 1 - j / stride : tiles - 1 - j % stride, is_short ? j % stride : j / stride);
    });
}

// Broadcasts work tiles inside a persistent block: a pipeline of one stage, at byte AT of shared memory, with a full
// and an empty mbarrier.
//
//   using Scheduler = SchedulerPipeline<AT>;
//   Scheduler::SchedulerProducer producer{smem};     scheduler warp:   producer.publish_all(...)
//   Scheduler::Consumer scheduler(smem);             other warps:      while (scheduler.next()) ... scheduler.tile ...
template <unsigned AT>
struct SchedulerPipeline : Pipeline<AT, 1> {
    using Pipeline<AT, 1>::full, Pipeline<AT, 1>::empty;
    static constexpr unsigned TILE = Pipeline<AT, 1>::END, END = AT + 48;
    static_assert(sizeof(WorkTile) <= END - TILE, "a work tile follows the two barriers");

    // `count`: threads that call next().
    static __device__ __forceinline__ void init_barriers(SmemAddr base, unsigned count) {
        mbarrier_init(full(base, 0), 1);
        mbarrier_init(empty(base, 0), count);
    }

    struct SchedulerProducer {
        char* const smem;
        unsigned count = 0;
        // Waits until all consumers have released the previous work tile, then writes the next one.
        __device__ __forceinline__ void publish(const WorkTile& work_tile) {
            acquire();
            write(work_tile);
        }
#if RAGGED || BLOCK_MAP
        // Publishes all work tiles of the block and calls f(work_tile) after each. All lanes of the warp call it. The
        // first tile has number blockIdx.x; the numbers of the others are drawn from `tile_counter` when the consumers
        // have released the previous tile, or, after a short tile, before that (`prefetch`).
        template <class F>
        __device__ __forceinline__ void produce_all(const LongestFirst<QueryTiles>& order, unsigned heads,
                                                    unsigned group, unsigned* tile_counter, F f) {
            const bool leader = threadIdx.x % 32 == 0;
            bool prefetch = true;
#pragma unroll 1
            for (unsigned number = blockIdx.x;;) {
                const WorkTile work_tile = order.work_tile(number, heads, group);
                if (leader) {
                    if (prefetch) acquire();
                    write(work_tile);
                }
                griddepcontrol_wait();  // the previous kernel clears the counter
                if (work_tile.invalid()) return;
                f(work_tile);
                prefetch = order.is_short(work_tile);
                if (leader) {
                    if (!prefetch) acquire();
                    number = atomicAdd(tile_counter, 1u);
                }
                number = __shfl_sync(0xffffffffu, number, 0) + grid_size_x();
            }
        }
#endif

        // Publishes all work tiles of the block, in the order that suits the problem; called by all lanes of the warp.
        // A dynamic order (ragged, block map) calls f(work_tile) after each. CAUSAL_WINDOW: use the order for windows.
        template <bool CAUSAL_WINDOW, class F>
        __device__ __forceinline__ void publish_all(const Score& score, unsigned heads, unsigned H, unsigned group,
                                                    unsigned* tile_counter, F f) {
#if RAGGED
            produce_all(LongestFirst<QueryTiles>(score), heads, group, tile_counter, f);
#elif BLOCK_MAP
            produce_all(LongestFirst<QueryTiles>(score, H), heads, group, tile_counter, f);
#else
            if (!elect()) return;
            const unsigned tiles = query_tiles<BLOCK_M>(score);
            const auto publish_tile = [&](unsigned tile, unsigned head) { publish(WorkTile(tile * BLOCK_M, head, H)); };
            if constexpr (CAUSAL_WINDOW) for_each_window_work_tile(score, tiles, heads, publish_tile);
            else for_each_work_tile</*PAIR_BY_HEAD=*/true>(tiles, heads, publish_tile);
            publish(WorkTile());  // invalid: no more work tiles
#endif
        }

      private:
        __device__ __forceinline__ void acquire() { SchedulerPipeline::acquire(smem_address(smem), count++); }
        __device__ __forceinline__ void write(const WorkTile& work_tile) {
            *reinterpret_cast<WorkTile*>(smem + TILE) = work_tile;
            mbarrier_arrive(full(smem_address(smem), 0));
        }
    };

    struct Consumer {
        const char* const smem;
        unsigned count = 0;
        WorkTile tile;
        __device__ __forceinline__ explicit Consumer(const char* smem) : smem(smem) {}
        // Waits for the next work tile; false if there is none. Releases the stage, unless the caller does so later.
        __device__ __forceinline__ bool next(bool release_now = true) {
            const SmemAddr base = smem_address(smem);
            SchedulerPipeline::wait(base, count++);
            tile = *reinterpret_cast<const WorkTile*>(smem + TILE);
            if (tile.invalid()) return false;
            if (release_now) release();
            return true;
        }
        __device__ __forceinline__ void release() const { SchedulerPipeline::release(smem_address(smem), 0); }
        // Phase of barriers that complete once per work tile.
        __device__ __forceinline__ unsigned phase() const { return (count - 1) % 2; }
    };
};

// The same work tile, uniform over the warp: the compiler may keep it in uniform registers.
__device__ __forceinline__ WorkTile uniform(WorkTile work_tile) {
    unsigned* const words = reinterpret_cast<unsigned*>(&work_tile);
#pragma unroll
    for (unsigned i = 0; i < sizeof(WorkTile) / 4; ++i) words[i] = uniform(words[i]);
    return work_tile;
}
