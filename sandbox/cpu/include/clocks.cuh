// The CPU backend's twin of kernels_cu/include/clocks.cuh: no time passes here, but there is an order.
#pragma once

// A moment of a tape for each mark that the block came to. Shared memory, and so all bits set when a block begins.
inline unsigned sm_clock() {
    static __shared__ unsigned marks;
    return 4 * TIMELINE_STEPS * (++marks + 1);  // never 0: no mark is there
}

inline unsigned long long shared_clock() { return 0; }
inline unsigned sm_index() { return 0; }
inline bool marks_here() { return cpu::sandbox_self->lane == 0; }  // which `elect` elects, too

template <unsigned AT>
inline void write_mark(unsigned long long address, unsigned clock) {
    *reinterpret_cast<unsigned*>(address + AT) = clock;
}
