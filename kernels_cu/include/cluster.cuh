// A team: CLUSTER blocks, neighbours along x, that run at one time and read and write each other's shared memory (CUDA: a thread block
// cluster, from compute capability 9.0 on). With CLUSTER = 1 a block is alone and all of this is nothing.
//
//   cluster_arrive();                              this block has begun: from now on it has shared memory
//   ...
//   cluster_wait();                              all of the team have
//   map_shared_rank(inbox, member)[i] = x;
//   cluster_sync();                            what they have written is there
#pragma once
#include "tensor.cuh"

// Which of the team this block is.
__device__ __forceinline__ unsigned cluster_cta_rank() { return CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER; }

// Says that this block has begun, and waits for nobody; and waits until all of the team have said so. Once each, before any cluster_sync.
__device__ __forceinline__ void cluster_arrive() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Waits for all threads of the team; what they have written to shared memory is there. Nobody may leave while others use its memory.
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Where the block of that number in its team has what lies at `own` in this block's shared memory.
template <class T>
__device__ __forceinline__ T* map_shared_rank(T* own, unsigned member) {
#if CLUSTER > 1
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(member));
    return there;
#else
    return own;
#endif
}
