// Reads memory and adds it up, for what is a matter of reading memory: how long would that alone take? Each thread has LOADS times 16 bytes on
// their way at once; what all threads of the grid ask for in a turn lies in a row.
extern "C" __global__ __launch_bounds__(THREADS, 1) void read_all(
    const uint4* data,  // (count,)
    long long count,    // times 16 bytes
    unsigned* sums) {   // (warps of the grid,): of the 32-bit words that a warp has read
    const long long threads = static_cast<long long>(gridDim.x) * THREADS;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const auto sum_of = [](uint4 words) { return words.x + words.y + words.z + words.w; };
    unsigned sum = 0;
    long long next = thread;
#pragma unroll 1
    for (; next + (LOADS - 1) * threads < count; next += LOADS * threads) {
        uint4 words[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) words[i] = data[next + i * threads];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) sum += sum_of(words[i]);
    }
#pragma unroll 1
    for (; next < count; next += threads) sum += sum_of(data[next]);
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) sums[thread / 32] = sum;
}
