// The producer warpgroup of fwd_wgmma_fp8: the warp that loads, and the warps that transpose V. Included by
// fwd_wgmma_fp8.cu.
#pragma once
#include "load_tile.cuh"

// The thread that runs the tile scheduler and loads Q, K and V.
__device__ __forceinline__ void load_work_tiles(char* smem, SmemAddr base, const View<const dtype>& Q,
                                                const View<const dtype>& K, const View<const dtype_v>& V,
                                                const TensorMap& Q_map, const TensorMap& K_map, const TensorMap& V_map,
                                                unsigned batch_heads, int H, int group, int full_wave_tiles,
                                                float* partials, const Score& score) {
    unsigned work_tiles = 0, pipe_index = 0;  // earlier work tiles, and key tiles of these
    unsigned* const has_tile = reinterpret_cast<unsigned*>(smem + HAS_TILE_AT);
    for_each_fp8_work_tile(batch_heads, H, full_wave_tiles, partials, score, [&](const Fp8WorkTileRange& work_tile) {
        const int h = work_tile.h / group, b = work_tile.b;
        const SeqlenInfo sequence(score, b);
        const auto load = [&](auto layout, auto pipeline, const TensorMap& map, const auto& tensor, unsigned tiles_at,
                              int j) {
            const unsigned i = pipe_index + j, stage = stage_of(i);
            TIMELINE(wait_empty);
            pipeline.acquire(base, i);
            TIMELINE(load);
            if (tiles_at == V_AT) has_tile[stage] = true;
            load_key_tile<decltype(layout)>(base + tiles_at + stage * layout.BYTES, map, tensor, sequence, b, h,
                                            work_tile.n0(j), pipeline.full(base, stage));
        };
        const auto load_KV = [&](int begin, int end) {
#pragma unroll 1
            for (int j = begin; j < end; ++j) {
                load(Keys(), KPipeline(), K_map, K, K_AT, j);
                load(Values(), VPipeline(), V_map, V, V_AT, j);
            }
        };
        load_KV(0, min(work_tile.tiles, 1));  // does not depend on the release of the previous Q
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            mbarrier_wait(EmptyQ::at(base, consumer), work_tiles % 2 ^ 1);
            tile_info(smem, consumer, work_tiles % 2) = work_tile;
            load_query_tile<Queries>(base + consumer * Queries::BYTES, Q_map, Q, sequence, b, work_tile.h,
                                     work_tile.m0 + WARPGROUP_ROWS * consumer, FullQ::at(base, consumer));
        }
        ++work_tiles;
        load_KV(1, work_tile.tiles);
        pipe_index += work_tile.tiles;
    });
    // No more work tiles, for the transpose warps and for the consumers.
    VPipeline::acquire(base, pipe_index);
    has_tile[stage_of(pipe_index)] = false;
    mbarrier_arrive(VPipeline::full(base, stage_of(pipe_index)));
#pragma unroll 1
    for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
        mbarrier_wait(EmptyQ::at(base, consumer), work_tiles % 2 ^ 1);
        tile_info(smem, consumer, work_tiles % 2).b = -1;
        mbarrier_arrive(FullQ::at(base, consumer));
    }
}

// A transpose warp: its part of the tiles of V of all work tiles.
__device__ __forceinline__ void transpose_tiles(char* smem, SmemAddr base, unsigned warp, unsigned lane) {
    unsigned* const has_tile = reinterpret_cast<unsigned*>(smem + HAS_TILE_AT);
#pragma unroll 1
    for (unsigned i = 0;; ++i) {  // key tiles of all work tiles
        const unsigned stage = stage_of(i);
        TIMELINE(wait_V);
        VPipeline::wait(base, i);
        if (!has_tile[stage]) break;
        TIMELINE(wait_empty);
        VtPipeline::acquire(base, i);
        TIMELINE(transpose);
        transpose_V<TRANSPOSE_WARPS, BLOCK_N, HEAD_DIM_V>(base + V_AT + stage * Values::BYTES,
                                                          base + VT_AT + stage * VT_BYTES, warp + TRANSPOSE_WARPS - 4);
        fence_proxy_async();
        __syncwarp();  // all lanes have read V and written Vt
        if (lane == 0) {
            VPipeline::release(base, i);
            mbarrier_arrive(VtPipeline::full(base, stage));
        }
    }
}
