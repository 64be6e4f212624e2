// Tiles of 16-bit elements, or of pairs of float8, in shared memory, as the tensor-core kernels keep them: how rows are laid out, filled by cp.async,
// and addressed by ldmatrix.
#pragma once
#include <ptx.cuh>  // found along the include path, where the CPU backend puts its twin first

// Rows of COLUMNS elements, a multiple of 16, are made of 16-byte chunks, and the chunks of a row change places with one
// another (XOR with the row) so that the eight rows that an ldmatrix reads fall into eight different groups of banks.
template <int COLUMNS>
struct Swizzled {
    static_assert(COLUMNS % 16 == 0, "whole MMA steps");
    static constexpr unsigned CHUNKS = COLUMNS / 8;                                // 16-byte chunks of a row
    static constexpr unsigned GROUP = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;  // they change places within such groups
    static constexpr unsigned ROW = 2 * COLUMNS;                                   // bytes

    // Where chunk `chunk` of row `row` lies in its tile, in bytes.
    static __device__ __forceinline__ unsigned at(unsigned row, unsigned chunk) {
        return row * ROW + (chunk ^ row * GROUP / 8 % GROUP) * 16;
    }
};

// Requests rows n0 .. n0 + ROWS of a (S, WIDTH) matrix, by threads 0 .. THREADS_; rows from S on and columns from WIDTH on
// become zeros.
template <int ROWS, int COLUMNS, unsigned THREADS_, int WIDTH = HEAD_DIM, class T>
__device__ __forceinline__ void cp_async_tile(SmemAddr tile, const T* matrix, long long stride, int n0, int S,
                                             unsigned thread = threadIdx.x) {
    using Tile = Swizzled<COLUMNS>;
    constexpr int PER_CHUNK = 16 / sizeof(T);  // elements
    constexpr unsigned STEP = THREADS_ / Tile::CHUNKS, COPIERS = STEP * Tile::CHUNKS;  // one chunk of every STEP-th row each
    const unsigned row0 = thread / Tile::CHUNKS, chunk = thread % Tile::CHUNKS;
    if (COPIERS < THREADS_ && thread >= COPIERS) return;
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

// The copies of such a tile one at a time, for who puts them between other things. A thread copies the same chunk of every group
// of a row before it goes on to another row: one address serves them all, the rest are immediates.
template <int ROWS, int COLUMNS, unsigned THREADS_, int WIDTH = HEAD_DIM, class T = dtype>
struct TileCopies {
    using Tile = Swizzled<COLUMNS>;
    static constexpr unsigned GROUP = Tile::GROUP, GROUPS = Tile::CHUNKS / GROUP, STEP = THREADS_ / GROUP;  // every STEP-th row
    static constexpr int COUNT = (ROWS + STEP - 1) / STEP * GROUPS, PER_CHUNK = 16 / sizeof(T);
    static constexpr bool WHOLE = WIDTH == COLUMNS * PER_CHUNK / 8;
    static_assert(THREADS_ % GROUP == 0 && STEP % 8 == 0, "rows STEP apart are swizzled alike");
    SmemAddr to;
    const T* from;
    unsigned row, chunk;
    int rows;  // from `row` on, before S

    __device__ __forceinline__ void begin(SmemAddr tile, const T* matrix, long long stride, int n0, int S) {
        const unsigned thread = thread_index_x();
        row = thread / GROUP, chunk = thread % GROUP;
        to = tile + Tile::at(row, chunk);
        from = matrix + (n0 + static_cast<int>(row)) * stride + chunk * PER_CHUNK;
        rows = S - n0 - static_cast<int>(row);
    }
    // Copy i of COUNT, in their order.
    __device__ __forceinline__ void request(int i, long long stride) {
        const unsigned step = i / GROUPS * STEP, group = i % GROUPS * GROUP;
        if (i > 0 && group == 0) from += STEP * stride;
        const bool inside = static_cast<int>(step) < rows && (WHOLE || (group + chunk) * PER_CHUNK < WIDTH);
        if (ROWS % STEP == 0 || row + step < ROWS)
            cp_async_16(to + step * Tile::ROW + group * 16, from + group * PER_CHUNK, inside);
    }
};

// Byte offsets, within a tile, of the row and chunk of a 16 x 16 block that this lane points ldmatrix at. Step i of 16
// columns lies at at[i % (GROUP / 2)] + i / (GROUP / 2) * GROUP * 16: the swizzle is computed once, the rest are immediates.
template <int COLUMNS, bool ONE_REGISTER = false>
struct FragmentOffsets {
    using Tile = Swizzled<COLUMNS>;
    unsigned at[Tile::GROUP / 2];
    __device__ __forceinline__ FragmentOffsets(unsigned row, unsigned chunk) {
#pragma unroll
        for (unsigned i = 0; i < Tile::GROUP / 2; ++i) at[i] = Tile::at(row, 2 * i + chunk);
    }
    __device__ __forceinline__ unsigned operator()(unsigned row, unsigned step) const {  // `row` a multiple of 16
        return row * Tile::ROW + at[step % (Tile::GROUP / 2)] + step / (Tile::GROUP / 2) * Tile::GROUP * 16;
    }
};

// The same by an instruction more for a register or three less: a step's bits of the chunk's number may as well be flipped
// after the row's have been.
template <int COLUMNS>
struct FragmentOffsets<COLUMNS, true> {
    using Tile = Swizzled<COLUMNS>;
    unsigned first;
    __device__ __forceinline__ FragmentOffsets(unsigned row, unsigned chunk) : first(Tile::at(row, chunk)) {}
    __device__ __forceinline__ unsigned operator()(unsigned row, unsigned step) const {  // `row` a multiple of 16
        return (first ^ step % (Tile::GROUP / 2) * 32) + (row * Tile::ROW + step / (Tile::GROUP / 2) * Tile::GROUP * 16);
    }
};
