// kernels_cu/include/hopper.cuh for the CPU backend: the same functions. Asynchronous operations stay asynchronous: the
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

#if RAGGED
constexpr int RAGGED_ROWS = 1 << 30;
#else
constexpr int RAGGED_ROWS = 0;
#endif

inline void tma_load(SmemAddr to, const TensorMap& map, int d, int s, int h, int b, SmemAddr barrier, SANDBOX_SITE) {
    const int at[cpu::MAP_RANK] = {d, s + RAGGED_ROWS, h, b, RAGGED_ROWS};
    cpu::sandbox_tma_load(to, &map, at, barrier, site);
}
inline void tma_store(const TensorMap& map, int d, int s, int h, int b, SmemAddr from, SANDBOX_SITE) {
    const int at[cpu::MAP_RANK] = {d, s + RAGGED_ROWS, h, b, RAGGED_ROWS};
    cpu::sandbox_tma_store(from, &map, at, site);
}
inline void tma_reduce_add(float* to, SmemAddr from, unsigned bytes, SANDBOX_SITE) {
    cpu::sandbox_bulk_store(to, from, bytes, true, site);
}
inline void bulk_store(float* to, SmemAddr from, unsigned bytes, SANDBOX_SITE) {
    cpu::sandbox_bulk_store(to, from, bytes, false, site);
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
inline float* pin_address(float* address) { return address; }
inline void tma_store_commit() { cpu::sandbox_bulk_commit(); }
template <int PENDING = 0>
inline void tma_store_wait_read() {
    cpu::sandbox_bulk_wait_read(PENDING);
}
inline void tma_store_wait() { cpu::sandbox_bulk_wait(); }

// ---- counters in global memory

inline bool counter_reached(const unsigned* counter, unsigned arrivals) {
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= arrivals;
}
inline void counter_wait(const unsigned* counter, unsigned arrivals) {
    while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < arrivals) cpu::sandbox_yield();
}
inline void counter_arrive(unsigned* counter, unsigned arrivals = 1) {
    __atomic_fetch_add(counter, arrivals, __ATOMIC_RELEASE);
}
inline unsigned counter_load(const unsigned* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
inline void counter_arrive_acquire(unsigned* counter) { counter_arrive(counter); }
inline unsigned counter_fetch_add(unsigned* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQUIRE); }

// ---- warpgroup MMA

struct Descriptor {
    unsigned long long bits;
};

inline Descriptor make_descriptor(SmemAddr at, unsigned leading, unsigned stride) {
    const unsigned long long offset = at - sandbox_dynamic_smem;  // the address on the GPU: one array of shared memory
    return {offset / 16 | static_cast<unsigned long long>(leading / 16) << 16 |
            static_cast<unsigned long long>(stride / 16) << 32 | 1ull << 62};
}
inline Descriptor operator+(Descriptor descriptor, unsigned bytes) { return {descriptor.bits + bytes / 16}; }

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
        d,          nullptr,       a.bits, b.bits, 2 * R, A_ORDER == Order::K_MAJOR, B_ORDER == Order::K_MAJOR,
        accumulate, cpu::FORMAT_16};
    cpu::sandbox_wgmma(&mine, site);
}
template <Order B_ORDER, int R>
inline void wgmma(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate, SANDBOX_SITE) {
    const cpu::Product mine{d, a, 0, b.bits, 2 * R, true, B_ORDER == Order::K_MAJOR, accumulate, cpu::FORMAT_16};
    cpu::sandbox_wgmma(&mine, site);
}

// ---- warps and warpgroups

template <class T>
inline T uniform(T x, SANDBOX_SITE) {
    if (__any_sync(0xffffffffu, x != __shfl_sync(0xffffffffu, x, 0))) {
        cpu::sandbox_trap("uniform of a value that differs between the lanes of a warp", site);
    }
    return x;
}
inline bool elect() { return cpu::sandbox_self->lane == 0; }
template <int REGISTERS>
inline void setmaxnreg_dec(SANDBOX_SITE) {
    cpu::sandbox_setmaxnreg(REGISTERS, site);
}
template <int REGISTERS>
inline void setmaxnreg_inc(SANDBOX_SITE) {
    cpu::sandbox_setmaxnreg(REGISTERS, site);
}
inline void named_barrier_sync(unsigned id, unsigned threads, SANDBOX_SITE) {
    cpu::sandbox_named_barrier(id, threads, true, false, site);
}
inline void named_barrier_arrive(unsigned id, unsigned threads, SANDBOX_SITE) {
    cpu::sandbox_named_barrier(id, threads, false, false, site);
}
inline bool named_barrier_or(unsigned id, unsigned threads, bool predicate, SANDBOX_SITE) {
    return cpu::sandbox_named_barrier(id, threads, true, predicate, site);
}

namespace cpu {
// Element i of this lane's pair of a matrix is stored at (g; 2q + i), or transposed at (2q + i; g).

inline void store_matrices(SmemAddr row, const unsigned (&mine)[4], bool transposed, Site site) {
    if (reinterpret_cast<uint64_t>(row) % 16) sandbox_trap("stmatrix to an address that is not a multiple of 16", site);
    uint64_t rows[32];
    memcpy(rows, sandbox_collective(Collective::stmatrix, 0xffffffffu, reinterpret_cast<uint64_t>(row), site),
           sizeof rows);
    const unsigned g = sandbox_self->lane / 4, q = sandbox_self->lane % 4;
    for (unsigned matrix = 0; matrix < 4; ++matrix)
        for (unsigned i = 0; i < 2; ++i) {
            const unsigned r = transposed ? 2 * q + i : g, c = transposed ? g : 2 * q + i;
            char* to = reinterpret_cast<char*>(rows[8 * matrix + r]) + 2 * c;
            *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(mine[matrix] >> 16 * i);
            sandbox_generic_write(to, 2);
        }
}
}  // namespace cpu

inline void stmatrix_x4(SmemAddr row, unsigned r0, unsigned r1, unsigned r2, unsigned r3, SANDBOX_SITE) {
    cpu::store_matrices(row, {r0, r1, r2, r3}, false, site);
}
inline void stmatrix_x4_trans(SmemAddr row, unsigned r0, unsigned r1, unsigned r2, unsigned r3, SANDBOX_SITE) {
    cpu::store_matrices(row, {r0, r1, r2, r3}, true, site);
}
