// How fwd_wgmma loads a tile of K or V: by TMA, into a stage of its pipeline. Keys in pages: in boxes of PAGE_BOX keys,
// each of which is in one page. One thread that looked up the pages and issued the TMA instructions of all boxes would
// take longer than the consumers need for the tile. So with LOAD_BY_WARP one warp loads K and another V, and each lane
// one box.
#pragma once
#include "fwd_tiles.cuh"
#include "load_tile.cuh"

__device__ constexpr int greatest_common_divisor(int a, int b) { return b ? greatest_common_divisor(b, a % b) : a; }
constexpr int PAGE_BOX = greatest_common_divisor(BLOCK_N, PAGE_SIZE);
static_assert(PAGE_BOX % 8 == 0, "a box begins at a multiple of 8 rows, the period of the swizzle");
static_assert(!LOAD_BY_WARP || BLOCK_N / PAGE_BOX <= 32, "a lane loads one box");
static_assert(!LOAD_BY_WARP || !Head::HAS_BLOCK_MAP, "one thread writes the entries of a block map");

enum class Load { K, V, K_AND_V };  // what a thread or warp loads of each key tile

// Loads the key tiles of one work tile; used by one thread, or with LOAD_BY_WARP by all lanes of a warp.
// WorkTileRange::load_key_tiles calls load_K and load_V.
template <Load LOAD>
struct KeyTileLoader {
    char* const smem;
    const SmemAddr base;
    const Arguments& args;
    const WorkTileRange work_tile;
    const unsigned& pipe_index;  // index of the work tile's first key tile in the pipelines
    const int h, b;              // of K and V
    const SeqlenInfo sequence;
    __device__ __forceinline__ KeyTileLoader(char* smem, const Arguments& args, const WorkTileRange& work_tile,
                                             const unsigned& pipe_index)
        : smem(smem), base(smem_address(smem)), args(args), work_tile(work_tile), pipe_index(pipe_index),
          h(work_tile.h() / args.group), b(work_tile.b), sequence(work_tile.sequence(args.score)) {}

    // The j-th key tile, from key n0 on. entry: with a block map, the tile's entry in the list.
    __device__ __forceinline__ void load_K(int j, int n0, unsigned entry) const {
        if (LOAD == Load::V) return;
        const unsigned i = pipe_index + j, stage = stage_of(i);
        TIMELINE(wait_empty);
        KPipeline::acquire(base, i);
        TIMELINE(load);
        if (Head::HAS_BLOCK_MAP) KeyTileEntries::entry(smem, stage) = entry;
        load_tile<KPipeline>(i, args.K_map, args.K, n0, Bias::STAGE_BYTES);
        if (BIAS_TILES && (!LOAD_BY_WARP || threadIdx.x % 32 == 0))
            Bias::load(base, stage, args.bias_map, args.score, work_tile.h(), b, work_tile.row0, n0,
                       KPipeline::full(base, stage));
    }
    __device__ __forceinline__ void load_V(int j, int n0) const {
        if (LOAD == Load::K) return;
        const unsigned i = pipe_index + j;
        TIMELINE(wait_empty);
        VPipeline::acquire(base, i);
        TIMELINE(load);
        load_tile<VPipeline>(i, args.V_map, args.V, n0);
    }

  private:
    // Loads the keys from n0 on into the acquired stage of tile i. extra_tx_bytes: bytes of other loads on the same
    // barrier.
    template <class KeyPipeline>
    __device__ __forceinline__ void load_tile(unsigned i, const TensorMap& map, const View<const dtype>& tensor, int n0,
                                              unsigned extra_tx_bytes = 0) const {
#if PAGE_SIZE
        const SmemAddr full = KeyPipeline::full(base, stage_of(i));
        const int lane = threadIdx.x % 32, row = lane * PAGE_BOX;
        __syncwarp();  // all lanes have acquired the stage: one without a box must not fall two phases behind
        // Bytes of other lanes may arrive earlier: the phase lasts until this arrival.
        if (lane == 0) mbarrier_arrive_expect_tx(full, KeyPipeline::Tile::BYTES + extra_tx_bytes);
        if (row < BLOCK_N) {
            const int2 box = sequence.template tma_page_coords<PAGE_BOX>(n0 + row);
            KeyPipeline::Tile::load_5d(base + KeyPipeline::tile_at(i) + row * 128, map, box.x, tensor.stride_h ? h : 0,
                                       box.y, full);
        }
#else
        load_key_tile<typename KeyPipeline::Tile>(base + KeyPipeline::tile_at(i), map, tensor, sequence, b, h, n0,
                                                  KeyPipeline::full(base, stage_of(i)), extra_tx_bytes);
#endif
    }
};
