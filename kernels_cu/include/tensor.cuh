// Strided tensor views, and tile loads with bounds checks.
#pragma once
#include "element.cuh"
#include "reduce.cuh"

#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM  // head dimension of V, O, dO and dV
#endif

#include "view.cuh"

// The rows of one head, an operand of cp_async_tile (mma_smem.cuh). PagedRows has the same functions for keys in pages.
template <typename T>
struct DenseRows {
    const View<T>& tensor;
    T* data;  // row 0

    // Whether rows n0 .. n0 + ROWS - 1 have one stride, for n0 a multiple of ROWS.
    template <int ROWS>
    static constexpr bool adjacent() {
        return true;
    }
    // If adjacent<ROWS>(): row n of the head, n0 <= n < n0 + ROWS, is at first_row(n0) + n * stride_s (n, not n - n0).
    // In PagedRows first_row(n0) need not be the address of row 0.
    __device__ __forceinline__ T* first_row(int n0) const { return data; }
    __device__ __forceinline__ T* operator()(int row) const { return data + row * tensor.stride_s; }
};

// Loads rows n0 .. n0 + ROWS - 1 of head (b, h) into tile[ROWS][WIDTH] as fp32, with all THREADS threads of the block;
// adjacent threads load adjacent columns. Rows >= S are filled with zeros, so that the compute loops need no bounds
// checks.
template <int ROWS, int THREADS, int WIDTH = HEAD_DIM, template <class> class AnyView, class T>
__device__ __forceinline__ void load_tile(float* tile, AnyView<const T> tensor, int b, int h, int n0, int S,
                                          int thread) {
    for (int i = thread; i < ROWS * WIDTH; i += THREADS) {
        const int row = n0 + i / WIDTH;
        tile[i] = row < S ? to_float(tensor.row(b, h, row)[i % WIDTH]) : 0.0f;
    }
}

// Four adjacent elements as one aligned load.
template <class T>
struct __align__(4 * sizeof(T)) Four {
    unsigned words[sizeof(T)];
};
using dtype4 = Four<dtype>;
template <class T>
__device__ __forceinline__ float4 to_float4(Four<T> x) {
    const T* e = reinterpret_cast<const T*>(x.words);
    return make_float4(to_float(e[0]), to_float(e[1]), to_float(e[2]), to_float(e[3]));
}

// Whether every row of head (b, h) is aligned for Four. Uniform across a block that has one head.
template <template <class> class AnyView, class T>
__device__ __forceinline__ bool aligned_for_dtype4(AnyView<const T> tensor, int b, int h) {
    return tensor.aligned(b, h, sizeof(Four<T>));
}

// Loads rows row0 .. row0 + ROWS - 1 and columns col0 .. col0 + COLS - 1 of head (b, h) into tile[ROWS][PITCH] as fp32,
// with a block of X * Y threads. If the tensor is aligned, a load has four elements, and a thread issues all its loads
// before it uses the first. Rows >= S and columns >= WIDTH are filled with zeros.
template <int ROWS, int COLS, int PITCH, int X, int Y, int WIDTH = HEAD_DIM, template <class> class AnyView, class T>
__device__ __forceinline__ void load_tile4(float* tile, AnyView<const T> tensor, int b, int h, int row0, int S,
                                           int col0) {
    static_assert(ROWS % Y == 0 && COLS % (4 * X) == 0 && PITCH % 4 == 0,
                  "every thread loads the same number of elements");
    constexpr int R = ROWS / Y, C = COLS / (4 * X);
    const int row = row0 + threadIdx.y, col = col0 + 4 * threadIdx.x;
    const T* from = tensor.row(b, h, row) + col;
    auto step = tensor.step(b, h, row, Y);
    tile += threadIdx.y * PITCH + 4 * threadIdx.x;
    if (WIDTH % 4 == 0 && aligned_for_dtype4(tensor, b, h)) {
        Four<T> values[R][C];
#pragma unroll
        for (int r = 0; r < R; ++r, tensor.advance(from, step))
#pragma unroll
            for (int c = 0; c < C; ++c) {
                values[r][c] = Four<T>{};
                if (row + r * Y < S && col + c * 4 * X < WIDTH)
                    values[r][c] = *reinterpret_cast<const Four<T>*>(from + c * 4 * X);
            }
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c)
                *reinterpret_cast<float4*>(tile + r * Y * PITCH + c * 4 * X) = to_float4(values[r][c]);
    } else {
#pragma unroll 1
        for (int r = 0; r < R; ++r, tensor.advance(from, step), tile += Y * PITCH)
#pragma unroll 1
            for (int c = 0; c < C * 4 * X; c += 4 * X)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    tile[c + e] = row + r * Y < S && col + c + e < WIDTH ? to_float(from[c + e]) : 0.0f;
    }
}
