// TIMELINE(name) marks the start of a step of this warp. The step ends at the warp's next mark. TIMELINE(done) ends the
// last step and records the SM. `python -m sandbox timeline KERNEL` reports steps named wait_… as waiting time.
//
// Without TIMELINE_MARKS, which that command defines, a mark adds no instruction. With it, a warp stores its clock in a
// buffer of its own. The buffer has one byte per cycle and the clock is the write position, so that no counter is
// needed; the offset within each aligned chunk of 4 * TIMELINE_STEPS bytes identifies the step. A mark is a clock read,
// a LOP3 and a store. A second mark of the same step within one chunk of cycles replaces the first.
//
// Marks do not branch: blocks that are not recorded write to a buffer that is not read. A kernel that defines
// TIMELINE_BRANCH before this header branches instead, which needs fewer registers. experiments/018_timeline has the
// cost of both.
//
// The compiler does not move memory accesses, barriers and wgmma across a mark; it may move arithmetic. Place a mark
// directly before the first memory access or barrier of its step.
#pragma once

#if TIMELINE_MARKS
#include <clocks.cuh>

#ifndef TIMELINE_BRANCH
#define TIMELINE_BRANCH 0
#endif

namespace timeline {

constexpr unsigned BYTES = TIMELINE_MARKS;      // of a warp's buffer, a power of two; the clock wraps around in it
constexpr unsigned CHUNK = 4 * TIMELINE_STEPS;  // bytes, and cycles: four bytes for each step
constexpr unsigned DONE = 0;                    // the step number of TIMELINE(done)

// Shared with the host: sandbox/timeline/mark_buffers.py has the same layout.
struct Anchor {  // of a finished warp: its SM, and one moment on the SM's clock and on the global timer
    unsigned sm, clock;
    unsigned long long nanoseconds;
};
struct MarkBuffers {
    Anchor* anchors;
    unsigned high, low;  // address of the first buffer, a multiple of BYTES; all buffers are in one aligned 4 GiB
    unsigned blocks[TIMELINE_BLOCKS];  // the recorded blocks; all others write to the buffers after the last of these
};

// The linear index of a block or thread. Extents are constants: recomputing it is cheap.
template <unsigned X, unsigned Y, unsigned Z, class Index>
__device__ __forceinline__ unsigned linear_index(const Index& index) {
    return index.x + (Y > 1 ? X * index.y : 0) + (Z > 1 ? X * Y * index.z : 0);
}

}  // namespace timeline

extern "C" {
__constant__ timeline::MarkBuffers sandbox_timeline;  // the host looks up this symbol
}

namespace timeline {

template <unsigned STEP>
__device__ __forceinline__ void mark() {
    if (!marks_here()) return;
    // Up to `buffer`, all marks of a warp compute the same values: the compiler keeps these in registers, or recomputes
    // them.
    const MarkBuffers& buffers = sandbox_timeline;
    const unsigned block = linear_index<TIMELINE_GRID_X, TIMELINE_GRID_Y, TIMELINE_GRID_Z>(blockIdx);
    const unsigned warp = linear_index<TIMELINE_BLOCK_X, TIMELINE_BLOCK_Y, TIMELINE_BLOCK_Z>(threadIdx) / 32;
    constexpr unsigned warps = (TIMELINE_BLOCK_X * TIMELINE_BLOCK_Y * TIMELINE_BLOCK_Z + 31) / 32;
    unsigned recorded = TIMELINE_BLOCKS;  // index among the recorded blocks
#pragma unroll
    for (unsigned i = 0; i < TIMELINE_BLOCKS; ++i) recorded = block == buffers.blocks[i] ? i : recorded;
    if (TIMELINE_BRANCH && recorded == TIMELINE_BLOCKS) return;
    const unsigned buffer = buffers.low + (recorded * warps + warp) * BYTES;
    const unsigned clock = sm_clock();
    write_mark<4 * STEP>(static_cast<unsigned long long>(buffers.high) << 32 | (buffer | (clock & (BYTES - CHUNK))),
                         clock);
    if (STEP == DONE) buffers.anchors[(buffer - buffers.low) / BYTES] = {sm_index(), clock, shared_clock()};
}

}  // namespace timeline

#define TIMELINE(name) timeline::mark<TIMELINE_STEP_##name>()
#else
#define TIMELINE(name)
#endif
