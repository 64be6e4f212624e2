// y[n] = sum over k of w[k] x[n + k - K / 2], where x is 0 outside of 0 .. N - 1.
#include "element.cuh"

extern "C" __global__ __launch_bounds__(THREADS) void stencil(const dtype* x,  // (N)
                                                              const float* w,  // (K)
                                                              dtype* y,        // (N)
                                                              int N, int K) {
    extern __shared__ float x_smem[];  // THREADS + K - 1
    const int first = blockIdx.x * THREADS - K / 2;
    for (int i = threadIdx.x; i < THREADS + K - 1; i += THREADS)
        x_smem[i] = first + i >= 0 && first + i < N ? to_float(x[first + i]) : 0.0f;
    __syncthreads();  // neighbours have loaded their elements

    const int n = blockIdx.x * THREADS + threadIdx.x;
    if (n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += w[k] * x_smem[threadIdx.x + k];
    y[n] = dtype(sum);
}
