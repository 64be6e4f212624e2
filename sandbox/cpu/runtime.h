// The interface between compiled kernels (through cuda_cpu.h) and the runtime that executes them.
//
// Every CUDA thread is a fiber. The fibers of a block share one OS thread and switch only at a barrier, in a warp
// collective, or at the end. Blocks are distributed over OS threads.
#pragma once
#include <stdint.h>

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cpu {

struct Thread {  // the built-in variables of a CUDA thread
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    unsigned lane, warp_mask;  // warp_mask: the lanes that exist; the last warp may be partial
};

struct Site {
    const char* file;
    int line;
};  // a call in the .cu

constexpr unsigned MAX_DYNAMIC_SMEM = 227 * 1024;  // per block: the largest limit of any architecture

enum class Collective : int {
    none,
    syncwarp,
    shfl,
    shfl_up,
    shfl_down,
    shfl_xor,
    ballot,
    any,
    all,
    match,
    reduce,
    ldmatrix,
    mma,
    stmatrix,
    wgmma,
    wgmma_wait
};

// Tensor map: a (B, H, S, D) tensor, innermost dimension first, and the box that one copy moves. Strides in bytes. The
// map of a ragged batch has a fifth dimension. A box has extent 1 in H, B and the fifth dimension. Written by Box in
// sandbox/launch/tensor_maps.py.
constexpr unsigned MAP_RANK = 5;
struct TensorMap {
    char* data;
    uint64_t size[MAP_RANK], stride[MAP_RANK - 1];
    uint32_t box[MAP_RANK], itemsize, rank;
};

enum class Format : int { float16, bfloat16, e4m3, e5m2 };  // of wgmma operands

struct Product {        // one lane's part of a wgmma
    float* d;           // n / 2 accumulators
    const unsigned* a;  // four registers; null: A by descriptor
    uint64_t a_descriptor, b_descriptor;
    unsigned n;
    bool a_k_major, b_k_major, accumulate;
    Format format;
};

extern "C" {
// The running CUDA thread. initial-exec: read by one instruction; the runtime is small enough for static TLS.
extern __attribute__((tls_model("initial-exec"))) thread_local Thread* sandbox_self;

// Block barrier: waits until every thread of the block has reached the same call.
void sandbox_barrier(Site site);
// Block barrier that returns whether the predicate of any thread is true.
bool sandbox_barrier_or(bool predicate, Site site);
// Cluster barrier: waits until every thread of the cluster has reached it; threads of this block, the same call.
void sandbox_cluster_barrier(Site site);
// The two halves of a cluster barrier: the wait waits for all threads. Each wait needs an arrival before it.
void sandbox_cluster_arrive(Site site);
void sandbox_cluster_wait(Site site);
// The address in the shared memory of block `cta_rank` of the cluster that corresponds to `own` in this block.
const char* sandbox_map_shared_rank(const char* own, unsigned cta_rank);
// Arrives at the mbarrier of block `cta_rank` of the cluster that corresponds to `barrier` in this block, and expects
// `bytes` there.
void sandbox_mbarrier_arrive_at_rank(char* barrier, unsigned bytes, unsigned cta_rank, Site site);
// Copies to the address of that block that corresponds to `to`. The bytes are read when the copy completes.
void sandbox_bulk_copy_to_rank(char* to, const char* from, unsigned bytes, char* barrier, unsigned cta_rank, Site site);
// Warp collective: waits until every existing lane in `mask` has called the same collective. Returns the 32 values of
// the warp, valid until the next collective.
const uint64_t* sandbox_collective(Collective what, unsigned mask, uint64_t value, Site site);
// Memory fence. All fences are totally ordered.
void sandbox_fence();
// cp.async copies `valid` bytes and writes zeros up to `bytes`. The copy is executed when its group is waited for, so a
// missing wait is detected. commit closes a group; wait completes all closed groups except the newest `pending`.
void sandbox_cp_async(void* to, const void* from, unsigned bytes, unsigned valid);
void sandbox_cp_async_commit();
void sandbox_cp_async_wait(unsigned pending);
// mbarriers. A deadlock is reported with the wait of each thread.
void sandbox_mbarrier_init(char* barrier, unsigned arrivals, Site site);
void sandbox_mbarrier_arrive(char* barrier, unsigned bytes, Site site);
void sandbox_mbarrier_wait(char* barrier, unsigned parity, Site site);
// bar.sync, bar.arrive, bar.red.or; returns whether any predicate is true.
bool sandbox_named_barrier(unsigned id, unsigned threads, bool waits, bool predicate, Site site);
// setmaxnreg: a block has 65536 registers, initially distributed evenly; an increase waits until enough registers are
// free.
void sandbox_setmaxnreg(unsigned registers, Site site);
// TMA and bulk copies. A load completes some scheduling steps later, in the default order of threads only while a
// thread waits for its mbarrier; until then its destination contains NaN. A store reads shared memory when it is waited
// for. A reduction is added when the block ends or its full completion is waited for. A bulk store without reduction is
// written when no other block can make progress without it; its block waits until then.
void sandbox_tma_load(char* to, const TensorMap* map, const int* at, char* barrier, Site site);
void sandbox_bulk_load(char* to, const void* from, unsigned bytes, char* barrier, Site site);
void sandbox_tma_store(const char* from, const TensorMap* map, const int* at, Site site);
void sandbox_bulk_store(float* to, const char* from, unsigned bytes, bool add, Site site);
void sandbox_bulk_commit();
void sandbox_bulk_wait_read(unsigned pending);
void sandbox_bulk_wait();
// In a loop that waits for another block; again: not the first time in this wait.
void sandbox_yield(Site site, bool again);
// Records a write of the generic proxy, which the async proxy sees only after a fence.
void sandbox_generic_write(const char* at, unsigned bytes);
void sandbox_fence_proxy_async();
// wgmma, by warp: operands are read, and accumulators written, when their group is waited for. Until then the
// accumulators are NaN. An operand that changes in between is an error.
void sandbox_wgmma(const Product* mine, Site site);
void sandbox_wgmma_fence();
void sandbox_wgmma_commit();
void sandbox_wgmma_wait(unsigned pending, Site site);
void sandbox_wgmma_settled(const float* d, Site site);
// Ends the launch with an error.
[[noreturn]] void sandbox_trap(const char* reason, Site site);

enum Fill : unsigned { NANS, ZEROS, REPORTED_NANS };  // REPORTED_NANS: a read is an error

struct Launch {
    void (*entry)(void** args);
    void** args;
    char* (*dynamic_smem)();  // dynamic shared memory of the calling OS thread
    dim3 grid, block;
    unsigned cluster;  // blocks per cluster, along x
    unsigned smem_bytes;
    unsigned workers;  // OS threads
    // 0: ascending; else blocks descending, warps and lanes shuffled with this seed, and one lagging warp per block
    unsigned order;
    unsigned stack;  // a Fill: initial contents of local variables; with SANDBOX_SHADOW only
    char* error;     // error_size bytes: the error message, "" on success
    uint64_t error_size;
};

int sandbox_launch(const Launch* launch);  // 0 on success
}

}  // namespace cpu
