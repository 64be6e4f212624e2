// A team: TEAM blocks, neighbours along x, that run at one time and read each other's shared memory (CUDA: a thread block cluster, from
// compute capability 9.0 on). With TEAM = 1 a block is alone and all of this is nothing.
#pragma once
#include "common.cuh"

// Which of the team this block is.
__device__ __forceinline__ unsigned team_member() { return TEAM == 1 ? 0 : blockIdx.x % TEAM; }

// Waits for all threads of the team; what they have written to shared memory is there. Nobody may leave while others read its memory.
__device__ __forceinline__ void team_barrier() {
#if TEAM > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Where the block of that number in its team has what lies at `own` in this block's shared memory.
template <class T>
__device__ __forceinline__ const T* of_teammate(const T* own, unsigned member) {
#if TEAM > 1
    const T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(member));
    return there;
#else
    return own;
#endif
}
