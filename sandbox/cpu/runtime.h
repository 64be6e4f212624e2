// The seam between compiled kernels (through cuda_cpu.h) and the runtime that executes them.
//
// Every CUDA thread is a fiber; the fibers of a block take turns on one OS thread and change over only where they
// meet: at a barrier, in a warp collective, or when they end. Blocks are spread over OS threads.
#pragma once
#include <stdint.h>

struct uint3 { unsigned x, y, z; };

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cpu {

struct Thread {  // what a kernel may know of the CUDA thread it runs in
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    unsigned lane;
};

struct Site { const char* file; int line; };  // where in the .cu

constexpr unsigned MAX_DYNAMIC_SMEM = 227 * 1024;  // the most that any architecture gives a block

enum class Collective : int { none, syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all, match, reduce };

extern "C" {
// The running CUDA thread. initial-exec: one instruction to read it, and the runtime is small enough for static TLS.
extern __attribute__((tls_model("initial-exec"))) thread_local Thread* sandbox_self;

// Waits until every thread of the block has come to this very place.
void sandbox_barrier(Site site);
// Hands in `value`; returns the 32 values of the warp once every lane in `mask` has called the same collective.
const uint64_t* sandbox_collective(Collective what, unsigned mask, uint64_t value, Site site);
// Ends the launch with an error.
[[noreturn]] void sandbox_trap(const char* reason, Site site);

struct Launch {
    void (*entry)(void** args);
    void** args;
    char* (*dynamic_smem)();  // where the calling OS thread has its dynamic shared memory
    dim3 grid, block;
    unsigned smem_bytes;
    unsigned workers;  // OS threads to spread the blocks over
    char* error;       // of error_size bytes: what went wrong, "" when all is well
    uint64_t error_size;
};

int sandbox_launch(const Launch* launch);  // 0 when every block ran to its end
}

}  // namespace cpu
