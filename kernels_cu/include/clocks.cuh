// Clocks and SM index for timeline marks (timeline.cuh). The CPU backend has its own version of this file.
#pragma once

// The low 32 bits of this SM's cycle counter. The compiler does not move memory accesses across the call.
__device__ __forceinline__ unsigned sm_clock() {
    unsigned cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

// Nanoseconds of the global timer, which all SMs share; its resolution is 32 ns or more.
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

// Whether this lane writes the mark. All active lanes do: the same value to the same address is one memory access.
__device__ __forceinline__ constexpr bool marks_here() { return true; }

// Stores a mark to global memory at address + AT.
template <unsigned AT>
__device__ __forceinline__ void write_mark(unsigned long long address, unsigned clock) {
    asm volatile("st.global.u32 [%0 + %1], %2;" ::"l"(address), "n"(AT), "r"(clock) : "memory");
}
