// A pipeline of STAGES tiles in shared memory. Each stage has two mbarriers: full (TMA has written it) and empty (all
// consumers have read it). The producer acquires an empty stage and loads it. A consumer waits until the stage is full,
// and releases it when it has read it.
#pragma once
#include <hopper.cuh>

// Stage and phase of the i-th tile of a pipeline. The producer acquires with phase ^ 1: the phase before the first one
// counts as completed, so the first STAGES acquires return at once.
__device__ __forceinline__ unsigned stage_of(unsigned i) { return i % STAGES; }
__device__ __forceinline__ unsigned parity_of(unsigned i) { return i / STAGES % 2; }

// The barriers of one pipeline: at byte AT of shared memory, all full ones, then all empty ones, 8 bytes each. i counts
// the tiles that pass through the pipeline. There is no function to commit: TMA completes the phase of full(base,
// stage).
template <unsigned AT>
struct Pipeline {
    static constexpr unsigned END = AT + 16 * STAGES;
    static __device__ __forceinline__ SmemAddr full(SmemAddr base, unsigned stage) { return base + AT + 8 * stage; }
    static __device__ __forceinline__ SmemAddr empty(SmemAddr base, unsigned stage) {
        return base + (AT + 8 * STAGES) + 8 * stage;
    }
    // Producer: waits until tile i's stage is empty.
    static __device__ __forceinline__ void acquire(SmemAddr base, unsigned i) {
        mbarrier_wait(empty(base, stage_of(i)), parity_of(i) ^ 1);
    }
    // Consumer: waits until tile i has been loaded.
    static __device__ __forceinline__ void wait(SmemAddr base, unsigned i) {
        mbarrier_wait(full(base, stage_of(i)), parity_of(i));
    }
    // Consumer: tile i's stage may be overwritten. One lane of each warp calls it.
    static __device__ __forceinline__ void release(SmemAddr base, unsigned i) {
        mbarrier_arrive(empty(base, stage_of(i)));
    }
};
