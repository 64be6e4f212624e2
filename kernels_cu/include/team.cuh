// A team: TEAM blocks, neighbours along x, that run at one time and read and write each other's shared memory (CUDA: a thread block
// cluster, from compute capability 9.0 on). With TEAM = 1 a block is alone and all of this is nothing.
//
//   team_begin();                              this block has begun: from now on it has shared memory
//   ...
//   team_begun();                              all of the team have
//   of_teammate(inbox, member)[i] = x;
//   team_barrier();                            what they have written is there
#pragma once
#include "common.cuh"

// Which of the team this block is.
__device__ __forceinline__ unsigned team_member() { return TEAM == 1 ? 0 : blockIdx.x % TEAM; }

// Says that this block has begun, and waits for nobody; and waits until all of the team have said so. Once each, before any team_barrier.
__device__ __forceinline__ void team_begin() {
#if TEAM > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void team_begun() {
#if TEAM > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Waits for all threads of the team; what they have written to shared memory is there. Nobody may leave while others use its memory.
__device__ __forceinline__ void team_barrier() {
#if TEAM > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Where the block of that number in its team has what lies at `own` in this block's shared memory.
template <class T>
__device__ __forceinline__ T* of_teammate(T* own, unsigned member) {
#if TEAM > 1
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(member));
    return there;
#else
    return own;
#endif
}
