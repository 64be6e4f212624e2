// Thread block clusters (compute capability 9.0): CLUSTER blocks, adjacent along x, run at the same time and access
// each other's shared memory (DSMEM). With CLUSTER = 1 these functions do nothing, except that cluster_sync is
// __syncthreads.
//
// clang-format off
//   cluster_arrive();                         this block has started
//   ...
//   cluster_wait();                           all blocks of the cluster have started: DSMEM may be accessed
//   map_shared_rank(pointer, rank)[i] = x;    a store to DSMEM
//   cluster_sync();                           the stores of all blocks are visible
// clang-format on
#pragma once
#include "tensor.cuh"

// This block's rank in its cluster.
__device__ __forceinline__ unsigned cluster_cta_rank() { return CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER; }

// Arrives at the cluster barrier without waiting; waits until all blocks of the cluster have arrived. Call each once,
// before any cluster_sync.
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

// Waits for all threads of the cluster; their stores to shared memory are then visible. A block must not exit while
// other blocks access its shared memory.
__device__ __forceinline__ void cluster_sync() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// The address in the shared memory of block `rank` that corresponds to `local` in this block's.
template <class T>
__device__ __forceinline__ T* map_shared_rank(T* local, unsigned rank) {
#if CLUSTER > 1
    T* remote;
    asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(local), "r"(rank));
    return remote;
#else
    return local;
#endif
}
