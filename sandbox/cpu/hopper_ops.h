// Hopper's asynchronous instructions, called by fibers. Included by runtime.cpp.
#pragma once

namespace {

#if defined(SANDBOX_TSAN)
void report_read(const void* at, uint64_t bytes) { __tsan_read_range(const_cast<void*>(at), bytes); }
void report_write(void* at, uint64_t bytes) { __tsan_write_range(at, bytes); }
#else
void report_read(const void*, uint64_t) {}
void report_write(void*, uint64_t) {}
#endif

template <class... A>
[[noreturn]] void trap(Site site, const char* format, A... values) {
    char reason[512];
    snprintf(reason, sizeof reason, format, values...);
    sandbox_trap(reason, site);
}

void atomic_add(float* to, float x) {
    uint32_t* const bits = reinterpret_cast<uint32_t*>(to);
    uint32_t old = __atomic_load_n(bits, __ATOMIC_RELAXED), sum;
    do {
        float value;
        memcpy(&value, &old, 4);
        value += x;
        memcpy(&sum, &value, 4);
    } while (!__atomic_compare_exchange_n(bits, &old, sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

unsigned thread_of(const Fiber& fiber) { return static_cast<unsigned>(&fiber - current->fibers); }

// Byte offset of an address in dynamic shared memory.
uint64_t smem_offset_of(const char* at, uint64_t bytes, Site site) {
    const SharedMemory& smem = current->smem;
    if (at < smem.dynamic || at + bytes > smem.dynamic + smem.dynamic_bytes)
        trap(site, "out of bounds: %llu bytes at byte %lld of dynamic shared memory, which has %u",
             static_cast<unsigned long long>(bytes), static_cast<long long>(at - smem.dynamic), smem.dynamic_bytes);
    return at - smem.dynamic;
}

Mbarrier& mbarrier_at(char* at, Site site) {
    const uint64_t offset = smem_offset_of(at, 8, site);
    Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(at);
    if (offset % 8 || barrier.magic != Mbarrier::MAGIC)
        trap(site, "no mbarrier was initialised at shared memory + %llu", static_cast<unsigned long long>(offset));
    return barrier;
}

// Ends the phase if no arrivals and no bytes are pending.
void end_phase(Block& block, char* at) {
    Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(at);
    if (barrier.missing || barrier.bytes) return;
    barrier.parity ^= 1;
    barrier.missing = barrier.expected;
    if (barrier.unseen < 2) ++barrier.unseen;
    block.wake(State::at_mbarrier, at, barrier.parity ^ 1);
}

void check_fenced(uint64_t begin, uint64_t end, const char* what, Site site) {
    const Proxies& proxies = current->hopper.proxies;
    if (!proxies.used) return;
    for (uint64_t chunk = begin / 16; chunk * 16 < end; ++chunk) {
        if (proxies.unfenced[chunk])
            trap(site, "thread %u wrote data that %s and did not call fence_proxy_async", proxies.unfenced[chunk] - 1,
                 what);
        if (!proxies.fence_is_visible(chunk, thread_of(self())))
            trap(site,
                 "warp %u wrote data that %s and called fence_proxy_async only after the barrier that orders the "
                 "accesses",
                 proxies.fenced_by[chunk], what);
    }
}

void block_until(State state, Site site) {
    self().state = state;
    self().site = site;
    pause();
}

}  // namespace

void Block::wake(State state, const char* mbarrier, unsigned number) {
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& fiber = fibers[t];
        if (fiber.state != state) continue;
        if (state == State::at_mbarrier && (fiber.mbarrier != mbarrier || fiber.parity != number)) continue;
        if (state == State::at_named_barrier && fiber.named_barrier != number) continue;
        fiber.state = State::ready;
    }
}

// Marks the TMA loads that may complete, and returns whether there are any. In the default order of threads, a load
// completes only while a thread waits for its mbarrier: a missing wait is noticed however much time other waits take.
// In a shuffled order it also completes without.
bool Block::mark_tma_loads() {
    List<TmaLoad>& boxes = hopper.tma_loads;
    if (!boxes.count) return false;
    for (unsigned i = 0; i < boxes.count; ++i) boxes.items[i].may_complete = launch.order;
    bool any = launch.order;
    for (unsigned t = 0; t < threads && !launch.order; ++t) {
        if (fibers[t].state != State::at_mbarrier) continue;
        for (unsigned i = 0; i < boxes.count; ++i)
            if (boxes.items[i].barrier == fibers[t].mbarrier) any = boxes.items[i].may_complete = true;
    }
    return any;
}

// One scheduling step: completes the marked TMA loads that are due. If no fiber is ready, advances to the first of
// them. Returns whether any load completed.
bool Block::complete_tma_loads() {
    List<TmaLoad>& boxes = hopper.tma_loads;
    ++hopper.step;
    if (!any_ready()) {
        uint64_t next = UINT64_MAX;
        for (unsigned i = 0; i < boxes.count; ++i)
            if (boxes.items[i].may_complete && boxes.items[i].due < next) next = boxes.items[i].due;
        if (next > hopper.step && next < UINT64_MAX) hopper.step = next;
    }
    unsigned left = 0, completed = 0;
    for (unsigned i = 0; i < boxes.count; ++i) {
        const TmaLoad box = boxes.items[i];
        if (!box.may_complete || box.due > hopper.step) {
            boxes.items[left++] = box;
            continue;
        }
        acquire(box.barrier);  // the issuing thread
        if (box.from) memcpy(box.to, box.from, box.size);
        else load_box(box.to, box.map, box.at);
        if (box.copies) __atomic_fetch_sub(box.copies, 1, __ATOMIC_RELEASE);
        smem.mark(box.to, box.bytes(), true);
        hopper.proxies.tma_wrote(box.to - smem.dynamic, box.to - smem.dynamic + box.bytes());
        release(box.barrier);
        reinterpret_cast<Mbarrier*>(box.barrier)->bytes -= static_cast<int64_t>(box.bytes());
        end_phase(*this, box.barrier);
        ++completed;
    }
    boxes.count = left;
    return completed;
}

// Executes what other blocks of the cluster have sent. Returns false if it failed.
bool Block::read_mail() {
    List<TmaLoad> mail{};
    {
        const MailLock lock;
        const List<TmaLoad> none{};
        mail = cluster[cta_rank].mail;
        cluster[cta_rank].mail = none;
    }
    for (unsigned i = 0; i < mail.count && !message; ++i) {
        TmaLoad& item = mail.items[i];
        Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(item.barrier);
        const char *const file = item.site.file, *const what = item.to ? "copy" : "arrival";
        const long long at = item.barrier - smem.dynamic;
        if (barrier.magic != Mbarrier::MAGIC) {
            fail("%s at %s:%d from another block of the cluster: no mbarrier was initialised at shared memory + %lld",
                 what, file, item.site.line, at);
        } else if (item.to && hopper.proxies.unfenced[at / 16]) {
            fail(
                "copy at %s:%d from another block of the cluster: its mbarrier was initialised and fence_proxy_async "
                "not called",
                file, item.site.line);
        } else if (item.to) {
            acquire(item.barrier);  // the issuing thread
            memset(item.to, 0xff, item.size);
            smem.mark(item.to, item.size, false);
            item.due = hopper.step + 2 + hopper.tma_loads.count % 3;
            hopper.tma_loads.add() = item;
        } else if (!barrier.missing) {
            fail(
                "arrival at %s:%d from another block of the cluster: too many arrivals at the mbarrier at shared "
                "memory + %lld",
                file, item.site.line, at);
        } else {
            --barrier.missing;
            barrier.bytes += item.size;
            end_phase(*this, item.barrier);
        }
    }
    if (!TSAN) free(mail.items);
    return !message;
}

// Waits until another block of the cluster sends something. Returns false if none can: each has ended, waits itself, or
// waits at a cluster barrier that this block has not reached, or for a counter that no block will change.
bool Block::wait_for_mail() {
    if (launch.cluster == 1) return false;
    ClusterBlock& own = cluster[cta_rank];
    set_waits_for_blocks(true);
    while (!__atomic_load_n(&failed, __ATOMIC_RELAXED)) {
        {
            const MailLock lock;
            own.waits = !own.mail.count;
            bool any_runs = false;
            for (unsigned rank = 0; rank < launch.cluster; ++rank) {
                const ClusterBlock& other = cluster[rank];
                any_runs |= rank != cta_rank && !other.ended && !other.waits &&
                            __atomic_load_n(&other.barriers, __ATOMIC_ACQUIRE) <= own.barriers;
            }
            if (!own.waits || !any_runs) return !own.waits;
        }
        sched_yield();
        if (stores.all_wait(waiting_steps)) return false;  // the others wait for counters
    }
    return false;
}

// Marks this block as ended. Returns false if something that another block has sent comes too late, or a copy to
// another block is pending, which reads this block's shared memory.
bool Block::end_in_cluster() {
    ClusterBlock& own = cluster[cta_rank];
    if (__atomic_load_n(&own.copies, __ATOMIC_ACQUIRE))
        return fail("the block ends before its copy at %s:%d to another block of the cluster has been read",
                    last_copy.file, last_copy.line);
    const MailLock lock;
    __atomic_store_n(&own.ended, true, __ATOMIC_RELEASE);
    if (!own.mail.count) return true;
    const TmaLoad& item = own.mail.items[0];
    return fail("the block ends before the %s at %s:%d by another block of its cluster has reached its shared memory",
                item.to ? "copy" : "arrival", item.site.file, item.site.line);
}

// Reports TMA loads, bulk stores and wgmmas that are pending when the block ends.
bool Block::check_completed() {
    if (hopper.tma_loads.count) {
        const Site site = hopper.tma_loads.items[0].site, init = hopper.init_of(hopper.tma_loads.items[0].barrier);
        return fail(
            "the block ends before the TMA load issued at %s:%d has completed: no thread waits for its mbarrier, "
            "which is initialised at %s:%d",
            site.file, site.line, init.file, init.line);
    }
    for (unsigned t = 0; t < threads; ++t) {
        if (!fibers[t].bulk_stores.count) continue;
        const Site site = fibers[t].bulk_stores.items[0].site;
        return fail("thread %u ends before the bulk store issued at %s:%d has read shared memory", t, site.file,
                    site.line);
    }
    for (unsigned t = 0; t < threads; t += WARP) {
        const WarpMma &warp = hopper.mma[t / WARP], &first = hopper.mma[t / WARP / 4 * 4];
        if (warp.in_flight.count) {
            const Site site = warp.in_flight.items[0]->site;
            return fail("warp %u ends before the wgmma at %s:%d has completed", t / WARP, site.file, site.line);
        }
        if (warp.issued != first.issued)
            return fail("warps %u and %u of one warpgroup issued %u and %u wgmmas", t / WARP / 4 * 4, t / WARP,
                        first.issued, warp.issued);
    }
    write_read_stores();
    return true;
}

// Writes the bulk stores of one fiber that waits, or of all. Reductions are added in reverse order, which is
// unspecified.
void Block::write_read_stores(const Fiber* by) {
    if (!by) acquire(&ended);  // the issuing threads
    List<ReadStore>& sums = hopper.read_stores;
    bool stored = false;
    for (unsigned i = 0; i < sums.count; ++i) stored |= !sums.items[i].add && (!by || sums.items[i].by == by);
    if (stored) set_waits_for_blocks(false), stores.wait();  // it has made progress, if it waited before
    for (unsigned i = sums.count; i-- > 0;) {
        const ReadStore item = sums.items[i];
        if (by && item.by != by) continue;
        for (unsigned n = 0; n < item.count; ++n) {
            if (item.add) atomic_add(item.to + n, item.numbers[n]);
            else __atomic_store(item.to + n, item.numbers + n, __ATOMIC_RELAXED);
        }
        free(item.numbers);
        sums.items[i].numbers = nullptr;
    }
    unsigned left = 0;
    for (unsigned i = 0; i < sums.count; ++i)
        if (sums.items[i].numbers) sums.items[left++] = sums.items[i];
    sums.count = left;
}

namespace {

// "waits at mbarrier_wait(shared memory + 512) file.cu:12 for the phase of parity 0: 2 arrivals and 4096 bytes are
// pending"
void describe_wait(const Block& block, const Fiber& fiber, bool several, char* text, size_t size) {
    const int length = snprintf(text, size, several ? "wait " : "waits ");
    text += length;
    size -= length;
    if (fiber.state == State::at_mbarrier) {
        const Mbarrier& barrier = *reinterpret_cast<const Mbarrier*>(fiber.mbarrier);
        const Site init = block.hopper.init_of(fiber.mbarrier);
        snprintf(text, size,
                 "at mbarrier_wait(shared memory + %td) %s:%d for the phase of parity %u: %u arrivals and %lld bytes "
                 "are pending; it is initialised at %s:%d",
                 fiber.mbarrier - block.smem.dynamic, fiber.site.file, fiber.site.line, fiber.parity,
                 static_cast<unsigned>(barrier.missing), static_cast<long long>(barrier.bytes), init.file, init.line);
    } else if (fiber.state == State::at_named_barrier) {
        const NamedBarrier& barrier = block.hopper.named[fiber.named_barrier];
        snprintf(text, size, "at named barrier %u %s:%d: %u of %u threads have arrived", fiber.named_barrier,
                 fiber.site.file, fiber.site.line, barrier.arrived, barrier.threads);
    } else {
        snprintf(text, size, "for registers %s:%d: %u are free", fiber.site.file, fiber.site.line,
                 block.hopper.free_registers);
    }
}

}  // namespace

extern "C" void sandbox_mbarrier_init(char* at, unsigned arrivals, Site site) {
    if (smem_offset_of(at, 8, site) % 8) trap(site, "the address of an mbarrier must be a multiple of 8 bytes");
    if (!arrivals || arrivals > 1024)
        trap(site, "an mbarrier for %u arrivals is not supported: the count must be 1 to 1024", arrivals);
    Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(at);
    barrier.magic = Mbarrier::MAGIC;
    barrier.parity = 0;
    barrier.expected = barrier.missing = arrivals;
    barrier.bytes = 0;
    barrier.unseen = Mbarrier::NO_WAIT_YET;
    current->hopper.mbarrier_inits.add() = {at, site};
    current->hopper.proxies.write(at - current->smem.dynamic, at + 8 - current->smem.dynamic, thread_of(self()));
}

extern "C" void sandbox_mbarrier_arrive(char* at, unsigned bytes, Site site) {
    Mbarrier& barrier = mbarrier_at(at, site);
    if (!barrier.missing) {
        const Site init = current->hopper.init_of(at);
        trap(
            site,
            "too many arrivals at the mbarrier that is initialised at %s:%d, of whose phase only transaction bytes are "
            "pending: a wait before this arrival is missing, or it waits for an mbarrier with too small a count",
            init.file, init.line);
    }
    release(at);
    Proxies& proxies = current->hopper.proxies;
    proxies.release(proxies.mbarrier(at), thread_of(self()));
    barrier.bytes += bytes;
    --barrier.missing;
    end_phase(*current, at);
    if (barrier.unseen == 2) {  // threads of which each waits for every phase would miss one; the first may be skipped
        const Site init = current->hopper.init_of(at);
        trap(site,
             "two phases of the mbarrier that is initialised at %s:%d have ended without a wait in between: more "
             "threads arrive than its count, or a wait before this arrival is missing",
             init.file, init.line);
    }
    if (current->lags(self())) pause();
}

extern "C" void sandbox_mbarrier_wait(char* at, unsigned parity, Site site) {
    Fiber& fiber = self();
    fiber.mbarrier = at;
    fiber.parity = parity;
    if (parity > 1) trap(site, "parity %u of an mbarrier wait: it must be 0 or 1", parity);
    if (mbarrier_at(at, site).parity == parity) block_until(State::at_mbarrier, site);
    mbarrier_at(at, site).unseen = 0;
    acquire(at);
    Proxies& proxies = current->hopper.proxies;
    proxies.acquire(proxies.mbarrier(at), thread_of(fiber));
}

extern "C" bool sandbox_named_barrier(unsigned id, unsigned threads, bool waits, bool predicate, Site site) {
    Block& block = *current;
    if (!id || id >= NAMED_BARRIERS) trap(site, "named barrier %u: it must be 1 to 15 (0 is __syncthreads)", id);
    NamedBarrier& barrier = block.hopper.named[id];
    if (!threads || threads % WARP || threads > block.threads)
        trap(site, "named barrier %u for %u threads: the count must be a multiple of 32, at most the block's %u", id,
             threads, block.threads);
    if (barrier.arrived && barrier.threads != threads)
        trap(site, "named barrier %u for %u threads, but earlier arrivals used a count of %u", id, threads,
             barrier.threads);
    const unsigned parity = barrier.generation % 2;
    release(&barrier.order[parity]);
    Clock& clock = block.hopper.proxies.named_barriers[id][parity];
    block.hopper.proxies.release(clock, thread_of(self()));
    barrier.threads = threads;
    barrier.any |= predicate;
    if (++barrier.arrived == threads) {
        barrier.result[parity] = barrier.any;
        barrier.any = false;
        barrier.arrived = 0;
        ++barrier.generation;
        block.wake(State::at_named_barrier, nullptr, id);
    } else if (waits) {
        self().named_barrier = id;
        block_until(State::at_named_barrier, site);
    }
    if (waits) acquire(&barrier.order[parity]);
    if (waits) block.hopper.proxies.acquire(clock, thread_of(self()));
    return barrier.result[parity];
}

extern "C" void sandbox_setmaxnreg(unsigned registers, Site site) {
    Fiber& fiber = self();
    unsigned& pool = current->hopper.free_registers;
    if (registers % 8 || registers < 24 || registers > 256)
        trap(site, "setmaxnreg %u: the count must be a multiple of 8 from 24 to 256", registers);
    while (registers > fiber.registers + pool) block_until(State::for_registers, site);
    pool += fiber.registers;
    pool -= registers;
    fiber.registers = registers;
    current->wake(State::for_registers, nullptr, 0);
}
