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
#include "tensor.h"

#if defined(SANDBOX_TSAN)
extern "C" void* __tsan_get_current_fiber(void);
extern "C" void* __tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void* fiber);
extern "C" void __tsan_switch_to_fiber(void* fiber, unsigned flags);
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" void __tsan_read_range(void* address, unsigned long size);
extern "C" void __tsan_write_range(void* address, unsigned long size);
extern "C" void __tsan_func_entry(void* called_from);
extern "C" void __tsan_func_exit(void);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#elif defined(SANDBOX_ASAN)
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
extern "C" void __asan_poison_memory_region(const volatile void* address, size_t size);
extern "C" void __asan_unpoison_memory_region(const volatile void* address, size_t size);
extern "C" void* __asan_region_is_poisoned(void* address, size_t size);
extern "C" void __asan_loadN(const void* address, size_t size);
extern "C" void __asan_storeN(void* address, size_t size);
extern "C" void* __asan_get_report_address(void);
extern "C" const char* __asan_get_report_description(void);
extern "C" void sandbox_print_place(const char* at);  // of main.cpp
#endif
#if defined(SANDBOX_SHADOW)
#include <dlfcn.h>
#include <execinfo.h>
#endif

namespace cpu {

extern "C" {
thread_local Thread* sandbox_self;
#if defined(SANDBOX_SHADOW)
uint64_t sandbox_stack_fill;
#endif
}

#if defined(SANDBOX_SHADOW)
constexpr uint64_t STACK_NAN = 0xfff5fff5fff5fff5;  // a NaN as fp64, fp32, fp16 and bf16, and no number that kernels use
constexpr size_t FILLED_BYTES = 32 * 1024;          // filled at the top of a stack when a block begins
#if defined(__x86_64__)
// -mfentry calls this function before another function sets up its frame. It fills 512 bytes below the stack pointer,
// which earlier calls have used. Every register may contain an argument. The words pushed here are in the new frame
// too, so they are filled at the end.
asm(R"(
    .text
    .globl __fentry__
    .type __fentry__, @function
__fentry__:
    pushq %rax
    pushq %rcx
    pushq %rdi
    movq sandbox_stack_fill(%rip), %rax
    leaq -512(%rsp), %rdi
    movl $64, %ecx
    rep stosq
    popq %rdi
    popq %rcx
    movq %rax, -16(%rsp)
    movq %rax, -8(%rsp)
    popq %rax
    pushq sandbox_stack_fill(%rip)
    leaq 8(%rsp), %rsp
    ret
    .size __fentry__, . - __fentry__
)");
#endif
#endif

namespace {

constexpr unsigned WARP = 32, LAG_STEPS = 64;  // LAG_STEPS: scheduling steps a lagging warp is delayed at most
constexpr size_t STACK_BYTES = 512 * 1024, GUARD_BYTES = 64 * 1024;  // reserved; only touched pages are committed
#if defined(SANDBOX_TSAN)
constexpr bool TSAN = true;
constexpr unsigned MAX_FIBERS = 4096;  // ThreadSanitizer supports 8128 threads
#else
constexpr bool TSAN = false;
constexpr unsigned MAX_FIBERS = 16384;  // a stack and its guard are two mappings, and Linux allows a process 65530
#endif

enum class State { ready, at_barrier, in_collective, at_mbarrier, at_named_barrier, for_registers, returned };

struct Copy {  // one pending cp.async
    char* to;
    const char* from;
    unsigned bytes, valid, group;
    void* issued;  // return address in the kernel: reports name it as the location of the deferred copy
};

struct BulkStore {  // one pending store from shared to global memory: a box of a tensor map, or contiguous floats
    const char* from;
    TensorMap map;
    int at[MAP_RANK];
    float* numbers;  // destination of contiguous floats; null: a box
    unsigned bytes;
    bool add;  // add to the destination
    bool committed;
    unsigned newer_groups;  // committed after this group
    Site site;
};

struct Fiber;

struct ReadStore {  // floats that were read from shared memory and are not yet written to global memory
    float *to, *numbers;
    unsigned count;
    bool add;
    const Fiber* by;
};

template <class T> struct List {
    T* items;
    unsigned count, room;
    T& add() {
        if (count == room) grow();
        return items[count++];
    }
    // Fibers of a block share some lists. They do not run concurrently, but ThreadSanitizer sees unordered threads.
    void grow() {
#if defined(SANDBOX_TSAN)
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
        items = static_cast<T*>(realloc(static_cast<void*>(items), (room = room ? 2 * room : 16) * sizeof(T)));
#if defined(SANDBOX_TSAN)
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
    }
};

struct Fiber : Thread {
    Context context;
    State state;
    Site site;           // of the barrier or collective in which it waits
    Collective what;
    unsigned mask;       // of the collective
    uint64_t value;      // its input to the collective
    char* stack;
    void* tool;          // the sanitizer's handle of this fiber
    char order[2];       // ThreadSanitizer's synchronisation objects of __syncwarp, used alternately
    unsigned syncwarps;  // calls so far
    Copy* copies;        // sorted by group
    unsigned copy_count, copy_room, copy_group;
    List<BulkStore> bulk_stores;
    char* mbarrier;      // on which it waits until the phase of this parity ends
    unsigned parity, named_barrier, registers;
    bool wgmma_fenced;
    unsigned wgmma_operations;  // wgmma, commit and wait calls so far
    unsigned cluster_barriers;   // cluster barrier calls so far
};

bool same_site(Site a, Site b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }
bool same_collective(const Fiber& a, const Fiber& b) {
    return a.state == State::in_collective && b.state == State::in_collective && a.what == b.what && a.mask == b.mask;
}

// This OS thread's copy of the kernel's shared memory. `__shared__` is thread_local, so shared memory is the TLS block
// of the kernel's library; dynamic shared memory is a part of it.
struct SharedMemory {
    char *begin, *end, *dynamic;
    unsigned dynamic_bytes;
#if defined(SANDBOX_SHADOW)
    bool* written;  // per byte: written by this block

    bool contains(const char* at) const { return begin <= at && at < end; }
    void mark(const char* at, size_t bytes, bool as_written) {
        for (size_t i = 0; i < bytes; ++i)
            if (contains(at + i)) written[at + i - begin] = as_written;
    }
    bool was_written(const char* at, size_t bytes) const {
        for (size_t i = 0; i < bytes; ++i)
            if (contains(at + i) && !written[at + i - begin]) return false;
        return true;
    }
    ~SharedMemory() { free(written); }
#else
    void mark(const char*, size_t, bool) {}
    bool was_written(const char*, size_t) const { return true; }
#endif

    explicit SharedMemory(const Launch& launch) : dynamic_bytes(launch.smem_bytes) {
        dynamic = begin = launch.dynamic_smem();  // the call also allocates the TLS block
        end = dynamic + MAX_DYNAMIC_SMEM;
        dl_iterate_phdr(find_tls_block, this);
#if defined(SANDBOX_SHADOW)
        written = static_cast<bool*>(malloc(end - begin));
#endif
#if defined(SANDBOX_ASAN)
        const unsigned used = (dynamic_bytes + 7) / 8 * 8;
        __asan_poison_memory_region(dynamic + used, MAX_DYNAMIC_SMEM - used);
    }
    ~SharedMemory() {
        __asan_unpoison_memory_region(dynamic, MAX_DYNAMIC_SMEM);
#endif
    }

    static int find_tls_block(dl_phdr_info* module, size_t, void* self) {
        SharedMemory& smem = *static_cast<SharedMemory*>(self);
        char* base = static_cast<char*>(module->dlpi_tls_data);
        for (int i = 0; base && i < module->dlpi_phnum; ++i) {
            const size_t size = module->dlpi_phdr[i].p_memsz;
            if (module->dlpi_phdr[i].p_type == PT_TLS && base <= smem.dynamic && smem.dynamic < base + size) {
                smem.begin = base;
                smem.end = base + size;
                return 1;
            }
        }
        return 0;
    }

    // Makes reads of unwritten shared memory visible in the result. All bits set is NaN in fp32, fp16 and bf16. Some
    // kernels recompute non-finite rows, which would hide it: alternate blocks contain finite values (1.3e7, 14.6 and
    // 1.3e7).
    void poison(bool finite) {
        const int byte = finite ? 0x4b : 0xff;
        memset(begin, byte, dynamic - begin);
        memset(dynamic, byte, dynamic_bytes);
        memset(dynamic + MAX_DYNAMIC_SMEM, byte, end - (dynamic + MAX_DYNAMIC_SMEM));
#if defined(SANDBOX_SHADOW)
        memset(written, false, end - begin);
#endif
    }
};

#include "proxies.h"
#include "hopper.h"

// Delays bulk stores (not reductions) until no other block can make progress without them. A block that adds to, or
// reads, the destination without waiting for the store then computes a wrong result. Delayed stores complete in reverse
// order.
struct StoreOrder {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    unsigned running = 0, in_flight = 0;  // OS threads whose block can make progress; that are blocked in wait()

    void count(int more) {
        pthread_mutex_lock(&lock);
        running += more;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    void wait() {
        if (TSAN) return;  // the lock would order blocks that the kernel does not order
        pthread_mutex_lock(&lock);
        --running;
        const unsigned place = ++in_flight;
        pthread_cond_broadcast(&changed);
        while (running || in_flight != place) pthread_cond_wait(&changed, &lock);
        --in_flight, ++running;
        pthread_mutex_unlock(&lock);
    }
};

struct ClusterBlock {  // state of a block that the other blocks of its cluster read
    SharedMemory* smem;
    unsigned barriers;  // cluster barriers reached by all of its threads
    bool ended;
};

struct Block {
    const Launch& launch;
    StoreOrder& stores;
    const int& failed;  // whether any block of the launch has failed
    ClusterBlock* cluster = nullptr;
    unsigned cta_rank = 0;
    unsigned threads;
    Fiber* fibers;
    unsigned *thread_order, *warp_order;  // execution order: threads within each warp, and warps
    uint64_t values[WARP];  // inputs of the running warp's lanes to a collective
    Context scheduler;
    void* scheduler_tool = nullptr;
    const void* scheduler_stack = nullptr;  // stack bounds, for AddressSanitizer
    size_t scheduler_stack_size = 0;
    unsigned generation = 0;  // block barriers completed
    bool any[2] = {};         // result of __syncthreads_or, by parity of `generation`
    char order[2] = {};       // as Fiber::order, of __syncthreads
    char begun = 0, ended = 0;  // synchronisation objects of the begin and end of a block
    SharedMemory smem;
    char* message = nullptr;
    Hopper hopper{};
    unsigned resumed = 0, yielded = 0;  // fibers resumed in this scheduling step; those of them that called sandbox_yield
    unsigned lagged_steps = 0;              // steps in which the lagging warp did not run
    bool waits_for_blocks = false;      // every resumed fiber yielded

    Block(const Launch& launch, StoreOrder& stores, const int& failed);
    ~Block();
    bool run(dim3 index, ClusterBlock* its_cluster);

    void fill_stack(Fiber& fiber);
    void shuffle(dim3 index);
    // The first warp of a shuffled order runs only while no other warp makes progress. If the others do not wait for it
    // where they must, the result is wrong. The delay is limited because other warps may poll.
    bool has_lagging_warp() const { return launch.order && threads > WARP; }
    bool lags(const Fiber& fiber) const { return has_lagging_warp() && (&fiber - fibers) / WARP == warp_order[0]; }
    void resume(Fiber& fiber);
    bool run_warp(unsigned first);
    bool release_collectives(unsigned first, unsigned last);
    bool release_barrier();
    bool any_ready() const;
    bool complete_tma_loads();
    bool check_completed();
    void write_read_stores(const Fiber* by = nullptr);
    void set_waits_for_blocks(bool now);
    void wake(State state, const char* mbarrier, unsigned number);
    void explain_deadlock();
    bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
};

thread_local Block* current = nullptr;

Fiber& self() { return *static_cast<Fiber*>(sandbox_self); }

#if defined(SANDBOX_TSAN)
void acquire(char* order) { __tsan_acquire(order); }
void release(char* order) { __tsan_release(order); }
#else
void acquire(char*) {}
void release(char*) {}
#endif

// AddressSanitizer reports accesses to the destination of a pending cp.async.
#if defined(SANDBOX_ASAN)
void poison_destination(const Copy& copy) { __asan_poison_memory_region(copy.to, copy.bytes); }
void unpoison_destination(const Copy& copy) { __asan_unpoison_memory_region(copy.to, copy.bytes); }
#else
void poison_destination(const Copy&) {}
void unpoison_destination(const Copy&) {}
#endif

#if defined(SANDBOX_ASAN)
// The pending cp.async that writes to `at`, and the thread that issued it.
const Copy* pending_copy(const char* at, unsigned* thread);
#endif

// Switches to the scheduler; returns when the scheduler resumes this fiber.
void pause(bool finished = false) {
    Block& block = *current;
    Fiber& fiber = self();
#if defined(SANDBOX_TSAN)
    __tsan_switch_to_fiber(block.scheduler_tool, 1);  // 1: a switch orders nothing
#elif defined(SANDBOX_ASAN)
    __sanitizer_start_switch_fiber(finished ? nullptr : &fiber.tool, block.scheduler_stack, block.scheduler_stack_size);
#endif
    switch_context(&fiber.context, &block.scheduler);
#if defined(SANDBOX_ASAN)
    __sanitizer_finish_switch_fiber(fiber.tool, nullptr, nullptr);
#endif
    (void)finished;
}

void fiber_main() {
#if defined(SANDBOX_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &current->scheduler_stack, &current->scheduler_stack_size);
#endif
    acquire(&current->begun);
    current->launch.entry(current->launch.args);
    release(&current->ended);
    self().state = State::returned;
    pause(true);
}

Block::Block(const Launch& launch, StoreOrder& stores, const int& failed)
    : launch(launch), stores(stores), failed(failed), smem(launch) {
    threads = launch.block.x * launch.block.y * launch.block.z;
    fibers = static_cast<Fiber*>(calloc(threads, sizeof(Fiber)));
    thread_order = static_cast<unsigned*>(malloc(2 * threads * sizeof(unsigned)));
    warp_order = thread_order + threads;
    for (unsigned t = 0; t < threads; ++t) thread_order[t] = warp_order[t] = t;
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[t];
        void* stack = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) {
            fail("no memory for the stacks of %u threads", threads);
            break;
        }
        mprotect(stack, GUARD_BYTES, PROT_NONE);  // a stack overflow faults
        fiber.stack = static_cast<char*>(stack);
        fiber.thread_idx = {t % launch.block.x, t / launch.block.x % launch.block.y,
                            t / (launch.block.x * launch.block.y)};
        fiber.block_dim = launch.block;
        fiber.grid_dim = launch.grid;
        fiber.lane = t % WARP;
        const unsigned lanes = threads - t / WARP * WARP;
        fiber.warp_mask = lanes < WARP ? (1u << lanes) - 1 : ~0u;
#if defined(SANDBOX_TSAN)
        fiber.tool = __tsan_create_fiber(0);
#endif
    }
#if defined(SANDBOX_TSAN)
    scheduler_tool = __tsan_get_current_fiber();
#endif
}

Block::~Block() {
    for (unsigned t = 0; t < threads && fibers[t].stack; ++t) {
        munmap(fibers[t].stack, GUARD_BYTES + STACK_BYTES);
        if (!TSAN) free(fibers[t].copies);
        if (!TSAN) free(fibers[t].bulk_stores.items);
#if defined(SANDBOX_TSAN)
        __tsan_destroy_fiber(fibers[t].tool);
#endif
    }
    free(thread_order);
    if (!TSAN) free(fibers);  // ThreadSanitizer would report a race with an abandoned fiber
    if (!TSAN) hopper.free_all();
    free(message);
}

void Block::resume(Fiber& fiber) {
    sandbox_self = &fiber;
    fiber.state = State::ready;
    ++resumed;
#if defined(SANDBOX_TSAN)
    __tsan_switch_to_fiber(fiber.tool, 1);
#elif defined(SANDBOX_ASAN)
    void* mine = nullptr;
    __sanitizer_start_switch_fiber(&mine, fiber.stack + GUARD_BYTES, STACK_BYTES);
#endif
    switch_context(&scheduler, &fiber.context);
#if defined(SANDBOX_ASAN)
    __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
#endif
}

// Runs the lanes of one warp until each waits at a barrier or in an incomplete collective, or has returned.
bool Block::run_warp(unsigned first) {
    const unsigned last = first + WARP < threads ? first + WARP : threads;
    do {
        for (unsigned t = first; t < last; ++t) {
            Fiber& fiber = fibers[thread_order[t]];
            if (fiber.state == State::ready) resume(fiber);
            if (message) return false;
        }
    } while (release_collectives(first, last));
    return true;
}

// Completes collectives that every lane of the mask has reached. No lane runs during the call, so every lane has read
// the result of its last collective, and `values` can be overwritten.
bool Block::release_collectives(unsigned first, unsigned last) {
    bool any = false;
    for (unsigned t = first; t < last; ++t) {
        const Fiber fiber = fibers[t];
        if (fiber.state != State::in_collective) continue;
        const unsigned mask = fiber.mask & fiber.warp_mask;
        bool complete = true;
        for (unsigned lane = 0; lane < WARP; ++lane) {
            if (mask >> lane & 1) complete &= same_collective(fibers[first + lane], fiber);
        }
        for (unsigned lane = 0; complete && lane < WARP; ++lane) {
            if (!(mask >> lane & 1)) continue;
            values[lane] = fibers[first + lane].value;
            fibers[first + lane].state = State::ready;
        }
        any |= complete;
    }
    return any;
}

// Shuffles, for each block, the order of warps (the first one lags) and of the lanes in each warp.
void Block::shuffle(dim3 index) {
    uint64_t state = (uint64_t(launch.order) << 32 | 1) ^ (index.x + 977ull * index.y + 65537ull * index.z) << 1;
    const auto below = [&](unsigned n) {  // Knuth's MMIX generator
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return unsigned((state >> 33) % n);
    };
    const auto permute = [&](unsigned* numbers, unsigned n) {
        for (unsigned i = n; i > 1; --i) {
            const unsigned j = below(i), last = numbers[i - 1];
            numbers[i - 1] = numbers[j];
            numbers[j] = last;
        }
    };
    permute(warp_order, (threads + WARP - 1) / WARP);
    for (unsigned first = 0; first < threads; first += WARP) {
        permute(thread_order + first, threads - first < WARP ? threads - first : WARP);
    }
}

bool Block::run(dim3 index, ClusterBlock* its_cluster) {
    if (message) return false;
    cluster = its_cluster, cta_rank = index.x % launch.cluster;
    cluster[cta_rank].smem = &smem;
    acquire(&ended);  // the previous block on the same OS thread
    for (unsigned t = 0; t < threads; ++t) {
        for (unsigned i = 0; i < fibers[t].copy_count; ++i) unpoison_destination(fibers[t].copies[i]);
    }
    smem.poison((index.x + index.y + index.z) % 2);
    if (launch.order) shuffle(index);
    release(&begun);
    generation = 0;
    any[0] = any[1] = false;
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[t];
        fiber.block_idx = {index.x, index.y, index.z};
        fiber.state = State::ready;
        fiber.copy_count = fiber.copy_group = 0;  // copies that were not waited for are dropped
        fiber.bulk_stores.count = 0;
        fiber.wgmma_fenced = false;
        fiber.wgmma_operations = fiber.cluster_barriers = 0;
        fiber.registers = REGISTERS / threads / 8 * 8;
        fill_stack(fiber);
        prepare(&fiber.context, fiber.stack + GUARD_BYTES, STACK_BYTES, fiber_main);
    }
    hopper.begin();
    current = this;
    for (;;) {
        resumed = yielded = 0;
        for (unsigned w = has_lagging_warp(); w < (threads + WARP - 1) / WARP; ++w) {
            if (!run_warp(warp_order[w] * WARP)) return false;
        }
        const bool others_progress = resumed != yielded || hopper.tma_loads.count;
        if (has_lagging_warp() && (!others_progress || ++lagged_steps % LAG_STEPS == 0) && !run_warp(warp_order[0] * WARP))
            return false;
        set_waits_for_blocks(resumed && resumed == yielded && !hopper.tma_loads.count);
        unsigned returned = 0;
        for (unsigned t = 0; t < threads; ++t) returned += fibers[t].state == State::returned;
        if (returned == threads) {
            __atomic_store_n(&cluster[cta_rank].ended, true, __ATOMIC_RELEASE);
            return check_completed();
        }
        if (waits_for_blocks) sched_yield();
        if (!complete_tma_loads() && !any_ready() && !release_barrier()) {
            explain_deadlock();
            return false;
        }
    }
}

// Fills the kernel's stack frame; __fentry__ fills the frame of each function on x86-64.
void Block::fill_stack(Fiber& fiber) {
#if defined(SANDBOX_SHADOW)
    sandbox_stack_fill = launch.stack == ZEROS ? 0 : STACK_NAN;
    char* const end = fiber.stack + GUARD_BYTES + STACK_BYTES;
    for (char* at = end - FILLED_BYTES; at < end; at += sizeof(uint64_t)) memcpy(at, &sandbox_stack_fill, sizeof(uint64_t));
#else
    (void)fiber;
#endif
}

void Block::set_waits_for_blocks(bool now) {
    if (now != waits_for_blocks) stores.count(now ? -1 : 1);
    waits_for_blocks = now;
}

bool Block::any_ready() const {
    for (unsigned t = 0; t < threads; ++t)
        if (fibers[t].state == State::ready) return true;
    return false;
}

// Releases the block barrier if every thread of the block waits at the same call. Returns whether it did.
bool Block::release_barrier() {
    for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t].state != State::at_barrier || !same_site(fibers[t].site, fibers[0].site)) return false;
    }
    for (unsigned t = 0; t < threads; ++t) fibers[t].state = State::ready;
    any[++generation % 2] = false;  // every thread has read it: last used two barriers ago
    return true;
}

bool Block::fail(const char* format, ...) {
    if (message) return false;
    message = static_cast<char*>(malloc(2048));
    va_list args;
    va_start(args, format);
    vsnprintf(message, 2048, format, args);
    va_end(args);
    return false;
}

const char* collective_name(Collective what) {
    static const char* const names[] = {"?", "__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync",
                                        "__shfl_xor_sync", "__ballot_sync", "__any_sync", "__all_sync",
                                        "__match_any_sync", "__reduce_sync", "ldmatrix", "mma", "stmatrix",
                                        "wgmma", "wgmma_wait"};
    return names[static_cast<int>(what)];
}

bool waits_in_hopper(const Fiber& fiber) {
    return fiber.state == State::at_mbarrier || fiber.state == State::at_named_barrier || fiber.state == State::for_registers;
}
void describe_wait(const Block& block, const Fiber& fiber, bool several, char* text, size_t size);

// Reports where each thread waits: "threads 0..31 wait at __syncthreads() file.cu:12", "threads 32..63 returned".
void Block::explain_deadlock() {
    char text[1536] = "";
    size_t used = 0;
    unsigned groups = 0;
    for (unsigned t = 0; t < threads;) {
        const Fiber& fiber = fibers[t];
        unsigned end = t + 1;
        while (end < threads && fibers[end].state == fiber.state &&
               (fiber.state == State::returned || same_site(fibers[end].site, fiber.site)) &&
               (fiber.state != State::at_mbarrier || fibers[end].mbarrier == fiber.mbarrier) &&
               (fiber.state != State::at_named_barrier || fibers[end].named_barrier == fiber.named_barrier) &&
               (fiber.state != State::in_collective || same_collective(fibers[end], fiber))) ++end;
        if (++groups <= 8) {
            const char* plural = end - t > 1 ? "s" : "";
            char who[48], where[320];
            if (end - t > 1) snprintf(who, sizeof who, "%u..%u", t, end - 1);
            else snprintf(who, sizeof who, "%u", t);
            if (fiber.state == State::returned) snprintf(where, sizeof where, "returned");
            else if (fiber.state == State::at_barrier)
                snprintf(where, sizeof where, "wait%s at __syncthreads() %s:%d", *plural ? "" : "s", fiber.site.file,
                         fiber.site.line);
            else if (waits_in_hopper(fiber))
                describe_wait(*this, fiber, end - t > 1, where, sizeof where);
            else snprintf(where, sizeof where, "wait%s in %s(mask 0x%08x) %s:%d", *plural ? "" : "s",
                          collective_name(fiber.what), fiber.mask, fiber.site.file, fiber.site.line);
            used += snprintf(text + used, sizeof text - used, "\n  thread%s %s %s", plural, who, where);
            if (used >= sizeof text) used = sizeof text - 1;
        }
        t = end;
    }
    const char* kind = "barrier not reached by every thread of the block";
    for (unsigned t = 0; t < threads; ++t) {
        if (waits_in_hopper(fibers[t])) kind = "deadlock: no remaining thread can complete these waits";
    }
    for (unsigned t = 0; t < threads; ++t) {
        if (fibers[t].state == State::in_collective) kind = "warp collective not reached by every lane of its mask";
    }
    const uint3& b = fibers[0].block_idx;
    fail("%s, in block (%u,%u,%u):%s%s", kind, b.x, b.y, b.z, text, groups > 8 ? "\n  ..." : "");
}

struct Grid {
    const Launch& launch;
    uint64_t blocks;
    uint64_t workers, next = 0;  // the next block, taken atomically by the workers
    int failed = 0;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    StoreOrder stores{};
    ClusterBlock* cluster_blocks = nullptr;  // all blocks, grouped by cluster
};

void* work(void* argument) {
    Grid& grid = *static_cast<Grid*>(argument);
    pthread_mutex_lock(&grid.lock);  // wait until the number of workers is known
    const uint64_t workers = grid.workers;
    pthread_mutex_unlock(&grid.lock);
    const dim3& extent = grid.launch.grid;
    Block block(grid.launch, grid.stores, grid.failed);
    uint64_t index = __atomic_fetch_add(&grid.next, 1, __ATOMIC_RELAXED);
    while (index < grid.blocks && !__atomic_load_n(&grid.failed, __ATOMIC_RELAXED)) {
        const uint64_t i = grid.launch.order ? grid.blocks - 1 - index : index;
        const dim3 at(i % extent.x, i / extent.x % extent.y, i / extent.x / extent.y);
        if (!block.run(at, grid.cluster_blocks + i / grid.launch.cluster * grid.launch.cluster)) {
            pthread_mutex_lock(&grid.lock);
            if (!grid.failed) snprintf(grid.launch.error, grid.launch.error_size, "%s", block.message);
            __atomic_store_n(&grid.failed, 1, __ATOMIC_RELAXED);
            pthread_mutex_unlock(&grid.lock);
        }
        // ThreadSanitizer: a fixed assignment. Blocks of one worker are ordered, so neighbouring blocks need different
        // workers.
        index = TSAN ? index + workers : __atomic_fetch_add(&grid.next, 1, __ATOMIC_RELAXED);
    }
    block.set_waits_for_blocks(true);  // it no longer delays stores of other blocks
    acquire(&block.ended);  // orders the kernel's writes before the return of the launch
    return nullptr;
}

}  // namespace

extern "C" void sandbox_barrier(Site site) { sandbox_barrier_or(false, site); }

extern "C" bool sandbox_barrier_or(bool predicate, Site site) {
    Fiber& fiber = self();
    bool& any = current->any[current->generation % 2];
    any |= predicate;
    char* order = &current->order[current->generation % 2];  // alternates: code after a barrier must not be ordered before it
    Proxies& proxies = current->hopper.proxies;
    Clock& clock = proxies.block_barrier[current->generation % 2];
    const unsigned thread = static_cast<unsigned>(&fiber - current->fibers);
    release(order);
    proxies.release(clock, thread);
    fiber.state = State::at_barrier;
    fiber.site = site;
    pause();
    acquire(order);
    proxies.acquire(clock, thread);
    return any;
}

extern "C" void sandbox_cluster_barrier(Site site) {
    static char order;  // shared by all clusters
    sandbox_barrier(site);
    Block& block = *current;
    Fiber& fiber = self();
    const unsigned reached = ++fiber.cluster_barriers;
    release(&order);
    if (&fiber == block.fibers) __atomic_store_n(&block.cluster[block.cta_rank].barriers, reached, __ATOMIC_RELEASE);
    for (unsigned cta_rank = 0; cta_rank < block.launch.cluster; ++cta_rank) {
        while (__atomic_load_n(&block.cluster[cta_rank].barriers, __ATOMIC_ACQUIRE) < reached) {
            if (__atomic_load_n(&block.cluster[cta_rank].ended, __ATOMIC_ACQUIRE) ||
                __atomic_load_n(&block.failed, __ATOMIC_RELAXED)) {
                block.fail("cluster barrier %s:%d: block (%u,%u,%u) waits for a block of its cluster that has ended",
                           site.file, site.line, fiber.block_idx.x, fiber.block_idx.y, fiber.block_idx.z);
                pause(true);
            }
            sandbox_yield();
        }
    }
    acquire(&order);
}

extern "C" const char* sandbox_map_shared_rank(const char* own, unsigned cta_rank) {
    return current->cluster[cta_rank].smem->begin + (own - current->smem.begin);
}

extern "C" const uint64_t* sandbox_collective(Collective what, unsigned mask, uint64_t value, Site site) {
    Fiber& fiber = self();
    Block& block = *current;
    fiber.state = State::in_collective;
    fiber.site = site;
    fiber.what = what;
    fiber.mask = mask;
    if (!(mask >> fiber.lane & 1)) {
        const unsigned t = static_cast<unsigned>(&fiber - block.fibers);
        block.fail("%s(mask 0x%08x) %s:%d: lane %u (thread %u) calls it but is not in its mask", collective_name(what), mask,
                   site.file, site.line, fiber.lane, t);
        pause(true);
    }
    char* order = nullptr;
    // Only __syncwarp orders memory; a shuffle or a vote does not (CUDA C++ Programming Guide, warp intrinsics).
    if (TSAN && what == Collective::syncwarp) {
        order = &fiber.order[fiber.syncwarps++ % 2];  // the first lane's object, used by all lanes of the collective
        for (unsigned lane = 0; lane < WARP; ++lane) {
            if (!(mask & fiber.warp_mask & 1u << lane) || lane == fiber.lane) continue;
            const Fiber& other = (&fiber - fiber.lane)[lane];
            if (same_collective(other, fiber)) order = reinterpret_cast<char*>(other.value);
        }
        value = reinterpret_cast<uint64_t>(order);
        release(order);
    }
    fiber.value = value;
    pause();
    if (order) acquire(order);
    return block.values;
}

extern "C" void sandbox_fence() {
    static char order;  // all fences are totally ordered
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    acquire(&order);
    release(&order);
}

extern "C" void sandbox_cp_async(void* to, const void* from, unsigned bytes, unsigned valid) {
    Fiber& fiber = self();
#if defined(SANDBOX_ASAN)  // bad addresses are reported now, with this call's stack
    if (valid) __asan_loadN(from, valid);
    const char* bad = static_cast<char*>(__asan_region_is_poisoned(to, bytes));
    unsigned thread;
    if (bad && !pending_copy(bad, &thread)) __asan_storeN(to, bytes);
#endif
    if (fiber.copy_count == fiber.copy_room) {
        fiber.copy_room = fiber.copy_room ? 2 * fiber.copy_room : 16;
        fiber.copies = static_cast<Copy*>(realloc(fiber.copies, fiber.copy_room * sizeof(Copy)));
    }
    fiber.copies[fiber.copy_count++] = {static_cast<char*>(to), static_cast<const char*>(from), bytes, valid,
                                        fiber.copy_group, __builtin_return_address(0)};
    poison_destination(fiber.copies[fiber.copy_count - 1]);
}

extern "C" void sandbox_cp_async_commit() { ++self().copy_group; }

extern "C" void sandbox_cp_async_wait(unsigned pending) {
    Fiber& fiber = self();
    unsigned done = 0;
    while (done < fiber.copy_count && fiber.copies[done].group + pending < fiber.copy_group) {
        const Copy& copy = fiber.copies[done++];
        unpoison_destination(copy);
        current->smem.mark(copy.to, copy.bytes, true);
#if defined(SANDBOX_TSAN)
        __tsan_func_entry(copy.issued);
#endif
        memcpy(copy.to, copy.from, copy.valid);
        memset(copy.to + copy.valid, 0, copy.bytes - copy.valid);
        if (current->hopper.proxies.used) sandbox_generic_write(copy.to, copy.bytes);
#if defined(SANDBOX_TSAN)
        __tsan_func_exit();
#endif
    }
    fiber.copy_count -= done;
    memmove(fiber.copies, fiber.copies + done, fiber.copy_count * sizeof(Copy));
}

#include "hopper_ops.h"

extern "C" void sandbox_trap(const char* reason, Site site) {
    const uint3 &t = self().thread_idx, &b = self().block_idx;
    current->fail("%s at %s:%d, in block (%u,%u,%u) thread (%u,%u,%u)", reason, site.file, site.line, b.x, b.y, b.z,
                  t.x, t.y, t.z);
    pause(true);
    abort();  // never resumed
}

#if defined(SANDBOX_ASAN)
namespace {
const Copy* pending_copy(const char* at, unsigned* thread) {
    for (*thread = 0; current && *thread < current->threads; ++*thread) {
        const Fiber& fiber = current->fibers[*thread];
        for (unsigned i = 0; i < fiber.copy_count; ++i) {
            if (fiber.copies[i].to <= at && at < fiber.copies[i].to + fiber.copies[i].bytes) return &fiber.copies[i];
        }
    }
    return nullptr;
}
}  // namespace

// AddressSanitizer calls this before it prints a report. Adds the CUDA thread and the distance to the nearest buffer.
extern "C" void __asan_on_error() {
    const char* const at = static_cast<char*>(__asan_get_report_address());
    unsigned thread;
    if (pending_copy(at, &thread)) {
        fprintf(stderr, "shared memory used while a cp.async to it by thread %u has not been waited for\n", thread);
        return;
    }
    if (!current) return;
    const char* const end = current->smem.dynamic + current->launch.smem_bytes;
    fprintf(stderr, "sandbox: ");
    if (end <= at && at < current->smem.dynamic + MAX_DYNAMIC_SMEM)
        fprintf(stderr, "%td bytes past the end of its %u bytes ", at - end, current->launch.smem_bytes);
    else if (!strcmp(__asan_get_report_description(), "heap-buffer-overflow"))  // a tensor, not an array of the kernel
        sandbox_print_place(at);
    const uint3 &t = self().thread_idx, &b = self().block_idx;
    fprintf(stderr, "in block (%u,%u,%u) thread (%u,%u,%u)\n", b.x, b.y, b.z, t.x, t.y, t.z);
}
#elif defined(SANDBOX_SHADOW)
namespace {
// The shared memory of the cluster that contains the address; this block's own if none does.
SharedMemory& owner_of(const char* at) {
    for (unsigned cta_rank = 0; cta_rank < current->launch.cluster; ++cta_rank) {
        SharedMemory* const smem = current->cluster[cta_rank].smem;
        if (smem && smem->contains(at)) return *smem;
    }
    return current->smem;
}
// Whether a local array's element is unwritten: it still contains the fill pattern of the stack.
bool unwritten_local(const char* at, size_t bytes) {
    const char* const stack = self().stack;
    if (current->launch.stack != REPORTED_NANS || bytes != 4) return false;
    if (at < stack || at >= stack + GUARD_BYTES + STACK_BYTES) return false;
    return !memcmp(at, &STACK_NAN, bytes);
}
void check_read(const char* at, size_t bytes, const void* where) {
    const bool local = unwritten_local(at, bytes);
    if (!local && owner_of(at).was_written(at, bytes)) return;
    void* calls[16];
    char stack[1024] = "";
    size_t used = 0;
    int depth = backtrace(calls, 16), i = 0;
    while (i < depth && calls[i] != where) ++i;
    for (; i < depth && used < sizeof stack; ++i) {
        Dl_info module{};
        if (!dladdr(calls[i], &module)) continue;
        used += snprintf(stack + used, sizeof stack - used, "\n    in %s+0x%zx", module.dli_fname,
                         static_cast<char*>(calls[i]) - static_cast<char*>(module.dli_fbase));
    }
    const uint3 &t = self().thread_idx, &b = self().block_idx;
    current->fail("%s read before anything was written there, in block (%u,%u,%u) thread (%u,%u,%u)%s",
                  local ? "a local array" : "shared memory", b.x, b.y, b.z, t.x, t.y, t.z, stack);
    pause(true);
}
void record_store(const char* at, size_t bytes) {
    owner_of(at).mark(at, bytes, true);
    if (current->hopper.proxies.used) sandbox_generic_write(at, static_cast<unsigned>(bytes));
}
}  // namespace

// -fsanitize=kernel-address calls these functions at each load and store.
#define SANDBOX_ACCESS(size) \
    extern "C" void __asan_load##size##_noabort(const char* at) { check_read(at, size, __builtin_return_address(0)); } \
    extern "C" void __asan_store##size##_noabort(const char* at) { record_store(at, size); }
SANDBOX_ACCESS(1)
SANDBOX_ACCESS(2)
SANDBOX_ACCESS(4)
SANDBOX_ACCESS(8)
SANDBOX_ACCESS(16)
extern "C" void __asan_loadN_noabort(const char* at, size_t bytes) { check_read(at, bytes, __builtin_return_address(0)); }
extern "C" void __asan_storeN_noabort(const char* at, size_t bytes) { record_store(at, bytes); }
extern "C" void __asan_handle_no_return() {}
#endif

extern "C" int sandbox_launch(const Launch* launch) {
    Grid grid{*launch, static_cast<uint64_t>(launch->grid.x) * launch->grid.y * launch->grid.z, 1};
    launch->error[0] = '\0';
    const uint64_t threads = static_cast<uint64_t>(launch->block.x) * launch->block.y * launch->block.z;
    // Blocks of a cluster are scheduled consecutively: with one worker per block of a cluster, all of them run and none
    // deadlocks.
    const uint64_t at_least = launch->workers < launch->cluster ? launch->cluster : launch->workers;
    uint64_t most = at_least < grid.blocks ? at_least : grid.blocks;
    if (most * threads > MAX_FIBERS) most = MAX_FIBERS / threads;
    grid.cluster_blocks = static_cast<ClusterBlock*>(calloc(grid.blocks, sizeof(ClusterBlock)));
    pthread_t* threads_of_workers = static_cast<pthread_t*>(calloc(most + 1, sizeof(pthread_t)));
    pthread_mutex_lock(&grid.lock);
    while (grid.workers < most && pthread_create(&threads_of_workers[grid.workers], nullptr, work, &grid) == 0) ++grid.workers;
    grid.stores.running = grid.workers;
    if (grid.workers < launch->cluster) {
        snprintf(launch->error, launch->error_size, "no memory for the threads of a cluster of %u blocks", launch->cluster);
        grid.failed = 1;
    }
    pthread_mutex_unlock(&grid.lock);
    work(&grid);
    for (uint64_t i = 1; i < grid.workers; ++i) pthread_join(threads_of_workers[i], nullptr);
    free(threads_of_workers);
    free(grid.cluster_blocks);
    return grid.failed;
}

}  // namespace cpu
