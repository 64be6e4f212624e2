// Switches between fibers; runs the warps of a block until all have returned. Included by runtime.cpp.
#pragma once

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
        fiber.stack = unused_stacks.take();
        if (!fiber.stack) {
            fail("no memory for the stacks of %u threads", threads);
            break;
        }
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
        unused_stacks.give(fibers[t].stack);
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
        const Fiber& fiber = fibers[t];
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
        fiber.cluster_arrived = false;
        fiber.registers = REGISTERS / threads / 8 * 8;
        fill_stack(fiber);
        prepare(&fiber.context, fiber.stack + GUARD_BYTES, STACK_BYTES, fiber_main);
    }
    hopper.begin();
    current = this;
    for (;;) {
        resumed = yielded = 0;
        if (launch.cluster > 1 && !read_mail()) return false;
        for (unsigned w = has_lagging_warp(); w < (threads + WARP - 1) / WARP; ++w) {
            if (!run_warp(warp_order[w] * WARP)) return false;
        }
        bool loads = mark_tma_loads();
        const bool others_progress = resumed != yielded || loads;
        if (has_lagging_warp() && (!others_progress || ++lagged_steps % LAG_STEPS == 0)) {
            if (!run_warp(warp_order[0] * WARP)) return false;
            loads = mark_tma_loads();  // those of the lagging warp, too
        }
        set_waits_for_blocks(resumed && resumed == yielded && !loads);
        unsigned returned = 0;
        for (unsigned t = 0; t < threads; ++t) returned += fibers[t].state == State::returned;
        if (returned == threads) return (launch.cluster == 1 || read_mail()) && end_in_cluster() && check_completed();
        if (waits_for_blocks) {
            if (__atomic_load_n(&failed, __ATOMIC_RELAXED)) return false;  // it may wait for the block that has failed
            sched_yield();
            if (const unsigned blocks = stores.all_wait(waiting_steps)) {
                explain_deadlock(blocks);
                return false;
            }
        }
        if (!(loads && complete_tma_loads()) && !any_ready() && !release_barrier() && !wait_for_mail()) {
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
    for (char* at = end - FILLED_BYTES; at < end; at += sizeof(uint64_t))
        memcpy(at, &sandbox_stack_fill, sizeof(uint64_t));
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
