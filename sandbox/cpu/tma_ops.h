// TMA loads and stores, bulk stores, fences of the async proxy. Included by runtime.cpp.
#pragma once

extern "C" void sandbox_tma_load(char* to, const TensorMap* map, const int* at, char* barrier, Site site) {
    Hopper& hopper = current->hopper;
    const uint64_t offset = smem_offset_of(to, box_bytes(*map), site);
    if (offset % 1024) trap(site, "the shared-memory address of a TMA box must be a multiple of 1024");
    check_fenced(offset, offset + box_bytes(*map), "a TMA load overwrites", site);
    mbarrier_at(barrier, site);
    check_fenced(barrier - current->smem.dynamic, barrier + 8 - current->smem.dynamic, "TMA accesses (an mbarrier)",
                 site);
    report_write(to, box_bytes(*map));
    memset(to, 0xff, box_bytes(*map));
    current->smem.mark(to, box_bytes(*map), false);
    TmaLoad& box = hopper.tma_loads.add();
    box = {to,    *map, {at[0], at[1], at[2], at[3], at[4]}, barrier, hopper.step + 2 + hopper.tma_loads.count % 3,
           false, site};
    for_box_chunks(*map, box.at, [](const char* from, uint64_t, unsigned valid) { report_read(from, valid); });
    release(barrier);
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
