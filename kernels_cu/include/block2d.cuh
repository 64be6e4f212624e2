// Matrix products of the rung 2 kernels: THREADS_X * THREADS_Y threads share a tile, and each has a register tile of
// the result with rows THREADS_Y apart. Operands are fp32 in shared memory; an LDS.128 loads four words.
#pragma once

__device__ __forceinline__ float4 load4(const float* smem) { return *reinterpret_cast<const float4*>(smem); }

// S += A X^T over `columns` columns. A thread has every THREADS_Y-th row of A and every THREADS_X-th of X.
template <int A_PITCH, int X_PITCH, int ROWS, int COLS>
__device__ __forceinline__ void add_dot_products(float (&S)[ROWS][COLS], const float* A, const float* X, int columns) {
    const int tx = threadIdx.x, ty = threadIdx.y;
#pragma unroll 1
    for (int d = 0; d < columns; d += 4) {
        float4 a[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) a[i] = load4(A + (ty + i * THREADS_Y) * A_PITCH + d);
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
            const float4 x = load4(X + (tx + j * THREADS_X) * X_PITCH + d);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                S[i][j] += a[i].x * x.x;
                S[i][j] += a[i].y * x.y;
                S[i][j] += a[i].z * x.z;
                S[i][j] += a[i].w * x.w;
            }
        }
    }
}

// sums += P X for KEYS rows of X. A thread has four adjacent columns of every 4 * THREADS_X. FULLY_VISIBLE: no score of
// the tile is hidden. Otherwise pairs for which visible(i, j) is false are skipped (i: row of the register tile): their
// P is 0, but 0 * NaN is NaN.
template <bool FULLY_VISIBLE, int KEYS, int P_PITCH, int X_PITCH, int ROWS, int COLS, class Visible>
__device__ __forceinline__ void add_product(float (&sums)[ROWS][COLS], const float* P, const float* X,
                                            const Visible& visible) {
    constexpr int STEP = FULLY_VISIBLE ? 4 : 1;
#pragma unroll 1
    for (int j0 = 0; j0 < KEYS; j0 += STEP) {
        float p[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (FULLY_VISIBLE) *reinterpret_cast<float4*>(p[i]) = load4(P + i * THREADS_Y * P_PITCH + j0);
            else p[i][0] = P[i * THREADS_Y * P_PITCH + j0];
        }
#pragma unroll
        for (int j = 0; j < STEP; ++j)
#pragma unroll
            for (int c = 0; c < COLS; c += 4) {
                const float4 x = load4(X + (j0 + j) * X_PITCH + c * THREADS_X);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    if (!FULLY_VISIBLE && !visible(i, j0)) continue;
                    sums[i][c] += p[i][j] * x.x;
                    sums[i][c + 1] += p[i][j] * x.y;
                    sums[i][c + 2] += p[i][j] * x.z;
                    sums[i][c + 3] += p[i][j] * x.w;
                }
            }
    }
}
