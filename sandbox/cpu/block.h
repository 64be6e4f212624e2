// The state of a running block: fibers, pending copies, shared memory, order of bulk stores. Included by runtime.cpp.
#pragma once

constexpr unsigned WARP = 32, LAG_STEPS = 64;  // LAG_STEPS: scheduling steps a lagging warp is delayed at most
constexpr size_t STACK_BYTES = 512 * 1024, GUARD_BYTES = 64 * 1024;  // reserved; only touched pages are committed
#if defined(SANDBOX_TSAN)
constexpr bool TSAN = true;
constexpr unsigned MAX_FIBERS = 4096;  // ThreadSanitizer supports 8128 threads
#else
constexpr bool TSAN = false;
constexpr unsigned MAX_FIBERS = 16384;  // a stack and its guard are two mappings, and Linux allows a process 65530
#endif

#if defined(SANDBOX_TSAN) || defined(SANDBOX_ASAN) || defined(SANDBOX_SHADOW)
constexpr bool SANITIZED = true;
#else
constexpr bool SANITIZED = false;
#endif

// Stacks of earlier launches, which stay mapped: to map, protect and touch a stack takes longer than most fibers run.
// Not for a sanitizer's program, which executes one launch: ThreadSanitizer would take the lock as an order of blocks.
struct UnusedStacks {
    static constexpr unsigned MOST = SANITIZED ? 0 : 1024;  // a few pages each
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    unsigned count = 0;
    char* stacks[MOST + 1];

    // The lowest address of a stack and its guard; null if there is no memory.
    char* take() {
        if (char* const unused = kept()) return unused;
        void* const mapped = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) return nullptr;
        mprotect(mapped, GUARD_BYTES, PROT_NONE);  // a stack overflow faults
        return static_cast<char*>(mapped);
    }
    void give(char* stack) {
        if (!keep(stack)) munmap(stack, GUARD_BYTES + STACK_BYTES);
    }

  private:
    char* kept() {
        if (SANITIZED) return nullptr;
        pthread_mutex_lock(&lock);
        char* const stack = count ? stacks[--count] : nullptr;
        pthread_mutex_unlock(&lock);
        return stack;
    }
    bool keep(char* stack) {
        if (SANITIZED) return false;
        pthread_mutex_lock(&lock);
        const bool room = count < MOST;
        if (room) stacks[count++] = stack;
        pthread_mutex_unlock(&lock);
        return room;
    }
};

UnusedStacks unused_stacks;

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

template <class T>
struct List {
    T* items;
    unsigned count, room;
    T& add() {
        if (count == room) grow();
        return items[count++];
    }
    // As add() = item. ThreadSanitizer does not see the copy, which a lock orders that it does not see, either.
    void put(const T& item) {
        T& to = add();
#if defined(SANDBOX_TSAN)
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
        to = item;
#if defined(SANDBOX_TSAN)
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
#endif
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
    Site site;  // of the barrier, collective or other block's counter for which it waits
    Collective what;
    unsigned mask;   // of the collective
    uint64_t value;  // its input to the collective
    char* stack;
    void* tool;          // the sanitizer's handle of this fiber
    char order[2];       // ThreadSanitizer's synchronisation objects of __syncwarp, used alternately
    unsigned syncwarps;  // calls so far
    Copy* copies;        // sorted by group
    unsigned copy_count, copy_room, copy_group;
    List<BulkStore> bulk_stores;
    char* mbarrier;  // on which it waits until the phase of this parity ends
    unsigned parity, named_barrier, registers;
    bool wgmma_fenced;
    unsigned wgmma_operations;  // wgmma, commit and wait calls so far
    unsigned cluster_barriers;  // cluster barrier calls so far
    bool cluster_arrived;       // sandbox_cluster_arrive without its wait
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
// order. Also finds deadlocks between blocks.
struct StoreOrder {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    unsigned running = 0, in_flight = 0;  // OS threads whose block can make progress; that are blocked in wait()
    unsigned threads = 0;                 // OS threads that have a block
    uint64_t changes = 0;                 // of `running` and `threads`
    unsigned settled = 0;                 // OS threads whose block has waited for a whole step since the last change
    struct Steps {                        // of a block since change number `change`
        uint64_t change;
        unsigned count;
    };

    void change(int more_running) { running += more_running, ++changes, settled = 0; }  // with the lock
    void count(int more, int more_threads = 0) {
        pthread_mutex_lock(&lock);
        threads += more_threads;
        change(more);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    // Called after each step by a block whose threads wait for other blocks. Returns the number of blocks if all do,
    // and each has made a whole step since the last change: a deadlock. The first step of `own` may have begun before
    // that.
    unsigned all_wait(Steps& own) {
        if (TSAN) return 0;  // as in wait()
        pthread_mutex_lock(&lock);
        unsigned all = 0;
        if (!running && !in_flight) {
            if (own.change != changes) own = {changes, 0};
            settled += ++own.count == 2;
            all = settled == threads ? threads : 0;
        }
        pthread_mutex_unlock(&lock);
        return all;
    }
    void wait() {
        if (TSAN) return;  // the lock would order blocks that the kernel does not order
        pthread_mutex_lock(&lock);
        change(-1);
        const unsigned place = ++in_flight;
        pthread_cond_broadcast(&changed);
        while (running || in_flight != place) pthread_cond_wait(&changed, &lock);
        --in_flight;
        change(1);
        pthread_mutex_unlock(&lock);
    }
};

struct ClusterBlock {  // state of a block that the other blocks of its cluster read
    SharedMemory* smem;
    unsigned barriers;  // cluster barriers reached by all of its threads
    bool ended;
    bool waits;          // for mail: without it, no thread can run
    unsigned copies;     // to other blocks that are pending
    List<TmaLoad> mail;  // from other blocks: copies to this block's shared memory; without `to` arrivals at a barrier
                         // that expect `size` bytes
};

// Protects `ended`, `waits` and `mail` of all blocks. Not a mutex, which ThreadSanitizer would take as an order of
// blocks.
struct MailLock {
    MailLock() {
        while (__atomic_test_and_set(&held, __ATOMIC_ACQUIRE)) sched_yield();
    }
    ~MailLock() { __atomic_clear(&held, __ATOMIC_RELEASE); }
    MailLock(const MailLock&) = delete;
    MailLock& operator=(const MailLock&) = delete;
    static char held;
};
char MailLock::held = 0;

struct Block {
    const Launch& launch;
    StoreOrder& stores;
    const int& failed;  // whether any block of the launch has failed
    ClusterBlock* cluster = nullptr;
    unsigned cta_rank = 0;
    Site last_copy = {};  // by bulk_copy_to_rank
    unsigned threads;
    Fiber* fibers;
    unsigned *thread_order, *warp_order;  // execution order: threads within each warp, and warps
    uint64_t values[WARP];                // inputs of the running warp's lanes to a collective
    Context scheduler;
    void* scheduler_tool = nullptr;
    const void* scheduler_stack = nullptr;  // stack bounds, for AddressSanitizer
    size_t scheduler_stack_size = 0;
    unsigned generation = 0;    // block barriers completed
    bool any[2] = {};           // result of __syncthreads_or, by parity of `generation`
    char order[2] = {};         // as Fiber::order, of __syncthreads
    char begun = 0, ended = 0;  // synchronisation objects of the begin and end of a block
    SharedMemory smem;
    char* message = nullptr;
    Hopper hopper{};
    unsigned resumed = 0,
             yielded = 0;           // fibers resumed in this scheduling step; those of them that called sandbox_yield
    unsigned lagged_steps = 0;      // steps in which the lagging warp did not run
    bool waits_for_blocks = false;  // every resumed fiber yielded
    StoreOrder::Steps waiting_steps{};

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
    bool mark_tma_loads();
    bool complete_tma_loads();
    bool read_mail();
    bool wait_for_mail();
    bool end_in_cluster();
    bool check_completed();
    void write_read_stores(const Fiber* by = nullptr);
    void set_waits_for_blocks(bool now);
    void wake(State state, const char* mbarrier, unsigned number);
    void explain_deadlock(unsigned blocks = 0);  // blocks: how many wait for each other
    bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
};

thread_local Block* current = nullptr;
