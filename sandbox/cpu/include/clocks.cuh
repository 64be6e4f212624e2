// The CPU backend's twin of kernels_cu/include/clocks.cuh: no time passes here, but there is an order.
#pragma once

// How many marks the block came to before this one. Shared memory, and so all bits set when a block begins.
inline unsigned sm_clock() {
    static __shared__ unsigned marks;
    return ++marks;
}

inline unsigned long long shared_clock() { return 0; }
inline unsigned sm_index() { return 0; }
inline bool first_here() { return cpu::sandbox_self->lane == 0; }  // which `elect` elects, too
