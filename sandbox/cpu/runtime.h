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
    unsigned lane, warp_mask;  // its place in the warp; the lanes that the warp has: a last one may be partial
};

struct Site { const char* file; int line; };  // where in the .cu

constexpr unsigned MAX_DYNAMIC_SMEM = 227 * 1024;  // the most that any architecture gives a block

enum class Collective : int { none, syncwarp, shfl, shfl_up, shfl_down, shfl_xor, ballot, any, all, match, reduce, ldmatrix, mma, stmatrix,
                               wgmma, wgmma_wait };

// What a tensor map is here: a (B, H, S, D) tensor, innermost dimension first, and the box that one copy moves. Strides in
// bytes. A ragged batch's has a fifth dimension, in which a box is one wide, as it is in H and B. Written by Box in
// sandbox/launch/tensor_maps.py.
constexpr unsigned MAP_RANK = 5;
struct TensorMap {
    char* data;
    uint64_t size[MAP_RANK], stride[MAP_RANK - 1];
    uint32_t box[MAP_RANK], itemsize, rank;
};

enum class Format : int { float16, bfloat16, e4m3, e5m2 };  // of a wgmma's operands

struct Product {  // one lane's part of a wgmma
    float* d;                 // n / 2 accumulators
    const unsigned* a;        // four registers, or null: A by descriptor
    uint64_t a_descriptor, b_descriptor;
    unsigned n;
    bool a_k_major, b_k_major, accumulate;
    Format format;
};

extern "C" {
// The running CUDA thread. initial-exec: one instruction to read it, and the runtime is small enough for static TLS.
extern __attribute__((tls_model("initial-exec"))) thread_local Thread* sandbox_self;

// Waits until every thread of the block has come to this very place.
void sandbox_barrier(Site site);
// The same; returns whether any thread handed in true.
bool sandbox_barrier_or(bool predicate, Site site);
// Waits until every thread of the team has come to it, those of this block to this very place.
void sandbox_cluster_barrier(Site site);
// Where that member of the team has what lies at `own` in this block's shared memory.
const char* sandbox_map_shared_rank(const char* own, unsigned cta_rank);
// Hands in `value`; returns the 32 values of the warp, to be read at once, when every lane in `mask` (that the warp has)
// has called the same collective.
const uint64_t* sandbox_collective(Collective what, unsigned mask, uint64_t value, Site site);
// What is written before a fence is seen by whoever passes one later.
void sandbox_fence();
// cp.async: a copy of `valid` bytes, then zeros up to `bytes`, that happens only when its group is waited for, so that
// a missing wait shows; commit closes a group; wait completes all closed groups but the newest `pending`.
void sandbox_cp_async(void* to, const void* from, unsigned bytes, unsigned valid);
void sandbox_cp_async_commit();
void sandbox_cp_async_wait(unsigned pending);
// mbarriers. A wait whose phase never ends is reported with everything that waits.
void sandbox_mbarrier_init(char* barrier, unsigned arrivals, Site site);
void sandbox_mbarrier_arrive(char* barrier, unsigned bytes, Site site);
void sandbox_mbarrier_wait(char* barrier, unsigned parity, Site site);
// bar.sync, bar.arrive, bar.red.or; returns whether any thread brought true.
bool sandbox_named_barrier(unsigned id, unsigned threads, bool waits, bool predicate, Site site);
// setmaxnreg: a block has 65536 registers, dealt out evenly at first; taking waits until others gave back.
void sandbox_setmaxnreg(unsigned registers, Site site);
// Boxes. What is requested comes some scheduling steps later, until when its place in shared memory holds NaN; what is
// sent leaves shared memory only when it is waited for. Sums are added later still: when the block ends. Numbers that are
// stored come last of all, when no other block can go on without them, and their block stands still until then.
void sandbox_tma_load(char* to, const TensorMap* map, const int* at, char* barrier, Site site);
void sandbox_tma_store(const char* from, const TensorMap* map, const int* at, Site site);
void sandbox_bulk_store(float* to, const char* from, unsigned bytes, bool add, Site site);
void sandbox_bulk_commit();
void sandbox_bulk_wait_read(unsigned pending);
void sandbox_bulk_wait();
void sandbox_yield();
// Ordinary writes that the async proxy does not see before the fence.
void sandbox_generic_write(const char* at, unsigned bytes);
void sandbox_fence_proxy_async();
// wgmma, by warp: operands are read, and accumulators written, only when their group is waited for; until then they
// are NaN. An operand that changes in between is reported.
void sandbox_wgmma(const Product* mine, Site site);
void sandbox_wgmma_fence();
void sandbox_wgmma_commit();
void sandbox_wgmma_wait(unsigned pending, Site site);
void sandbox_wgmma_settled(const float* d, Site site);
// Ends the launch with an error.
[[noreturn]] void sandbox_trap(const char* reason, Site site);

enum Fill : unsigned { NANS, ZEROS, REPORTED_NANS };  // the last: a read of one ends the launch

struct Launch {
    void (*entry)(void** args);
    void** args;
    char* (*dynamic_smem)();  // where the calling OS thread has its dynamic shared memory
    dim3 grid, block;
    unsigned cluster;  // blocks, neighbours along x, that run at one time and read each other's shared memory
    unsigned smem_bytes;
    unsigned workers;  // OS threads to spread the blocks over
    unsigned order;    // 0: blocks, warps and lanes in ascending order; else blocks descending, and a shuffle's seed; one warp lags behind
    unsigned stack;    // a Fill: what local variables hold before they are written; with SANDBOX_SHADOW alone
    char* error;       // of error_size bytes: what went wrong, "" when all is well
    uint64_t error_size;
};

int sandbox_launch(const Launch* launch);  // 0 when every block ran to its end
}

}  // namespace cpu
