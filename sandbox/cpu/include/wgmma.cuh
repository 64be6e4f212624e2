// kernels_cu/include/wgmma.cuh for the CPU backend: the same functions, asynchronous as those of tma.cuh.
#pragma once
#include "descriptor.cuh"
#include "ptx.cuh"

// The address on the GPU: one array of shared memory; in a cluster also the rank of the block.
inline Descriptor make_descriptor(SmemAddr at, unsigned leading, unsigned stride) {
    unsigned address = at - sandbox_dynamic_smem;
#if CLUSTER > 1
    address |= blockIdx.x % CLUSTER << 24;
#endif
    return make_descriptor(address, leading, stride);
}

enum class Order { K_MAJOR, MN_MAJOR };

inline void wgmma_fence() { cpu::sandbox_wgmma_fence(); }
inline void wgmma_commit() { cpu::sandbox_wgmma_commit(); }
template <int PENDING>
inline void wgmma_wait(SANDBOX_SITE) {
    cpu::sandbox_wgmma_wait(PENDING, site);
}
template <int R>
inline void warpgroup_fence_operand(float (&d)[R], SANDBOX_SITE) {
    cpu::sandbox_wgmma_settled(d, site);
}

template <int R>
inline void wgmma_discard(float (&d)[R]) {
    memset(d, 0xff, sizeof d);
}

namespace cpu {
#if defined(DTYPE_bfloat16)
constexpr Format FORMAT_16 = Format::bfloat16;
#else
constexpr Format FORMAT_16 = Format::float16;
#endif
}  // namespace cpu

template <Order B_ORDER, Order A_ORDER = Order::K_MAJOR, int R>
inline void wgmma(float (&d)[R], Descriptor a, Descriptor b, bool accumulate, SANDBOX_SITE) {
    const cpu::Product mine{
        d,          nullptr,       a.bits(), b.bits(), 2 * R, A_ORDER == Order::K_MAJOR, B_ORDER == Order::K_MAJOR,
        accumulate, cpu::FORMAT_16};
    cpu::sandbox_wgmma(&mine, site);
}
template <Order B_ORDER, int R>
inline void wgmma(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate, SANDBOX_SITE) {
    const cpu::Product mine{d, a, 0, b.bits(), 2 * R, true, B_ORDER == Order::K_MAJOR, accumulate, cpu::FORMAT_16};
    cpu::sandbox_wgmma(&mine, site);
}
