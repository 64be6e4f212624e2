// Which writes to shared memory are visible to the async proxy (TMA, wgmma): the writing thread must call
// fence_proxy_async after the write and before a barrier that orders it before the async proxy reads or overwrites it.
// Ordinary stores are recorded by the sanitizer `uninitialised` only. Barriers propagate vector clocks with one entry
// per warp. Included by runtime.cpp.
#pragma once

constexpr unsigned WARPS = 1024 / WARP, NAMED_BARRIERS = 16, CHUNKS = MAX_DYNAMIC_SMEM / 16;

struct Clock {  // vector clock: per warp, the number of its releases that are ordered before
    uint32_t of[WARPS];

    void join(const Clock& other) {
        for (unsigned w = 0; w < WARPS; ++w) of[w] = of[w] < other.of[w] ? other.of[w] : of[w];
    }
};

struct Proxies {
    bool used;  // whether the running block has mbarriers or tracked writes; otherwise nothing is recorded
    Clock warps[WARPS], block_barrier[2], named_barriers[NAMED_BARRIERS][2];
    struct MbarrierClock {
        const char* at;
        Clock clock;
    };
    List<MbarrierClock> mbarriers;
    uint16_t unfenced[CHUNKS];         // 1 + the thread that wrote this 16-byte chunk after its last fence; 0: none
    uint32_t fenced_at[CHUNKS];        // clock of its warp at the fence
    uint8_t fenced_by[CHUNKS];         // the warp
    uint32_t first[1024], last[1024];  // per thread, range of the chunks written after its last fence

    void begin() {  // everything in the previous block is ordered before
        if (used) {
            memset(unfenced, 0, sizeof unfenced);
            memset(last, 0, sizeof last);
        }
        used = false;
        mbarriers.count = 0;
        Clock all{};
        for (const Clock& warp : warps) all.join(warp);
        for (uint32_t& number : all.of) ++number;
        for (Clock& warp : warps) warp = all;
    }
    void release(Clock& barrier, unsigned thread) {
        if (!used) return;
        barrier.join(warps[thread / WARP]);
        ++warps[thread / WARP].of[thread / WARP];
    }
    void acquire(const Clock& barrier, unsigned thread) {
        if (used) warps[thread / WARP].join(barrier);
    }
    Clock& mbarrier(const char* at) {
        for (unsigned i = 0; i < mbarriers.count; ++i)
            if (mbarriers.items[i].at == at) return mbarriers.items[i].clock;
        mbarriers.add() = {at, {}};
        return mbarriers.items[mbarriers.count - 1].clock;
    }
    void write(uint64_t begin, uint64_t end, unsigned thread) {  // byte offsets in dynamic shared memory
        used = true;
        if (!last[thread] || begin / 16 < first[thread]) first[thread] = static_cast<uint32_t>(begin / 16);
        if ((end + 15) / 16 > last[thread]) last[thread] = static_cast<uint32_t>((end + 15) / 16);
        for (uint64_t chunk = begin / 16; chunk * 16 < end; ++chunk)
            unfenced[chunk] = static_cast<uint16_t>(1 + thread);
    }
    void tma_wrote(uint64_t begin, uint64_t end) {  // the async proxy's own writes need no fence
        for (uint64_t chunk = begin / 16; used && chunk * 16 < end; ++chunk) unfenced[chunk] = fenced_at[chunk] = 0;
    }
    void fence(unsigned thread) {
        const uint16_t mine = static_cast<uint16_t>(1 + thread);
        for (unsigned chunk = first[thread]; chunk < last[thread]; ++chunk) {
            if (unfenced[chunk] != mine) continue;
            unfenced[chunk] = 0;
            fenced_by[chunk] = static_cast<uint8_t>(thread / WARP);
            fenced_at[chunk] = warps[thread / WARP].of[thread / WARP];
        }
        last[thread] = 0;
    }
    // Whether the fence precedes a barrier that this thread has passed.
    bool fence_is_visible(uint64_t chunk, unsigned thread) const {
        return warps[thread / WARP].of[fenced_by[chunk]] >= fenced_at[chunk];
    }
};
