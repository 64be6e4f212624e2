// Shared-memory tiles of the mma.sync kernels: swizzled layout, loads by cp.async, fragments by ldmatrix, and products
// of fragments with tiles. An element has 16 bits; float8 tiles are tiles of pairs.
#pragma once
#include <ptx.cuh>  // the CPU backend has its own
#include "tensor.cuh"

// A row of COLUMNS elements consists of 16-byte chunks. The swizzle is an XOR of the chunk index with the row, so that
// the eight rows of an ldmatrix matrix are in eight different groups of four banks. ADJACENT = 2: chunks 2i and 2i + 1
// stay adjacent, for loads of 32 bytes of each of four rows.
template <int COLUMNS, unsigned ADJACENT = 1>
struct SwizzledRows {
    static_assert(COLUMNS % 16 == 0, "whole MMA steps");
    static constexpr unsigned CHUNKS = COLUMNS / 8;  // 16-byte chunks per row
    // Chunks are permuted within groups of this size.
    static constexpr unsigned GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
    static constexpr unsigned ROW = 2 * COLUMNS;  // bytes per row

    // Byte offset of a chunk in the tile.
    static __device__ __forceinline__ unsigned at(unsigned row, unsigned chunk) {
        constexpr unsigned PLACES = GROUP / ADJACENT, ROWS = 8 / ADJACENT;
        return row * ROW + (chunk ^ row * PLACES / ROWS % PLACES * ADJACENT) * 16;
    }
};

// Issues cp.async for rows n0 .. n0 + ROWS - 1 of an (S, WIDTH) matrix with threads 0 .. THREADS_ - 1. Rows >= S and
// columns >= WIDTH are filled with zeros.
template <int ROWS, int COLUMNS, unsigned THREADS_, int WIDTH = HEAD_DIM, class T>
__device__ __forceinline__ void cp_async_tile(SmemAddr tile, const T* matrix, long long stride, int n0, int S,
                                              unsigned thread = threadIdx.x) {
    using Tile = SwizzledRows<COLUMNS>;
    constexpr int PER_CHUNK = 16 / sizeof(T);  // elements
    constexpr unsigned STEP = THREADS_ / Tile::CHUNKS,
                       ACTIVE = STEP * Tile::CHUNKS;  // a thread loads one chunk of every STEP-th row
    const unsigned row0 = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
    if (ACTIVE < THREADS_ && thread >= ACTIVE) return;
    const T* from = matrix + (n0 + static_cast<int>(row0)) * stride + chunk * PER_CHUNK;
    const bool whole = WIDTH == COLUMNS * PER_CHUNK / 8 && ROWS % STEP == 0 && n0 + ROWS <= S;
#pragma unroll
    for (unsigned i = 0; whole && i < ROWS / STEP; ++i, from += STEP * stride)
        cp_async_16(tile + Tile::at(row0 + i * STEP, chunk), from, true);
#pragma unroll
    for (unsigned i = 0; !whole && i < (ROWS + STEP - 1) / STEP; ++i, from += STEP * stride) {
        const unsigned row = row0 + i * STEP;
        const bool inside = n0 + static_cast<int>(row) < S && chunk * PER_CHUNK < WIDTH;
        if (ROWS % STEP == 0 || row < ROWS) cp_async_16(tile + Tile::at(row, chunk), from, inside);
    }
}

// The same for the rows of a head, which may be in pages.
template <int ROWS, int COLUMNS, unsigned THREADS_, int WIDTH = HEAD_DIM, class AnyRows>
__device__ __forceinline__ void cp_async_tile(SmemAddr tile, const AnyRows& rows, int n0, int S) {
    if constexpr (AnyRows::template adjacent<ROWS>())
        return cp_async_tile<ROWS, COLUMNS, THREADS_, WIDTH>(tile, rows.first_row(n0), rows.tensor.stride_s, n0, S);
    using Tile = SwizzledRows<COLUMNS>;
    constexpr int PER_CHUNK = 16 / sizeof(*rows(0));
#pragma unroll 4
    for (unsigned i = threadIdx.x; i < ROWS * Tile::CHUNKS; i += THREADS_) {
        const int row = i / Tile::CHUNKS, chunk = i % Tile::CHUNKS;
        const bool inside = n0 + row < S && chunk * PER_CHUNK < WIDTH;
        cp_async_16(tile + Tile::at(row, chunk), rows(n0 + row) + chunk * PER_CHUNK, inside);
    }
}

// The same as single copies, which a kernel interleaves with MMAs. A thread copies the same chunk of every group of a
// row before it advances to another row: one address register, all other offsets are immediates.
template <int ROWS, int COLUMNS, unsigned THREADS_, int WIDTH = HEAD_DIM, class T = dtype>
struct TileCopies {
    using Tile = SwizzledRows<COLUMNS>;
    static constexpr unsigned GROUP = Tile::GROUP, GROUPS = Tile::CHUNKS / GROUP,
                              STEP = THREADS_ / GROUP;  // rows per step
    static constexpr int COUNT = (ROWS + STEP - 1) / STEP * GROUPS, PER_CHUNK = 16 / sizeof(T);
    static constexpr bool WHOLE = WIDTH == COLUMNS * PER_CHUNK / 8;
    static_assert(THREADS_ % GROUP == 0 && STEP % 8 == 0, "rows at a distance of STEP have the same swizzle");
    SmemAddr to;
    const T* from;
    unsigned row, chunk;
    int rows;  // valid rows from `row`

    template <class AnyRows>
    __device__ __forceinline__ void begin(SmemAddr tile, const AnyRows& all_rows, int n0, int S) {
        const unsigned thread = thread_index_x();
        row = thread / GROUP, chunk = thread % GROUP;
        to = tile + Tile::at(row, chunk);
        from = all_rows.first_row(n0) + (n0 + static_cast<int>(row)) * all_rows.tensor.stride_s + chunk * PER_CHUNK;
        rows = S - n0 - static_cast<int>(row);
    }
    // Issues copy i of COUNT; in order.
    __device__ __forceinline__ void load(int i, long long stride) {
        const unsigned step = i / GROUPS * STEP, group = i % GROUPS * GROUP;
        if (i > 0 && group == 0) from += STEP * stride;
        const bool inside = static_cast<int>(step) < rows && (WHOLE || (group + chunk) * PER_CHUNK < WIDTH);
        if (ROWS % STEP == 0 || row + step < ROWS)
            cp_async_16(to + step * Tile::ROW + group * 16, from + group * PER_CHUNK, inside);
    }
};

// Byte offsets in a tile of the address that this lane passes to ldmatrix for a 16 x 16 block: row and chunk of step 0.
// Step i of 16 columns is at at[i % (GROUP / 2)] + i / (GROUP / 2) * GROUP * 16: the swizzle is computed once, the rest
// are immediates.
template <int COLUMNS, bool ONE_REGISTER = false, class Tile_ = SwizzledRows<COLUMNS>>
struct FragmentOffsets {
    static_assert(!ONE_REGISTER, "specialised below for SwizzledRows<COLUMNS>");
    using Tile = Tile_;
    unsigned at[Tile::GROUP / 2];
    __device__ __forceinline__ FragmentOffsets(unsigned row, unsigned chunk) {
#pragma unroll
        for (unsigned i = 0; i < Tile::GROUP / 2; ++i) at[i] = Tile::at(row, 2 * i + chunk);
    }
    __device__ __forceinline__ unsigned operator()(unsigned row, unsigned step) const {  // `row` a multiple of 16
        return row * Tile::ROW + at[step % (Tile::GROUP / 2)] + step / (Tile::GROUP / 2) * Tile::GROUP * 16;
    }
};

// Keeps only the offset of step 0, which contains the XOR with the row; each later step XORs its bits of the chunk
// index into it. One register instead of GROUP / 2, and one instruction more.
template <int COLUMNS>
struct FragmentOffsets<COLUMNS, true, SwizzledRows<COLUMNS>> {
    using Tile = SwizzledRows<COLUMNS>;
    unsigned first;
    __device__ __forceinline__ FragmentOffsets(unsigned row, unsigned chunk) : first(Tile::at(row, chunk)) {}
    __device__ __forceinline__ unsigned operator()(unsigned row, unsigned step) const {  // `row` a multiple of 16
        return (first ^ step % (Tile::GROUP / 2) * 32) +
               (row * Tile::ROW + step / (Tile::GROUP / 2) * Tile::GROUP * 16);
    }
};

// Offsets of this lane in a 16 x 16 block, which begins at chunk `chunk` of a row: of an A operand by ldmatrix_x4, or
// of a B operand by ldmatrix_x4_trans; and of a transposed B operand by ldmatrix_x4, or a transposed A operand by
// ldmatrix_x4_trans. The latter differ, so that the two registers of a B operand are adjacent (12% faster at D = 128).
template <class Offsets>
__device__ __forceinline__ Offsets row_offsets(unsigned lane, unsigned chunk = 0) {
    return {lane % 16, chunk + lane / 16};
}
template <class Offsets>
__device__ __forceinline__ Offsets transposed_offsets(unsigned lane, unsigned chunk = 0) {
    return {lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2};
}
// Those of this lane in the forward: Q as A operand, K as transposed B operand, V as B operand.
template <class QOffsets, class KOffsets, class VOffsets>
struct ForwardOffsets {
    QOffsets Q;
    KOffsets K;
    VOffsets V;
    __device__ __forceinline__ explicit ForwardOffsets(unsigned lane)
        : Q(row_offsets<QOffsets>(lane)), K(transposed_offsets<KOffsets>(lane)), V(row_offsets<VOffsets>(lane)) {}
};

// C += A B for 8 columns of B. Kernels with float8 operands pass another function.
struct Mma16Bit {
    __device__ __forceinline__ void operator()(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) const {
        mma_m16n8k16(c, a, b0, b1);
    }
};
// The same for the COLUMNS columns of an ldmatrix_x4_trans result.
struct MmaRows16Bit {
    static constexpr int COLUMNS = 16;
    __device__ __forceinline__ void operator()(float (*c)[4], const unsigned (&a)[4], const unsigned (&b)[4]) const {
        mma_m16n8k16(c[0], a, b[0], b[1]);
        mma_m16n8k16(c[1], a, b[2], b[3]);
    }
};

// C += A B^T, one MMA step: fragments A of 16 rows each, and 8 * N_TILES rows of B_tile from `row` on. `step`: columns
// of B_tile.
template <int M_TILES, int N_TILES, int REGISTERS, class Offsets, class Mma = Mma16Bit>
__device__ __forceinline__ void mma_ABt_step(float (&C)[M_TILES][N_TILES][4], const unsigned (&A)[M_TILES][REGISTERS],
                                             SmemAddr B_tile, int row, int step, const Offsets& transposed_offsets,
                                             const Mma& mma = Mma()) {
#pragma unroll
    for (int nt = 0; nt < N_TILES / 2; ++nt) {
        unsigned B[4];
        ldmatrix_x4(B, B_tile + transposed_offsets(row + 16 * nt, step));
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            mma(C[mt][2 * nt], A[mt], B[0], B[1]);
            mma(C[mt][2 * nt + 1], A[mt], B[2], B[3]);
        }
    }
}

// C += A B, one MMA step: fragments A of 16 rows each, and 16 rows of B_tile from `row` on, with 8 * N_TILES columns.
template <int M_TILES, int N_TILES, class Offsets, class Mma = MmaRows16Bit>
__device__ __forceinline__ void mma_AB_step(float (&C)[M_TILES][N_TILES][4], const unsigned (&A)[M_TILES][4],
                                            SmemAddr B_tile, int row, const Offsets& row_offsets,
                                            const Mma& mma = Mma()) {
#pragma unroll
    for (int dt = 0; dt < 8 * N_TILES / Mma::COLUMNS; ++dt) {
        unsigned B[4];
        ldmatrix_x4_trans(B, B_tile + row_offsets(row, dt));
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) mma(&C[mt][dt * Mma::COLUMNS / 8], A[mt], B);
    }
}
