// Block and cluster barriers, warp collectives, fences. Included by runtime.cpp.
#pragma once

extern "C" void sandbox_barrier(Site site) { sandbox_barrier_or(false, site); }

extern "C" bool sandbox_barrier_or(bool predicate, Site site) {
    Fiber& fiber = self();
    bool& any = current->any[current->generation % 2];
    any |= predicate;
    char* order =
        &current->order[current->generation % 2];  // alternates: code after a barrier must not be ordered before it
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
    if (self().cluster_arrived)
        sandbox_trap("cluster_sync between cluster_arrive and cluster_wait: the wait must come before it", site);
    sandbox_barrier(site);
    Block& block = *current;
    Fiber& fiber = self();
    const unsigned reached = ++fiber.cluster_barriers;
    release(&order);
    if (&fiber == block.fibers) __atomic_store_n(&block.cluster[block.cta_rank].barriers, reached, __ATOMIC_RELEASE);
    for (unsigned cta_rank = 0; cta_rank < block.launch.cluster; ++cta_rank) {
        const auto waits = [&] {
            return __atomic_load_n(&block.cluster[cta_rank].barriers, __ATOMIC_ACQUIRE) < reached;
        };
        for (bool again = false; waits(); again = true) {
            const bool ended = __atomic_load_n(&block.cluster[cta_rank].ended, __ATOMIC_ACQUIRE);
            // It may have reached the barrier and ended since the first look.
            if ((ended && waits()) || __atomic_load_n(&block.failed, __ATOMIC_RELAXED)) {
                block.fail("cluster barrier %s:%d: block (%u,%u,%u) waits for a block of its cluster that has ended",
                           site.file, site.line, fiber.block_idx.x, fiber.block_idx.y, fiber.block_idx.z);
                pause(true);
            }
            sandbox_yield(site, again);
        }
    }
    acquire(&order);
}

extern "C" void sandbox_cluster_arrive(Site site) {
    Fiber& fiber = self();
    if (fiber.cluster_arrived) sandbox_trap("cluster_arrive twice without cluster_wait in between", site);
    fiber.cluster_arrived = true;
}

extern "C" void sandbox_cluster_wait(Site site) {
    Fiber& fiber = self();
    if (!fiber.cluster_arrived) sandbox_trap("cluster_wait without cluster_arrive before it", site);
    fiber.cluster_arrived = false;
    sandbox_cluster_barrier(site);
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
        block.fail("%s(mask 0x%08x) %s:%d: lane %u (thread %u) calls it but is not in its mask", collective_name(what),
                   mask, site.file, site.line, fiber.lane, t);
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
