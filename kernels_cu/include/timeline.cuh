// TIMELINE(name): a warp's step of that name begins here. It ends with the warp's next mark; TIMELINE(done) ends the last one.
// A step called wait_… is a wait: what `python -m sandbox timeline KERNEL` adds up apart from work.
//
// A mark is nothing, to the last bit of the machine code, unless that command asks for it (TIMELINE_MARKS). Then a lane of
// the warp notes name and clock: no shared memory, no atomic, no parameter. The compiler keeps memory accesses, barriers
// and warpgroup MMAs on their side of a mark; arithmetic it may move across.
#pragma once

#if TIMELINE_MARKS
#include <clocks.cuh>

namespace timeline {

// What the host knows of a warp's notes and the warp goes on writing. Mirrored in sandbox/timeline/notes.py, all three.
struct alignas(32) Warp {
    unsigned next, begin, end;  // its place among the events: so many beyond `end` were not kept
    unsigned sm;
    unsigned long long nanoseconds;  // of the first mark, on a clock that all SMs share
};
struct Event {
    unsigned step, clock;
};
struct Notes {
    Warp* warps;  // of all blocks; null: nobody listens
    Event* events;
    unsigned blocks, warps_per_block;  // of the entry that is listened to
};

constexpr unsigned number_of(const char* name) {  // FNV-1a: what stands for a step's name
    unsigned hash = 2166136261u;
    for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619u;
    return hash;
}

}  // namespace timeline

extern "C" {
__constant__ timeline::Notes sandbox_timeline;  // the host finds it by this name
}

namespace timeline {

template <unsigned STEP>
__device__ __forceinline__ void note() {
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    if (!first_here() || !sandbox_timeline.warps) return;
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (block >= sandbox_timeline.blocks || thread / 32 >= sandbox_timeline.warps_per_block) return;  // of a later one
    Warp& warp = sandbox_timeline.warps[block * sandbox_timeline.warps_per_block + thread / 32];
    const unsigned place = warp.next, clock = sm_clock();
    warp.next = place + 1;
    if (place < warp.end) sandbox_timeline.events[place] = {STEP, clock};
    if (place == warp.begin) warp.sm = sm_index(), warp.nanoseconds = shared_clock();
}

}  // namespace timeline

#define TIMELINE(name) timeline::note<timeline::number_of(#name)>()
#else
#define TIMELINE(name)
#endif
