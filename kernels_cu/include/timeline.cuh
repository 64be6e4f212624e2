// TIMELINE(name): a warp's step of that name begins here. It ends with the warp's next mark; TIMELINE(done) ends the last one,
// and tells which SM it was.
// A step called wait_… is a wait: what `python -m sandbox timeline KERNEL` adds up apart from work.
//
// A mark is nothing, to the last bit of the machine code, unless that command asks for it (TIMELINE_MARKS). Then a warp writes
// name and clock on a tape of its own. A tape has a byte for each cycle: a mark is written where the clock stands, so that
// nobody has to know how many there were before. It is a clock, a LOP3 and a store that nobody waits for, six instructions
// among the others: no branch either, so that blocks that nobody listens to write too, on tapes that nobody reads. Where
// registers are short a branch costs less: TIMELINE_BRANCH, defined before this header, is a kernel's own choice.
// experiments/018_timeline has what both cost.
// The compiler keeps memory accesses, barriers and warpgroup MMAs on their side of a mark; arithmetic it may move across.
#pragma once

#if TIMELINE_MARKS
#include <clocks.cuh>

#ifndef TIMELINE_BRANCH
#define TIMELINE_BRANCH 0
#endif

namespace timeline {

constexpr unsigned BYTES = TIMELINE_MARKS;  // of a tape, a power of two; the clock goes round it
constexpr unsigned MOST_BLOCKS = 4;

// What the host tells the marks, and they the host. Mirrored in sandbox/timeline/tapes.py, all three.
struct Mark {  // as `write_mark` writes it
    unsigned step, clock;
};
struct Anchor {  // of a warp that is done: where it was, and when, on a clock that all SMs share
    unsigned sm, clock;
    unsigned long long nanoseconds;
};
struct Tapes {
    Anchor* anchors;
    unsigned high, low;  // where the tapes begin, at a multiple of BYTES: each warp's beside the next one's, in one 4 GiB
    unsigned warps_per_block;
    unsigned blocks[MOST_BLOCKS];  // that are listened to, counted from 1; all others write where a next one would
};

constexpr unsigned number_of(const char* name) {  // FNV-1a: what stands for a step's name
    unsigned hash = 2166136261u;
    for (; *name; ++name) hash = (hash ^ static_cast<unsigned char>(*name)) * 16777619u;
    return hash;
}

}  // namespace timeline

extern "C" {
__constant__ timeline::Tapes sandbox_timeline;  // the host finds it by this name
}

namespace timeline {

template <unsigned STEP>
__device__ __forceinline__ void mark() {
    if (!marks_here()) return;
    // The same for all marks of a warp: the compiler keeps it, or asks again where registers are few.
    const Tapes& tapes = sandbox_timeline;
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) + 1;
    const unsigned warp = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) / 32;
    unsigned among = MOST_BLOCKS;
#pragma unroll
    for (unsigned i = 0; i < MOST_BLOCKS; ++i) among = block == tapes.blocks[i] ? i : among;
    if (TIMELINE_BRANCH && among == MOST_BLOCKS) return;
    const unsigned tape = tapes.low + among * tapes.warps_per_block * BYTES + warp * BYTES;
    const unsigned clock = sm_clock();
    write_mark(static_cast<unsigned long long>(tapes.high) << 32 | (tape | (clock & (BYTES - 8))), STEP, clock);
    if (STEP == number_of("done")) tapes.anchors[(tape - tapes.low) / BYTES] = {sm_index(), clock, shared_clock()};
}

}  // namespace timeline

#define TIMELINE(name) timeline::mark<timeline::number_of(#name)>()
#else
#define TIMELINE(name)
#endif
