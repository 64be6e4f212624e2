// Tile schedulers: which work tiles a block processes, and in which order. A work tile is BLOCK_M query rows of one
// head (forward), or BLOCK_N key rows of one head (backward). This header has the forward's; those of the backward are
// BwdWorkTile in tile_scheduler_bwd.cuh (bwd_wgmma) and work_tile_of in tile_scheduler_bwd_persistent.cuh.
//
//   for_each_work_tile, for_each_window_work_tile   static persistent scheduler of dense batches
//   LongestFirst<QueryTiles or KeyTiles>            longest_first.cuh: ragged batches and block maps
//   SchedulerPipeline<AT>                           broadcasts the work tile inside a block; its publish_all chooses
//                                                   one of these orders (forward)
#pragma once
#include <hopper.cuh>
#include "longest_first.cuh"
#include "pipeline.cuh"
#include "score_mod.cuh"

// The range of key tiles (n_blocks) that rows m0 .. m1 - 1 see.
__device__ __forceinline__ Range n_block_range(const Head& head, int m0, int m1) {
    const Range keys = head.keys(m0, m1);
    const int end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
    return {Head::HAS_LEFT_BOUND ? min(keys.begin / BLOCK_N, end) : 0, end};
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
    constexpr bool HEAD_GROUPS = CAUSAL && !Head::HAS_LEFT_BOUND;
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
//   Scheduler::Writer work_tiles{smem};    scheduler warp:   work_tiles.publish_all(...)
//   Scheduler::Reader scheduler(smem);     other warps:      while (scheduler.next()) ... scheduler.tile ...
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

    struct Writer {
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
        __device__ __forceinline__ void publish_dynamic(const LongestFirst<QueryTiles>& order, unsigned heads,
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
                griddepcontrol_wait();  // the previous entry point clears the counter
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
            publish_dynamic(LongestFirst<QueryTiles>(score), heads, group, tile_counter, f);
#elif BLOCK_MAP
            publish_dynamic(LongestFirst<QueryTiles>(score, H), heads, group, tile_counter, f);
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

    struct Reader {
        const char* const smem;
        unsigned count = 0;
        WorkTile tile;
        __device__ __forceinline__ explicit Reader(const char* smem) : smem(smem) {}
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

// Clears the tile counter of a dynamic order; called by one warp, in an entry point that runs before the
// persistent one.
__device__ __forceinline__ void clear_tile_counter(unsigned* tile_counter, const Score& score) {
    griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) *tile_counter = 0;
#if RAGGED
    const int b = threadIdx.x;  // prefetch the first offsets, which all blocks read at once
    if (b <= score.sequences) {
        prefetch_L2(score.cu_seqlens_q + b * score.cu_seqlens_q_stride_b);
#if RAGGED_KEYS
        prefetch_L2(score.cu_seqlens_k + b * score.cu_seqlens_k_stride_b);
#else
        prefetch_L2(score.key_lengths + b * score.key_lengths_stride_b);
#endif
    }
#endif
}

// The same work tile, uniform over the warp: the compiler may keep it in uniform registers.
__device__ __forceinline__ WorkTile uniform(WorkTile work_tile) {
    unsigned* const words = reinterpret_cast<unsigned*>(&work_tile);
#pragma unroll
    for (unsigned i = 0; i < sizeof(WorkTile) / 4; ++i) words[i] = uniform(words[i]);
    return work_tile;
}
