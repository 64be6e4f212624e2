// The pipeline of K and V of a warp of fwd_decode by TMA: one lane copies the rows of a page, where with cp.async all
// lanes execute 16 copies and compute their addresses.
//
// For pages of a multiple of 16 keys, and rows of 128 bytes: a tile, or each half in another page, is one box, whose
// swizzle is that of SwizzledRows. Keys beyond those of the batch entry are out of the map's bounds: zeros (tma.cuh).
#pragma once
#include "decode_load.cuh"

struct TmaPipeline {
    static constexpr int PER_TILE = PagesAhead::PER_TILE, TILES = PagesAhead::TILES;
    static_assert(PAGE_SIZE > 0 && !PagesAhead::BY_KEY && KTile::ROW == 128 && VTile::ROW == 128, "boxes in pages");
    static_assert(RINGS_AT % 1024 == 0 && RING % 1024 == 0 && STAGE % 1024 == 0,
                  "the swizzle repeats every 1024 bytes");
    const TensorMap &K_map, &V_map;
    const int K_head, V_head;
    const unsigned lane;
    const SmemAddr stages, barriers;       // a barrier for each stage; each tile is a phase
    unsigned written, read, parities = 0;  // the next stages to load and to read; bit i: parity of stage i's next phase
    SmemAddr read_stage;
    unsigned next_tile;    // of the current TILES tiles. Lane i has the boxes of tile i, and loads it
    int2 boxes[PER_TILE];  // coordinates
    int later[PER_TILE];   // pages of the lane's tile of the following TILES tiles

    __device__ __forceinline__ TmaPipeline(const View<const dtype_k>& K, const View<const dtype_v>& V,
                                           const TensorMap& K_map, const TensorMap& V_map, int kv_head, unsigned lane,
                                           SmemAddr stages, SmemAddr barriers)
        : K_map(K_map), V_map(V_map), K_head(K.stride_h ? kv_head : 0), V_head(V.stride_h ? kv_head : 0), lane(lane),
          stages(stages), barriers(barriers) {
        if (lane < STAGES) mbarrier_init(barriers + 8 * lane, 1);
        fence_proxy_async();  // TMA sees the initialised barriers
        __syncwarp();
    }
    // The tiles from j on become the current TILES tiles; their pages are in `later`.
    __device__ __forceinline__ void set_boxes(const SplitPart& part, int j) {
        next_tile = 0;
#pragma unroll
        for (int i = 0; i < PER_TILE; ++i) {
            const int n = (j + static_cast<int>(lane) * WARPS) * BLOCK_N + i * ADDRESSED;
            boxes[i] = part.seqlen.template tma_page_coords<ADDRESSED>(n, part.seqlen.key_address(n, later[i]));
        }
        PagesAhead::read(later, part, j + TILES * WARPS, lane);
    }
    // The first tile will be `part.first`. No loads are in flight.
    __device__ __forceinline__ void begin(const SplitPart& part) {
        written = read = 0, read_stage = stages;
        PagesAhead::read(later, part, part.first, lane);
        next_tile = TILES;  // `load` waits for these pages, after the loads of Q have started
    }
    static __device__ __forceinline__ unsigned after(unsigned stage) { return stage + 1 == STAGES ? 0 : stage + 1; }
    __device__ __forceinline__ void advance() { read = after(read), read_stage = stages + read * STAGE; }
    // Loads key tile j.
    __device__ __forceinline__ void load(const SplitPart& part, int j) {
        if (j < part.end) {
            if (next_tile == TILES) set_boxes(part, j);
            if (lane == next_tile) {
                const SmemAddr full = barriers + 8 * written, stage = stages + written * STAGE;
                mbarrier_arrive_expect_tx(full, STAGE);
#pragma unroll
                for (int i = 0; i < PER_TILE; ++i) {
                    const SmemAddr to = stage + i * ADDRESSED * KTile::ROW;
                    tma_load_5d(to, K_map, 0, boxes[i].x, K_head, boxes[i].y, full);
                    tma_load_5d(to + K_BYTES, V_map, 0, boxes[i].x, V_head, boxes[i].y, full);
                }
            }
            __syncwarp();
            ++next_tile;
        }
        written = after(written);
    }
    static __device__ __forceinline__ void wait_for_Q() { cp_async_wait<0>(); }
    // Waits for the tile in read_stage.
    __device__ __forceinline__ void wait() {
        mbarrier_wait(barriers + 8 * read, parities >> read & 1);
        parities ^= 1u << read;
    }
    static __device__ __forceinline__ void wait_for_all() {}  // each tile has been waited for
    // Loads after the next barrier may overwrite what this thread has written to the stages.
    static __device__ __forceinline__ void release_results() { fence_proxy_async(); }
};
