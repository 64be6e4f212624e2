// Reads memory and sums it: the read ceiling of memory-bound problems. Each thread issues LOADS 16-byte loads at once;
// the loads of all threads of the grid are consecutive.
//
// H200, GB/s after an L2 flush: 1 GiB 4333, 512 MiB 4116, 256 MiB 3708, 128 MiB 3155, 8 MiB 1006. Alternatives,
// relative to this kernel: bulk copies to shared memory by one thread per block +0.2 ... 1.4%; a persistent kernel -0.5
// ... -5%; __ldcs +9% at 128 MiB, -4% at 1 GiB; PyTorch's sum reaches 4131, 3847, 3362, 2703 and 624 GB/s.
extern "C" __global__ __launch_bounds__(THREADS, 1) void read_all(
    const uint4* data,  // (threads of the grid * LOADS,)
    unsigned* sums) {   // (warps of the grid,): sum of the 32-bit words that each warp reads
    const long long threads = static_cast<long long>(gridDim.x) * THREADS;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    uint4 words[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) words[i] = data[thread + i * threads];
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) sum += words[i].x + words[i].y + words[i].z + words[i].w;
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) sums[thread / 32] = sum;
}
