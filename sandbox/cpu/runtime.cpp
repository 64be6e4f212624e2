// Executes a grid of CUDA blocks on the CPU: fiber scheduler, barriers, warp collectives, asynchronous copies, error
// reports.
//
// Built once per host compiler and sanitizer; every kernel library links it. The runtime itself is not instrumented.
// ThreadSanitizer (-DSANDBOX_TSAN): each fiber is registered as a thread, and only barriers order threads. A race
// between two CUDA threads is therefore found in every run, although fibers of a block never run at the same time.
// AddressSanitizer (-DSANDBOX_ASAN): stack switches are announced, and the destination of a pending cp.async is
// poisoned. -DSANDBOX_SHADOW: kernels call the runtime at each load and store; a read of unwritten shared memory is an
// error.
#include "runtime.h"

#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fiber.h"
#include "sanitizers.h"
#include "tensor.h"

namespace cpu {

extern "C" {
thread_local Thread* sandbox_self;
#if defined(SANDBOX_SHADOW)
uint64_t sandbox_stack_fill;
#endif
}

#include "stack_fill.h"

namespace {

#include "block.h"
#include "scheduler.h"
#include "deadlock.h"

}  // namespace

#include "barriers.h"
#include "async_copies.h"
#include "hopper_ops.h"
#include "tma_ops.h"
#include "wgmma_ops.h"

extern "C" void sandbox_trap(const char* reason, Site site) {
    const uint3 &t = self().thread_idx, &b = self().block_idx;
    current->fail("%s at %s:%d, in block (%u,%u,%u) thread (%u,%u,%u)", reason, site.file, site.line, b.x, b.y, b.z,
                  t.x, t.y, t.z);
    pause(true);
    abort();  // never resumed
}

#include "memory_reports.h"
#include "launch.h"

}  // namespace cpu
