// TMA loads and stores, bulk stores, fences of the async proxy. Included by runtime.cpp.
#pragma once

namespace {

// Starts a load to shared memory; `load` has everything but `due`.
void start_load(const TmaLoad& load) {
    Hopper& hopper = current->hopper;
    const Site site = load.site;
    const uint64_t bytes = load.bytes(), offset = smem_offset_of(load.to, bytes, site);
    check_fenced(offset, offset + bytes, "a TMA load overwrites", site);
    mbarrier_at(load.barrier, site);
    check_fenced(load.barrier - current->smem.dynamic, load.barrier + 8 - current->smem.dynamic,
                 "TMA accesses (an mbarrier)", site);
    report_write(load.to, bytes);
    memset(load.to, 0xff, bytes);
    current->smem.mark(load.to, bytes, false);
    TmaLoad& pending = hopper.tma_loads.add();
    pending = load;
    pending.due = hopper.step + 2 + hopper.tma_loads.count % 3;
    if (load.from) report_read(load.from, load.size);
    else
        for_box_chunks(load.map, load.at, [](const char* from, uint64_t, unsigned valid) { report_read(from, valid); });
    release(load.barrier);
}

}  // namespace

extern "C" void sandbox_tma_load(char* to, const TensorMap* map, const int* at, char* barrier, Site site) {
    if (smem_offset_of(to, box_bytes(*map), site) % 1024)
        trap(site, "the shared-memory address of a TMA box must be a multiple of 1024");
    start_load({to, nullptr, 0, *map, {at[0], at[1], at[2], at[3], at[4]}, barrier, 0, false, site});
}

extern "C" void sandbox_bulk_load(char* to, const void* from, unsigned bytes, char* barrier, Site site) {
    if ((smem_offset_of(to, bytes, site) | reinterpret_cast<uint64_t>(from) | bytes) % 16)
        trap(site, "bulk load of %u bytes: the size and both addresses must be multiples of 16", bytes);
    start_load({to, static_cast<const char*>(from), bytes, {}, {}, barrier, 0, false, site});
}

namespace {

// The address in block `cta_rank` of the cluster that corresponds to `own` in this block.
char* mapped_rank(char* own, unsigned cta_rank, Site site) {
    if (!current->cluster[cta_rank].smem)
        trap(site,
             "access to the shared memory of block %u of the cluster, which has not started: call cluster_sync "
             "before",
             cta_rank);
    return const_cast<char*>(sandbox_map_shared_rank(own, cta_rank));
}

void send(unsigned cta_rank, const TmaLoad& mail, Site site) {
    ClusterBlock& receiver = current->cluster[cta_rank];
    release(mail.barrier);
    bool ended;
    {
        const MailLock lock;
        ended = receiver.ended;
        if (!ended) receiver.mail.put(mail);
        receiver.waits = false;
    }
    if (ended) trap(site, "access to the shared memory of block %u of the cluster, which has ended", cta_rank);
}

}  // namespace

extern "C" void sandbox_mbarrier_arrive_at_rank(char* barrier, unsigned bytes, unsigned cta_rank, Site site) {
    if (cta_rank == current->cta_rank) return sandbox_mbarrier_arrive(barrier, bytes, site);
    if (cta_rank >= current->launch.cluster)
        trap(site, "block %u of a cluster of %u blocks", cta_rank, current->launch.cluster);
    smem_offset_of(barrier, 8, site);
    send(cta_rank, {nullptr, nullptr, bytes, {}, {}, mapped_rank(barrier, cta_rank, site), 0, false, site}, site);
    if (current->lags(self())) pause();
}

namespace {

void check_written(const char* from, uint64_t bytes, const char* what, Site site) {
    if (!current->smem.was_written(from, bytes))
        trap(site, "%s shared memory + %lld before anything was written there", what,
             static_cast<long long>(from - current->smem.dynamic));
}

// Offset of a bulk store's source in shared memory. All of it must be visible to the async proxy.
uint64_t bulk_source_offset(const char* from, uint64_t bytes, Site site) {
    const uint64_t offset = smem_offset_of(from, bytes, site);
    check_fenced(offset, offset + bytes, "a bulk store reads", site);
    report_read(from, bytes);
    return offset;
}

}  // namespace

extern "C" void sandbox_bulk_copy_to_rank(char* to, const char* from, unsigned bytes, char* barrier, unsigned cta_rank,
                                          Site site) {
    if (cta_rank >= current->launch.cluster || cta_rank == current->cta_rank)
        trap(site, "copy to block %u of a cluster of %u blocks, from block %u", cta_rank, current->launch.cluster,
             current->cta_rank);
    if ((bulk_source_offset(from, bytes, site) | smem_offset_of(to, bytes, site) | bytes) % 16)
        trap(site, "bulk copy of %u bytes: the size and both addresses must be multiples of 16", bytes);
    smem_offset_of(barrier, 8, site);
    check_written(from, bytes, "bulk copy reads", site);
    TmaLoad copy{};
    copy.to = mapped_rank(to, cta_rank, site), copy.from = from, copy.size = bytes;
    copy.barrier = mapped_rank(barrier, cta_rank, site), copy.site = site;
    copy.copies = &current->cluster[current->cta_rank].copies;
    __atomic_fetch_add(copy.copies, 1, __ATOMIC_RELAXED);
    current->last_copy = site;
    send(cta_rank, copy, site);
}

extern "C" void sandbox_bulk_store(float* to, const char* from, unsigned bytes, bool add, Site site) {
    if ((bulk_source_offset(from, bytes, site) | reinterpret_cast<uint64_t>(to) | bytes) % 16)
        trap(site, "bulk store of %u bytes: the size and both addresses must be multiples of 16", bytes);
    check_written(from, bytes, "bulk store reads", site);
    self().bulk_stores.add() = {from, {}, {}, to, bytes, add, false, 0, site};
}

extern "C" void sandbox_tma_store(const char* from, const TensorMap* map, const int* at, Site site) {
    if (bulk_source_offset(from, box_bytes(*map), site) % 1024)
        trap(site, "the shared-memory address of a TMA box must be a multiple of 1024");
    BulkStore& box = self().bulk_stores.add();
    box = {from, *map, {at[0], at[1], at[2], at[3], at[4]}, nullptr, 0, false, false, 0, site};
    for_box_chunks(*map, box.at, [&](char* to, uint64_t place, unsigned valid) {
        check_written(from + place, valid, "TMA store reads", site);
        report_write(to, valid);
    });
}

extern "C" void sandbox_bulk_commit() {
    List<BulkStore>& bulk_stores = self().bulk_stores;
    for (unsigned i = 0; i < bulk_stores.count; ++i)
        bulk_stores.items[i].newer_groups += bulk_stores.items[i].committed;
    for (unsigned i = 0; i < bulk_stores.count; ++i) bulk_stores.items[i].committed = true;
}

static float* copy_floats(const char* from, unsigned bytes) {
    return static_cast<float*>(memcpy(malloc(bytes), from, bytes));
}

extern "C" void sandbox_bulk_wait_read(unsigned pending) {
    List<BulkStore>& bulk_stores = self().bulk_stores;
    unsigned left = 0;
    for (unsigned i = 0; i < bulk_stores.count; ++i) {
        const BulkStore item = bulk_stores.items[i];
        if (!item.committed || item.newer_groups < pending) bulk_stores.items[left++] = item;
        else if (!item.numbers) store_box(item.from, item.map, item.at);
        else
            current->hopper.read_stores.add() = {item.numbers, copy_floats(item.from, item.bytes), item.bytes / 4,
                                                 item.add, &self()};
    }
    bulk_stores.count = left;
}

extern "C" void sandbox_bulk_wait() {
    sandbox_bulk_wait_read(0);
    current->write_read_stores(&self());
}

// Switches to other fibers, in a thread that polls for another block. The first time in a wait it may have made
// progress before.
extern "C" void sandbox_yield(Site site, bool again) {
    current->yielded += again;
    self().site = site;
    pause();
}

extern "C" void sandbox_generic_write(const char* at, unsigned bytes) {
    const SharedMemory& smem = current->smem;
    if (at < smem.dynamic || at + bytes > smem.dynamic + smem.dynamic_bytes) return;
    current->hopper.proxies.write(at - smem.dynamic, at + bytes - smem.dynamic, thread_of(self()));
}

extern "C" void sandbox_fence_proxy_async() { current->hopper.proxies.fence(thread_of(self())); }
