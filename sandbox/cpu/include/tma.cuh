// kernels_cu/include/tma.cuh for the CPU backend: the same functions. Asynchronous operations stay asynchronous: the
// runtime executes them later, so a missing wait is detected (runtime.h).
#pragma once
#include "ptx.cuh"

// ---- mbarriers

inline void mbarrier_init(SmemAddr barrier, unsigned arrivals, SANDBOX_SITE) {
    cpu::sandbox_mbarrier_init(barrier, arrivals, site);
}
inline void mbarrier_arrive(SmemAddr barrier, SANDBOX_SITE) { cpu::sandbox_mbarrier_arrive(barrier, 0, site); }
inline void mbarrier_arrive_expect_tx(SmemAddr barrier, unsigned bytes, SANDBOX_SITE) {
    cpu::sandbox_mbarrier_arrive(barrier, bytes, site);
}
inline void mbarrier_wait(SmemAddr barrier, unsigned parity, SANDBOX_SITE) {
    cpu::sandbox_mbarrier_wait(barrier, parity, site);
}
inline unsigned mbarrier_test_wait(SmemAddr, unsigned) { return false; }  // always the slow path: wait
inline void mbarrier_wait_unless(unsigned ended, SmemAddr barrier, unsigned parity, SANDBOX_SITE) {
    if (!ended) cpu::sandbox_mbarrier_wait(barrier, parity, site);
}
inline void fence_proxy_async() { cpu::sandbox_fence_proxy_async(); }

// ---- tensor maps

struct alignas(64) TensorMap : cpu::TensorMap {};
static_assert(sizeof(TensorMap) == 128, "TensorMap differs from sandbox/launch/tensor_maps.py");

constexpr int RAGGED_OFFSET = 1 << 30;
#if RAGGED
constexpr int OWN_ROWS = RAGGED_OFFSET;
#else
constexpr int OWN_ROWS = 0;
#endif

inline void tma_load_5d(SmemAddr to, const TensorMap& map, int d, int s, int h, int b, SmemAddr barrier, SANDBOX_SITE) {
    const int at[cpu::MAP_RANK] = {d, s + RAGGED_OFFSET, h, b, RAGGED_OFFSET};
    cpu::sandbox_tma_load(to, &map, at, barrier, site);
}
inline void tma_load(SmemAddr to, const TensorMap& map, int d, int s, int h, int b, SmemAddr barrier, SANDBOX_SITE) {
    const int at[cpu::MAP_RANK] = {d, s + OWN_ROWS, h, b, OWN_ROWS};
    cpu::sandbox_tma_load(to, &map, at, barrier, site);
}
inline void tma_store(const TensorMap& map, int d, int s, int h, int b, SmemAddr from, SANDBOX_SITE) {
    const int at[cpu::MAP_RANK] = {d, s + OWN_ROWS, h, b, OWN_ROWS};
    cpu::sandbox_tma_store(from, &map, at, site);
}
inline void tma_reduce_add(float* to, SmemAddr from, unsigned bytes, SANDBOX_SITE) {
    cpu::sandbox_bulk_store(to, from, bytes, true, site);
}
inline void bulk_store(void* to, SmemAddr from, unsigned bytes, SANDBOX_SITE) {
    cpu::sandbox_bulk_store(static_cast<float*>(to), from, bytes, false, site);
}
inline void bulk_load(SmemAddr to, const void* from, unsigned bytes, SmemAddr barrier, SANDBOX_SITE) {
    cpu::sandbox_bulk_load(to, from, bytes, barrier, site);
}
inline void store_floats(SmemAddr to, float x0, float x1, float x2, float x3, SANDBOX_SITE) {
    if (reinterpret_cast<uint64_t>(to) % 16)
        cpu::sandbox_trap("store_floats to an address that is not a multiple of 16", site);
    *reinterpret_cast<float4*>(to) = make_float4(x0, x1, x2, x3);
    cpu::sandbox_generic_write(to, 16);
}
inline void add_floats(float* to, const float (&x)[4]) {
    for (int i = 0; i < 4; ++i) atomicAdd(to + i, x[i]);
}
inline void store_floats(float* to, const float (&x)[4]) {
    for (int i = 0; i < 4; ++i) to[i] = x[i];
}
inline void tma_store_commit() { cpu::sandbox_bulk_commit(); }
template <int PENDING = 0>
inline void tma_store_wait_read() {
    cpu::sandbox_bulk_wait_read(PENDING);
}
inline void tma_store_wait_complete() { cpu::sandbox_bulk_wait(); }
