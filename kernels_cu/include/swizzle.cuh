// Tiles of 16-bit elements, or of float8, in shared memory as TMA writes them, with 128-byte swizzle, and as wgmma and stmatrix see them.
// clang-format off
//
//   a tile (ROWS x COLUMNS) is slabs of 64 columns:    slab 0: [ROWS][64]   slab 1: [ROWS][64]   ...   a box fills one
//   a row of a slab is 128 bytes, 8 chunks of 16:      chunk c of row r lies at place c ^ r % 8, so that the eight rows
//                                                      of an 8 x 8 matrix fall into eight different groups of banks
//   8 rows are 1024 bytes, which slabs are aligned to: r % 8 is three bits of the address
//
// clang-format on
// Of elements of one byte a slab is 128 columns, and a step of wgmma 32 deep: as many bytes.
//
// One step of wgmma is 16 deep. Where columns are summed over (Q, K in Q K^T: K-major), a step is 16 columns, 32 bytes
// within the rows; the next 8 rows are `stride` = 1024 bytes on. Where rows are summed over (V in P V: MN-major), a step is
// 16 rows, 2048 bytes; the next 8 rows are `stride` = 1024 bytes on and the next slab is `leading` bytes on.
#pragma once
#include <hopper.cuh>  // not the neighbour: on the CPU backend its twin

template <int ROWS, int COLUMNS, int ELEMENT_BYTES = 2>
struct Swizzled {
    static constexpr int SLAB_COLUMNS = 128 / ELEMENT_BYTES, SLABS = (COLUMNS + SLAB_COLUMNS - 1) / SLAB_COLUMNS;
    static constexpr unsigned SLAB_BYTES = ROWS * 128, BYTES = SLABS * SLAB_BYTES;
    static_assert(ROWS % 8 == 0, "the swizzle repeats every 8 rows");

    static __device__ __forceinline__ Descriptor k_major(SmemAddr tile) { return make_descriptor(tile, 0, 1024); }
    static __device__ __forceinline__ Descriptor mn_major(SmemAddr tile) { return make_descriptor(tile, SLAB_BYTES, 1024); }

    // How far step `i` of 16 columns, or of 16 rows, lies into the tile.
    static constexpr __device__ unsigned k_step(int i) { return i / 4 * SLAB_BYTES + i % 4 * 32; }
    static constexpr __device__ unsigned mn_step(int i) { return i * 2048; }

    // How far chunk `chunk` of row `row` lies into the tile.
    static __device__ __forceinline__ unsigned chunk(unsigned row, unsigned chunk) {
        return chunk / 8 * SLAB_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }

    // Rows s .. s + ROWS of head (b, h), a box a slab. `more` bytes will be requested besides, before the barrier's phase ends.
    static __device__ __forceinline__ void load(SmemAddr tile, const TensorMap& map, int s, int h, int b,
                                                   SmemAddr barrier, unsigned more = 0) {
        mbarrier_arrive_expect_tx(barrier, BYTES + more);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) tma_load(tile + slab * SLAB_BYTES, map, slab * SLAB_COLUMNS, s, h, b, barrier);
    }
    // Such a tile that begins at a column, as part of what somebody else announced.
    static __device__ __forceinline__ void load_part(SmemAddr tile, const TensorMap& map, int column, int s, int h, int b,
                                               SmemAddr barrier) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            tma_load(tile + slab * SLAB_BYTES, map, column + slab * 64, s, h, b, barrier);
    }
    // Sends rows s .. s + ROWS: so many slabs from slab `first` on, the first of which lies at `from`.
    static __device__ __forceinline__ void store(const TensorMap& map, int s, int h, int b, SmemAddr from, int first = 0,
                                                int slabs = SLABS) {
#pragma unroll
        for (int slab = first; slab < min(first + slabs, SLABS); ++slab)
            tma_store(map, slab * SLAB_COLUMNS, s, h, b, from + (slab - first) * SLAB_BYTES);
        tma_store_commit();
    }
};
