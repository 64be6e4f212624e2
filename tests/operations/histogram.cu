// How often each of BINS values occurs in x. A block counts in shared memory, then adds its counts to the total.
extern "C" __global__ __launch_bounds__(THREADS) void histogram(const int* x,  // (N), values 0 .. BINS - 1
                                                                int* counts,   // (BINS), zero before the launch
                                                                int N) {
    __shared__ int counts_smem[BINS];
    for (int b = threadIdx.x; b < BINS; b += THREADS) counts_smem[b] = 0;
    __syncthreads();  // all counts are zero before the first one is increased
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < N; i += gridDim.x * THREADS)
        atomicAdd(&counts_smem[x[i]], 1);
    __syncthreads();  // the block has counted all its elements
    for (int b = threadIdx.x; b < BINS; b += THREADS) atomicAdd(&counts[b], counts_smem[b]);
}
