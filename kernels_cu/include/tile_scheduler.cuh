// Tile schedulers: which work tiles a block processes, and in which order. A work tile is BLOCK_M query rows of one
// head (forward), or BLOCK_N key rows of one head (backward). This header has the forward's; those of the backward are
// BwdWorkTile in tile_scheduler_bwd.cuh (bwd_wgmma) and work_tile_of in tile_scheduler_bwd_persistent.cuh.
//
//   for_each_work_tile, for_each_window_work_tile   static (FlashAttention-3: StaticPersistentTileScheduler)
//   LongestFirst, CausalOrder (longest_first.cuh)   dynamic (DynamicPersistentTileScheduler): for ragged batches,
//                                                   and for dense batches with a block map
//   SchedulerPipeline<AT>                           broadcasts the work tile inside a block; its publish_all chooses
//                                                   one of these orders (forward)
//
// To add a static order, write a function that calls f(m_block, batch head) for each work tile of this block, as
// for_each_work_tile does; for a dynamic order, a struct with the functions of CausalOrder. Use it in publish_all.
#pragma once
#include <hopper.cuh>
#include "longest_first.cuh"
#include "pipeline.cuh"
#include "work_tile.cuh"

// Calls f(i) for each i < count that this block processes, in waves of gridDim.x indices. The waves alternate in
// direction (serpentine order): with x = begin, usually blockIdx.x, wave w has i = w * gridDim.x + x if w is even, and
// i = (w + 1) * gridDim.x - 1 - x if it is odd. Index i belongs to head i % heads. With several heads, a block
// processes its two indices of waves 2k and 2k + 1 in the order of their heads.
template <class F>
__device__ __forceinline__ void serpentine(unsigned begin, unsigned count, unsigned heads, F f) {
#pragma unroll 1
    for (unsigned wave_begin = 0, i = begin; wave_begin < count; wave_begin += gridDim.x, i = 2 * wave_begin - 1 - i) {
        unsigned index = i;
        if (heads > 1) {
            const bool reversed = wave_begin / gridDim.x % 2;  // the second wave of the two
            const unsigned in_other_wave = 2 * (reversed ? wave_begin : wave_begin + gridDim.x) - 1 - i;
            const unsigned in_even = reversed ? in_other_wave : i, in_odd = reversed ? i : in_other_wave;
            if (in_odd < count && in_odd % heads < in_even % heads) index = in_other_wave;
        }
        if (index >= count) continue;
        f(index);
    }
}

// Calls f(m_block, batch head) for each work tile of the block, given the number of m_blocks per head.
//
// Causal: L2 head groups (FlashAttention-3: L2 swizzle) of two waves each, longest tiles first. In serpentine order,
// the two tiles of a block have together the same length in every block. The groups start at different blocks, and a
// remainder of heads joins the last group, as far as L2 permits (mean fraction of time in which a block is busy: 0.79
// -> 0.95 at B8 H12 S1024 D64). If one head has four waves of tiles or more, no remainder joins: the tiles of one head
// are enough to balance the blocks, and more heads at a time cost L2 hits (B1 H16 D128, S = 128k: 610 -> 706 TFLOP/s
// with separate heads, experiments/008_hopper). Windows: one group, since most tiles have the same length. Not causal:
// one group, head by head.
//
// WAVES_BY_HEAD: a block processes its two tiles of two waves in the order of their heads, so that half of the heads
// are active at a time. At D = 256, two waves exceed L2: +9% at S = 512, +3% at 1k, +1% at 2k. D = 64, 128: -0.3 ...
// +0.9%; float8: up to -3%.
template <bool WAVES_BY_HEAD = false, class F>
__device__ __forceinline__ void for_each_work_tile(unsigned m_blocks, unsigned batch_heads, F f) {
    constexpr bool HEAD_GROUPS = CAUSAL && !Head::HAS_LEFT_BOUND;
    const unsigned head_group = HEAD_GROUPS ? max(2 * gridDim.x / m_blocks, 1) : batch_heads;
    // A remainder of fewer than max(head_group / 2, L2_HEADS) heads joins the last group, whose K and V should then
    // still stay in L2. Found by measurement.
    constexpr unsigned L2_HEADS = (HEAD_DIM <= 128 ? 28 : 8) / sizeof(dtype);
    const unsigned joining_heads = HEAD_GROUPS && m_blocks >= 4 * gridDim.x ? 0 : max(head_group / 2, L2_HEADS);
    const unsigned last_group_limit = head_group + joining_heads;  // the last group has fewer heads than this
#pragma unroll 1
    for (unsigned head = 0, size; head < batch_heads; head += size) {
        size = batch_heads - head < last_group_limit ? batch_heads - head : head_group;
        // 17 blocks further per head: the groups start at different blocks.
        const unsigned begin = (blockIdx.x + 17 * (head % gridDim.x)) % gridDim.x;
        serpentine(begin, size * m_blocks, HEAD_GROUPS && WAVES_BY_HEAD ? size : 1, [&](unsigned i) {
            CAUSAL ? f(m_blocks - 1 - i / size, head + i % size) : f(i % m_blocks, i / m_blocks);
        });
    }
}

// The same for a causal window. First the tiles of full length, head by head, so that neighbouring blocks share keys;
// then the tiles whose window begins before key 0, longest first, all heads together (+5% at a window of 1024).
template <class F>
__device__ __forceinline__ void for_each_window_work_tile(const Score& score, unsigned m_blocks, unsigned batch_heads,
                                                          F f) {
    const unsigned shortened_rows = max(-Head(score, 0, 0).first_key(0), 0);  // per head
    const unsigned short_tiles = min((shortened_rows + BLOCK_M - 1) / BLOCK_M, m_blocks);
    const unsigned full_tiles = m_blocks - short_tiles;
    serpentine(blockIdx.x, batch_heads * m_blocks, 1, [&](unsigned i) {
        const bool is_short = i >= batch_heads * full_tiles;
        const unsigned j = is_short ? i - batch_heads * full_tiles : i, stride = is_short ? batch_heads : full_tiles;
        f(is_short ? short_tiles - 1 - j / stride : m_blocks - 1 - j % stride, is_short ? j % stride : j / stride);
    });
}

#if !RAGGED
// The work tiles of a static order: m_block < m_blocks() of each head < heads(). With PACK_GQA a group of heads counts
// as one head; with SPLIT_KEYS each of the `splits` ranges of a head's keys counts as a head. INVARIANT: the last
// ranges first, since those after the first SHORT_RANGES are twice as long (KeyRange).
struct StaticWorkTiles {
    const unsigned H, group, splits;
    __device__ __forceinline__ unsigned m_blocks(const Score& score) const {
        return PACK_GQA ? (group * slots_of_head(score.Sq) * WARP_ROWS + BLOCK_M - 1) / BLOCK_M
                        : query_tiles<BLOCK_M>(score);
    }
    // batch_heads: B * H * splits
    __device__ __forceinline__ unsigned heads(unsigned batch_heads) const {
        return PACK_GQA ? batch_heads / group : batch_heads;
    }
    // head < heads
    __device__ __forceinline__ WorkTile tile(unsigned m_block, unsigned head, unsigned heads) const {
        const unsigned whole_heads = heads / splits;
        const unsigned whole = !SPLIT_KEYS ? head : INVARIANT ? head % whole_heads : head / splits;
        WorkTile work_tile(m_block * BLOCK_M, PACK_GQA ? whole * group : whole, H);
#if KEY_SPLITS
        work_tile.split = !SPLIT_KEYS ? 0 : INVARIANT ? splits - 1 - head / whole_heads : head % splits;
        work_tile.group = group;
#endif
#if KEY_SPLITS && !INVARIANT
        work_tile.splits = splits;
#endif
        return work_tile;
    }
};
#endif

// Broadcasts work tiles inside a persistent block: a pipeline of one stage, at byte AT of shared memory, with a full
// and an empty mbarrier.
//
//   using Scheduler = SchedulerPipeline<AT>;
//   Scheduler::Writer work_tiles{smem};    scheduler warp:   work_tiles.publish_all(...)
//   Scheduler::Reader scheduler(smem);     other warps:      while (scheduler.next()) ... scheduler.tile ...
template <unsigned AT>
struct SchedulerPipeline : Pipeline<AT, 1> {
    using Pipeline<AT, 1>::full, Pipeline<AT, 1>::empty;
    static constexpr unsigned TILE = Pipeline<AT, 1>::END, END = TILE + 32;
    static_assert(sizeof(WorkTile) <= 32, "TILE .. END has room for a work tile");

    // `count`: threads that call next().
    static __device__ __forceinline__ void init_barriers(SmemAddr base, unsigned count) {
        mbarrier_init(full(base, 0), 1);
        mbarrier_init(empty(base, 0), count);
    }

    struct Writer {
        char* const smem;
        unsigned count = 0;
        // Waits until all readers have released the previous work tile, then writes the next one.
        __device__ __forceinline__ void publish(const WorkTile& work_tile) {
            acquire();
            write(work_tile);
        }
#if RAGGED || BLOCK_MAP
        // Dynamic scheduler: publishes all work tiles of the block and calls f(work_tile) after each. All lanes of the
        // warp call it. The first tile has index blockIdx.x in the order; the indices of the others are drawn from
        // `tile_counter` when all readers have released the previous tile, or, after a short tile, before that
        // (`prefetch`). The last work tile that is published is invalid.
        template <class Order, class F>
        __device__ __forceinline__ void publish_dynamic(const Order& order, unsigned batch_heads, unsigned group,
                                                        unsigned* tile_counter, F f) {
            const bool leader = threadIdx.x % 32 == 0;
            bool prefetch = true;
#pragma unroll 1
            for (unsigned tile_index = blockIdx.x;;) {
                const WorkTile work_tile = order.work_tile(tile_index, batch_heads, group);
                if (leader) {
                    if (prefetch) acquire();
                    write(work_tile);
                }
                griddepcontrol_wait();  // an earlier entry point clears the counter
                if (work_tile.invalid()) return;
                f(work_tile);
                prefetch = order.is_short(work_tile);
                if (leader) {
                    if (!prefetch) acquire();
                    tile_index = atomicAdd(tile_counter, 1u);
                }
                tile_index = __shfl_sync(0xffffffffu, tile_index, 0) + grid_size_x();
            }
        }
#endif

        // Publishes all work tiles of the block, in the order that suits the problem, and then an invalid one; called
        // by all lanes of the warp. A dynamic order (ragged, block map) calls f(work_tile) after each. CAUSAL_WINDOW:
        // use for_each_window_work_tile. batch_heads: B * H, or H in a ragged batch (the argument `heads` of the spec),
        // times `splits`, the number of ranges of keys.
        template <bool CAUSAL_WINDOW, class F>
        __device__ __forceinline__ void publish_all(const Score& score, unsigned batch_heads, unsigned H,
                                                    unsigned group, unsigned* tile_counter, F f, unsigned splits = 1) {
#if RAGGED
            publish_dynamic(LongestFirst<QueryTileOrder>(score), batch_heads, group, tile_counter, f);
#elif BLOCK_MAP
            publish_dynamic(CausalOrder(score, H), batch_heads, group, tile_counter, f);
#else
            if (!elect()) return;
            const StaticWorkTiles tiles{H, group, splits};
            const unsigned m_blocks = tiles.m_blocks(score), heads = tiles.heads(batch_heads);
            const auto publish_tile = [&](unsigned m_block, unsigned head) {
                publish(tiles.tile(m_block, head, heads));
            };
            if constexpr (CAUSAL_WINDOW) for_each_window_work_tile(score, m_blocks, heads, publish_tile);
            else for_each_work_tile</*WAVES_BY_HEAD=*/true>(m_blocks, heads, publish_tile);
            publish(WorkTile());
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
        // Parity of the current phase of barriers that complete once per work tile.
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
