// TIMELINE(name): a warp's step of that name begins here. It ends with the warp's next mark; TIMELINE(done) ends the last one,
// and tells which SM it was.
// A step called wait_… is a wait: what `python -m sandbox timeline KERNEL` adds up apart from work.
//
// A mark is nothing, to the last bit of the machine code, unless that command asks for it (TIMELINE_MARKS). Then a warp writes
// its clock on a tape of its own. A tape has a byte for each cycle: a mark is written where the clock stands, so that
// nobody has to know how many there were before, and each step has its own place in each 64 bytes, which tells its name. So a mark
// is a clock, a LOP3 and a store that nobody waits for; one of the same step within 64 cycles would replace it.
// No branch either: blocks that nobody listens to write too, on tapes that nobody reads. TIMELINE_BRANCH, defined
// before this header, is a kernel's own choice: then they jump, which is less where registers are short.
// experiments/018_timeline has what both cost.
// The compiler keeps memory accesses, barriers and warpgroup MMAs on their side of a mark; arithmetic it may move across, but
// what is written behind a barrier and a mark it computes there. So a mark stands right before the step's first such access.
#pragma once

#if TIMELINE_MARKS
#include <clocks.cuh>

#ifndef TIMELINE_BRANCH
#define TIMELINE_BRANCH 0
#endif

namespace timeline {

constexpr unsigned BYTES = TIMELINE_MARKS;       // of a tape, a power of two; the clock goes round it
constexpr unsigned MOMENT = 4 * TIMELINE_STEPS;  // bytes, and cycles, of which each step has four
constexpr unsigned DONE = 0;                     // the number of the step that ends all others

// What the host tells the marks, and they the host. Mirrored in sandbox/timeline/tapes.py, both.
struct Anchor {  // of a warp that is done: where it was, and when, on a clock that all SMs share
    unsigned sm, clock;
    unsigned long long nanoseconds;
};
struct MarkBuffers {
    Anchor* anchors;
    unsigned high, low;  // where the tapes begin, at a multiple of BYTES: each warp's beside the next one's, in one 4 GiB
    unsigned blocks[TIMELINE_BLOCKS];  // that are listened to; all others write where a next one would
};

// x, y, z as one number. Extents are constants, so that a warp whose registers are few finds it out again in no time.
template <unsigned X, unsigned Y, unsigned Z, class Index>
__device__ __forceinline__ unsigned number_of(const Index& at) {
    return at.x + (Y > 1 ? X * at.y : 0) + (Z > 1 ? X * Y * at.z : 0);
}

}  // namespace timeline

extern "C" {
__constant__ timeline::MarkBuffers sandbox_timeline;  // the host finds it by this name
}

namespace timeline {

template <unsigned STEP>
__device__ __forceinline__ void mark() {
    if (!marks_here()) return;
    // The same for all marks of a warp: the compiler keeps it, or asks again where registers are few.
    const MarkBuffers& tapes = sandbox_timeline;
    const unsigned block = number_of<TIMELINE_GRID_X, TIMELINE_GRID_Y, TIMELINE_GRID_Z>(blockIdx);
    const unsigned warp = number_of<TIMELINE_BLOCK_X, TIMELINE_BLOCK_Y, TIMELINE_BLOCK_Z>(threadIdx) / 32;
    constexpr unsigned warps = (TIMELINE_BLOCK_X * TIMELINE_BLOCK_Y * TIMELINE_BLOCK_Z + 31) / 32;
    unsigned among = TIMELINE_BLOCKS;
#pragma unroll
    for (unsigned i = 0; i < TIMELINE_BLOCKS; ++i) among = block == tapes.blocks[i] ? i : among;
    if (TIMELINE_BRANCH && among == TIMELINE_BLOCKS) return;
    const unsigned tape = tapes.low + (among * warps + warp) * BYTES;
    const unsigned clock = sm_clock();
    write_mark<4 * STEP>(static_cast<unsigned long long>(tapes.high) << 32 | (tape | (clock & (BYTES - MOMENT))), clock);
    if (STEP == DONE) tapes.anchors[(tape - tapes.low) / BYTES] = {sm_index(), clock, shared_clock()};
}

}  // namespace timeline

#define TIMELINE(name) timeline::mark<TIMELINE_STEP_##name>()
#else
#define TIMELINE(name)
#endif
