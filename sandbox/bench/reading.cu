// Reads memory and adds it up, for what is a matter of reading memory: how long would that alone take? Each thread reads LOADS times 16 bytes,
// all on their way at once; what the threads of the grid ask for together lies in a row.
//
// H200, GB/s behind a flush that leaves L2 full of others' data: 1 GiB 4333, 512 MiB 4116, 256 MiB 3708, 128 MiB 3155, 8 MiB 1006. Bulk copies into
// shared memory by one thread a block reach 0.2 ... 1.4% more; blocks that stay and walk 0.5 ... 5% less; __ldcs 9% more of 128 MiB, which
// then leaves others' data in L2, and 4% less of 1 GiB; PyTorch's sum 4131, 3847, 3362, 2703 and 624.
extern "C" __global__ __launch_bounds__(THREADS, 1) void read_all(
    const uint4* data,  // (threads of the grid * LOADS,)
    unsigned* sums) {   // (warps of the grid,): of the 32-bit words that a warp has read
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
