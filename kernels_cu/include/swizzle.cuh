// Tiles in shared memory with the 128-byte swizzle of TMA and wgmma; `chunk` has the addresses for stmatrix and
// ldmatrix. Elements of 16 bits, or of 8 (float8).
// clang-format off
//
//   a tile (ROWS x COLUMNS) is slabs of 64 columns:    slab 0: [ROWS][64]   slab 1: [ROWS][64]   ...   one TMA box each
//   a row of a slab is 128 bytes, 8 chunks of 16 B:    chunk c of row r is stored at position c ^ r % 8, so that the
//                                                      eight rows of an 8 x 8 matrix are in different banks
//   8 rows are 1024 bytes, the alignment of a slab:    r % 8 is three bits of the address
//
// clang-format on
// With float8, a slab has 128 columns, and a K-major wgmma step has 32: the same numbers of bytes.
//
// A wgmma step covers 16 indices of the reduction dimension (PTX's K). `stride` and `leading` are the stride and
// leading byte offsets of the descriptor. K-major (Q and K in Q K^T: columns are the reduction dimension): a step is 16
// columns, 32 bytes of each row, and `stride` = 1024 bytes is the distance to the next 8 rows. MN-major (V in P V: rows
// are the reduction dimension): a step is 16 rows, 2048 bytes, `stride` = 1024 bytes is the distance to the next 8
// rows, and `leading` that to the next slab.
#pragma once
#include <hopper.cuh>  // angle brackets: the CPU backend has its own

template <int ROWS, int COLUMNS, int ELEMENT_BYTES = 2>
struct Swizzled {
    static constexpr int SLAB_COLUMNS = 128 / ELEMENT_BYTES, SLABS = (COLUMNS + SLAB_COLUMNS - 1) / SLAB_COLUMNS;
    static constexpr unsigned ROW_BYTES = 128, SLAB_BYTES = ROWS * ROW_BYTES, BYTES = SLABS * SLAB_BYTES;
    static_assert(ROWS % 8 == 0, "the swizzle repeats every 8 rows");

    static __device__ __forceinline__ Descriptor k_major(SmemAddr tile) { return make_descriptor(tile, 0, 1024); }
    static __device__ __forceinline__ Descriptor mn_major(SmemAddr tile) {
        return make_descriptor(tile, SLAB_BYTES, 1024);
    }

    // Offset in bytes of wgmma step `i`: of 16 columns (k_step) or 16 rows (mn_step).
    static constexpr __device__ unsigned k_step(int i) { return i / 4 * SLAB_BYTES + i % 4 * 32; }
    static constexpr __device__ unsigned mn_step(int i) { return i * 2048; }

    // Offset in bytes of a chunk of 16 bytes.
    static __device__ __forceinline__ unsigned chunk(unsigned row, unsigned chunk) {
        return chunk / 8 * SLAB_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16;
    }

    // Loads rows s .. s + ROWS - 1 of head (b, h), one box per slab. `extra_tx_bytes`: bytes of further loads on the
    // same barrier.
    static __device__ __forceinline__ void load(SmemAddr tile, const TensorMap& map, int s, int h, int b,
                                                SmemAddr barrier, unsigned extra_tx_bytes = 0) {
        mbarrier_arrive_expect_tx(barrier, BYTES + extra_tx_bytes);
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            tma_load(tile + slab * SLAB_BYTES, map, slab * SLAB_COLUMNS, s, h, b, barrier);
    }
    // Loads one box of each slab through a map of five dimensions (tma.cuh), of as many rows as the map's box. `tile`
    // is the first row's address in slab 0; the row is a multiple of 8. The barrier must already expect the bytes.
    static __device__ __forceinline__ void load_5d(SmemAddr tile, const TensorMap& map, int s, int h, int b,
                                                   SmemAddr barrier) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            tma_load_5d(tile + slab * SLAB_BYTES, map, slab * SLAB_COLUMNS, s, h, b, barrier);
    }
    // Loads one box of each slab, of as many rows as the map's box. Slab 0 begins at column `column` of the tensor. The
    // barrier must already expect the bytes, for example as `extra_tx_bytes` of an earlier load.
    static __device__ __forceinline__ void load_part(SmemAddr tile, const TensorMap& map, int column, int s, int h,
                                                     int b, SmemAddr barrier) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
            tma_load(tile + slab * SLAB_BYTES, map, column + slab * SLAB_COLUMNS, s, h, b, barrier);
    }
    // Stores one box of each slab, of as many rows as the map's box, from row s on: `slabs` slabs from slab `first` on,
    // which begin in shared memory at `from`.
    static __device__ __forceinline__ void store(const TensorMap& map, int s, int h, int b, SmemAddr from,
                                                 int first = 0, int slabs = SLABS) {
#pragma unroll
        for (int slab = first; slab < min(first + slabs, SLABS); ++slab)
            tma_store(map, slab * SLAB_COLUMNS, s, h, b, from + (slab - first) * SLAB_BYTES);
        tma_store_commit();
    }
};
