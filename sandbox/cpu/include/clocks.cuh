// kernels_cu/include/clocks.cuh for the CPU backend: a counter instead of a clock.
#pragma once

// One tick per mark of the block, counted from the initial contents of shared memory.
inline unsigned sm_clock() {
    static __shared__ unsigned marks;
    return 4 * TIMELINE_STEPS * (++marks + 1);  // never 0, which means "no mark"
}

inline unsigned long long shared_clock() { return 0; }
inline unsigned sm_index() { return 0; }
inline bool marks_here() { return cpu::sandbox_self->lane == 0; }  // the lane that `elect` selects

template <unsigned AT>
inline void write_mark(unsigned long long address, unsigned clock) {
    *reinterpret_cast<unsigned*>(address + AT) = clock;
}
