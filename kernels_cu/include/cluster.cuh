// Thread block clusters (compute capability 9.0): CLUSTER blocks, adjacent along x, run at the same time and access
// each other's shared memory (DSMEM). With CLUSTER = 1 the barriers do nothing, except that cluster_sync is
// __syncthreads; arrivals and copies at another rank are not called.
//
// clang-format off
//   cluster_arrive();                         this block has started
//   ...
//   cluster_wait();                           all blocks of the cluster have started: DSMEM may be accessed
//   map_shared_rank(pointer, rank)[i] = x;    a store to DSMEM
//   cluster_sync();                           the stores of all blocks are visible
// clang-format on
#pragma once
#include "ptx.cuh"
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

// Makes mbarrier initialisations visible to the other blocks of the cluster, after the next cluster_arrive and
// cluster_wait.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the barrier with the same offset in the shared memory of block `rank` of the cluster. The block must not
// have exited. The arrival orders no writes to memory: a scope wider than this block would wait for all of them.
__device__ __forceinline__ void mbarrier_arrive_at_rank(SmemAddr barrier, unsigned rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
// The same, and adds `bytes` to the transaction count that copies must complete before the phase can complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx_at_rank(SmemAddr barrier, unsigned bytes, unsigned rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n}" ::"r"(barrier),
        "r"(rank), "r"(bytes)
        : "memory");
}
// Copies `bytes` of this block's shared memory to the offset of `to` in that of block `rank`, and counts them at the
// barrier with the same offset there. Both addresses and `bytes` are multiples of 16. `from` must not be overwritten
// before the copy is complete.
__device__ __forceinline__ void bulk_copy_to_rank(SmemAddr to, SmemAddr from, unsigned bytes, SmemAddr barrier,
                                                  unsigned rank) {
    asm volatile(
        "{\n.reg .b32 to, counted;\nmapa.shared::cluster.u32 to, %0, %4;\nmapa.shared::cluster.u32 counted, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [counted];\n}" ::"r"(
            to),
        "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
        : "memory");
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
