// kernels_cu/include/cluster.cuh for the CPU backend: the blocks of a cluster run concurrently, each on an OS thread.
#pragma once
#include "ptx.cuh"
#include "tensor.cuh"

inline unsigned cluster_cta_rank() { return CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER; }
inline void cluster_sync(SANDBOX_SITE) {
    if (CLUSTER == 1) cpu::sandbox_barrier(site);
    else cpu::sandbox_cluster_barrier(site);
}
inline void cluster_arrive(SANDBOX_SITE) {
    if (CLUSTER > 1) cpu::sandbox_cluster_arrive(site);
}
inline void cluster_wait(SANDBOX_SITE) {
    if (CLUSTER > 1) cpu::sandbox_cluster_wait(site);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_at_rank(SmemAddr barrier, unsigned rank, SANDBOX_SITE) {
    cpu::sandbox_mbarrier_arrive_at_rank(barrier, 0, rank, site);
}
inline void mbarrier_arrive_expect_tx_at_rank(SmemAddr barrier, unsigned bytes, unsigned rank, SANDBOX_SITE) {
    cpu::sandbox_mbarrier_arrive_at_rank(barrier, bytes, rank, site);
}
inline void bulk_copy_to_rank(SmemAddr to, SmemAddr from, unsigned bytes, SmemAddr barrier, unsigned rank,
                              SANDBOX_SITE) {
    cpu::sandbox_bulk_copy_to_rank(to, from, bytes, barrier, rank, site);
}
template <class T>
inline T* map_shared_rank(T* own, unsigned cta_rank) {
    if (CLUSTER == 1) return own;
    const char* const mapped = cpu::sandbox_map_shared_rank(reinterpret_cast<const char*>(own), cta_rank);
    return reinterpret_cast<T*>(const_cast<char*>(mapped));
}
