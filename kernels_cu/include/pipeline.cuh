// A pipeline of STAGES tiles in shared memory. Each stage has two mbarriers: full (TMA has written it) and empty (all
// consumers have read it). The producer acquires an empty stage and commits it by loading; a consumer waits for full
// and releases it.
#pragma once

// Stage and phase of the i-th tile of a pipeline. The producer acquires with phase ^ 1: the phase before the first one
// counts as completed, so the first STAGES acquires return at once.
__device__ __forceinline__ unsigned stage_of(unsigned i) { return i % STAGES; }
__device__ __forceinline__ unsigned parity_of(unsigned i) { return i / STAGES % 2; }
