// What time it is, where, and who is there, for marks (timeline.cuh). The CPU backend has a twin of this file.
#pragma once

// Cycles of this SM's clock, the low 32 bits. No memory access is moved across.
__device__ __forceinline__ unsigned sm_clock() {
    unsigned cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

// Nanoseconds of a clock that all SMs share; it advances in steps of 32 or more.
__device__ __forceinline__ unsigned long long shared_clock() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

__device__ __forceinline__ unsigned sm_index() {
    unsigned index;
    asm("mov.u32 %0, %%smid;" : "=r"(index));
    return index;
}

// Whether this lane is the first of those of its warp that are here: one, where a single lane was elected.
__device__ __forceinline__ bool first_here() {
    unsigned lower;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower));
    return !(__activemask() & lower);
}
