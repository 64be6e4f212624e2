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

// Whether this lane writes a mark: all that are here do, the same to the same place, which is one access to memory.
__device__ __forceinline__ constexpr bool marks_here() { return true; }

// A mark's four bytes, to global memory, AT bytes behind an address; nobody waits for them.
template <unsigned AT>
__device__ __forceinline__ void write_mark(unsigned long long address, unsigned clock) {
    asm volatile("st.global.u32 [%0 + %1], %2;" ::"l"(address), "n"(AT), "r"(clock) : "memory");
}
