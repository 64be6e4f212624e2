// Wrappers of the inline PTX of Hopper's kernels (sm_90a), in addition to ptx.cuh: tma.cuh (mbarriers, TMA), wgmma.cuh
// (warpgroup MMA), and here counters in global memory, register allocation and named barriers.
// sandbox/cpu/include/hopper.cuh has the same functions for the CPU backend.
#pragma once
#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// ---- counters in global memory, with which blocks wait for each other

// Whether the counter has reached `arrivals`; and a wait until it has. Acquire: what the arriving threads wrote before
// is then visible to this thread, and to its TMA stores.
__device__ __forceinline__ bool counter_reached(const unsigned* counter, unsigned arrivals) {
    unsigned arrived;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return arrived >= arrivals;
}
__device__ __forceinline__ void counter_wait(const unsigned* counter, unsigned arrivals) {
    unsigned arrived;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    while (arrived < arrivals);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void counter_arrive(unsigned* counter, unsigned arrivals = 1) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(arrivals) : "memory");
}
// Reads the counter, without acquire: what the arriving threads wrote is visible only after the fence of a later
// counter_arrive_acquire. That fence also orders this thread's own writes before its arrival.
__device__ __forceinline__ unsigned counter_load(const unsigned* counter) {
    unsigned arrived;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    return arrived;
}
__device__ __forceinline__ void counter_arrive_acquire(unsigned* counter) {
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;\nfence.proxy.async.global;" ::"l"(counter)
                 : "memory");
}
// Adds one and returns the previous value; acquire, as counter_wait.
__device__ __forceinline__ unsigned counter_fetch_add(unsigned* counter) {
    unsigned before;
    asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return before;
}

// ---- warps and warpgroups

// True in one lane of the warp.
__device__ __forceinline__ bool elect() {
    unsigned elected;
    asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\nselp.b32 %0, 1, 0, elected;\n}"
                 : "=r"(elected));
    return elected;
}

// Tells the compiler that all lanes have the same value. What depends on it, such as a descriptor, is then computed
// once per warp in uniform registers, as wgmma requires. volatile: not hoisted out of loops, since there are few
// uniform registers. redux.sync also synchronises the warp, on which fwd_consumer.cuh relies.
__device__ __forceinline__ unsigned uniform(unsigned x) {
    unsigned y;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// A lane's address, computed at this point: the compiler moves it neither past a wait nor into branches.
__device__ __forceinline__ float* pin_address(float* address) {
    const unsigned long long whole = reinterpret_cast<unsigned long long>(address);
    const unsigned low = __shfl_sync(0xffffffffu, static_cast<unsigned>(whole), threadIdx.x % 32);
    const unsigned high = __shfl_sync(0xffffffffu, static_cast<unsigned>(whole >> 32), threadIdx.x % 32);
    return reinterpret_cast<float*>(static_cast<unsigned long long>(high) << 32 | low);
}

// Sets the number of registers per thread of a warpgroup; inc waits until other warpgroups have released enough.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers 1 to 15 of a block, for `threads` threads in whole warps (0 is __syncthreads). sync waits until all
// threads have arrived; arrive does not wait.
__device__ __forceinline__ void named_barrier_sync(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(unsigned id, unsigned threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// As sync; returns whether the predicate is true in any thread. The result is uniform over the warp.
__device__ __forceinline__ bool named_barrier_or(unsigned id, unsigned threads, bool predicate) {
    unsigned any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine;\nselp.b32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
        : "memory");
    return uniform(any);
}

// The inverse of ldmatrix_x4: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(SmemAddr row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// The same with each matrix transposed: lane i gives the address of row i % 8 of the transposed matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(SmemAddr row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}
