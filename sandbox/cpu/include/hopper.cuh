// kernels_cu/include/hopper.cuh for the CPU backend: the same functions.
#pragma once
#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// ---- counters in global memory

inline bool counter_reached(const unsigned* counter, unsigned arrivals) {
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= arrivals;
}
inline void counter_wait(const unsigned* counter, unsigned arrivals, SANDBOX_SITE) {
    for (bool again = false; __atomic_load_n(counter, __ATOMIC_ACQUIRE) < arrivals; again = true)
        cpu::sandbox_yield(site, again);
}
inline void counter_arrive(unsigned* counter, unsigned arrivals = 1) {
    __atomic_fetch_add(counter, arrivals, __ATOMIC_RELEASE);
}
inline unsigned counter_load(const unsigned* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
inline void counter_arrive_acquire(unsigned* counter) { counter_arrive(counter); }
inline unsigned counter_fetch_add(unsigned* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQUIRE); }

// ---- warps and warpgroups

template <class T>
inline T uniform(T x, SANDBOX_SITE) {
    if (__any_sync(0xffffffffu, x != __shfl_sync(0xffffffffu, x, 0))) {
        cpu::sandbox_trap("uniform of a value that differs between the lanes of a warp", site);
    }
    return x;
}
inline float* pin_address(float* address) { return address; }
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
