// A ring of STAGES tiles in shared memory, each with two mbarriers: full and empty.
#pragma once

// The stage and the parity of the i-th tile that goes through a ring of STAGES.
__device__ __forceinline__ unsigned stage_of(unsigned i) { return i % STAGES; }
__device__ __forceinline__ unsigned parity_of(unsigned i) { return i / STAGES % 2; }
